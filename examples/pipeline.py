"""Train a model whose layers lie on several ranks: one forward, one backward in turn.

    torchrun --nproc-per-node=2 examples/pipeline.py

Activations and gradients of microbatches go from rank to rank by sends and receives.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import torch_nixl  # noqa: F401 - makes the backend known

WIDTH = 64


def main() -> None:
    """Run one rank."""
    dist.init_process_group("nixl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(size)
    ]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.Adam(layers[rank].parameters(), lr=0.01)
    inputs = torch.randn(32, WIDTH)
    targets = torch.tanh(inputs.roll(1, dims=1))
    means = []
    for _ in range(20):
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=targets, losses=losses)
            means.append(float(torch.stack(losses).detach().mean()))
        else:
            schedule.step()
        optimizer.step()
    if rank == size - 1:
        print(f"loss fell from {means[0]:.3f} to {means[-1]:.3f} over {size} stages")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
