"""What collectives take: tensors made one-dimensional and contiguous, and refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch

from torch_nixl.collectives.segments import Range, Segment, SegmentT, may_meet
from torch_nixl.engine.streams import device_of
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.description import describe
from torch_nixl.p2p.protocol import integer_of
from torch_nixl.p2p.tensors import check_target, sendable


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor as the algorithms see it.

    Attributes:
        data: ``[n]``, contiguous: the tensor's own memory, or a temporary where it has gaps.
        target: The tensor that `finish` copies a temporary to; None where there is none.
    """

    data: torch.Tensor
    target: torch.Tensor | None

    def load(self) -> None:
        """Bring what the caller's tensor holds to where it is reduced."""
        if self.target is not None:
            self.data.view(self.target.shape).copy_(self.target)

    def finish(self) -> None:
        """Put the result where the caller wants it."""
        if self.target is not None:
            self.target.copy_(self.data.view(self.target.shape))


def flat_source(tensor: torch.Tensor, name: str = "tensor") -> Flat:
    """Take a tensor to be read.

    Raises:
        TypeError, ValueError: As `p2p.tensors.sendable`.
        TransferError: Its device's current stream is being captured into a graph.
    """
    return _flat_source(_source(tensor, name))


def source_segment(tensor: torch.Tensor, out: torch.Tensor, name: str = "tensor") -> Segment:
    """Take a tensor to be read piece by piece, while what was read before becomes a result.

    Args:
        tensor: Any strides. If it has gaps, nothing is copied yet.
        out: Where the result goes. If that may be the same memory, `tensor` is copied after all.
        name: For messages.

    Raises:
        TypeError, ValueError, TransferError: As `flat_source`.
    """
    tensor = _source(tensor, name)
    if tensor.is_contiguous() or may_meet(tensor, out):
        return _flat_source(tensor).data
    return Range(tensor, 0, tensor.numel())


def _source(tensor: torch.Tensor, name: str) -> torch.Tensor:
    describe(tensor, name=name)
    tensor = sendable(tensor, name=name).detach()
    device = device_of(tensor)
    if device is not None:
        device.check_capture()
    return tensor


def _flat_source(tensor: torch.Tensor) -> Flat:
    device = device_of(tensor)
    if device is not None and not tensor.is_contiguous():
        tensor = device.pack(tensor, device.current())
    return Flat(tensor.contiguous().view(-1), None)


def flat_target(tensor: torch.Tensor, name: str = "out") -> Flat:
    """Take a tensor to be overwritten. If it is to be read, too, it needs a `load`.

    Args:
        tensor: Any strides.
        name: For messages.

    Raises:
        TypeError, ValueError: As `p2p.tensors.check_target`.
        TransferError: Its device's current stream is being captured into a graph.
    """
    return _flat_target(checked_target(tensor, name))


