"""Ranks that call different things, or nothing, on the loopback adapter; and async collectives."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from collectives.conftest import World, together
from torch_nixl import collectives as c
from torch_nixl.collectives import operation
from torch_nixl.collectives.group import group_of
from torch_nixl.collectives.reduction import Reduction
from torch_nixl.errors import (
    ClosedError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p import protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.tensors import MismatchError
from torch_nixl.testing import LoopbackFabric

LARGE = 300_000
"""Elements of a tensor of which every rank's part is offered."""

Call = Callable[[Communicator], "c.CollectiveWork | None"]


@pytest.fixture(autouse=True)
def _asks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "ASK_SECONDS", 0.05)


def ends(ranks: list[Communicator], call: Call, seconds: float = 10.0) -> list[BaseException]:
    """Let every rank begin something; return what each ended with."""
    works = []
    errors: list[BaseException] = []
    for rank in ranks:
        try:
            works.append(call(rank))
        except TransferError as error:
            errors.append(error)
    for work in works:
        assert work is not None
        try:
            work.wait(seconds)
        except TransferError as error:
            errors.append(error)
    return errors


@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        (
            "shape",
            lambda g, n: c.all_reduce_tensor(torch.ones(n + 1), group=g, async_op=True),
            "[{}] of torch.float32, op=sum",
        ),
        (
            "dtype",
            lambda g, n: c.all_reduce_tensor(torch.ones(n).double(), group=g, async_op=True),
            "torch.float64",
        ),
        (
            "op",
            lambda g, n: c.all_reduce_tensor(
                torch.ones(n), op=dist.ReduceOp.MAX, group=g, async_op=True
            ),
            "op=max",
        ),
        ("kind", lambda g, n: c.barrier(group=g, async_op=True), "barrier()"),
        (
            "root",
            lambda g, n: c.broadcast_tensor(torch.ones(n), 0, group=g, async_op=True),
            "src=0",
        ),
    ],
)
def test_ranks_that_call_different_things_all_learn_both(
    world: World, name: str, wrong: Callable[..., c.CollectiveWork], says: str, count: int
) -> None:
    ranks = world(3)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))

    def call(g: Communicator) -> c.CollectiveWork | None:
        if g.rank == 2:
            return wrong(g, count)
        return c.all_reduce_tensor(torch.ones(count), group=g, async_op=True)

    errors = ends(ranks, call)
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, MismatchError)
        assert f"all_reduce([{count}] of torch.float32, op=sum)" in str(error)
        assert says.format(count + 1) in str(error)
        assert "collective 1" in str(error)
    # Nothing is left that waits, and p2p goes on.
    ranks[0].send(torch.tensor(5), 1)
    assert int(ranks[1].recv(0)) == 5


def test_several_roots_of_a_small_broadcast_are_found_by_the_next_collective(world: World) -> None:
    ranks = world(2)
    # Both send and wait for nobody; who has met the other's message by then fails at once.
    ends(ranks, lambda g: c.broadcast_tensor(torch.ones(2), g.rank, group=g, async_op=True))
    errors = ends(ranks, lambda g: c.barrier(group=g, async_op=True))
    assert len(errors) == 2
    assert all(isinstance(one, MismatchError) and "broadcast" in str(one) for one in errors)


