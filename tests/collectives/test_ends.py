"""How collectives end when ranks leave, come late or call something else, on the loopback."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from collectives.conftest import World, together
from torch_nixl import collectives as c
from torch_nixl.collectives import inquiry, operation
from torch_nixl.collectives.group import group_of
from torch_nixl.engine.connection import Connection
from torch_nixl.errors import PeerLostError, TransferCancelled, TransferTimeout
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.tensors import MismatchError
from torch_nixl.testing import LoopbackFabric


@pytest.fixture(autouse=True)
def _asks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "ASK_SECONDS", 0.05)


def gather(ranks: list[Communicator], rank: int) -> c.CollectiveWork:
    """Begin a rank's part in a gather to rank 1."""
    outs = [torch.zeros(2) for _ in ranks] if rank == 1 else None
    work = c.gather_tensor(
        torch.full((2,), float(rank)), outs, 1, group=ranks[rank], async_op=True, timeout=15
    )
    assert work is not None
    return work


def test_rank_that_leaves_does_not_end_earlier_collectives(world: World) -> None:
    ranks = world(3)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    # Rank 0 has done its part; rank 2 comes late.
    gather(ranks, 0).wait()
    root = gather(ranks, 1)
    # Too large to be sent before anyone asks for it.
    later = [
        c.all_reduce_tensor(torch.ones(200_000), group=one, async_op=True, timeout=15)
        for one in ranks[:2]
    ]
    ranks[0].close(0.1)
    assert later[1] is not None
    with pytest.raises(PeerLostError, match="rank 0"):
        later[1].wait(10)
    assert not root.is_completed()
    # Told that a later one failed, it is still of use to the earlier one.
    late = ranks[2].connection.progress.wait_until(
        lambda: group_of(ranks[2]).failed is not None, time.monotonic() + 10
    )
    assert late
    gather(ranks, 2).wait()
    assert [float(one[0]) for one in root.result()] == [0.0, 1.0, 2.0]
    with pytest.raises(PeerLostError, match="failed before"):
        c.barrier(group=ranks[2])
    assert all(not group_of(one)._active for one in ranks)


def test_earlier_collectives_that_need_the_rank_that_left_end_on_all(world: World) -> None:
    ranks = world(3)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    works = [
        call
        for one in ranks[1:]
        for call in (
            c.all_reduce_tensor(torch.ones(3), group=one, async_op=True, timeout=15),
            c.barrier(group=one, async_op=True, timeout=15),
        )
    ]
    started = time.monotonic()
    ranks[0].close(0.1)
    for work in works:
        assert work is not None
        with pytest.raises(PeerLostError):
            work.wait()
    assert time.monotonic() - started < 8


def test_collective_that_failed_is_ended_whoever_else_is_about_to(world: World) -> None:
    ranks = world(2)
    work = c.barrier(group=ranks[1], async_op=True)
    assert work is not None
    group, begun = group_of(ranks[1]), work._operation
    # As another thread does that fails the group, before it ends what was under way.
    group._active.pop(begun.number)
    group.fail(begun, PeerLostError("rank 0 left"))
    assert isinstance(work.exception(), PeerLostError)


def test_collective_whose_algorithm_was_interrupted_fails(world: World) -> None:
    def interrupted() -> operation.Steps:
        yield from ()
        raise KeyboardInterrupt

    ranks = world(2)
    work = c.barrier(group=ranks[1], async_op=True)
    assert work is not None
    begun = work._operation
    begun._blocking, begun._steps = None, interrupted()
    with pytest.raises(KeyboardInterrupt):
        begun.attend()
    begun.attend()
    with pytest.raises(TransferCancelled, match="interrupted by KeyboardInterrupt"):
        work.wait(10)


def test_one_that_only_waits_for_others_learns_that_an_earlier_collective_failed(
    world: World,
) -> None:
    ranks = world(3)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    # Rank 2 only waits for rank 1, which waits for rank 0.
    root = gather(ranks, 1)
    works = [c.barrier(group=one, async_op=True, timeout=15) for one in (ranks[1],)]
    gather(ranks, 2)
    group_of(ranks[2])._fail_all(PeerLostError("rank 0 left"), 2)
    second = c.barrier(group=ranks[1], async_op=True) if group_of(ranks[1]).failed is None else None
    ranks[0].close(0.1)
    with pytest.raises(PeerLostError):
        root.wait()
    for work in (*works, second):
        if work is not None:
            with pytest.raises(PeerLostError):
                work.wait()
    assert ranks[2].connection.progress.wait_until(
        lambda: group_of(ranks[2])._failed_from == 1, time.monotonic() + 5
    )


