"""The algorithms: each a generator over messages, that yields what it waits for.

All tensors are one-dimensional and contiguous. What a rank sends must not change until the
collective has ended, unless the algorithm knows that its receiver has it.

[Note: the first yield]
What an algorithm does up to its first yield, of None, is done by the caller's thread, perhaps long
before its tensors may be touched: it makes all its memory there, and nothing else. The rest is
done by whichever thread has it go on, which on a device must not allocate: see
[Note: no device calls in the driver] in `engine/streams.py`.

N: ranks; n: elements of a tensor; segment: the part of a tensor that one rank reduces.
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

_DATA, _RESULT = 0, 1


def barrier(port: Port, token: torch.Tensor) -> Steps:
    """Dissemination: in round k each rank hears from the one 2^k before it.

    Args:
        port: The group.
        token: ``[0]``.
    """
    yield None
    distance = 1
    while distance < port.world_size:
        port.send(token, (port.rank + distance) % port.world_size)
        yield port.recv(token, (port.rank - distance) % port.world_size)
        distance *= 2


def broadcast(port: Port, tensor: torch.Tensor, src: int) -> Steps:
    """From the root to all, or down a binomial tree."""
    yield None
    size = port.world_size
    if size <= choice.FLAT_RANKS:
        if port.rank != src:
            yield port.recv(tensor, src)
            return
        for step in range(1, size):
            port.send(tensor, (src + step) % size, assist=size == 2)
        return
    place = (port.rank - src) % size
    # A rank's parent lacks its lowest set bit; its children have one more below that.
    below = 1 << (size - 1).bit_length()
    if place:
        below = place & -place
        yield port.recv(tensor, (src + place - below) % size)
    bit = below >> 1
    while bit:
        if place + bit < size:
            port.send(tensor, (src + place + bit) % size)
        bit >>= 1


def scatter(port: Port, out: torch.Tensor, inputs: Sequence[torch.Tensor], src: int) -> Steps:
    """From the root, to each its part. `inputs` is empty elsewhere."""
    yield None
    if port.rank != src:
        yield port.recv(out, src)
        return
    for step in range(1, port.world_size):
        dst = (src + step) % port.world_size
        port.send(inputs[dst], dst, assist=port.world_size == 2)
    _copy(out, inputs[src])


def gather(port: Port, tensor: torch.Tensor, outs: Sequence[torch.Tensor], dst: int) -> Steps:
    """From each to the root. `outs` is empty elsewhere."""
    yield None
    if port.rank != dst:
        port.send(tensor, dst, assist=port.world_size == 2)
        return
    receives = []
    for step in range(1, port.world_size):
        src = (dst + step) % port.world_size
        receives.append(port.recv(outs[src], src))
    _copy(outs[dst], tensor)
    yield from receives


def all_gather(port: Port, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
    """From each to each."""
    yield None
    for step in range(1, port.world_size):
        port.send(tensor, (port.rank + step) % port.world_size)
    receives = []
    for step in range(1, port.world_size):
        src = (port.rank - step) % port.world_size
        receives.append(port.recv(outs[src], src))
    _copy(outs[port.rank], tensor)
    yield from receives


def all_to_all(port: Port, outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
    """From each to each, something else for each. Nothing at all is sent as such."""
    yield None
    for step in range(1, port.world_size):
        dst = (port.rank + step) % port.world_size
        port.send(inputs[dst], dst)
    receives = []
    for step in range(1, port.world_size):
        src = (port.rank - step) % port.world_size
        receives.append(port.recv(outs[src], src))
    _copy(outs[port.rank], inputs[port.rank])
    yield from receives


def reduce(
    port: Port, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, how: Reduction
) -> Steps:
    """To the root: all at once, or each rank reduces its segment first."""
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
        result = port.scratch(segments[port.rank])
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
    port: Port, tensors: Sequence[torch.Tensor], hows: Sequence[Reduction]
) -> Steps:
    """Several, in place: small ones of one dtype are packed and share their messages."""
    by_kind: dict[tuple[Reduction, torch.device], list[torch.Tensor]] = {}
    alone: list[Steps] = []
    for tensor, how in zip(tensors, hows, strict=True):
        if choice.reduces_at_once(tensor.nbytes, port.world_size):
            by_kind.setdefault((how, tensor.device), []).append(tensor)
        else:
            alone.append(all_reduce(port, tensor, how))
    together: list[tuple[list[torch.Tensor], list[torch.Tensor], Steps]] = []
    for (how, _), members in by_kind.items():
        sizes = [one.numel() for one in members]
        packed = port.room(members[0], sum(sizes))
        parts = list(torch.split(packed, sizes))
        together.append((members, parts, all_reduce(port, packed, how)))
    for steps in (*alone, *(steps for _, _, steps in together)):
        next(steps)
    yield None
    for steps in alone:
        yield from steps
    for members, parts, steps in together:
        # Of one dtype and contiguous: on devices mere copies of bytes, which load no kernels.
        for part, member in zip(parts, members, strict=True):
            part.copy_(member)
        yield from steps
        for part, member in zip(parts, members, strict=True):
            member.copy_(part)


def reduce_scatter(
    port: Port, out: torch.Tensor, inputs: Sequence[torch.Tensor], how: Reduction
) -> Steps:
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
        output_nbytes: See `choice.chunk_nbytes`; each rank's segment is its output by default.
        buffers: For the chunk that is reduced and the next: one from each other rank.
        total: What chunks are accumulated in, if they need that.
    """

    output_nbytes: int | None
    buffers: list[dict[int, torch.Tensor]]
    total: torch.Tensor | None


