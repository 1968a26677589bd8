"""Ping-pong between two ranks: `send` and `recv` against `dist.send` and `dist.recv`, bare NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from torch_nixl.bench.raw import NAME as RAW
from torch_nixl.bench.raw import RawAgent
from torch_nixl.bench.report import OURS
from torch_nixl.bench.session import Case, Session
from torch_nixl.p2p.protocol import EAGER_NBYTES

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)


def suite(session: Session) -> Iterator[Case]:
    """Half a round trip at each size. Ranks beyond the first two only wait."""
    sizes = session.options.sizes
    buffer = torch.zeros(max(sizes), dtype=torch.uint8, device=session.device)
    buffer.fill_(session.rank)
    raw = None
    if session.world_size == 2 and RAW not in session.options.without:
        raw = RawAgent(session, buffer)
    for nbytes in sizes:
        part = buffer[:nbytes]
        contestants: dict[str, Callable[[], object]] = {OURS: partial(_ours, session, part)}
        for name, group in session.rivals().items():
            contestants[name] = partial(_group, session, part, group)
        if raw is not None:
            contestants[RAW] = partial(_raw, session, raw, nbytes)
        yield Case("half a round trip", nbytes, contestants, share=2.0)


def _ours(session: Session, tensor: torch.Tensor) -> None:
    communicator = session.communicator
    if session.rank == 0:
        communicator.send(tensor, 1)
        communicator.recv(1, out=tensor)
    elif session.rank == 1:
        communicator.recv(0, out=tensor)
        communicator.send(tensor, 0)


def _group(session: Session, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if session.rank == 0:
        dist.send(tensor, 1, group=group)
        dist.recv(tensor, 1, group=group)
    elif session.rank == 1:
        dist.recv(tensor, 0, group=group)
        dist.send(tensor, 0, group=group)


def _raw(session: Session, raw: RawAgent, nbytes: int) -> None:
    """A notification where ours is eager; above, one that says so and a one-sided READ."""

    def send() -> None:
        raw.notify(b"x" * nbytes if nbytes <= EAGER_NBYTES else b"go")
        if nbytes > EAGER_NBYTES:
            raw.await_message()

    def receive() -> None:
        raw.await_message()
        if nbytes > EAGER_NBYTES:
            raw.read(nbytes, b"done")

    if session.rank == 0:
        send()
        receive()
    else:
        receive()
        send()