def test_close_lets_collectives_end_that_nobody_waits_for(world: World) -> None:
    ranks = world(2)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    tensors = [torch.full((200_000,), rank + 1.0) for rank in range(2)]
    c.all_reduce_tensor(tensors[0], group=ranks[0], async_op=True)
    closing = threading.Thread(target=ranks[0].close)
    closing.start()
    c.all_reduce_tensor(tensors[1], group=ranks[1], timeout=15)
    closing.join(10)
    assert not closing.is_alive()
    assert all(bool((one == 3).all()) for one in tensors)


def test_close_does_not_wait_for_ranks_that_never_come(world: World) -> None:
    ranks = world(2)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    work = c.barrier(group=ranks[0], async_op=True)
    ranks[0].connection.progress.stop()  # so that nobody else ends it
    started = time.monotonic()
    ranks[0].close(0.2)
    assert time.monotonic() - started < 5
    assert work is not None and work.is_completed() and not work.is_success()


def test_first_contact_that_times_out_says_how_long_it_took(fabric: LoopbackFabric) -> None:
    connection = Connection(fabric.adapter("only"))
    with Communicator(HashStore(), 0, 2, connection=connection) as only:
        with pytest.raises(TransferTimeout, match=r"rank 1 has not made its .* within 1\.2 s"):
            c.barrier(group=only, timeout=1.2)
        # Refused at once, and not held.
        assert not group_of(only)._active
    connection.close()


def test_first_contact_ends_when_another_rank_has_failed(fabric: LoopbackFabric) -> None:
    store = HashStore()
    connections = [Connection(fabric.adapter(f"rank{rank}")) for rank in range(2)]
    # Rank 2 never comes.
    ranks = [Communicator(store, rank, 3, connection=connections[rank]) for rank in range(2)]
    errors: list[BaseException] = []

    def begin() -> None:
        try:
            c.barrier(group=ranks[0], timeout=30)
        except TransferTimeout as error:
            errors.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    started = time.monotonic()
    with pytest.raises(TransferTimeout, match="rank 2 has not made"):
        c.barrier(group=ranks[1], timeout=0.5)
    thread.join(15)
    assert not thread.is_alive() and time.monotonic() - started < 15
    assert "rank 1 reports" in str(errors[0]) and "rank 2 has not made" in str(errors[0])
    assert [len(one.operations) for one in connections] == [1, 1]  # The link to each other.
    for rank, connection in zip(ranks, connections, strict=True):
        rank.abort()
        connection.abort()


def test_message_that_nobody_receives_names_both_calls(world: World) -> None:
    ranks = world(3)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    errors = []

    def call(turn: int, one: Communicator) -> c.CollectiveWork | None:
        if turn:
            return c.barrier(group=one, async_op=True)
        if one.rank:
            return c.reduce_tensor(torch.ones(4), 0, group=one, async_op=True)
        return c.broadcast_tensor(torch.ones(4), 0, group=one, async_op=True)

    for turn in range(2):
        works = []
        for one in ranks:
            try:
                works.append(call(turn, one))
            except MismatchError as error:
                errors.append(str(error))
        for work in works if turn else ():
            assert work is not None
            with pytest.raises(MismatchError) as caught:
                work.wait(10)
            errors.append(str(caught.value))
    assert len(errors) == 3
    for text in errors:
        assert "broadcast([4] of torch.float32, src=0)" in text, text
        assert "reduce([4] of torch.float32, op=sum, dst=0)" in text, text


def test_rank_that_does_not_say_what_it_called_is_named_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_nixl.collectives.group.INQUIRY_SECONDS", 0.3)
    assert inquiry.INQUIRY_SECONDS > 0.3
    ranks = world(2)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    monkeypatch.setattr(type(group_of(ranks[0])), "_compare", lambda *_, **__: None)
    c.broadcast_tensor(torch.ones(4), 0, group=ranks[0])
    matcher = ranks[1]._exchange.inbox.matcher
    assert ranks[1].connection.progress.wait_until(
        lambda: matcher.num_messages > 0, time.monotonic() + 10
    )
    with pytest.raises(MismatchError, match=r"with rank 0: .*never received"):
        c.broadcast_tensor(torch.ones(4), 1, group=ranks[1], timeout=20)
    assert len(ranks[1].connection.operations) == ranks[1].statistics().peers
