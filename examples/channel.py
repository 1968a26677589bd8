"""Send the same weights from rank 0 to rank 1 after every update.

    torchrun --nproc-per-node=2 examples/channel.py

Both ranks make the channel over tensors of their own. From the second step on nothing is
registered, described or looked up: only bytes move. Two channels, used in turn, let rank 0 work on
one set of weights while the other is under way.
"""

from __future__ import annotations

import os

import torch

import torch_nixl

STEPS = 6


def weights() -> dict[str, list[torch.Tensor]]:
    """A small model's weights."""
    return {"layers": [torch.zeros(512, 512) for _ in range(8)], "bias": [torch.zeros(512)]}


def main() -> None:
    """Run one rank."""
    rank = int(os.environ["RANK"])
    trees = [weights(), weights()]
    channels = [torch_nixl.channel(1 - rank, like=tree, tag=tag) for tag, tree in enumerate(trees)]
    if rank == 0:
        works: list[torch_nixl.Work | None] = [None, None]
        for step in range(STEPS):
            turn = step % 2
            work = works[turn]
            if work is not None:
                work.wait()  # Only now may these weights change.
            for tensor in trees[turn]["layers"] + trees[turn]["bias"]:
                tensor.fill_(step)
            works[turn] = channels[turn].isend()
        for work in works:
            if work is not None:
                work.wait()
    else:
        for step in range(STEPS):
            received = channels[step % 2].recv()
            total = sum(tensor.sum().item() for tensor in received["layers"])
            print(f"rank 1: step {step}, sum {total:.0f}")
    for channel in channels:
        channel.close()
    torch_nixl.shutdown()


if __name__ == "__main__":
    main()