def _room_for_chunks(
    port: Port,
    out: torch.Tensor,
    segments: Sequence[torch.Tensor],
    how: Reduction,
    output_nbytes: int | None,
) -> _ChunkRoom:
    size = port.world_size
    mine = segments[port.rank]
    first_two = list(itertools.islice(_chunks(mine, output_nbytes, size), 2))
    sources = [(port.rank - step) % size for step in range(1, size)]
    buffers = [{src: port.room(chunk) for src in sources} for chunk in first_two]
    total = port.total(how, first_two[0], out) if first_two else None
    return _ChunkRoom(output_nbytes, buffers, total)


def _reduce_segment(
    port: Port,
    out: torch.Tensor,
    segments: Sequence[torch.Tensor],
    how: Reduction,
    room: _ChunkRoom,
    targets: Sequence[int],
) -> Steps:
    """Exchange segments and reduce this rank's, chunk by chunk, into `out`.

    Each chunk goes to the ranks in `targets` as soon as it is reduced.

    Args:
        port: The group.
        out: ``[n]``; may be this rank's segment itself.
        segments: One for each rank.
        how: The reduction.
        room: Where.
        targets: Ranks.
    """
    size = port.world_size
    for step in range(1, size):
        dst = (port.rank + step) % size
        for chunk in _chunks(segments[dst], room.output_nbytes, size):
            port.send(chunk, dst)
    mine = list(_chunks(segments[port.rank], room.output_nbytes, size))
    results = torch.split(out, mine[0].numel()) if mine else ()
    coming: list[list[Message]] = []

    def receive(index: int) -> None:
        count = mine[index].numel()
        buffers = room.buffers[index % 2]
        coming.append([port.recv(buffer[:count], src) for src, buffer in buffers.items()])

    for index in range(min(2, len(mine))):
        receive(index)
    for index, (chunk, result) in enumerate(zip(mine, results, strict=True)):
        yield from coming[index]
        received = room.buffers[index % 2]
        values = [
            chunk if rank == port.rank else received[rank][: chunk.numel()] for rank in range(size)
        ]
        how.combine(values, result, room.total)
        for dst in targets:
            port.send(result, dst, phase=_RESULT)
        if index + 2 < len(mine):
            receive(index + 2)


def _segments(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut into segments that differ by one element at most."""
    return list(torch.tensor_split(tensor, count))


def _chunks(
    segment: torch.Tensor, output_nbytes: int | None, world_size: int
) -> Iterator[torch.Tensor]:
    """Cut a segment into the pieces that are exchanged one by one."""
    nbytes = segment.nbytes
    most = choice.chunk_nbytes(
        nbytes, nbytes if output_nbytes is None else output_nbytes, world_size
    )
    step = max(1, most // segment.element_size())
    for start in range(0, segment.numel(), step):
        yield segment[start : start + step]


def _copy(out: torch.Tensor, tensor: torch.Tensor) -> None:
    if out.data_ptr() != tensor.data_ptr():
        out.copy_(tensor)
