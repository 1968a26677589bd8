"""Collectives of device memory: in the order of streams, on a fake device, over loopback.

A kernel waits for a `threading.Event` that the host sets later, so a call that blocked the host
would never return.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from slow_streams import SECONDS, queued, wait_on
from torch.distributed import HashStore

from collectives.conftest import World
from torch_nixl import collectives as c
from torch_nixl.collectives import CollectiveWork
from torch_nixl.collectives.device_operation import DeviceCollective
from torch_nixl.collectives.operation import CollectiveOperation
from torch_nixl.collectives.reduction import ReduceOp
from torch_nixl.engine.connection import Connection
from torch_nixl.errors import (
    PoisonedError,
    TorchNixlError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import FakeDevice, LoopbackFabric

COUNT = 5000


def some(work: CollectiveWork | None) -> CollectiveWork:
    assert work is not None
    return work


class Rank:
    """One rank's device and stream, and tensors that a slow kernel is yet to fill."""

    def __init__(self, comm: Communicator, slow: threading.Event) -> None:
        self.comm = comm
        self.device = FakeDevice(f"fake:{comm.rank}")
        self.stream = self.device.new_stream()
        self.stream.launch(lambda: wait_on(slow))

    def made(self, values: torch.Tensor, *, strided: bool = False) -> torch.Tensor:
        """A tensor that will hold values once the slow kernel has run; -1 before."""
        if strided:
            made = self.device.zeros(*values.shape, 2, dtype=values.dtype)[..., 0]
        else:
            made = self.device.zeros(*values.shape, dtype=values.dtype)
        made.fill_(-1)
        self.stream.launch(lambda: made.copy_(values))
        return made

    def room(self, *shape: int) -> torch.Tensor:
        return self.device.zeros(*shape)


def check_calls(ranks: list[Rank]) -> None:
    """No thread but the callers' and the devices' own may have called for a runtime."""
    for rank in ranks:
        name = rank.device.name
        allowed = {threading.current_thread().name, f"fake-{name}-run", f"fake-{name}-allocate"}
        assert {thread for _, thread in rank.device.calls} <= allowed


