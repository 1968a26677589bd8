"""What is left in memory of a connection that has ended: nothing, however it ended."""

from __future__ import annotations

import asyncio
import datetime
import gc
import time
import tracemalloc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from kv.worlds import Decode, Prefill
from torch.distributed import HashStore

import torch_nixl
from torch_nixl import connect
from torch_nixl.connect.metadata import MAX_REMEMBERED, decode_blob, encode_blob
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.arrays import as_memory
from torch_nixl.engine.connection import Connection
from torch_nixl.p2p.channel import Channel
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.process_group.group import NixlProcessGroup
from torch_nixl.testing import FakeDevice, LoopbackFabric, Rank, RankPool

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


def trees(connections: list[Connection]) -> tuple[Ends, Ends]:
    ranks = two_ranks(connections)
    tree = {"small": torch.ones(3), "large": [torch.ones(300_000)], "step": 7}
    sent = [ranks[0].isend_tree(tree, 1), ranks[0].isend_object("word", 1)]
    assert ranks[1].recv_tree(0)["large"][0].sum() == 300_000
    assert ranks[1].recv_object(0) == "word"
    for work in sent:
        work.wait(10)
    return [one.close for one in ranks], [one.abort for one in ranks]


def devices(connections: list[Connection]) -> tuple[Ends, Ends]:
    ranks = two_ranks(connections)
    here, there = FakeDevice("fake:0"), FakeDevice("fake:1")
    for n in (10, 100_000):
        with here.stream(here.new_stream()):
            sent = ranks[0].isend(here.tensor(torch.ones(n)), 1)
        out = there.zeros(n)
        with there.stream(there.new_stream()) as stream:
            ranks[1].irecv(0, out=out).wait(10)
        sent.synchronize(10)
        stream.synchronize()
        assert out.sum() == n
    return [one.close for one in ranks], [one.abort for one in ranks]


def step(ends: Sequence[Channel[torch.Tensor]]) -> None:
    work = ends[0].isend()
    received = ends[1].recv()
    work.wait(10)
    assert torch.equal(received, ends[0].like)


def open_channels(ranks: list[Communicator], n: int) -> list[Channel[torch.Tensor]]:
    return [
        one.channel(1 - rank, like=torch.full((n,), 1.0 + rank), tag=n)
        for rank, one in enumerate(ranks)
    ]


def channels(connections: list[Connection]) -> tuple[Ends, Ends]:
    ranks = two_ranks(connections)
    ended: Ends = []
    for n in (10, 100_000):
        ends = open_channels(ranks, n)
        step(ends)
        ended += [one.close for one in ends]
    return [*ended, *(one.close for one in ranks)], [one.abort for one in ranks]


class Connector(connect.Connector):
    """A Connector on a connection that is there already."""

    def __init__(self, engine: Connection) -> None:
        super().__init__(engine.name)
        self._engine = engine

    def open_engine(self) -> Connection:
        return self._engine


def one_sided(connections: list[Connection]) -> tuple[Ends, Ends]:
    owner, other = [Connector(one) for one in connections]
    store, source, target = HashStore(), torch.ones(8), torch.zeros(8)
    kept = connect.Descriptor(source)
    kept.register_with_connector(owner.connection())
    exposed = connect.ReadableOperation(owner.connection(), kept)
    connect.publish(store, "key", exposed)
    told = connect.fetch(store, "key", timeout=10)
    connect.ReadOperation(other.connection(), told, connect.Descriptor(target)).wait(10)
    exposed.wait(10)
    assert target.sum() == 8

    async def write() -> None:
        with await owner.create_writable(connect.Descriptor(source)) as writable:
            told = writable.metadata()
            with await other.begin_write(connect.Descriptor(target + 1), told) as writing:
                await writing.wait_for_completion(10)
            await writable

    asyncio.run(write())
    assert source.sum() == 16
    unread = connect.ReadableOperation(owner.connection(), connect.Descriptor(target))
    connect.publish(store, "unread", unread)
    return [owner.close, other.close], [owner.abort, other.abort]


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
@pytest.mark.parametrize(
    "use", [nothing, p2p, trees, devices, channels, one_sided, collectives, kv]
)
def test_nothing_is_left(use: Callable[[list[Connection]], tuple[Ends, Ends]], end: str) -> None:
    assert are_gone(used(use, end)) == [True, True]


