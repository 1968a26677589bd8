"""Train a small model in two stages, one on each rank.

    torchrun --nproc-per-node=2 examples/training_loop.py

Rank 0 has the first half of the layers, rank 1 the second. Of every batch, some micro-batches are
on their way at a time: activations go forward, gradients come back, both by `torch_nixl`. Rank 1
trains the whole model by itself, too, and checks that each step's loss is the same.
"""

from __future__ import annotations

import os

import torch
from torch import nn

import torch_nixl

NUM_STEPS = 20
NUM_MICRO_BATCHES = 4
MICRO_BATCH_SIZE = 64


def make_stages() -> list[nn.Sequential]:
    """Make both halves of the model, with the same weights wherever that is done."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
    return [first, nn.Sequential(nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 1))]


def micro_batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs [MICRO_BATCH_SIZE, 8] and targets [MICRO_BATCH_SIZE, 1] of one step."""
    generator = torch.Generator().manual_seed(step)
    shape = (NUM_MICRO_BATCHES, MICRO_BATCH_SIZE, 8)
    return [(x, x.sin().sum(1, keepdim=True)) for x in torch.randn(shape, generator=generator)]


def train_alone() -> list[float]:
    """Train the whole model in this process; return the loss of each step."""
    model = nn.Sequential(*make_stages())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        parts = []
        for inputs, targets in micro_batches(step):
            loss = nn.functional.mse_loss(model(inputs), targets) / NUM_MICRO_BATCHES
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(loss.item())
        optimizer.step()
        losses.append(sum(parts))
    return losses


def train_stage(rank: int) -> list[float]:
    """Train one half; return the loss of each step on rank 1, nothing on rank 0."""
    stage = make_stages()[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        if rank == 0:
            outputs = [stage(inputs) for inputs, _ in micro_batches(step)]
            works = [torch_nixl.isend_tensor(output, dst=1) for output in outputs]
            for output in outputs:
                output.backward(torch_nixl.recv_tensor(src=1))
        else:
            works, parts = [], []
            for _, targets in micro_batches(step):
                hidden = torch_nixl.recv_tensor(src=0).requires_grad_()
                loss = nn.functional.mse_loss(stage(hidden), targets) / NUM_MICRO_BATCHES
                loss.backward()  # type: ignore[no-untyped-call]
                assert hidden.grad is not None
                works.append(torch_nixl.isend_tensor(hidden.grad, dst=0))
                parts.append(loss.item())
            losses.append(sum(parts))
        for work in works:
            work.wait()
        optimizer.step()
    return losses


if __name__ == "__main__":
    losses = train_stage(int(os.environ["RANK"]))
    torch_nixl.shutdown()
    if losses:
        torch.testing.assert_close(losses, train_alone(), rtol=1e-6, atol=0.0)
        print(f"loss from {losses[0]:.4f} to {losses[-1]:.4f}, as in one process")
