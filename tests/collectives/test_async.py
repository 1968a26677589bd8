"""Async collectives, threads, and what else goes on meanwhile, on the loopback adapter."""

# ruff: noqa: B023 - what is begun in a loop's turn ends in it

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import torch_nixl
from collectives.conftest import World, together
from torch_nixl import collectives as c
from torch_nixl.p2p.communicator import Communicator

LARGE = 300_000
"""Elements of a tensor of which every rank's part is offered."""


def test_async_collectives_overlap_and_end_unattended(world: World) -> None:
    ranks = world(3)
    counts = [1, LARGE, 10, 70_000, 0, 1000] * 5
    tensors = [[torch.full((n,), float(i + r)) for i, n in enumerate(counts)] for r in range(3)]
    works = [
        [c.all_reduce_tensor(one, group=rank, async_op=True) for one in tensors[rank.rank]]
        for rank in ranks
    ]
    events = []
    for row in works:
        for work in row:
            assert work is not None
            event = threading.Event()
            events.append(event)
            work.add_done_callback(event.set)
    # Nobody waits in the driver: background threads do it all.
    assert all(event.wait(30) for event in events)
    for results in tensors:
        assert all(bool((one == 3 * i + 3).all()) for i, one in enumerate(results))


def test_order_of_waiting_does_not_matter(world: World) -> None:
    ranks = world(2)
    tensors = [[torch.full((50,), float(i)) for i in range(20)] for _ in ranks]
    works = [
        [c.all_reduce_tensor(one, group=rank, async_op=True) for one in tensors[rank.rank]]
        for rank in ranks
    ]
    for row in works:
        for work in reversed(row):
            assert work is not None
            work.wait(20)
    assert all(bool((one == 2 * i).all()) for row in tensors for i, one in enumerate(row))


def test_threads_of_ranks_wait_inline(world: World) -> None:
    ranks = world(3)
    tensors = [torch.full((LARGE,), float(rank)) for rank in range(3)]
    errors: list[BaseException] = []

    def run(rank: Communicator) -> None:
        try:
            for _ in range(5):
                assert c.all_reduce_tensor(tensors[rank.rank], group=rank) is None
                c.barrier(group=rank)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert all(bool((one == 3**5).all()) for one in tensors)


def test_messages_of_programs_never_mix_with_collectives(world: World) -> None:
    a, b = ranks = world(2)
    anything = b.irecv()
    sent = a.isend(torch.ones(LARGE), 1, tag=3)
    small = [a.isend(torch.tensor(i), 1, tag=7) for i in range(1000)]
    tensors = [torch.ones(n) for n in (5, LARGE)]
    copies = [one.clone() for one in tensors]
    for one, other in zip(tensors, copies, strict=True):
        together(
            ranks,
            lambda g: c.all_reduce_tensor(one if g is a else other, group=g, async_op=True),
        )
        assert bool((one == 2).all()) and bool((other == 2).all())
    assert not anything.is_completed()
    assert a.iprobe(tag=7) is None
    assert [int(b.recv(0, tag=7)) for _ in range(1000)] == list(range(1000))
    assert bool((b.recv(0, tag=3) == 1).all())
    a.send(torch.tensor(1), 1)
    assert int(anything.result()) == 1  # type: ignore[arg-type]
    for work in (sent, *small):
        work.wait()
    for tag in (-1, -(1 << 62)):
        with pytest.raises(ValueError, match="tag"):
            a.isend(torch.ones(1), 1, tag=tag)
        with pytest.raises(ValueError, match="tag"):
            a.irecv(1, tag=tag)


def test_futures_awaiting_and_what_a_work_tells(world: World) -> None:
    a, b = world(2)
    tensor = torch.ones(4)
    work = c.all_reduce_tensor(tensor, group=a, async_op=True)
    assert isinstance(work, torch_nixl.CollectiveWork)
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    assert "pending" in repr(work)
    future = work.get_future()
    seen: list[object] = []
    other = torch.ones(4)
    second = c.all_reduce_tensor(other, group=b, async_op=True)
    assert second is not None

    async def both() -> None:
        seen.append((await work)[0])
        await second

    asyncio.run(both())
    assert seen[0] is tensor
    assert future.wait()[0] is tensor
    assert work.is_success()
    assert "done" in repr(work)
    assert work.number == 0
    failing = c.barrier(group=a, async_op=True)
    assert failing is not None
    broken = failing.get_future()
    failing.cancel()
    # Not an exception set from Python: C++ would take that for a value.
    with pytest.raises(RuntimeError, match=r"TransferCancelled: .*cancelled"):
        broken.wait()
    assert "failed" in repr(failing)
