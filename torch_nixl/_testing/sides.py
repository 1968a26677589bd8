"""The words that conformance checks are written in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from torch_nixl._testing.harness import PEER_DEVICE_ID, Harness, Peer
from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind, Region, Spans, Transfer

DRAM = MemoryKind.DRAM
DEADLINE = 20.0
"""Seconds after which a check gives up waiting."""

GRACE = 0.2
"""Seconds for which a check watches that something does not happen."""


class Steps(Protocol):
    """Something that makes progress when told to."""

    def step(self) -> object: ...


class Side:
    """An adapter with a registered buffer, and all messages that it has drained so far."""

    def __init__(
        self, harness: Harness, name: str, *, nbytes: int = 1 << 20, device_id: int = 7
    ) -> None:
        self.adapter: Adapter = harness.adapter(name)
        self.name = name
        self.device_id = device_id
        self.buffer = harness.buffer(nbytes)
        self.region = Region(DRAM, self.buffer.ctypes.data, nbytes, device_id)
        self.registration = self.adapter.register(self.region)
        self.inbox: list[tuple[str, bytes]] = []

    def step(self) -> None:
        self.inbox += self.adapter.drain()

    def span(self, offset: int, nbytes: int) -> Spans:
        return spans((self.region.address + offset, nbytes, self.device_id))

    def know(self, other: Side) -> None:
        told = other.adapter.metadata([other.registration], connection=True)
        assert self.adapter.add_remote(told) == other.name

    def transfer(self, direction: Direction, mine: Spans, theirs: Spans, remote: str) -> Transfer:
        return self.adapter.prepare(direction, DRAM, mine, DRAM, theirs, remote)

    def finish(self, transfer: Transfer, *others: Steps) -> None:
        """Poll until the transfer is complete, while the others make progress."""
        until(lambda: self.adapter.poll(transfer), *others)

    def run(self, transfer: Transfer, *others: Steps, notification: bytes = b"") -> None:
        """Post and finish."""
        if not self.adapter.post(transfer, notification):
            self.finish(transfer, *others)


class PeerSide:
    """A peer, and all messages that it has drained so far."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.inbox: list[tuple[str, bytes]] = []

    def step(self) -> None:
        self.inbox += self.peer.drain()

    def span(self, offset: int, nbytes: int) -> Spans:
        return spans((self.peer.address + offset, nbytes, PEER_DEVICE_ID))


def spans(*rows: tuple[int, int, int]) -> Spans:
    return np.array(rows, np.uint64).reshape(-1, 3)


def until(condition: Callable[[], object], *others: Steps) -> None:
    """Wait for a condition while others make progress; fail at the deadline."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        for other in others:
            other.step()
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing happened for {DEADLINE} s")


def never(condition: Callable[[], object], *others: Steps) -> None:
    """Watch for a while that a condition does not come true."""
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        for other in others:
            other.step()
        assert not condition(), "that was not to happen"


def raises(expected: type[BaseException], call: Callable[..., object], *args: object) -> None:
    """Call, and fail unless that raises exactly what is expected, or a kind of it."""
    try:
        result = call(*args)
    except expected:
        return
    raise AssertionError(f"{call} returned {result!r} and did not raise {expected.__name__}")


def pair(harness: Harness) -> tuple[Side, Side]:
    """Return two sides that know each other and have been in contact both ways."""
    a, b = Side(harness, "a"), Side(harness, "b")
    a.know(b)
    b.know(a)
    a.adapter.notify("b", b"hello")
    b.adapter.notify("a", b"hello")
    until(lambda: a.inbox and b.inbox, a, b)
    # What the first messages owe is settled too: inline transfers complete without the target.
    a.run(a.transfer(Direction.WRITE, a.span(0, 1), b.span(0, 1), "b"), b)
    b.run(b.transfer(Direction.WRITE, b.span(0, 1), a.span(0, 1), "a"), a)
    a.inbox.clear()
    b.inbox.clear()
    return a, b


def side_and_peer(harness: Harness) -> tuple[Side, PeerSide]:
    """Return a side in contact with a peer, which knows it too."""
    a, peer = Side(harness, "a"), PeerSide(harness.peer("peer"))
    assert a.adapter.add_remote(peer.peer.metadata()) == "peer"
    peer.peer.add_remote(a.adapter.metadata([a.registration], connection=True))
    a.adapter.notify("peer", b"hello")
    peer.peer.notify("a", b"hello")
    until(lambda: a.inbox and peer.inbox, a, peer)
    a.run(a.transfer(Direction.WRITE, a.span(0, 1), peer.span(0, 1), "peer"), peer)
    a.inbox.clear()
    peer.inbox.clear()
    return a, peer
