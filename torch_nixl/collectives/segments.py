"""What algorithms take of a tensor: its own flat memory, or stretches of one that has gaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class Range:
    """Some elements of a tensor with gaps, in its order: copied out and in a piece at a time.

    Attributes:
        tensor: Any strides.
        start: The place of the first of them.
        stop: The place after the last.
    """

    tensor: torch.Tensor
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    def numel(self) -> int:
        return self.stop - self.start

    def element_size(self) -> int:
        return self.tensor.element_size()

    def __getitem__(self, part: slice) -> Range:
        """Some of these, as of a flat tensor."""
        start, stop, _ = part.indices(self.numel())
        return Range(self.tensor, self.start + start, self.start + max(start, stop))

    def blocks(self) -> Iterator[torch.Tensor]:
        """Views that have these elements, in their order: two for each dimension at most."""
        return _blocks(self.tensor, self.start, self.stop)

    def load(self, out: torch.Tensor) -> None:
        """Copy them to a flat tensor."""
        place = 0
        for block in self.blocks():
            out[place : place + block.numel()].view(block.shape).copy_(block)
            place += block.numel()

    def store(self, values: torch.Tensor) -> None:
        """Copy them from a flat tensor."""
        place = 0
        for block in self.blocks():
            block.copy_(values[place : place + block.numel()].view(block.shape))
            place += block.numel()


Segment: TypeAlias = torch.Tensor | Range
"""``[n]``, contiguous, or as many elements of a tensor that is not."""
SegmentT = TypeVar("SegmentT", torch.Tensor, Range, Segment)


def tensor_of(segment: Segment) -> torch.Tensor:
    """The tensor itself, or that which has the gaps."""
    return segment.tensor if isinstance(segment, Range) else segment


def load(segment: Segment, out: torch.Tensor) -> None:
    """Copy a segment to a flat tensor, unless that is the same."""
    if isinstance(segment, Range):
        segment.load(out)
    elif segment.data_ptr() != out.data_ptr():
        out.copy_(segment)


def store(values: torch.Tensor, segment: Segment) -> None:
    """Copy a flat tensor to a segment, unless that is the same."""
    if isinstance(segment, Range):
        segment.store(values)
    elif segment.data_ptr() != values.data_ptr():
        segment.copy_(values)


def _blocks(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    if start >= stop:
        return
    if tensor.dim() == 1:
        yield tensor[start:stop]
        return
    row = tensor.numel() // tensor.shape[0]
    if start % row:
        index = start // row
        end = min(stop, (index + 1) * row)
        yield from _blocks(tensor[index], start - index * row, end - index * row)
        start = end
    first, last = start // row, stop // row
    if first < last:
        yield tensor[first:last]
        start = last * row
    if start < stop:
        yield from _blocks(tensor[last], start - last * row, stop - last * row)


def may_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors may share elements: from where the first of each lies to the last."""
    (start, stop), (other_start, other_stop) = _extent(a), _extent(b)
    return start < other_stop and other_start < stop


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((count - 1) * stride for count, stride in strides)
    return start, start + (last + 1) * tensor.element_size()
