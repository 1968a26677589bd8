"""What an algorithm sees of its group: ranks, and messages to and from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torch_nixl.collectives.protocol import tag_of
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.sending import SendOperation

if TYPE_CHECKING:
    from torch_nixl.collectives.operation import CollectiveOperation
    from torch_nixl.p2p.communicator import Communicator


class Port:
    """One collective's messages.

    Attributes:
        rank: This rank in the group.
        world_size: How many there are.
    """

    __slots__ = ("_communicator", "_mark", "_number", "_operation", "rank", "world_size")

    def __init__(
        self, communicator: Communicator, number: int, mark: int, operation: CollectiveOperation
    ) -> None:
        self._communicator = communicator
        self._number = number
        self._mark = mark
        self._operation = operation
        self.rank = communicator.rank
        self.world_size = communicator.world_size

    def send(
        self, tensor: torch.Tensor, dst: int, *, phase: int = 0, assist: bool = False
    ) -> SendOperation | None:
        """Begin to send. The collective does not end before this has.

        Args:
            tensor: Must not change until the receiver has it, if it is large.
            dst: The rank that receives it with the same phase; messages to it are in order.
            phase: 0 to `MAX_PHASE`: sets apart messages that are not received in order.
            assist: Whether this rank has time to move a half of it.

        Returns:
            What to yield to wait until the tensor may change; None if it may.
        """
        tag = tag_of(self._number, self._mark, phase)
        waiting = assist and self._operation.attended > 0
        part = self._communicator._send(tensor, dst, tag, math.inf, waiting=waiting)
        if isinstance(part, SendOperation):
            self._operation.take(part)
            return part
        return None

    def recv(self, out: torch.Tensor, src: int, *, phase: int = 0) -> ReceiveOperation:
        """Begin to receive into `out`; yield what this returns to wait for it."""
        tag = tag_of(self._number, self._mark, phase)
        part = self._communicator._receive(src, out, tag, None, math.inf, spin=False)
        self._operation.take(part)
        return part
