"""How the functions of `functions.py` run what they have made of their arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_nixl.collectives.arguments import Flat
from torch_nixl.collectives.group import group_of
from torch_nixl.collectives.operation import Algorithm, Steps
from torch_nixl.collectives.protocol import Signature
from torch_nixl.collectives.work import CollectiveWork
from torch_nixl.p2p.communicator import Communicator


def loaded(flats: Sequence[Flat], running: Steps) -> Steps:
    """Load tensors once they may be touched: see [Note: the first yield] in `algorithms.py`."""
    next(running)
    yield None
    for one in flats:
        one.load()
    yield from running


def run(
    communicator: Communicator,
    signature: Signature,
    steps: Algorithm,
    moved: list[torch.Tensor],
    outputs: list[torch.Tensor],
    async_op: bool,
    timeout: float | None,
) -> CollectiveWork | None:
    """Begin a collective, and wait for it unless `async_op` is set.

    Args:
        communicator: Whose ranks.
        signature: What it is.
        steps: What it does.
        moved: The tensors that `steps` uses.
        outputs: The caller's that it changes.
        async_op: Return it at once.
        timeout: Seconds; the Communicator's by default.

    Raises:
        TorchNixlError: What it ends with, unless `async_op` is set: see `CollectiveWork.wait`.
    """
    operation = group_of(communicator).begin(
        signature, steps, moved, outputs, timeout, attended=not async_op
    )
    if async_op:
        return CollectiveWork(operation)
    try:
        operation.wait()
    finally:
        operation.attended -= 1
    return None
