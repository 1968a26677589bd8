"""What an algorithm sees of its group: ranks, and messages to and from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from torch_nixl.collectives import choice
from torch_nixl.collectives.protocol import tag_of
from torch_nixl.collectives.reduction import Reduction, load_kernels
from torch_nixl.collectives.segments import Range, Segment, tensor_of
from torch_nixl.engine.streams import device_of
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

    # Memory: before the first yield, see [Note: the first yield] in `algorithms.py`.

    def scratch(
        self, like: torch.Tensor, count: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Make ``[count]`` elements where another tensor is; as many, and of its dtype, by default.

        Not for messages.
        """
        count = like.numel() if count is None else count
        dtype = dtype or like.dtype
        device = device_of(like)
        if device is None:
            return torch.empty(count, dtype=dtype, device=like.device)
        return device.empty((count,), dtype)

    def room(self, like: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """Make the same for messages."""
        made = self.scratch(like, count)
        if device_of(made) is not None:
            self._operation.hold_memory([made])
        return made

    def stage(self, chunk: Range) -> torch.Tensor:
        """Make room for messages that are copied from a range with gaps."""
        self.load_copies(chunk)
        return self.room(chunk.tensor, chunk.numel())

    def load_copies(self, segment: Segment) -> None:
        """Load what copies to and from a segment with gaps on a device. Changes no value."""
        device = device_of(tensor_of(segment))
        if device is not None and isinstance(segment, Range):
            for block in segment.blocks():
                device.buffer(block, device.current())

    def total(self, how: Reduction, mine: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
        """Make what `how.combine` needs besides, and load what it runs.

        Args:
            how: The reduction.
            mine: What this rank has of what is reduced at a time.
            out: Where it goes.
        """
        place = self.rank if out.data_ptr() == mine.data_ptr() else None
        dtype = how.total_dtype(self.world_size, place)
        count = choice.total_numel(mine.numel())
        total = None if dtype is None else self.scratch(mine, count, dtype)
        device = device_of(mine)
        if device is not None:
            load_kernels(device, how, min(self.world_size, 3))
        return total

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