@pytest.mark.parametrize("rows", [2, 50_000])
def test_counts_of_an_all_to_all_that_differ_are_named_on_every_rank(
    world: World, rows: int
) -> None:
    ranks = world(3)

    def call(g: Communicator) -> c.CollectiveWork | None:
        more = int(g.rank == 2)
        return c.all_to_all_tensor(
            torch.zeros(3 * rows + more),
            torch.zeros(3 * rows),
            out_splits=[rows + more, rows, rows],
            group=g,
            async_op=True,
        )

    ends(ranks, call)
    # A rank whose own part was done learns of it with its next collective.
    errors = ends(ranks, lambda g: c.barrier(group=g, async_op=True))
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, MismatchError), error
        assert f"[{rows}]" in str(error)
        assert f"[{rows + 1}]" in str(error)


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "barrier", "gather"])
def test_rank_that_never_calls_is_named_at_the_timeout(world: World, call: str) -> None:
    ranks = world(3)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    calls: dict[str, Call] = {
        "all_reduce": lambda g: c.all_reduce_tensor(
            torch.ones(9), group=g, async_op=True, timeout=0.6
        ),
        "broadcast": lambda g: c.broadcast_tensor(
            torch.ones(LARGE), 0, group=g, async_op=True, timeout=0.6
        ),
        "barrier": lambda g: c.barrier(group=g, async_op=True, timeout=0.6),
        "gather": lambda g: c.gather_tensor(
            torch.ones(9),
            None if g.rank else [torch.ones(9)] * 3,
            0,
            group=g,
            async_op=True,
            timeout=0.6,
        ),
    }
    started = time.monotonic()
    errors = ends(ranks[:2], calls[call])
    assert time.monotonic() - started < 5
    assert errors
    for error in errors:
        assert isinstance(error, TransferTimeout)
        assert f"collective 1, {call}(" in str(error)
        assert "no sign of rank 2" in str(error)
    # The group is of no use any more, on the rank that has slept, too.
    for rank in ranks:
        assert has_failed(rank)
        with pytest.raises(TransferTimeout, match="failed before"):
            c.barrier(group=rank)
    ranks[0].send(torch.tensor(5), 1)
    assert int(ranks[1].recv(0)) == 5


def has_failed(rank: Communicator) -> bool:
    """Whether a rank knows within five seconds that its group has failed."""
    return rank.connection.progress.wait_until(
        lambda: group_of(rank).failed is not None, time.monotonic() + 5
    )


def test_ranks_that_all_called_but_stand_still_are_named(
    world: World, fabric: LoopbackFabric
) -> None:
    ranks = world(2)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    fabric.delay(1)
    errors = ends(
        ranks,
        lambda g: c.all_reduce_tensor(torch.ones(LARGE), group=g, async_op=True, timeout=1.0),
    )
    assert len(errors) == 2
    assert all(isinstance(one, TransferTimeout) for one in errors)
    assert any("all ranks have begun it; waits for rank" in str(one) for one in errors)


@pytest.mark.parametrize("count", [3, LARGE])
def test_dead_rank_ends_it_on_every_other_rank(
    world: World, fabric: LoopbackFabric, count: int
) -> None:
    ranks = world(3)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    works = [
        c.all_reduce_tensor(torch.ones(count), group=rank, async_op=True) for rank in ranks[:2]
    ]
    fabric.kill(ranks[2].connection.name)
    for work in works:
        assert work is not None
        with pytest.raises(PeerLostError, match=r"all_reduce.*rank 2"):
            work.wait(10)
    with pytest.raises(PeerLostError, match="failed before"):
        c.barrier(group=ranks[0])


def test_dead_rank_ends_one_whose_tensors_have_gaps(world: World, fabric: LoopbackFabric) -> None:
    ranks = world(3)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    works = [
        c.reduce_scatter_tensor(
            torch.ones(LARGE, 2)[:, 0], torch.ones(3 * LARGE, 2)[:, 0], group=rank, async_op=True
        )
        for rank in ranks[:2]
    ]
    fabric.kill(ranks[2].connection.name)
    for work in works:
        assert work is not None
        with pytest.raises(PeerLostError, match=r"reduce_scatter.*rank 2"):
            work.wait(10)


def test_rank_that_closes_is_lost(world: World) -> None:
    ranks = world(2)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    work = c.barrier(group=ranks[0], async_op=True)
    ranks[1].close(1)
    assert work is not None
    with pytest.raises(PeerLostError, match=r"from rank 1.*closed"):
        work.wait(10)


