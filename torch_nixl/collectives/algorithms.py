"""The algorithms: each a generator over messages, that yields what it waits for.

All tensors are one-dimensional and contiguous. What a rank sends must not change until the
collective has ended, unless the algorithm knows that its receiver has it.

N: ranks; n: elements of a tensor; segment: the part of a tensor that one rank reduces.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

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
    distance = 1
    while distance < port.world_size:
        port.send(token, (port.rank + distance) % port.world_size)
        yield port.recv(token, (port.rank - distance) % port.world_size)
        distance *= 2


def broadcast(port: Port, tensor: torch.Tensor, src: int) -> Steps:
    """From the root to all, or down a binomial tree."""
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
    if port.rank != src:
        yield port.recv(out, src)
        return
    for step in range(1, port.world_size):
        dst = (src + step) % port.world_size
        port.send(inputs[dst], dst, assist=port.world_size == 2)
    _copy(out, inputs[src])


def gather(port: Port, tensor: torch.Tensor, outs: Sequence[torch.Tensor], dst: int) -> Steps:
    """From each to the root. `outs` is empty elsewhere."""
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
    if choice.reduces_at_once(tensor.nbytes, port.world_size):
        if port.rank != dst:
            port.send(tensor, dst)
            return
        assert out is not None
        how.combine((yield from _receive_values(port, tensor)), out)
        return
    segments = _segments(tensor, port.world_size)
    if port.rank != dst:
        total = torch.empty_like(segments[port.rank])
        yield from _reduce_segment(port, total, segments, how, [dst], tensor.nbytes)
        return
    assert out is not None
    results = _segments(out, port.world_size)
    yield from _reduce_segment(port, results[port.rank], segments, how, [], out.nbytes)
    for step in range(1, port.world_size):
        src = (port.rank - step) % port.world_size
        for chunk in _chunks(results[src], out.nbytes, port.world_size):
            yield port.recv(chunk, src, phase=_RESULT)


def all_reduce(port: Port, tensor: torch.Tensor, how: Reduction) -> Steps:
    """In place: all at once, or each rank reduces its segment and sends it to all."""
    size = port.world_size
    if choice.reduces_at_once(tensor.nbytes, size):
        sends = [port.send(tensor, (port.rank + step) % size) for step in range(1, size)]
        values = yield from _receive_values(port, tensor)
        # Those that have not left, for lack of credit, would send the result.
        yield from filter(None, sends)
        how.combine(values, tensor)
        return
    segments = _segments(tensor, size)
    others = [(port.rank + step) % size for step in range(1, size)]
    results: list[Message] = []
    for src in reversed(others):
        results += [
            port.recv(chunk, src, phase=_RESULT)
            for chunk in _chunks(segments[src], tensor.nbytes, size)
        ]
    yield from _reduce_segment(port, segments[port.rank], segments, how, others, tensor.nbytes)
    yield from results


def all_reduce_coalesced(
    port: Port, tensors: Sequence[torch.Tensor], hows: Sequence[Reduction]
) -> Steps:
    """Several, in place: small ones of one dtype are packed and share their messages."""
    by_kind: dict[Reduction, list[torch.Tensor]] = {}
    for tensor, how in zip(tensors, hows, strict=True):
        if choice.reduces_at_once(tensor.nbytes, port.world_size):
            by_kind.setdefault(how, []).append(tensor)
        else:
            yield from all_reduce(port, tensor, how)
    for how, members in by_kind.items():
        packed = torch.cat(members)
        yield from all_reduce(port, packed, how)
        for member, result in zip(
            members, torch.split(packed, [one.numel() for one in members]), strict=True
        ):
            member.copy_(result)


def reduce_scatter(
    port: Port, out: torch.Tensor, inputs: Sequence[torch.Tensor], how: Reduction
) -> Steps:
    """Each rank reduces its segment."""
    yield from _reduce_segment(port, out, inputs, how, [], None)


def _receive_values(port: Port, mine: torch.Tensor) -> Generator[Message, None, list[torch.Tensor]]:
    """Receive all of what every other rank has; return what all have, in the order of ranks."""
    values = [
        mine if rank == port.rank else torch.empty_like(mine) for rank in range(port.world_size)
    ]
    receives = []
    for step in range(1, port.world_size):
        src = (port.rank - step) % port.world_size
        receives.append(port.recv(values[src], src))
    yield from receives
    return values


def _reduce_segment(
    port: Port,
    out: torch.Tensor,
    segments: Sequence[torch.Tensor],
    how: Reduction,
    targets: Sequence[int],
    output_nbytes: int | None,
) -> Steps:
    """Exchange segments and reduce this rank's, chunk by chunk, into `out`.

    Each chunk goes to the ranks in `targets` as soon as it is reduced.

    Args:
        port: The group.
        out: ``[n]``; may be this rank's segment itself.
        segments: One for each rank.
        how: The reduction.
        targets: Ranks.
        output_nbytes: See `choice.chunk_nbytes`; each rank's segment is its output by default.
    """
    size = port.world_size
    for step in range(1, size):
        dst = (port.rank + step) % size
        for chunk in _chunks(segments[dst], output_nbytes, size):
            port.send(chunk, dst)
    mine = list(_chunks(segments[port.rank], output_nbytes, size))
    results = torch.split(out, mine[0].numel()) if mine else ()
    sources = [(port.rank - step) % size for step in range(1, size)]
    room: list[dict[int, torch.Tensor]] = []
    coming: list[list[Message]] = []

    def receive(index: int) -> None:
        # Two chunks from each rank have room: the one that is reduced and the next.
        if len(room) < 2:
            room.append({src: torch.empty_like(mine[index]) for src in sources})
        count = mine[index].numel()
        coming.append([port.recv(buffer[:count], src) for src, buffer in room[index % 2].items()])

    for index in range(min(2, len(mine))):
        receive(index)
    for index, (chunk, result) in enumerate(zip(mine, results, strict=True)):
        yield from coming[index]
        received = room[index % 2]
        values = [
            chunk if rank == port.rank else received[rank][: chunk.numel()] for rank in range(size)
        ]
        how.combine(values, result)
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
