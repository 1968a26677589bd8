"""What sends and receives do, with several ranks in one process on the loopback adapter."""

from __future__ import annotations

import asyncio
import math
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from p2p.conftest import World
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.envelope import seal
from torch_nixl.engine.wire import Identity
from torch_nixl.errors import (
    ClosedError,
    MetadataError,
    PeerLostError,
    TransferCancelled,
    TransferTimeout,
)
from torch_nixl.p2p import protocol
from torch_nixl.p2p.bootstrap import Address, Bootstrap
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.description import DTYPES
from torch_nixl.p2p.tensors import MismatchError
from torch_nixl.testing import LoopbackFabric

LARGE = 4 * protocol.EAGER_NBYTES
"""Elements of float32 in a message that is offered."""

SPLIT = protocol.SPLIT_NBYTES
"""Elements of float32 in a message of which both ends move a half, if the sender waits."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    tensor = (torch.arange(nbytes) % 251).to(torch.uint8)
    if dtype is torch.bool:
        tensor = tensor % 2
    return tensor.view(dtype).reshape(shape)


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE, SPLIT], ids=str)
@pytest.mark.parametrize("posted_first", [True, False])
def test_message_arrives_whatever_its_size(
    world: World, path: str, count: int, posted_first: bool
) -> None:
    a, b = world()
    sent = torch.arange(count, dtype=torch.float32)
    if posted_first:
        receive = b.irecv(0)
        send = a.isend(sent, 1)
    else:
        send = a.isend(sent, 1)
        receive = b.irecv(0)
    assert torch.equal(result_of(receive), sent)
    send.wait()
    assert receive.is_success()
    assert send.is_success()
    assert receive.source_rank() == 0
    how = receive.statistics()
    if sent.nbytes <= protocol.EAGER_NBYTES:
        assert how.route == "eager"
    else:
        assert how.route == ("write" if path == "tcp" else "read")
        assert how.path == path
    assert how.nbytes == sent.nbytes


def test_large_message_is_split_while_its_sender_waits(world: World) -> None:
    a, b = world()
    sent, out = torch.randn(SPLIT + 333), torch.zeros(SPLIT + 333)
    for _ in range(3):
        receive = b.irecv(0, out=out.zero_())
        with ThreadPoolExecutor() as pool:
            done = pool.submit(a.send, sent, 1)
            assert receive.result() is out
            done.result()
        assert torch.equal(out, sent)
        assert receive.statistics().route == "split"


def test_half_that_nobody_moves_is_read_by_the_receiver(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = world()
    monkeypatch.setattr(protocol, "choose_route", lambda *_, **__: protocol.Route.SPLIT)
    sent = torch.randn(SPLIT)
    send = a.isend(sent, 1)  # Nobody waits for it.
    receive = b.irecv(0)
    assert torch.equal(result_of(receive), sent)
    assert receive.statistics().route == "read"
    send.wait()


def result_of(work: object) -> torch.Tensor:
    result = work.result()  # type: ignore[attr-defined]
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", sorted(DTYPES.values(), key=str), ids=str)
@pytest.mark.parametrize("rows", [3, 40_000])
def test_every_dtype_travels(world: World, dtype: torch.dtype, rows: int) -> None:
    a, b = world()
    sent = filled(dtype, rows, 2)
    with ThreadPoolExecutor() as pool:
        done = pool.submit(a.send, sent, 1)
        received = b.recv(0)
        done.result()
    assert (received.dtype, received.shape) == (dtype, sent.shape)
    assert torch.equal(bits(received), bits(sent))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)], ids=str)
def test_odd_shapes_travel(world: World, shape: tuple[int, ...]) -> None:
    a, b = world()
    sent = torch.full(shape, 7.0)
    a.send(sent, 1)
    received = b.recv(0)
    assert received.shape == shape
    assert torch.equal(received, sent)


@pytest.mark.parametrize("rows", [8, 300, 4000])
def test_strided_memory_on_both_sides_is_right_to_the_element(
    world: World, path: str, rows: int
) -> None:
    a, b = world()
    source = torch.arange(rows * 100, dtype=torch.int32).reshape(rows, 100)[:, ::2]
    target = torch.full((50, rows * 2), -1, dtype=torch.int32)
    out = target[:, ::2].t()
    receive = b.irecv(0, out=out)
    a.send(source, 1)
    assert receive.result() is out
    assert torch.equal(out, source)
    assert bool((target[:, 1::2] == -1).all()), "memory between the slices was touched"


def test_long_rows_move_as_they_lie(world: World, path: str) -> None:
    a, b = world()
    source = torch.randn(16, 2, 32 << 10)[:, 0]
    whole = torch.zeros(16, 3, 32 << 10)
    out = whole[:, 1]
    receive = b.irecv(0, out=out)
    send = a.isend(source, 1)
    receive.wait()
    send.wait()
    assert torch.equal(out, source)
    assert not whole[:, 0].any()
    assert not whole[:, 2].any()
    assert not receive.statistics().packed
    assert not send.statistics().packed


def test_lazy_views_are_resolved_and_gradients_stay_behind(world: World) -> None:
    a, b = world()
    value = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (value.conj(), value.conj().imag, value.requires_grad_()):
        a.send(lazy, 1)
        received = b.recv(0)
        assert torch.equal(received, lazy.detach())
        assert not received.requires_grad
    out = torch.zeros(2, dtype=value.dtype, requires_grad=True)
    a.send(value, 1)
    assert b.recv(0, out=out) is out
    assert torch.equal(out.detach(), value.detach())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_can_not_be_sent_is_refused_by_name(world: World) -> None:
    a, b = world()

    class Odd(torch.Tensor):
        pass

    quantised = torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)
    for tensor, message in (
        (quantised, "quantised"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.zeros(3).to_sparse(), "layout"),
        (torch.zeros(3).as_subclass(Odd), "Odd"),
        ([1.0], "list"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            a.send(tensor, 1)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match=message):
            b.recv(0, out=tensor)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="share memory"):
        b.recv(0, out=torch.zeros(1).expand(5))


def test_freed_storage_is_refused(world: World) -> None:
    a, _ = world()
    tensor = torch.zeros(100)
    view = tensor[10:]
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="freed or shrunk"):
        a.send(view, 1)


def test_bad_arguments_are_refused_on_the_spot(world: World) -> None:
    a, _ = world()
    tensor = torch.zeros(1)
    for rank in (-1, 2, 1.0, "1", True):
        with pytest.raises(ValueError, match="expected a rank"):
            a.send(tensor, rank)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected a rank"):
            a.recv(rank)  # type: ignore[arg-type]
    for tag in (-1, 2**63):
        with pytest.raises(ValueError, match="tag"):
            a.send(tensor, 1, tag=tag)
        with pytest.raises(ValueError, match="tag"):
            a.irecv(1, tag=tag)
    with pytest.raises(ValueError, match="timeout"):
        a.recv(1, timeout=-1)
    with pytest.raises(ValueError, match="device=meta"):
        a.recv(1, device="meta")
    with pytest.raises(ValueError, match="not both"):
        a.recv(1, out=tensor, device="cpu")


def test_messages_of_one_tag_keep_their_order_and_tags_do_not_mix(world: World) -> None:
    a, b = world()
    sizes = [1, 10 * protocol.EAGER_NBYTES, 3, SPLIT, 2]
    works = [
        a.isend(torch.full((size,), index + 10.0 * tag), 1, tag=tag)
        for index, size in enumerate(sizes)
        for tag in (0, 1)
    ]
    for tag in (1, 0):
        for index, size in enumerate(sizes):
            received = b.recv(0, tag=tag)
            assert received.shape == (size,)
            assert float(received[-1]) == index + 10 * tag
    for work in works:
        work.wait()


def test_any_source_takes_what_comes_and_says_from_where(world: World) -> None:
    a, b, c = world(3)
    receive = b.irecv(tag=4)
    c.send(torch.tensor(2), 1, tag=4)
    assert int(result_of(receive)) == 2
    assert receive.source_rank() == 2
    a.send(torch.tensor(0), 1, tag=4)
    c.send(torch.tensor(2), 1, tag=5)
    assert b.probe(tag=4).source == 0
    assert b.iprobe(2, tag=4) is None
    assert int(b.recv(tag=4)) == 0
    assert int(b.recv(tag=5)) == 2


def test_probe_tells_what_waits_and_leaves_it(world: World) -> None:
    a, b = world()
    assert b.iprobe(0) is None
    with pytest.raises(TransferTimeout):
        b.probe(0, timeout=0.05)
    a.isend(torch.zeros(3, LARGE, dtype=torch.float64), 1)
    envelope = b.probe(0)
    assert (envelope.source, envelope.tag, envelope.shape) == (0, 0, (3, LARGE))
    assert envelope.dtype is torch.float64
    assert envelope.nbytes == 3 * LARGE * 8
    assert b.iprobe() == envelope
    assert b.recv(0).shape == (3, LARGE)
    assert b.iprobe() is None


@pytest.mark.parametrize("count", [4, SPLIT])
def test_rank_can_send_to_itself(world: World, count: int) -> None:
    a, _ = world()
    tensor = torch.arange(count)
    a.send(tensor, 0, tag=1)
    tensor.zero_()
    assert torch.equal(a.recv(0, tag=1), torch.arange(count))
    out = torch.zeros(count, dtype=torch.int64)
    receive = a.irecv(out=out)
    a.send(torch.arange(count), 0)
    assert receive.result() is out
    assert torch.equal(out, torch.arange(count))
    a.send(torch.arange(count), 0)
    with pytest.raises(MismatchError):
        a.recv(0, out=torch.zeros(3))


@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize(
    "out", [torch.zeros(3), torch.zeros(10, dtype=torch.float64)], ids=["shape", "dtype"]
)
def test_mismatch_is_told_to_both_and_costs_one_message(
    world: World, path: str, count: int, out: torch.Tensor
) -> None:
    a, b = world()
    work = a.isend(torch.ones(count), 1)
    a.isend(torch.arange(5), 1)
    with pytest.raises(
        MismatchError, match=rf"\[{count}\] of torch.float32.*torch.float"
    ) as caught:
        b.recv(0, out=out)
    assert isinstance(caught.value, ValueError)
    assert not out.any()
    assert torch.equal(b.recv(0), torch.arange(5))
    assert a.connection.progress.wait_until(lambda: work.exception() is not None, None)
    with pytest.raises(MismatchError, match=rf"\[{count}\] of torch.float32"):
        work.wait()


@pytest.mark.parametrize("count", [10, LARGE])
def test_timed_out_receive_leaves_the_next_message_intact(
    world: World, path: str, count: int
) -> None:
    a, b = world()
    out = torch.zeros(count)
    with pytest.raises(TransferTimeout):
        b.recv(0, out=out, timeout=0.05)
    receive = b.irecv(0, timeout=0.05)
    with pytest.raises(TransferTimeout):
        receive.wait()
    assert receive.wait_released(1)
    sent = torch.arange(count, dtype=torch.float32)
    send = a.isend(sent, 1)
    assert torch.equal(b.recv(0), sent)
    send.wait()
    assert not out.any()


def test_send_that_times_out_is_withdrawn(world: World, path: str) -> None:
    a, b = world()
    work = a.isend(torch.ones(LARGE), 1, timeout=0.05)
    with pytest.raises(TransferTimeout):
        work.wait()
    assert work.wait_released(5)
    a.isend(torch.arange(3), 1)
    assert torch.equal(b.recv(0), torch.arange(3))
    assert b.statistics().unexpected == 0


def test_cancelled_works_end_and_leave_others_alone(world: World) -> None:
    a, b = world()
    receive, other = b.irecv(0), b.irecv(0)
    receive.cancel()
    with pytest.raises(TransferCancelled):
        receive.wait()
    send = a.isend(torch.ones(LARGE), 1, tag=1)
    send.cancel()
    with pytest.raises(TransferCancelled):
        send.wait()
    a.send(torch.tensor(3), 1)
    assert int(result_of(other)) == 3


def test_backlog_of_one_tag_does_not_delay_another(world: World) -> None:
    a, b = world()
    backlog = [a.isend(torch.tensor(index), 1) for index in range(2000)]
    assert a.statistics().queued > 1000
    large = a.isend(torch.ones(LARGE), 1, tag=3)
    a.isend(torch.tensor(-1), 1, tag=1)
    assert int(b.recv(0, tag=1, timeout=5)) == -1
    waiting = b.irecv(tag=2)
    a.isend(torch.tensor(-2), 1, tag=2)
    assert int(result_of(waiting)) == -2
    assert bool(b.recv(0, tag=3).all())
    assert b.statistics().unexpected <= protocol.CREDIT_FRAMES
    for index in range(2000):
        assert int(b.recv(0)) == index
    for work in (*backlog, large):
        work.wait(5)
    assert b.statistics().unexpected == 0


def test_large_backlog_is_bounded_by_bytes(world: World) -> None:
    a, b = world()
    payload = torch.ones(protocol.EAGER_NBYTES, dtype=torch.uint8)
    works = [a.isend(payload * index, 1) for index in range(200)]
    b.probe(0)
    assert b.statistics().unexpected * protocol.EAGER_NBYTES <= protocol.CREDIT_NBYTES
    for index in range(200):
        assert int(b.recv(0)[-1]) == index
    for work in works:
        work.wait(5)


def test_queued_send_times_out_by_itself(world: World) -> None:
    a, b = world()
    for _ in range(protocol.CREDIT_FRAMES):
        a.isend(torch.zeros(1), 1)
    late = a.isend(torch.zeros(1), 1, timeout=0.05)
    ended = threading.Event()
    late.add_done_callback(ended.set)
    assert ended.wait(5), "nobody waits for it in the library"
    with pytest.raises(TransferTimeout, match="room"):
        late.wait()
    assert a.statistics().outstanding == 0
    after = a.isend(torch.ones(1), 1)
    for _ in range(protocol.CREDIT_FRAMES):
        assert int(b.recv(0)) == 0
    assert int(b.recv(0)) == 1
    after.wait(5)


def test_dropped_works_lose_nothing(world: World) -> None:
    a, b = world()
    out = torch.zeros(LARGE)
    b.irecv(0, out=out, tag=1)
    a.isend(torch.ones(LARGE), 1, tag=1)
    a.isend(torch.ones(LARGE), 1, tag=2)
    a.isend(torch.tensor(5), 1, tag=3)
    assert int(b.recv(0, tag=3)) == 5
    assert bool(b.recv(0, tag=2).all())
    assert b.connection.progress.wait_until(lambda: bool(out.all()), None)


def test_work_completes_without_anyone_waiting(world: World, path: str) -> None:
    a, b = world()
    done = threading.Event()
    send = a.isend(torch.ones(LARGE), 1)
    receive = b.irecv(0)
    receive.add_done_callback(done.set)
    assert done.wait(10)
    assert receive.is_completed()
    released = threading.Event()
    send.add_done_callback(released.set)
    assert released.wait(10)


def test_futures_and_await(world: World) -> None:
    a, b = world()

    async def exchange() -> None:
        receive = b.irecv(0)
        a.isend(torch.tensor(3), 1)
        result = await receive
        assert result is not None and int(result) == 3
        large = b.irecv(0)
        assert await a.isend(torch.ones(LARGE), 1) is None
        await large
        with pytest.raises(TransferTimeout):
            await b.irecv(0, timeout=0.05)

    asyncio.run(asyncio.wait_for(exchange(), 20))

    receive = b.irecv(0)
    future = receive.get_future()
    a.send(torch.tensor(4), 1)
    [value] = future.wait()
    assert int(value) == 4
    assert a.isend(torch.tensor(4), 1).get_future().wait() == []


def test_awaits_that_are_cancelled_leave_nothing(world: World) -> None:
    _, b = world()
    receive = b.irecv(0)

    async def give_up() -> None:
        for _ in range(20):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(receive, 0.001)

    asyncio.run(give_up())
    operation = receive._operation
    assert operation is not None and not operation._callbacks
    receive.cancel()


def test_batch_posts_receives_first_and_keeps_the_order(world: World) -> None:
    a, b = world()
    sends = [
        SimpleNamespace(op="isend", tensor=torch.tensor(index), peer=1, tag=index)
        for index in range(4)
    ]
    outs = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
    receives = [
        SimpleNamespace(op=torch.distributed.irecv, tensor=outs[index], peer=0, tag=index)
        for index in range(4)
    ]
    works = a.batch_isend_irecv(sends) + b.batch_isend_irecv(receives)
    for work in works:
        work.wait()
    assert [int(out) for out in outs] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="isend or irecv"):
        a.batch_isend_irecv([SimpleNamespace(op="sum", tensor=outs[0], peer=1, tag=0)])


def test_two_communicators_do_not_mix(world: World) -> None:
    a, b = world(prefix="one")
    c, d = world(prefix="two")
    a.send(torch.tensor(1), 1)
    c.send(torch.tensor(2), 1)
    assert int(d.recv(0)) == 2
    assert int(b.recv(0)) == 1


def test_many_threads_each_with_a_tag(world: World) -> None:
    a, b = world()

    def talk(tag: int) -> bool:
        for index in range(30):
            count = LARGE if index % 10 == 0 else 5
            a.isend(torch.full((count,), index), 1, tag=tag)
            if int(b.recv(0, tag=tag)[-1]) != index:
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(talk, range(6)))


# The end.


def test_closing_tells_the_others(world: World) -> None:
    a, b = world()
    a.send(torch.tensor(1), 1)
    a.send(torch.tensor(2), 1)
    assert int(b.recv(0)) == 1
    waiting = b.irecv(0, tag=9)
    a.close()
    with pytest.raises(PeerLostError, match="rank 0"):
        waiting.wait(10)
    assert int(b.recv(0)) == 2, "what had arrived can still be received"
    with pytest.raises(PeerLostError, match="rank 0"):
        b.recv(0)
    with pytest.raises(PeerLostError, match="rank 0"):
        b.send(torch.tensor(1), 0)
    with pytest.raises(ClosedError):
        a.send(torch.tensor(1), 1)
    with pytest.raises(ClosedError):
        a.recv(1)
    a.close()


def test_close_waits_until_what_was_sent_is_received(world: World, path: str) -> None:
    a, b = world()
    sent = torch.randn(LARGE)
    work = a.isend(sent, 1)
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(a.close)
        assert torch.equal(b.recv(0), sent)
        closing.result()
    assert work.is_success()


def test_abort_wakes_all_waiters_at_once(world: World) -> None:
    a, b = world()
    works = [a.irecv(1), a.irecv(), a.isend(torch.ones(LARGE), 1)]
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(work.wait) for work in works]
        a.abort()
        for wait in waits:
            with pytest.raises(ClosedError):
                wait.result(5)
    assert b.connection.progress.wait_until(lambda: b.statistics().peers == 1, None)


def test_killed_peer_wakes_every_waiter(world: World, fabric: LoopbackFabric, path: str) -> None:
    a, b = world()
    b.send(torch.tensor(1), 0)
    a.recv(1)
    works = [a.irecv(1), a.irecv(), a.isend(torch.ones(LARGE), 1)]
    works += [a.isend(torch.zeros(1), 1) for _ in range(protocol.CREDIT_FRAMES + 1)][-1:]
    fabric.kill(b.connection.name)
    for work in works:
        with pytest.raises(PeerLostError) as caught:
            work.wait(10)
        assert caught.value.rank == 1
        assert isinstance(work.exception(), PeerLostError)
    calls: list[Callable[[], object]] = [
        lambda: a.recv(1),
        lambda: a.recv(timeout=10),
        lambda: a.send(torch.tensor(1), 1),
        lambda: a.isend(torch.ones(LARGE), 1),
        lambda: a.irecv(1),
        lambda: a.probe(1),
        lambda: a.probe(timeout=10),
    ]
    for call in calls:
        with pytest.raises(PeerLostError, match="rank 1 is lost") as caught:
            call()
        assert (caught.value.rank, caught.value.remote) == (1, b.connection.name)


@pytest.mark.parametrize("source", [1, None])
def test_killed_peer_is_noticed_soon_by_who_only_probes(
    world: World, fabric: LoopbackFabric, source: int | None
) -> None:
    a, b = world()
    b.send(torch.tensor(1), 0)
    a.recv(1)
    fabric.kill(b.connection.name)
    with pytest.raises(PeerLostError):
        a.probe(source, timeout=4)
    assert not a.connection.operations.busy


def test_each_communicator_names_a_lost_agent_by_its_own_rank(fabric: LoopbackFabric) -> None:
    store = HashStore()
    one, other = (Connection(fabric.adapter(name)) for name in ("one", "other"))
    pairs = [
        [
            Communicator(store, rank, 2, prefix=prefix, timeout=20, connection=connection)
            for rank, connection in enumerate(order)
        ]
        for prefix, order in (("p", (one, other)), ("q", (other, one)))
    ]
    for first, second in pairs:
        first.send(torch.tensor(1), 1)
        second.send(torch.tensor(1), 0)
        first.recv(1)
        second.recv(0)
    mine = pairs[0][0], pairs[1][1]
    works = [mine[0].irecv(1), mine[1].irecv(0)]
    fabric.kill("other")
    for rank, work in zip((1, 0), works, strict=True):
        with pytest.raises(PeerLostError) as caught:
            work.wait(10)
        assert caught.value.rank == rank
        found = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
        assert (found.rank, found.remote, str(found)) == (rank, "other", str(caught.value))
    for communicator in mine:
        communicator.abort()
    one.abort()
    other.abort()


def test_bytes_are_counted_once_on_each_side(world: World, path: str) -> None:
    a, b = world()
    for count in (LARGE, SPLIT):
        before = [one.connection.statistics() for one in (a, b)]
        receive = b.irecv(0)
        with ThreadPoolExecutor() as pool:
            done = pool.submit(a.send, torch.ones(count), 1)
            receive.wait()
            done.result()
        for one, then in zip((a, b), before, strict=True):
            now = one.connection.statistics()
            assert (now.operations - then.operations, now.nbytes - then.nbytes) == (1, 4 * count)
            assert now.failures == {}


def test_stopped_peer_meets_the_deadline_and_may_come_back(
    world: World, fabric: LoopbackFabric, path: str
) -> None:
    a, b = world()
    sent = torch.ones(LARGE)
    b.send(torch.tensor(1), 0)
    a.recv(1)
    fabric.stop(b.connection.name)
    work = a.isend(sent, 1, timeout=0.1)
    with pytest.raises(TransferTimeout):
        work.wait()
    assert not work.wait_released(0.05)
    fabric.resume(b.connection.name)
    assert work.wait_released(10)
    a.isend(sent * 2, 1)
    assert float(b.recv(0)[-1]) == 2.0


def test_five_times_in_a_row_over_one_store(fabric: LoopbackFabric) -> None:
    store = HashStore()
    keys = []
    for turn in range(5):
        ranks = [
            Communicator(
                store, rank, 2, timeout=10, connection=Connection(fabric.adapter(f"{turn}{rank}"))
            )
            for rank in range(2)
        ]
        ranks[0].send(torch.tensor(turn), 1)
        assert int(ranks[1].recv(0)) == turn
        for one in ranks:
            one.close()
            one.connection.close()
        keys.append(store.num_keys())
    assert keys == keys[:1] * 5, "keys stay behind"


def test_store_is_not_used_after_first_contact(fabric: LoopbackFabric) -> None:
    class Counting(HashStore):
        calls = 0

        def get(self, key: str) -> bytes:
            Counting.calls += 1
            return super().get(key)

        def set(self, key: str, value: str) -> None:
            Counting.calls += 1
            super().set(key, value)

    store = Counting()
    a, b = (
        Communicator(store, r, 2, timeout=10, connection=Connection(fabric.adapter(f"r{r}")))
        for r in range(2)
    )
    a.send(torch.tensor(1), 1)
    b.recv(0)
    b.send(torch.tensor(1), 0)
    a.recv(1)
    before = Counting.calls
    for _ in range(20):
        a.isend(torch.ones(LARGE), 1)
        b.recv(0)
        b.send(torch.tensor(1), 0)
        a.recv(1)
    assert Counting.calls == before > 0
    for one in (a, b):
        one.close()
        one.connection.close()


def test_close_does_not_wait_for_a_store_that_never_answers(fabric: LoopbackFabric) -> None:
    answer = threading.Event()

    class Stuck(HashStore):
        def delete_key(self, key: str) -> bool:
            answer.wait(60)
            return super().delete_key(key)

    store = Stuck()
    communicator = Communicator(store, 0, 1, connection=Connection(fabric.adapter("alone")))
    (tidying,) = _closing(communicator)
    keys = store.num_keys()
    answer.set()
    tidying.join(10)
    assert store.num_keys() < keys
    communicator.connection.abort()


def _closing(communicator: Communicator) -> list[threading.Thread]:
    """Close it in bounded time; return the threads that this leaves."""
    before = threading.enumerate()
    closing = threading.Thread(target=communicator.close, args=(0.1,))
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    return [
        one for one in threading.enumerate() if one not in before and one.name == "torch_nixl store"
    ]


def test_an_address_that_is_cut_is_refused_though_its_envelope_is_whole() -> None:
    store = HashStore()
    one, other = (Bootstrap(store, "group", rank, 2, None) for rank in range(2))
    address = Address(Identity(b"h" * 16, 4711, 99), b"NIXL's metadata")
    other.publish(address)
    assert one.fetch(1, 5.0, lambda: False) == address
    store.set("group/1/1", seal(address.pack()[: Identity.FIXED.size], key=None).hex())
    with pytest.raises(MetadataError, match=r"rank 1: .* cut"):
        one.fetch(1, 5.0, lambda: False)
