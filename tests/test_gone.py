"""What is left in memory of a connection that has ended: nothing, however it ended."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from kv.worlds import Decode, Prefill
from torch.distributed import HashStore

import torch_nixl
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.arrays import as_memory
from torch_nixl.engine.connection import Connection
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import LoopbackFabric

Ends = list[Callable[[], None]]
"""How the protocol on each connection is closed, and how it is aborted."""


def nothing(connections: list[Connection]) -> tuple[Ends, Ends]:
    a, b = connections
    target = torch.zeros(8)
    offered = a.expose(Direction.READ, [as_memory(torch.ones(8), name="source")])
    claim = b.claim(offered.offer(), [as_memory(target, name="target")])
    claim.wait(10)
    assert target.sum() == 8
    return [], []


def two_ranks(connections: list[Connection]) -> list[Communicator]:
    store = HashStore()
    return [
        Communicator(store, rank, 2, connection=connection)
        for rank, connection in enumerate(connections)
    ]


def p2p(connections: list[Connection]) -> tuple[Ends, Ends]:
    ranks = two_ranks(connections)
    sent = [ranks[0].isend(torch.ones(n), 1) for n in (10, 100_000)]
    for n in (10, 100_000):
        assert ranks[1].recv(0).sum() == n
    for work in sent:
        work.wait(10)
    return [one.close for one in ranks], [one.abort for one in ranks]


def collectives(connections: list[Connection]) -> tuple[Ends, Ends]:
    ranks = two_ranks(connections)
    works = [torch_nixl.all_reduce_tensor(torch.ones(4), group=one, async_op=True) for one in ranks]
    for work in works:
        assert work is not None
        assert work.result(10)[0].sum() == 8
    return [one.close for one in ranks], [one.abort for one in ranks]


def kv(connections: list[Connection]) -> tuple[Ends, Ends]:
    prefill, decode = Prefill(connections[0]), Decode(connections[1])
    offer = prefill.server.offer("one", [1], 16)
    decode.client.pull(offer.ticket, [2]).wait(10)
    assert offer.wait_released(10)
    server, client = prefill.server, decode.client
    return [server.close, client.close], [server.abort, client.abort]


@pytest.mark.parametrize("end", ["closed", "aborted", "connection closed", "connection aborted"])
@pytest.mark.parametrize("use", [nothing, p2p, collectives, kv])
def test_nothing_is_left(use: Callable[[list[Connection]], tuple[Ends, Ends]], end: str) -> None:
    left = used(use, end)
    # Threads that have ended a moment ago may still hold a frame.
    deadline = time.monotonic() + 5
    while any(one() is not None for one in left) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [one() for one in left] == [None, None]


def used(
    use: Callable[[list[Connection]], tuple[Ends, Ends]], end: str
) -> list[weakref.ref[Connection]]:
    """Have two connections used and ended; return what knows whether they are still there."""
    fabric = LoopbackFabric()
    connections = [Connection(fabric.adapter(name)) for name in ("a", "b")]
    closes, aborts = use(connections)
    for step in closes if end == "closed" else aborts if end == "aborted" else []:
        step()
    for connection in connections:
        if end == "connection aborted":
            connection.abort()
        else:
            connection.close()
    return [weakref.ref(connection) for connection in connections]
