"""The algorithms: each a generator over messages, that yields what it waits for.

All tensors are one-dimensional and contiguous; a segment may be a range of one that has gaps, which
is copied piece by piece. What a rank sends must not change until the collective has ended, unless
the algorithm knows that its receiver has it. Those that reduce are in `reducing.py`.

[Note: the first yield]
What an algorithm does up to its first yield, of None, is done by the caller's thread, perhaps long
before its tensors may be touched: it makes all its memory there, and nothing else. The rest is
done by whichever thread has it go on, which on a device must not allocate: see
[Note: no device calls in the driver] in `engine/streams.py`.

n: elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_nixl.collectives import choice
from torch_nixl.collectives.operation import Steps
from torch_nixl.collectives.port import Port
from torch_nixl.collectives.segments import Range, Segment, load


def barrier(port: Port, token: torch.Tensor) -> Steps:
    """Dissemination: in round k each rank hears from the one 2^k before it.

    Args:
        port: The group.
        token: ``[1]``: what is empty has no address, and takes longer to look at.
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


def scatter(port: Port, out: torch.Tensor, inputs: Sequence[Segment], src: int) -> Steps:
    """From the root, to each its part. `inputs` is empty elsewhere."""
    rank, size = port.rank, port.world_size
    # For parts with gaps, one after another.
    gaps = [one for one in inputs if isinstance(one, Range)]
    room = port.stage(gaps[0]) if gaps and size > 1 else None
    yield None
    if rank != src:
        yield port.recv(out, src)
        return
    in_room = None
    for step in range(1, size):
        dst = (src + step) % size
        part = inputs[dst]
        if isinstance(part, torch.Tensor):
            port.send(part, dst, assist=size == 2)
            continue
        assert room is not None
        yield in_room
        part.load(room)
        in_room = port.send(room, dst, assist=size == 2)
    load(inputs[src], out)


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
    load(tensor, outs[dst])
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
    load(tensor, outs[port.rank])
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
    load(inputs[port.rank], outs[port.rank])
    yield from receives
