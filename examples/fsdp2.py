"""Train with parameters, gradients and optimizer state sharded over all ranks, and save them.

torchrun --nproc-per-node=2 examples/fsdp2.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_nixl  # noqa: F401 - makes the backend known


def make() -> torch.nn.Sequential:
    """A model with the same parameters on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def main() -> None:
    """Run one rank."""
    dist.init_process_group("nixl")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, again = make(), make()
    for one in (model, again):
        for layer in one:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(one, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(50):
        inputs = torch.randn(32, 16)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    where = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(where, src=0)
    dcp.save(get_model_state_dict(model), checkpoint_id=where[0])
    state = get_model_state_dict(again)
    dcp.load(state, checkpoint_id=where[0])
    same = all(
        torch.equal(one, other)
        for one, other in zip(model.parameters(), again.parameters(), strict=True)
    )
    if rank == 0:
        print(f"loss more than halved: {losses[-1] < losses[0] / 2}; loaded what was saved: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
