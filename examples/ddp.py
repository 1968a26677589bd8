"""Train data-parallel with the process group "nixl".

    torchrun --nproc-per-node=2 examples/ddp.py

Nothing but the name of the backend differs from a program for Gloo or NCCL. Gradients are halved in
size on their way by a hook.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_nixl  # noqa: F401 - makes the backend known


def in_bfloat16(state: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients, in bfloat16 on the way."""
    small = bucket.buffer().bfloat16().div_(state.size())
    future = dist.all_reduce(small, group=state, async_op=True).get_future()
    averaged: torch.futures.Future[torch.Tensor] = future.then(
        lambda done: bucket.buffer().copy_(done.value()[0])
    )
    return averaged


# DDP compares annotations with types; here they are strings.
in_bfloat16.__annotations__.clear()


def main() -> None:
    """Run one rank."""
    dist.init_process_group("nixl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = DistributedDataParallel(layers)  # takes rank 0's parameters
    model.register_comm_hook(dist.group.WORLD, in_bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(50):
        inputs = torch.randn(32, 16)  # each rank's own
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    if rank == 0:
        same = all(torch.equal(weights, other) for other in everyone)
        fell = losses[-1] < losses[0] / 2
        print(f"loss more than halved: {fell}; same weights on {len(everyone)} ranks: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
