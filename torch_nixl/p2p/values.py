"""What a Communicator takes and tells, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message that waits to be received.

    Attributes:
        source: The rank that sent it.
        tag: Its tag.
        shape: The tensor's shape; of a tree or an object that of its bytes.
        dtype: Its dtype; of a tree or an object uint8.
        nbytes: Its size.
        form: ``"tensor"``, ``"tree"`` or ``"object"``: what receives it is named so.
    """

    source: int
    tag: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    form: str = "tensor"


@dataclass(frozen=True, slots=True)
class CommunicatorStatistics:
    """What a Communicator has done since it was made.

    Attributes:
        sent: Messages that left.
        received: Messages received.
        queued: Messages that had to wait for credit.
        refused: Messages that had left and were refused.
        unexpected: Messages that wait here to be received, now.
        outstanding: Sends and receives that have not ended, now.
        peers: Ranks met.
    """

    sent: int
    received: int
    queued: int
    refused: int
    unexpected: int
    outstanding: int
    peers: int


class SendOrReceive(Protocol):
    """One entry of a batch: `torch.distributed.P2POp`, or anything like it.

    `op` is a function named ``isend`` or ``irecv``, or one of these names; `tensor` is sent, or
    received into; `peer` is the other rank, in the Communicator's own numbers.
    """

    @property
    def op(self) -> object: ...

    @property
    def tensor(self) -> torch.Tensor: ...

    @property
    def peer(self) -> int: ...

    @property
    def tag(self) -> int: ...


def operation_name(operation: SendOrReceive) -> str:
    """Tell whether an entry of a batch sends or receives.

    Raises:
        ValueError: Neither.
    """
    op = operation.op
    name = op if isinstance(op, str) else getattr(op, "__name__", "")
    name = name.removesuffix("_tensor")
    if name not in ("isend", "irecv"):
        raise ValueError(f"op={op!r}: expected isend or irecv")
    return name