def check_order(
    ranks: list[Rank],
    slow: threading.Event,
    works: Sequence[CollectiveWork],
    checks: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Nothing may move before the slow kernel; then each tensor must hold what is expected."""
    for _ in range(20):
        for one in ranks:
            one.comm.connection.progress.step()
    assert not any(work.is_completed() for work in works)
    slow.set()
    for work in works:
        work.synchronize(SECONDS)
    for index, (out, want) in enumerate(checks):
        assert torch.equal(out, want), (index, out, want)
    check_calls(ranks)


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_all_reduce_in_stream_order(
    world: World, slow: threading.Event, reducing: str, strided: bool
) -> None:
    ranks = [Rank(comm, slow) for comm in world(3)]
    tensors = [
        one.made(torch.arange(COUNT, dtype=torch.float32) + one.comm.rank, strided=strided)
        for one in ranks
    ]
    works, seen = [], []
    for one, tensor in zip(ranks, tensors, strict=True):
        with one.device.stream(one.stream):
            work = some(c.all_reduce_tensor(tensor, group=one.comm, async_op=True))
            work.wait()
            assert work.result()[0] is tensor
        works.append(work)
        seen.append(queued(one.stream, tensor))
    assert not any(work.is_completed() for work in works)
    assert all(bool((tensor == -1).all()) for tensor in tensors)
    slow.set()
    want = 3 * torch.arange(COUNT, dtype=torch.float32) + 3
    for one, found, work in zip(ranks, seen, works, strict=True):
        one.stream.synchronize(SECONDS)
        assert torch.equal(found[0], want)
        work.synchronize()
        assert work.is_success()
        assert work.wait_released(SECONDS)
    check_calls(ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint16, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT], ids=["sum", "product"])
def test_reductions_of_dtypes(
    world: World, slow: threading.Event, reducing: str, dtype: torch.dtype, op: ReduceOp
) -> None:
    """As on the host, bit for bit."""
    ranks = [Rank(comm, slow) for comm in world(4)]
    host = [torch.randint(0, 9, (700,)).to(dtype) for _ in ranks]
    tensors = [one.made(values) for one, values in zip(ranks, host, strict=True)]
    works = []
    for one, tensor in zip(ranks, tensors, strict=True):
        with one.device.stream(one.stream):
            works.append(some(c.all_reduce_tensor(tensor, op=op, group=one.comm, async_op=True)))
    slow.set()
    for work in works:
        work.synchronize(SECONDS)
    others = [one.clone() for one in host]
    again = [
        some(c.all_reduce_tensor(tensor, op=op, group=one.comm, async_op=True))
        for one, tensor in zip(ranks, others, strict=True)
    ]
    for work in again:
        work.wait(SECONDS)
    assert all(torch.equal(tensor, others[0]) for tensor in (*tensors, *others))
    check_calls(ranks)


def test_every_collective_waits_for_its_tensors(
    world: World, slow: threading.Event, reducing: str
) -> None:
    ranks = [Rank(comm, slow) for comm in world(3)]
    works: list[CollectiveWork] = []
    checks: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begun(work: CollectiveWork | None, out: torch.Tensor, want: torch.Tensor) -> None:
        works.append(some(work))
        checks.append((out, want))

    def full(*values: float) -> torch.Tensor:
        return torch.tensor(values).repeat_interleave(COUNT)

    for one in ranks:
        comm, rank = one.comm, one.comm.rank
        with one.device.stream(one.stream):
            tensor = one.made(full(float(rank)))
            begun(c.broadcast_tensor(tensor, 1, group=comm, async_op=True), tensor, full(1.0))
            tensor = one.made(full(float(rank)))
            begun(
                c.reduce_tensor(tensor, 2, group=comm, async_op=True),
                tensor,
                full(3.0 if rank == 2 else float(rank)),
            )
            out, tensor = one.room(3 * COUNT), one.made(full(float(rank)))
            begun(
                c.all_gather_tensor(out, tensor, group=comm, async_op=True),
                out,
                full(0.0, 1.0, 2.0),
            )
            out, tensor = one.room(COUNT), one.made(full(1.0, 2.0, 3.0) + rank)
            begun(
                c.reduce_scatter_tensor(out, tensor, group=comm, async_op=True),
                out,
                full(3.0 * (rank + 1) + 3),
            )
            out, tensor = one.room(3 * COUNT), one.made(full(0.0, 1.0, 2.0) + 10 * rank)
            begun(
                c.all_to_all_tensor(out, tensor, group=comm, async_op=True),
                out,
                full(0.0, 10.0, 20.0) + rank,
            )
            out = one.room(COUNT)
            inputs = [one.made(full(float(i))) for i in range(3)] if rank == 0 else None
            begun(
                c.scatter_tensor(out, inputs, 0, group=comm, async_op=True), out, full(float(rank))
            )
            tensor = one.made(full(float(rank)))
            outs = [one.room(COUNT) for _ in range(3)] if rank == 1 else None
            works.append(some(c.gather_tensor(tensor, outs, 1, group=comm, async_op=True)))
            checks += [(out, full(float(i))) for i, out in enumerate(outs or ())]
            several = [one.made(full(float(i + rank))[: COUNT - i]) for i in range(4)]
            several.append(one.made(torch.full((20_000,), float(rank))))
            works.append(some(c.all_reduce_tensor(several, group=comm, async_op=True)))
            checks += [
                (out, torch.full((COUNT - i,), 3.0 * i + 3)) for i, out in enumerate(several[:4])
            ]
            checks.append((several[4], torch.full((20_000,), 3.0)))
    check_order(ranks, slow, works, checks)


class Busy:
    """A collective's lock. Who lets go of it first lets the device's turn end before that."""

    def __init__(self, operation: DeviceCollective) -> None:
        self._lock = operation._running
        self._used = False
        self.may_end = threading.Event()
        self.refused = threading.Event()

    def acquire(self, blocking: bool) -> bool:
        got = self._lock.acquire(blocking)
        if not got:
            self.refused.set()
        return got

    def release(self) -> None:
        if not self._used:
            self._used = True
            self.may_end.set()
            assert self.refused.wait(SECONDS)
        self._lock.release()


def check_goes_on(work: CollectiveWork, other: Communicator) -> None:
    """Without anybody who waits for it."""
    ended = threading.Event()
    work.add_done_callback(ended.set)
    theirs = some(
        c.all_reduce_tensor(
            torch.full((100_000,), 2.0), group=other, async_op=True, timeout=SECONDS
        )
    )
    assert ended.wait(SECONDS / 2), "nobody goes on with it"
    theirs.wait(SECONDS)
    assert bool((work.result()[0] == 3).all())


def test_turn_that_ends_while_another_thread_looks_is_gone_on_after(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks finds that the device's thread has its turn; that one finds the lock taken."""
    a, b = world(2)
    begun, turn, busy = threading.Event(), DeviceCollective._turn, list[Busy]()

    def slow_turn(self: DeviceCollective) -> None:
        turn(self)
        if not busy:
            busy.append(Busy(self))
            begun.set()
            assert busy[0].may_end.wait(SECONDS)

    monkeypatch.setattr(DeviceCollective, "_turn", slow_turn)
    tensor = FakeDevice().tensor(torch.ones(100_000))
    work = some(c.all_reduce_tensor(tensor, group=a, async_op=True))
    operation = work._operation
    assert begun.wait(SECONDS)
    operation._running = busy[0]  # type: ignore[assignment]
    operation.attend()
    check_goes_on(work, b)


def test_turn_that_ends_before_its_begin_has_returned_is_gone_on_after(
    world: World, slow: threading.Event
) -> None:
    """Who has begun it holds the lock still."""
    a, b = world(2)
    device = FakeDevice()
    tensor, stream = device.tensor(torch.ones(100_000)), device.new_stream()
    stream.launch(lambda: wait_on(slow))
    with device.stream(stream):
        work = some(c.all_reduce_tensor(tensor, group=a, async_op=True))
    operation = work._operation
    assert isinstance(operation, DeviceCollective)
    operation._running = Busy(operation)  # type: ignore[assignment]
    slow.set()
    check_goes_on(work, b)


def test_parts_with_gaps_are_packed_in_stream_order(
    world: World, slow: threading.Event, reducing: str
) -> None:
    ranks = [Rank(comm, slow) for comm in world(3)]
    whole = torch.arange(9.0 * COUNT).view(9, COUNT)
    works: list[CollectiveWork] = []
    checks: list[tuple[torch.Tensor, torch.Tensor]] = []
    for one in ranks:
        comm, rank = one.comm, one.comm.rank
        with one.device.stream(one.stream):
            out = one.made(torch.zeros(3, COUNT), strided=True)
            tensor = one.made(whole + rank, strided=True)
            works.append(some(c.reduce_scatter_tensor(out, tensor, group=comm, async_op=True)))
            checks.append((out, 3 * whole[3 * rank : 3 * rank + 3] + 3))
            out = one.made(torch.zeros(3, COUNT), strided=True)
            parts = [one.made(part, strided=True) for part in whole.chunk(3)]
            inputs = parts if rank == 1 else None
            works.append(some(c.scatter_tensor(out, inputs, 1, group=comm, async_op=True)))
            checks.append((out, whole[3 * rank : 3 * rank + 3]))
            several = [one.made(whole[0, :40] + rank, strided=True) for _ in range(3)]
            works.append(some(c.all_reduce_tensor(several, group=comm, async_op=True)))
            checks += [(each, 3 * whole[0, :40] + 3) for each in several]
    check_order(ranks, slow, works, checks)


def test_a_host_and_a_device_take_part_together(world: World, slow: threading.Event) -> None:
    a, b = world(2)
    one = Rank(a, slow)
    slow.set()
    for count in (10, 300_000):
        tensor, other = one.made(torch.ones(count)), torch.full((count,), 2.0)
        with one.device.stream(one.stream):
            work = some(c.all_reduce_tensor(tensor, group=a, async_op=True))
        theirs = some(c.all_reduce_tensor(other, group=b, async_op=True))
        theirs.wait(SECONDS)
        work.synchronize(SECONDS)
        assert bool((tensor == 3).all())
        assert bool((other == 3).all())


def test_overlapping_collectives_on_several_streams(world: World, slow: threading.Event) -> None:
    ranks = [Rank(comm, slow) for comm in world(2)]
    slow.set()
    found = []
    for turn in range(30):
        for one in ranks:
            stream = one.device.new_stream()
            tensor = one.device.zeros((10, 40_000)[turn % 2])
            with one.device.stream(stream):
                stream.launch(lambda tensor=tensor, turn=turn: tensor.fill_(turn), seconds=0.001)  # type: ignore[misc]
                some(c.all_reduce_tensor(tensor, group=one.comm, async_op=True)).wait()
            found.append((turn, stream, queued(stream, tensor)))
    for turn, stream, seen in found:
        stream.synchronize(SECONDS)
        assert bool((seen[0] == 2 * turn).all())


def test_blocking_calls_block_the_host(world: World, slow: threading.Event) -> None:
    a, b = world(2)
    one = Rank(a, slow)
    slow.set()
    tensor = one.made(torch.ones(100))
    done = threading.Thread(target=lambda: c.all_reduce_tensor(torch.ones(100), group=b))
    done.start()
    with one.device.stream(one.stream):
        c.all_reduce_tensor(tensor, group=a)
    done.join(SECONDS)
    assert bool((tensor == 2).all())
    assert "hold" not in {call for call, _ in one.device.calls}


def test_device_whose_streams_can_not_wait_blocks_the_host(world: World) -> None:
    a, b = world(2)
    device = FakeDevice(holds=False)
    tensor = device.tensor(torch.ones(100))
    work = some(c.all_reduce_tensor(tensor, group=a, async_op=True))
    other = some(c.all_reduce_tensor(torch.ones(100), group=b, async_op=True))
    work.wait()
    other.wait(SECONDS)
    assert bool((tensor == 2).all())


def test_failure_fills_the_outputs_before_streams_go_on(world: World) -> None:
    a, _ = world(2)
    device = FakeDevice()
    tensor = device.tensor(torch.ones(50_000))
    integers = device.tensor(torch.ones(100, dtype=torch.int32))
    works = [
        some(c.all_reduce_tensor(one, group=a, async_op=True, timeout=0.2))
        for one in (tensor, integers)
    ]
    for work in works:
        work.wait()
    seen = [queued(device.default_stream, one) for one in (tensor, integers)]
    device.default_stream.synchronize(SECONDS)
    assert bool(seen[0][0].isnan().all())
    assert bool((seen[1][0] == -1).all())
    with pytest.raises(TransferTimeout):
        works[0].wait()
    assert works[0].wait_released(SECONDS)
    with pytest.raises(PoisonedError):
        c.all_reduce_tensor(tensor, group=a)
    with pytest.raises(PoisonedError):
        a.isend(torch.ones(1), 1)


def test_failure_that_no_stream_waited_for_poisons_nothing(world: World) -> None:
    a, b = world(2)
    device = FakeDevice()
    tensor = device.tensor(torch.ones(100))
    work = some(c.all_reduce_tensor(tensor, group=a, async_op=True))
    with pytest.raises(TransferTimeout):
        work.wait(0.2)
    assert work.wait_released(SECONDS)
    assert bool(tensor.isnan().all())
    with pytest.raises(TorchNixlError, match="failed before"):
        c.all_reduce_tensor(tensor, group=a)
    a.send(torch.ones(1), 1)
    assert float(b.recv(0)) == 1.0


def test_cancel_before_the_stream_gets_there(world: World, slow: threading.Event) -> None:
    a, _ = world(2)
    one = Rank(a, slow)
    tensor = one.made(torch.ones(100))
    with one.device.stream(one.stream):
        work = some(c.all_reduce_tensor(tensor, group=a, async_op=True))
        work.wait()
    seen = queued(one.stream, tensor)
    work.cancel()
    assert work.is_completed()
    assert bool((tensor == -1).all()), "filled while what was queued before may use it"
    slow.set()
    one.stream.synchronize(SECONDS)
    assert bool(seen[0].isnan().all())


def test_failure_before_all_ranks_have_come(device: FakeDevice, fabric: LoopbackFabric) -> None:
    """Its order among the device's work isn't known yet then."""
    connection = Connection(fabric.adapter("only"))
    try:
        with (
            Communicator(HashStore(), 0, 2, connection=connection) as only,
            pytest.raises(TransferTimeout, match="rank 1 has not made its Communicator"),
        ):
            c.all_reduce_tensor(device.zeros(10), group=only, timeout=0.1)
    finally:
        connection.abort()


def test_failure_while_its_memory_is_made_holds_none(
    world: World, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = world(2)
    prepare = CollectiveOperation.prepare

    def fail_first(self: CollectiveOperation, moved: Sequence[torch.Tensor]) -> None:
        self.cancel()  # As if another rank had said so meanwhile.
        assert self.wait_released(SECONDS)
        prepare(self, moved)

    monkeypatch.setattr(CollectiveOperation, "prepare", fail_first)
    tensor = device.zeros(50_000)
    work = some(c.all_reduce_tensor(tensor, group=a, async_op=True))
    with pytest.raises(TransferCancelled):
        work.wait()
    assert work._operation.memories == ()


def test_abort_lets_streams_go_on(world: World, slow: threading.Event) -> None:
    a, _ = world(2)
    device = FakeDevice()
    tensor = device.tensor(torch.ones(50_000))
    some(c.all_reduce_tensor(tensor, group=a, async_op=True)).wait()
    seen = queued(device.default_stream, tensor)
    a.abort()
    device.default_stream.synchronize(SECONDS)
    assert bool(seen[0].isnan().all())


def test_close_of_the_other_rank_lets_streams_go_on(world: World) -> None:
    a, b = world(2)
    device = FakeDevice()
    tensor = device.tensor(torch.ones(50_000))
    work = some(c.all_reduce_tensor(tensor, group=a, async_op=True))
    work.wait()
    seen = queued(device.default_stream, tensor)
    b.close()
    device.default_stream.synchronize(SECONDS)
    assert bool(seen[0].isnan().all())
    with pytest.raises(TorchNixlError):
        work.wait()


def test_capture_is_refused_and_counts_as_no_call(world: World) -> None:
    a, b = world(2)
    device = FakeDevice()
    tensor = device.tensor(torch.ones(10))
    device.captured.add(device.default_stream)
    with pytest.raises(TransferError, match="captured into a graph"):
        c.all_reduce_tensor(tensor, group=a, async_op=True)
    device.captured.clear()
    works = [
        some(c.all_reduce_tensor(one, group=comm, async_op=True))
        for one, comm in ((tensor, a), (torch.ones(10), b))
    ]
    for work in works:
        work.synchronize(SECONDS)
    assert bool((tensor == 2).all())


def test_dropped_work_and_futures(world: World, slow: threading.Event) -> None:
    ranks = [Rank(comm, slow) for comm in world(2)]
    futures, tensors = [], []
    for one in ranks:
        tensor = one.made(torch.ones(1000))
        with one.device.stream(one.stream):
            futures.append(
                some(c.all_reduce_tensor(tensor, group=one.comm, async_op=True)).get_future()
            )
        tensors.append(tensor)
    slow.set()
    for future, tensor in zip(futures, tensors, strict=True):
        assert future.wait()[0] is tensor
        assert bool((tensor == 2).all())
