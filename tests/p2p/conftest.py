"""Communicators of several ranks in this process, on the loopback adapter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from torch_nixl.engine.connection import Connection
from torch_nixl.engine.operation import Operation
from torch_nixl.p2p.agreement import Agreement
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.peer import Link
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.sending import SendOperation
from torch_nixl.testing import LoopbackFabric

LEAVING_SECONDS = 5.0
"""How long what was under way at the end of a test may take to end."""

World = Callable[..., list[Communicator]]


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.fixture
def world(fabric: LoopbackFabric) -> Iterator[World]:
    """Make the Communicators of a world; all are closed in the end."""
    made: list[Communicator] = []

    def make(
        size: int = 2, *, timeout: float | None = 20.0, prefix: str = "t"
    ) -> list[Communicator]:
        store = HashStore()
        ranks = [
            Communicator(
                store,
                rank,
                size,
                prefix=prefix,
                timeout=timeout,
                connection=Connection(fabric.adapter(f"{prefix}{len(made)}-{rank}")),
            )
            for rank in range(size)
        ]
        made.extend(ranks)
        return ranks

    yield make
    for communicator in made:
        communicator.abort()
    try:
        _check_nothing_left(made, fabric)
    finally:
        for communicator in made:
            communicator.connection.abort()


def _check_nothing_left(made: list[Communicator], fabric: LoopbackFabric) -> None:
    """Nothing may be left in any table, and no memory be held."""
    for communicator in made:
        fabric.delay(None, initiator=communicator.connection.name)
    fabric.delay(1 << 30)
    open_ones = [one for one in made if not one.connection.closed]
    deadline = time.monotonic() + LEAVING_SECONDS
    left: list[object] = []
    while time.monotonic() < deadline:
        left = [what for one in open_ones for what in _left(one)]
        if not left:
            return
        for one in open_ones:
            one.connection.progress.step()
            one.connection.rounds.advance()
        time.sleep(0.001)
    pytest.fail(f"left behind: {left}")


def _left(communicator: Communicator) -> list[object]:
    """What nobody will end: operations, messages, and memory that no operation holds."""
    connection = communicator.connection
    operations = connection.operations
    every = {*operations.all(), *operations.busy, *operations.watched}
    excused = {one for one in every if _waits_for_the_other_side(one)}
    left: list[object] = [*(every - excused), *operations.transfers]
    left += [one for one in communicator._exchange.outstanding() if one not in excused]
    inbox = communicator._exchange.inbox
    left += inbox.matcher.messages()
    left += [one for one in inbox.pushed.values() if one.receive not in excused]
    registry = connection.registry
    entries = (*registry._anchored.values(), *registry._plain.values())
    held = [memory for one in excused for memory in one.memories if memory.entry is not None]
    if sum(entry.users for entry in entries) != len(held):
        left += [entry for entry in entries if entry.users]
    return left


def _waits_for_the_other_side(operation: Operation) -> bool:
    """Whether memory stays owned, as it must, until the other side's last word, or its death."""
    if isinstance(operation, SendOperation):
        return operation.done and not operation.released and operation._exposed
    if isinstance(operation, ReceiveOperation):
        return operation.done and not operation.released and operation._pushed is not None
    if isinstance(operation, Link):
        return operation._peer.pending > 0  # it is pinged for one of those
    return isinstance(operation, Agreement) and operation.done and operation._exposed


@pytest.fixture(params=["cma", "tcp"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way bytes take: by READ on one host, by WRITE over TCP."""
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    return str(request.param)