def target_segment(
    tensor: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> tuple[Segment, Flat | None]:
    """Take a tensor to be overwritten piece by piece, while the rest is still to be read.

    Args:
        tensor: From `checked_target`.
        inputs: What is read. If that may be the same memory, the result goes to a temporary.

    Returns:
        Where to write, and what to `finish` then, if anything.
    """
    if tensor.is_contiguous() or any(may_meet(tensor, one) for one in inputs):
        flat = _flat_target(tensor)
        return flat.data, flat
    return Range(tensor, 0, tensor.numel()), None


def packed_segment(tensor: torch.Tensor, name: str = "tensor") -> Segment:
    """Take a tensor to be read and overwritten: copied as a whole, at once, to and from another.

    Raises:
        TypeError, ValueError, TransferError: As `flat_target`.
    """
    tensor = checked_target(tensor, name)
    return tensor.view(-1) if tensor.is_contiguous() else Range(tensor, 0, tensor.numel())


def checked_target(tensor: torch.Tensor, name: str = "out") -> torch.Tensor:
    """Refuse what can't be overwritten; return it without its gradient.

    Raises:
        TypeError, ValueError, TransferError: As `flat_target`.
    """
    describe(tensor, name=name)
    check_target(tensor, name=name)
    tensor = tensor.detach()
    device = device_of(tensor)
    if device is not None:
        device.check_capture()
    return tensor


def _flat_target(tensor: torch.Tensor) -> Flat:
    if tensor.is_contiguous():
        return Flat(tensor.view(-1), None)
    device = device_of(tensor)
    if device is not None:
        data = device.buffer(tensor, device.current())
    else:
        data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return Flat(data.view(-1), tensor)


def check_alike(
    communicator: Communicator,
    tensors: Sequence[torch.Tensor] | None,
    name: str,
    *,
    like: torch.Tensor,
    uneven: bool = False,
) -> None:
    """Refuse a list that isn't one tensor for each rank, each like another tensor.

    Args:
        communicator: Whose ranks.
        tensors: The list.
        name: Its name, for messages.
        like: Whose dtype all have, and whose shape: all, or if `uneven` this rank's.
        uneven: Whether shapes may differ.
    """
    count = 0 if tensors is None else len(tensors)
    if tensors is None or count != communicator.world_size:
        raise ValueError(
            f"{name}: expected {communicator.world_size} tensors, one for each rank, not {count}"
        )
    for index, one in enumerate(tensors):
        if one.dtype is not like.dtype:
            raise TypeError(f"{name}[{index}] is of {one.dtype}, not {like.dtype}")
        if uneven and index != communicator.rank:
            continue
        if one.numel() != like.numel() if uneven else one.shape != like.shape:
            raise ValueError(f"{name}[{index}] is {list(one.shape)}, not {list(like.shape)}")


def equal_parts(
    communicator: Communicator, whole: SegmentT, part: torch.Tensor, name: str
) -> list[SegmentT]:
    """Cut a segment into one part for each rank, as large as `part`.

    Raises:
        TypeError, ValueError: It has another dtype, or doesn't have that many elements.
    """
    count, size = part.numel(), communicator.world_size
    if whole.dtype is not part.dtype:
        raise TypeError(f"{name} is of {whole.dtype}, the other of {part.dtype}")
    if whole.numel() != count * size:
        raise ValueError(
            f"{name} has {whole.numel()} elements; expected {count} for each of {size} ranks"
        )
    return [whole[index * count : (index + 1) * count] for index in range(size)]


def split(
    communicator: Communicator,
    whole: torch.Tensor | Sequence[torch.Tensor],
    splits: Sequence[SupportsIndex] | None,
    name: str,
    *,
    source: bool = False,
) -> tuple[list[Flat], list[torch.Tensor]]:
    """Cut what an all-to-all sends or receives into one part for each rank.

    Returns:
        What to finish, and the flat parts.

    Raises:
        TypeError, ValueError: The splits don't fit it.
    """
    size = communicator.world_size
    take = flat_source if source else flat_target
    if not isinstance(whole, torch.Tensor):
        if splits is not None and len(splits):
            raise ValueError(f"{name}: a list of tensors has no splits")
        if len(whole) != size:
            raise ValueError(f"{name}: expected {size} tensors, not {len(whole)}")
        flats = [take(one, name) for one in whole]
        return flats, [one.data for one in flats]
    rows = whole.shape[0] if whole.dim() else 1
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(f"{name} has {rows} rows, which {size} ranks can't share equally")
        counts = [rows // size] * size
    else:
        # Whatever is no integer is as wrong as one below zero.
        counts = [-1 if (count := integer_of(one)) is None else count for one in splits]
        if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
            raise ValueError(
                f"{name}: splits {list(splits)} are not {size} that add up to its {rows} rows"
            )
    flat = take(whole, name)
    row = flat.data.numel() // rows if rows else 0
    parts, start = [], 0
    for count in counts:
        parts.append(flat.data[start * row : (start + count) * row])
        start += count
    return [flat], parts


def check_apart(
    outs: Sequence[Segment],
    inputs: Sequence[Segment],
    *,
    same: tuple[int, int] | None = None,
) -> None:
    """Refuse outputs that lie over inputs.

    Args:
        outs: What is written to. What has gaps is known to lie apart.
        inputs: What is read.
        same: Indices of an output and an input that may be the same memory.

    Raises:
        ValueError: Some do.
    """
    targets, sources = _places(outs), _places(inputs)
    if same is not None and targets[same[0]] == sources[same[1]]:
        del sources[same[1]]
    spans = [(start, start + nbytes, 0) for start, nbytes in targets if nbytes]
    spans += [(start, start + nbytes, 1) for start, nbytes in sources if nbytes]
    # In the order of addresses: how far those of each kind have reached.
    reached = [0, 0]
    for start, stop, kind in sorted(spans):
        if start < reached[1 - kind]:
            raise ValueError("the output shares memory with the input")
        reached[kind] = max(reached[kind], stop)


def _places(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Address and size of each; nothing of what has gaps."""
    return [(0, 0) if isinstance(one, Range) else (one.data_ptr(), one.nbytes) for one in segments]


def shapes(tensors: Sequence[torch.Tensor]) -> str:
    """Shapes and dtypes, for a signature."""
    dtypes = {one.dtype for one in tensors}
    if len(dtypes) == 1:
        return f"{' '.join(str(list(one.shape)) for one in tensors)} of {dtypes.pop()}"
    return " ".join(f"{list(one.shape)} of {one.dtype}" for one in tensors)