def test_root_that_has_closed_before_others_begin_has_served_them(world: World) -> None:
    for turn in range(5):
        a, b, other = world(3, prefix=f"turn{turn}")
        sent = c.broadcast_tensor(torch.full((3,), 7.0), 0, group=a, async_op=True)
        assert sent is not None and sent.is_completed()
        a.close()
        for rank in (b, other):
            tensor = torch.zeros(3)
            c.broadcast_tensor(tensor, 0, group=rank, timeout=10)
            assert tensor.tolist() == [7.0] * 3


@pytest.mark.parametrize("end", ["abort", "close"])
@pytest.mark.parametrize("size", [1, 2])
def test_closed_communicator_is_refused(world: World, size: int, end: str) -> None:
    ranks = world(size)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    work = c.barrier(group=ranks[0], async_op=True)
    if end == "close":
        ranks[0].close(0.5)
    else:
        ranks[0].abort()
    assert work is not None
    if size > 1:
        with pytest.raises(ClosedError):
            work.wait(10)
    with pytest.raises(ClosedError):
        c.barrier(group=ranks[0])


def test_cancel_and_a_waits_timeout_end_it_everywhere(world: World) -> None:
    ways: list[tuple[Callable[[c.CollectiveWork], None], type[TransferError]]] = [
        (lambda work: work.cancel(), TransferCancelled),
        (lambda work: work.wait(0.01), TransferTimeout),
    ]
    for give_up, kind in ways:
        a, b = world(2, prefix=f"p{kind.__name__}")
        together([a, b], lambda g: c.barrier(group=g, async_op=True))
        tensor = torch.ones(LARGE)
        work = c.all_reduce_tensor(tensor, group=a, async_op=True)
        assert work is not None
        try:
            give_up(work)
        except TransferTimeout:
            assert kind is TransferTimeout
        with pytest.raises(kind, match=r"waits for rank 1|cancelled"):
            work.wait()
        assert work.wait_released(10)
        assert has_failed(b)
        with pytest.raises(kind, match="failed before"):
            c.barrier(group=b)
        assert a.statistics().outstanding == 0


def test_failure_in_the_middle_names_the_cause_and_releases_memory(
    world: World, fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world(2)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Reduction, "combine", fail)
    errors = ends(ranks, lambda g: c.all_reduce_tensor(torch.ones(LARGE), group=g, async_op=True))
    assert len(errors) == 2
    assert all("out of memory" in str(one) and "collective 1" in str(one) for one in errors)


def test_garbage_in_frames_is_refused_and_hurts_nobody(world: World) -> None:
    a, b = ranks = world(2)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    peer = a._exchange.peers[1]
    context = protocol.CONTEXT.pack(a._exchange.context)
    refused = b.connection.statistics().frames_refused
    for kind in (60, 61, 62):
        for tail in (b"", b"\xff" * 3, b"\xff" * 70, b"\xff" * 9000):
            a._exchange.send(peer, kind, context + tail)
        a._exchange.send(peer, kind, b"\0")
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    assert b.connection.statistics().frames_refused >= refused + 12


def test_many_rounds_leave_nothing_behind(world: World) -> None:
    ranks = world(2)
    tensors = [torch.ones(70_000), torch.ones(70_000)]
    for _ in range(50):
        together(ranks, lambda g: c.broadcast_tensor(tensors[g.rank], 0, group=g, async_op=True))
        together(ranks, lambda g: c.barrier(group=g, async_op=True))
    for rank in ranks:
        # Another thread may have ended the last message, and not forgotten it yet.
        rank.connection.progress.wait_until(
            lambda rank=rank: rank.statistics().outstanding == 0,  # type: ignore[misc]
            time.monotonic() + 10,
        )
        statistics = rank.statistics()
        assert statistics.outstanding == statistics.unexpected == 0
        assert len(rank.connection.operations) == statistics.peers
