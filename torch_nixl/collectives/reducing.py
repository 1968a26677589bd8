"""The algorithms that reduce. See `algorithms.py`, whose notes hold here, too.

N: ranks; n: elements of a tensor; segment: the part of a tensor that one rank reduces; chunk: the
part of a segment that is reduced at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_nixl.collectives import choice
from torch_nixl.collectives.operation import Message, Steps
from torch_nixl.collectives.port import Port
from torch_nixl.collectives.reduction import Reduction
from torch_nixl.collectives.segments import Range, Segment, SegmentT, load, store, tensor_of

_RESULT = 1


def reduce(
    port: Port, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, how: Reduction
) -> Steps:
    """To the root: all at once, or each rank reduces its segment first.

    Args:
        port: The group.
        out: ``[n]``: what may be overwritten, `tensor` itself if need be; the result on the root.
            None where there is no such memory, on any other rank.
        tensor: ``[n]``.
        dst: The root.
        how: The reduction.
    """
    size = port.world_size
    if choice.reduces_at_once(tensor.nbytes, size):
        if port.rank != dst:
            yield None
            port.send(tensor, dst)
            return
        assert out is not None
        values = _room_for_values(port, tensor)
        total = port.total(how, tensor, out)
        yield None
        yield from _receive_values(port, values)
        how.combine(values, out, total)
        return
    segments = _segments(tensor, size)
    if port.rank != dst:
        mine = segments[port.rank]
        result = port.scratch(mine) if out is None else _segments(out, size)[port.rank]
        room = _room_for_chunks(port, result, segments, how, tensor.nbytes)
        yield None
        yield from _reduce_segment(port, result, segments, how, room, [dst])
        return
    assert out is not None
    results = _segments(out, size)
    room = _room_for_chunks(port, results[port.rank], segments, how, out.nbytes)
    yield None
    yield from _reduce_segment(port, results[port.rank], segments, how, room, [])
    for step in range(1, size):
        src = (port.rank - step) % size
        for chunk in _chunks(results[src], out.nbytes, size):
            yield port.recv(chunk, src, phase=_RESULT)


def all_reduce(port: Port, tensor: torch.Tensor, how: Reduction) -> Steps:
    """In place: all at once, or each rank reduces its segment and sends it to all."""
    size = port.world_size
    if choice.reduces_at_once(tensor.nbytes, size):
        values = _room_for_values(port, tensor)
        total = port.total(how, tensor, tensor)
        yield None
        sends = [port.send(tensor, (port.rank + step) % size) for step in range(1, size)]
        yield from _receive_values(port, values)
        # Those that have not left, for lack of credit, would send the result.
        yield from filter(None, sends)
        how.combine(values, tensor, total)
        return
    segments = _segments(tensor, size)
    room = _room_for_chunks(port, segments[port.rank], segments, how, tensor.nbytes)
    yield None
    others = [(port.rank + step) % size for step in range(1, size)]
    results: list[Message] = []
    for src in reversed(others):
        results += [
            port.recv(chunk, src, phase=_RESULT)
            for chunk in _chunks(segments[src], tensor.nbytes, size)
        ]
    yield from _reduce_segment(port, segments[port.rank], segments, how, room, others)
    yield from results


def all_reduce_coalesced(
    port: Port, tensors: Sequence[Segment], hows: Sequence[Reduction]
) -> Steps:
    """Several, in place: small ones of one dtype are packed and share their messages.

    Only those that are packed may have gaps.
    """
    by_kind: dict[tuple[Reduction, torch.device], list[Segment]] = {}
    alone: list[Steps] = []
    for tensor, how in zip(tensors, hows, strict=True):
        if choice.reduces_at_once(tensor.nbytes, port.world_size):
            by_kind.setdefault((how, tensor_of(tensor).device), []).append(tensor)
        else:
            assert isinstance(tensor, torch.Tensor)
            alone.append(all_reduce(port, tensor, how))
    together: list[tuple[list[Segment], list[torch.Tensor], Steps]] = []
    for (how, _), members in by_kind.items():
        for one in members:
            port.load_copies(one)
        sizes = [one.numel() for one in members]
        packed = port.room(tensor_of(members[0]), sum(sizes))
        parts = list(torch.split(packed, sizes))
        together.append((members, parts, all_reduce(port, packed, how)))
    for steps in (*alone, *(steps for _, _, steps in together)):
        next(steps)
    yield None
    for steps in alone:
        yield from steps
    for members, parts, steps in together:
        # Of one dtype: on devices copies of bytes, which load no kernels, or those loaded above.
        for part, member in zip(parts, members, strict=True):
            load(member, part)
        yield from steps
        for part, member in zip(parts, members, strict=True):
            store(part, member)


def reduce_scatter(port: Port, out: Segment, inputs: Sequence[Segment], how: Reduction) -> Steps:
    """Each rank reduces its segment."""
    room = _room_for_chunks(port, out, inputs, how, None)
    yield None
    yield from _reduce_segment(port, out, inputs, how, room, [])


def _room_for_values(port: Port, mine: torch.Tensor) -> list[torch.Tensor]:
    """What this rank has, and room for what every other has, in the order of ranks."""
    return [mine if rank == port.rank else port.room(mine) for rank in range(port.world_size)]


def _receive_values(port: Port, values: Sequence[torch.Tensor]) -> Steps:
    """Receive all of what every other rank has."""
    receives = []
    for step in range(1, port.world_size):
        src = (port.rank - step) % port.world_size
        receives.append(port.recv(values[src], src))
    yield from receives


@dataclass(frozen=True, slots=True)
class _ChunkRoom:
    """Memory to reduce a segment in.

    Attributes:
        output_nbytes: See `choice.num_chunks`; each rank's segment is its output by default.
        buffers: For the chunk that is reduced and the next: one from each other rank.
        total: What chunks are accumulated in, if they need that.
        packed: For a chunk to each rank whose segment has gaps.
        mine: For a chunk of this rank's segment, if that has gaps.
        result: For what a chunk is reduced to, if the output has gaps.
    """

    output_nbytes: int | None
    buffers: list[dict[int, torch.Tensor]]
    total: torch.Tensor | None
    packed: dict[int, torch.Tensor]
    mine: torch.Tensor | None
    result: torch.Tensor | None

    def pack(self, dst: int, chunk: Segment) -> torch.Tensor:
        """Copy a chunk to where it is sent from; what was there before must have gone."""
        packed = self.packed[dst][: chunk.numel()]
        load(chunk, packed)
        return packed

    def own(self, chunk: Segment) -> torch.Tensor:
        """This rank's own chunk, without gaps."""
        if isinstance(chunk, torch.Tensor):
            return chunk
        assert self.mine is not None
        own = self.mine[: chunk.numel()]
        chunk.load(own)
        return own

    def for_result(self, count: int) -> torch.Tensor:
        assert self.result is not None
        return self.result[:count]