def are_gone(left: Sequence[weakref.ref[object]]) -> list[bool]:
    # Threads that have ended a moment ago may still hold a frame.
    deadline = time.monotonic() + 5
    while any(one() is not None for one in left) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return [one() is None for one in left]


def used(
    use: Callable[[list[Connection]], tuple[Ends, Ends]], end: str
) -> list[weakref.ref[object]]:
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


def test_a_channel_holds_nothing_that_it_was_reconnected_from() -> None:
    fabric, ends = LoopbackFabric(), list[Channel[torch.Tensor]]()

    def again(number: int) -> list[weakref.ref[object]]:
        """Have the two ends meet over new connections, which end."""
        connections = [Connection(fabric.adapter(f"{name}{number}")) for name in "ab"]
        ranks = two_ranks(connections)
        if ends:
            for end, one in zip(ends, ranks, strict=True):
                end.reconnect(one)
        else:
            ends.extend(open_channels(ranks, 10))
        step(ends)
        for connection in connections:
            connection.abort()
        return [weakref.ref(connection) for connection in connections]

    left = [one for number in range(3) for one in again(number)]
    # The last two are those of its last error.
    assert are_gone(left[:-2]) == [True] * 4
    ends.clear()
    assert are_gone(left) == [True] * 6


def test_memory_that_is_registered_anew_holds_nothing_of_before() -> None:
    fabric, kept = LoopbackFabric(), [connect.Descriptor(torch.ones(8))]

    def again(number: int) -> weakref.ref[object]:
        with Connector(Connection(fabric.adapter(f"a{number}"))) as connector:
            kept[0].register_with_connector(connector.connection())
            return weakref.ref(connector.connection().engine)

    left = [again(number) for number in range(3)]
    assert are_gone(left[:-1]) == [True, True]
    kept.clear()
    assert are_gone(left) == [True] * 3


def test_metadata_that_unpacks_to_much_is_not_remembered() -> None:
    nbytes = 1 << 19
    texts = [encode_blob(bytes(nbytes) + bytes([number])) for number in range(20)]
    assert max(map(len, texts)) <= MAX_REMEMBERED
    tracemalloc.start()
    try:
        for text in texts:
            assert len(decode_blob(text)) == nbytes + 1
        assert tracemalloc.get_traced_memory()[0] < nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("end", ["destroyed", "aborted", "default"])
def test_nothing_is_left_of_a_group(rank_pool: RankPool, end: str) -> None:
    for gone in rank_pool.run(end_groups, args=(end,), world_size=2):
        assert gone == [True] * len(gone)


def end_groups(rank: Rank, end: str) -> list[bool]:
    return are_gone(used_groups(rank, end))


def used_groups(rank: Rank, end: str) -> list[weakref.ref[object]]:
    """Use groups of real ranks, and end them; return what knows whether they are still there."""
    if end == "default":
        communicator = torch_nixl.init(store=rank.store(), rank=rank.rank, world_size=2)
        tensor = torch.ones(100_000)
        torch_nixl.all_reduce_tensor(tensor)
        assert tensor[0] == 2
        torch_nixl.shutdown()
        return [weakref.ref(communicator), weakref.ref(communicator.connection)]
    dist.init_process_group(
        "nixl",
        store=rank.store(),
        rank=rank.rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    world, part = dist.group.WORLD, dist.new_group([0, 1])
    left: list[weakref.ref[object]] = []
    for group in (world, part):
        assert isinstance(group, NixlProcessGroup)
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == 2
        communicator = group.communicator
        left += [weakref.ref(one) for one in (group, communicator, communicator.connection)]
    if end == "destroyed":
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._abort_process_group()
    return left
