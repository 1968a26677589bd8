"""What is left of a Communicator that closes, or that could not be made."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import HashStore

from p2p.conftest import World
from torch_nixl.engine.connection import Connection
from torch_nixl.errors import ClosedError, TransferError, TransferTimeout
from torch_nixl.p2p import protocol
from torch_nixl.p2p.bootstrap import Bootstrap
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.hub import exchanges_of, hub_of
from torch_nixl.testing import LoopbackFabric

LARGE = 4 * protocol.EAGER_NBYTES
DEADLINE = 10.0


@pytest.fixture
def agents(fabric: LoopbackFabric) -> Iterator[list[Connection]]:
    made = [Connection(fabric.adapter(f"agent{rank}")) for rank in range(2)]
    yield made
    for one in made:
        one.abort()


def pair(agents: list[Connection], prefix: str) -> list[Communicator]:
    """Two ranks that have met, on agents that others share."""
    store = HashStore()
    ranks = [
        Communicator(store, rank, 2, prefix=prefix, timeout=DEADLINE, connection=agents[rank])
        for rank in range(2)
    ]
    ranks[1].isend(torch.ones(1), 0, tag=7)
    ranks[0].recv(1, tag=7)
    return ranks


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("receiver", ["open", "closes", "aborts", "reads"])
def test_memory_of_what_was_not_received_is_released_though_the_agent_lives_on(
    agents: list[Connection], how: str, receiver: str
) -> None:
    a, b = pair(agents, "other")
    first, second = pair(agents, "closed")
    work = first.isend(torch.ones(LARGE), 1)
    if receiver == "reads":
        receive = second.irecv(0)
    elif receiver == "closes":
        second.close(0.1)
    elif receiver == "aborts":
        second.abort()
    if how == "close":
        first.close(0.1)
    else:
        first.abort()
    assert work.wait_released(DEADLINE)
    if receiver == "reads":
        assert receive.wait_released(DEADLINE)
        assert receive.is_completed()
    hub_of(agents[0])._forget_ended()
    assert not hub_of(agents[0])._ending
    sent = a.isend(torch.ones(LARGE), 1)
    assert float(b.recv(0)[-1]) == 1.0
    sent.wait(DEADLINE)


def test_close_leaves_nothing_for_the_agents_close_to_wait_for(world: World) -> None:
    a, b = world()
    work = a.isend(torch.ones(LARGE), 1)
    assert b.probe(0).nbytes == 4 * LARGE
    started = time.monotonic()
    a.close(0.2)
    assert work.wait_released(0)
    a.connection.close(DEADLINE)
    assert time.monotonic() - started < 1.5


def test_constructor_that_fails_leaves_nothing(
    agents: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise RuntimeError("the store is down")

        patch.setattr(Bootstrap, "publish", fail)
        for rank in range(2):
            with pytest.raises(RuntimeError, match="is down"):
                Communicator(store, rank, 2, connection=agents[rank], once=True)
    assert exchanges_of(agents[0]) == []
    assert store.num_keys() == 0


class BrokenStore(HashStore):
    """A store whose host has gone: its calls fail at once."""

    calls = 0

    def check(self, *_: object) -> bool:
        type(self).calls += 1
        raise RuntimeError("connection reset")


def test_dead_store_is_told_apart_from_a_rank_that_is_late(fabric: LoopbackFabric) -> None:
    with Connection(fabric.adapter("a")) as connection:
        late = Communicator(HashStore(), 0, 2, connection=connection, timeout=0.2)
        with pytest.raises(TransferTimeout, match="has not made its Communicator"):
            late.send(torch.ones(1), 1)
        dead = Communicator(BrokenStore(), 0, 2, connection=connection, timeout=60)
        started = time.monotonic()
        with pytest.raises(TransferError, match=r"store .* not work any more: connection reset"):
            dead.send(torch.ones(1), 1)
        assert time.monotonic() - started < 5
        assert BrokenStore.calls < 10
        late.close()
        dead.close()


def test_rank_that_has_come_and_gone_is_met_without_its_key(fabric: LoopbackFabric) -> None:
    store = HashStore()
    connections = [Connection(fabric.adapter(f"agent{rank}")) for rank in range(2)]
    a, b = (Communicator(store, rank, 2, connection=connections[rank]) for rank in range(2))
    b.isend(torch.ones(1), 0)
    store.delete_key(f"torch_nixl/1/{b.rank}")  # As its close does.
    assert a.recv(1, timeout=DEADLINE).tolist() == [1.0]
    for one in (a, b):
        one.close(0.1)
    with pytest.raises(ClosedError):
        a.recv(1)
    for connection in connections:
        connection.close()


def test_who_has_left_is_not_told_that_this_side_leaves(
    fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    connections = [Connection(fabric.adapter(f"agent{rank}")) for rank in range(2)]
    a, b = (Communicator(store, rank, 2, connection=connections[rank]) for rank in range(2))
    b.send(torch.ones(1), 0)
    a.recv(1, timeout=DEADLINE)
    for one, other in ((a, b), (b, a)):
        remote = one._exchange.peers[other.rank].remote
        answered = functools.partial(getattr, remote, "answered")
        assert one.connection.progress.wait_until(answered, time.monotonic() + DEADLINE)
    connections[0].progress.stop()  # Nobody takes in what b says from here on.
    b.close()
    connections[1].close()
    told: list[str] = []
    monkeypatch.setattr(connections[0].adapter, "notify", lambda name, _: told.append(name))
    a.close()
    connections[0].close()
    assert told == []