def _room_for_chunks(
    port: Port,
    out: Segment,
    segments: Sequence[Segment],
    how: Reduction,
    output_nbytes: int | None,
) -> _ChunkRoom:
    rank, size = port.rank, port.world_size
    others = [(rank - step) % size for step in range(1, size)]
    packed = {
        dst: port.stage(next(_chunks(one, output_nbytes, size)))
        for dst in others
        if isinstance(one := segments[dst], Range) and one.numel()
    }
    first_two = list(itertools.islice(_chunks(segments[rank], output_nbytes, size), 2))
    like = tensor_of(segments[rank])
    buffers = [{src: port.room(like, chunk.numel()) for src in others} for chunk in first_two]
    if not first_two:
        return _ChunkRoom(output_nbytes, buffers, None, packed, None, None)
    first, target = first_two[0], out[: first_two[0].numel()]
    mine = port.stage(first) if isinstance(first, Range) else None
    result = None
    if isinstance(target, Range):
        # What was copied from this rank's own segment may be overwritten.
        port.load_copies(target)
        result = port.scratch(target.tensor, target.numel()) if mine is None else mine
    value = first if mine is None else mine
    into = target if result is None else result
    assert isinstance(value, torch.Tensor) and isinstance(into, torch.Tensor)
    total = port.total(how, value, into)
    return _ChunkRoom(output_nbytes, buffers, total, packed, mine, result)


def _reduce_segment(
    port: Port,
    out: Segment,
    segments: Sequence[Segment],
    how: Reduction,
    room: _ChunkRoom,
    targets: Sequence[int],
) -> Steps:
    """Exchange segments and reduce this rank's, chunk by chunk, into `out`.

    Each chunk goes to the ranks in `targets` as soon as it is reduced. What has gaps is packed for
    each rank a chunk at a time: the next one when that was received.

    Args:
        port: The group.
        out: ``[n]``; may be this rank's segment itself. Without gaps if there are `targets`.
        segments: One for each rank.
        how: The reduction.
        room: Where.
        targets: Ranks.
    """
    rank, size = port.rank, port.world_size
    gaps: list[tuple[int, list[Segment]]] = []
    for step in range(1, size):
        dst = (rank + step) % size
        chunks = _chunks(segments[dst], room.output_nbytes, size)
        if dst in room.packed:
            gaps.append((dst, list(chunks)))
            continue
        for chunk in chunks:
            assert isinstance(chunk, torch.Tensor)
            port.send(chunk, dst)
    mine = list(_chunks(segments[rank], room.output_nbytes, size))
    length = mine[0].numel() if mine else 0
    coming: list[list[Message]] = []

    def receive(index: int) -> None:
        count = mine[index].numel()
        buffers = room.buffers[index % 2]
        coming.append([port.recv(buffer[:count], src) for src, buffer in buffers.items()])

    for index in range(min(2, len(mine))):
        receive(index)
    packed: list[Message | None] = []
    for index in range(max([len(mine), *(len(chunks) for _, chunks in gaps)])):
        yield from packed
        packed = [
            port.send(room.pack(dst, chunks[index]), dst)
            for dst, chunks in gaps
            if index < len(chunks)
        ]
        if index >= len(mine):
            continue
        yield from coming[index]
        chunk = mine[index]
        count = chunk.numel()
        target = out[index * length : index * length + count]
        received = room.buffers[index % 2]
        own = room.own(chunk)
        values = [own if src == rank else received[src][:count] for src in range(size)]
        result = target if isinstance(target, torch.Tensor) else room.for_result(count)
        how.combine(values, result, room.total)
        store(result, target)
        for dst in targets:
            port.send(result, dst, phase=_RESULT)
        if index + 2 < len(mine):
            receive(index + 2)


def _segments(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut into segments that differ by one element at most."""
    return list(torch.tensor_split(tensor, count))


def _chunks(segment: SegmentT, output_nbytes: int | None, world_size: int) -> Iterator[SegmentT]:
    """Cut a segment into the pieces that are exchanged one by one."""
    nbytes = segment.nbytes
    count = choice.num_chunks(
        nbytes, nbytes if output_nbytes is None else output_nbytes, world_size
    )
    step = -(-segment.numel() // max(1, count))
    for start in range(0, segment.numel(), max(1, step)):
        yield segment[start : start + step]
