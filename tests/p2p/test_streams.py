"""Sends and receives of device memory: before, after, and what a failure leaves behind.

The device is a fake whose streams are threads. Nothing here measures time: a kernel waits for a
`threading.Event` that the host sets later, so a call that blocked the host would never return.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from slow_streams import SECONDS, queued, wait_on

from p2p.conftest import World
from torch_nixl.errors import (
    ClosedError,
    PeerLostError,
    PoisonedError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p import ordered, protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.tensors import MismatchError
from torch_nixl.p2p.work import Work
from torch_nixl.testing import FakeDevice, LoopbackFabric

SMALL = 10
LARGE = 4 * protocol.EAGER_NBYTES
SIZES = pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])


# Before.


@SIZES
def test_send_goes_after_what_was_queued_and_the_host_goes_on(
    world: World, device: FakeDevice, slow: threading.Event, path: str, count: int
) -> None:
    a, b = world()
    tensor = device.zeros(count)
    stream = device.new_stream()
    stream.launch(lambda: wait_on(slow))
    stream.launch(lambda: tensor.fill_(7))
    with device.stream(stream):
        send = a.isend(tensor, 1)
    receive = b.irecv(0)
    assert not receive.is_completed()
    assert b.iprobe(0) is None, "it was offered although its producer has not run"
    slow.set()
    result = receive.result()
    assert result is not None
    assert bool((result == 7).all())
    send.synchronize()


@SIZES
def test_receive_does_not_overwrite_what_queued_work_still_reads(
    world: World, device: FakeDevice, slow: threading.Event, path: str, count: int
) -> None:
    a, b = world()
    out = device.tensor(torch.full((count,), 3.0))
    stream = device.new_stream()
    stream.launch(lambda: wait_on(slow))
    before = queued(stream, out)
    with device.stream(stream):
        receive = b.irecv(0, out=out)
    send = a.isend(torch.full((count,), 5.0), 1)
    for _ in range(50):
        a.connection.progress.step()
        b.connection.progress.step()
    assert bool((out == 3).all()), "the target was written to while the stream was busy"
    slow.set()
    receive.synchronize()
    send.wait()
    assert bool((before[0] == 3).all())
    assert bool((out == 5).all())


def test_stream_argument_counts_instead_of_the_current_one(
    world: World, device: FakeDevice, slow: threading.Event
) -> None:
    a, b = world()
    tensor, out = device.zeros(SMALL), device.zeros(SMALL)
    busy, other = device.new_stream(), device.new_stream()
    busy.launch(lambda: wait_on(slow))
    busy.launch(lambda: tensor.fill_(1))
    with device.stream(busy):
        b.irecv(0, out=out, tag=1, stream=other)
        a.isend(tensor, 1, tag=1, stream=other).synchronize()
    assert bool((out == 0).all())
    send = a.isend(tensor, 1, stream=busy)
    receive = b.irecv(0, out=out, stream=other)
    assert not receive.is_completed()
    slow.set()
    receive.synchronize()
    send.synchronize()
    assert bool((out == 1).all())


def test_stream_of_other_memory_is_refused(world: World, device: FakeDevice) -> None:
    a, _ = world()
    stream = FakeDevice("fake:1").new_stream()
    with pytest.raises(ValueError, match="a stream of fake:0"):
        a.isend(device.zeros(3), 1, stream=stream)
    with pytest.raises(ValueError, match="a stream of fake:0"):
        a.irecv(1, out=device.zeros(3), stream=stream)
    with pytest.raises(ValueError, match="device tensor"):
        a.isend(torch.zeros(3), 1, stream=stream)
    with pytest.raises(ValueError, match="device tensor"):
        a.irecv(1, out=torch.zeros(3), stream=stream)


def test_capture_is_refused_by_name(world: World, device: FakeDevice) -> None:
    a, b = world()
    out = device.zeros(3)
    work = b.irecv(0, out=out)
    device.captured.add(device.default_stream)
    with pytest.raises(TransferError, match="captured into a graph"):
        a.isend(device.zeros(3), 1)
    with pytest.raises(TransferError, match="captured into a graph"):
        a.irecv(1, out=device.zeros(3))
    with pytest.raises(TransferError, match="captured into a graph"):
        work.wait()
    device.captured.clear()
    other = device.new_stream()
    device.captured.add(other)
    with pytest.raises(TransferError, match="captured into a graph"):
        a.isend(device.zeros(LARGE, 2)[:, 0], 1, stream=other)
    with pytest.raises(TransferError, match="captured into a graph"):
        a.irecv(1, out=device.zeros(3), stream=other)
    a.send(torch.ones(3), 1)
    work.synchronize()


def test_waiting_send_holds_back_its_tag_and_no_other(
    world: World, device: FakeDevice, slow: threading.Event
) -> None:
    a, b = world()
    tensor = device.zeros(SMALL)
    device.default_stream.launch(lambda: wait_on(slow))
    first = a.isend(tensor, 1)
    host, large = torch.ones(SMALL), torch.ones(LARGE)
    later = [a.isend(host, 1), a.isend(large, 1), a.isend(tensor, 1)]
    a.send(host * 4, 1, tag=9)
    assert float(b.recv(0, tag=9)[0]) == 4.0
    assert b.iprobe(0) is None
    slow.set()
    received = [b.recv(0) for _ in range(4)]
    assert [(one.numel(), float(one[0])) for one in received] == [
        (SMALL, 0.0),
        (SMALL, 1.0),
        (LARGE, 1.0),
        (SMALL, 0.0),
    ]
    for work in (first, *later):
        work.synchronize()


def test_cancelled_send_lets_go_those_behind_it(
    world: World, device: FakeDevice, slow: threading.Event
) -> None:
    a, b = world()
    device.default_stream.launch(lambda: wait_on(slow))
    first = a.isend(device.zeros(SMALL), 1)
    second = a.isend(torch.ones(SMALL), 1)
    first.cancel()
    assert float(b.recv(0)[0]) == 1.0
    second.wait()
    with pytest.raises(TransferCancelled):
        first.wait()
    a.send(torch.ones(1), 1)
    assert a.statistics().outstanding == 0


def test_send_whose_stream_never_gets_there_times_out(
    world: World, device: FakeDevice, slow: threading.Event
) -> None:
    a, b = world()
    device.default_stream.launch(lambda: wait_on(slow))
    work = a.isend(device.zeros(SMALL), 1, timeout=0.05)
    with pytest.raises(TransferTimeout, match="stream had queued"):
        work.synchronize()
    assert work.wait_released(SECONDS)
    slow.set()
    a.send(torch.ones(2), 1)
    assert b.recv(0).numel() == 2


def test_tensor_of_another_device_than_the_current_stream(
    world: World, slow: threading.Event
) -> None:
    """Each device has a current stream of its own: two of them in one batch."""
    a, b = world()
    one, two = FakeDevice("fake:0"), FakeDevice("fake:1")
    first, second = one.zeros(SMALL), two.zeros(SMALL)
    one.default_stream.launch(lambda: wait_on(slow))
    one.default_stream.launch(lambda: first.fill_(1))
    two.default_stream.launch(lambda: second.fill_(2))
    sends = [a.isend(first, 1, tag=1), a.isend(second, 1, tag=2), a.isend(torch.ones(3), 1, tag=3)]
    assert float(b.recv(0, tag=2)[0]) == 2.0
    assert float(b.recv(0, tag=3)[0]) == 1.0
    assert not sends[0].is_completed()
    slow.set()
    assert float(b.recv(0, tag=1)[0]) == 1.0
    for work in sends:
        work.synchronize()


# After.


@SIZES
def test_wait_lets_streams_go_on_in_order_and_returns_at_once(
    world: World, device: FakeDevice, path: str, count: int
) -> None:
    a, b = world()
    out = device.zeros(count)
    first, second = device.new_stream(), device.new_stream()
    receive = b.irecv(0, out=out)
    seen = []
    for stream in (first, second):
        with device.stream(stream):
            receive.wait()
            seen.append(queued(stream, out))
    receive.wait()
    assert receive.result() is out
    assert not receive.is_completed()
    assert seen == [[], []], "a consumer ran before its data came"
    # On a stream of its own: on one that waits for the message it would wait for itself.
    a.isend(device.tensor(torch.full((count,), 5.0)), 1, stream=device.new_stream())
    for stream, found in zip((first, second), seen, strict=True):
        stream.synchronize()
        assert bool((found[0] == 5).all())
    assert receive.is_success()
    assert receive.source_rank() == 0


def test_stream_waits_until_a_sent_tensor_may_be_changed(world: World, device: FakeDevice) -> None:
    a, b = world()
    tensor = device.tensor(torch.ones(LARGE))
    a.isend(tensor, 1).wait()
    device.default_stream.launch(lambda: tensor.fill_(9))
    received = b.recv(0)
    assert bool((received == 1).all())
    device.default_stream.synchronize()
    assert float(tensor[0]) == 9.0


def test_wait_after_the_end_leaves_the_stream_alone(world: World, device: FakeDevice) -> None:
    a, b = world()
    receive = b.irecv(0, out=device.zeros(SMALL))
    a.send(torch.ones(SMALL), 1)
    receive.synchronize()
    receive.wait()
    assert "hold" not in {call for call, _ in device.calls}


def test_wait_with_a_timeout_blocks_the_host(world: World, device: FakeDevice) -> None:
    a, b = world()
    out = device.zeros(LARGE)
    receive = b.irecv(0, out=out)
    with pytest.raises(TransferTimeout):
        b.irecv(0, out=device.zeros(3), tag=1).wait(0.05)
    send = a.isend(torch.ones(LARGE), 1)
    receive.wait(SECONDS)
    assert bool((out == 1).all())
    send.wait()


def test_device_whose_streams_can_not_wait_blocks_the_host(world: World) -> None:
    a, b = world()
    device = FakeDevice(holds=False)
    out = device.zeros(SMALL)
    receive = b.irecv(0, out=out)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(receive.wait)
        a.isend(device.tensor(torch.ones(SMALL)), 1).wait()
        waiting.result(SECONDS)
    assert bool((out == 1).all())
    assert "hold" not in {call for call, _ in device.calls}


@SIZES
def test_message_without_a_tensor_for_it_lands_on_the_device(
    world: World, device: FakeDevice, count: int
) -> None:
    a, b = world()
    with device:
        receive = b.irecv(0)
        send = a.isend(torch.full((count,), 2.0), 1)
        result = receive.result()
        send.wait()
        assert result is not None
        # It is a device tensor: a send of it waits for the stream.
        device.default_stream.launch(lambda: result.add_(1))
        back = b.isend(result, 0)
        received = a.recv(1)
    back.synchronize()
    assert bool((received == 3).all())
    assert device.default_stream in device.kept, "it was made on another stream than it is used on"


@SIZES
def test_strided_device_memory_on_both_sides(
    world: World, device: FakeDevice, path: str, count: int
) -> None:
    a, b = world()
    source, target = device.zeros(count, 3), device.zeros(count, 2)
    sent, out = source[:, 1], target[:, 1]
    stream = device.new_stream()
    with device.stream(stream):
        stream.launch(lambda: sent.fill_(4), seconds=0.01)
        send = a.isend(sent, 1)
        receive = b.irecv(0, out=out)
        receive.wait()
        seen = queued(stream, target)
    stream.synchronize()
    send.synchronize()
    assert bool((seen[0][:, 1] == 4).all())
    assert not seen[0][:, 0].any()
    assert receive.statistics().packed or count == SMALL


@pytest.mark.parametrize("place", ["device", "host", "new"])
def test_message_to_this_rank_itself_is_ordered_too(
    world: World, device: FakeDevice, slow: threading.Event, place: str
) -> None:
    a, _ = world()
    tensor = device.zeros(SMALL)
    device.default_stream.launch(lambda: wait_on(slow))
    device.default_stream.launch(lambda: tensor.fill_(6))
    a.isend(tensor, 0).wait()
    device.default_stream.launch(lambda: tensor.fill_(1))
    out = {"device": device.zeros(SMALL), "host": torch.zeros(SMALL), "new": None}[place]
    receive = a.irecv(0, out=out)
    assert not receive.is_completed()
    slow.set()
    receive.synchronize()
    result = receive.result()
    assert result is not None
    assert bool((result == 6).all())


def test_future_ends_with_the_bytes_in_place(world: World, device: FakeDevice) -> None:
    a, b = world()
    out = device.zeros(LARGE)
    future = b.irecv(0, out=out).get_future()
    then = future.then(lambda done: float(done.value()[0].sum()))
    a.isend(torch.ones(LARGE), 1)
    assert then.wait() == LARGE


def test_work_can_be_dropped_after_a_stream_waits_for_it(world: World, device: FakeDevice) -> None:
    a, b = world()
    out = device.zeros(LARGE)
    stream = device.new_stream()
    with device.stream(stream):
        b.irecv(0, out=out).wait()
        stream.launch(lambda: None)
    alive = weakref.ref(out.untyped_storage())
    del out
    gc.collect()
    assert alive() is not None, "nobody holds what is about to be written to"
    a.isend(torch.ones(LARGE), 1).wait()
    stream.synchronize()
    with ThreadPoolExecutor() as pool:
        # Let go by the device's thread, a moment later.
        pool.submit(_until_dead, alive).result(SECONDS)


def _until_dead(alive: weakref.ref[torch.UntypedStorage]) -> None:
    gone = threading.Event()
    storage = alive()
    if storage is not None:
        weakref.finalize(storage, gone.set)
        del storage
        assert gone.wait(SECONDS)


def test_driver_calls_nothing_of_the_device(world: World, device: FakeDevice) -> None:
    a, b = world()
    outs = [device.zeros(LARGE, 2)[:, 0], device.zeros(SMALL), device.zeros(LARGE)]
    with device:
        works = [b.irecv(0, out=out) for out in outs]
        works.append(b.irecv(0))
    for work in works[:3]:
        work.wait()
    failed = b.irecv(0, out=device.zeros(3), tag=1, timeout=0.01)
    failed.wait()
    stream = device.new_stream()
    for out in outs:
        a.isend(device.tensor(torch.ones(out.shape)), 1, stream=stream)
    a.isend(torch.ones(LARGE), 1)
    for work in works:
        work.synchronize()
    device.default_stream.synchronize()
    with pytest.raises(TransferTimeout):
        failed.synchronize()
    threads = {thread for _, thread in device.calls}
    assert {"copy", "fill", "record", "hold"} <= {call for call, _ in device.calls}
    own = {"MainThread", "fake-fake:0-run", "fake-fake:0-allocate"}
    assert threads <= own, "the driver's thread called the device"


# Failure.


def fails_by_timeout(_: Communicator, work: Work) -> None:
    with pytest.raises(TransferTimeout):
        work.wait(0.02)


def fails_by_cancel(_: Communicator, work: Work) -> None:
    work.cancel()


def fails_by_loss(peer: Communicator, _: Work) -> None:
    peer.close()


@pytest.mark.parametrize("fail", [fails_by_timeout, fails_by_cancel, fails_by_loss])
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.int32, torch.bool])
def test_failure_fills_the_target_and_lets_the_stream_go_on(
    world: World, device: FakeDevice, fail: object, dtype: torch.dtype
) -> None:
    a, b = world()
    a.send(torch.ones(1), 1)
    b.recv(0)
    out = device.zeros(SMALL, 2, dtype=dtype)[:, 0]
    work = b.irecv(0, out=out)
    work.wait()
    seen = queued(device.default_stream, out)
    assert callable(fail)
    fail(a, work)
    device.default_stream.synchronize()
    if dtype.is_floating_point or dtype.is_complex:
        assert bool(seen[0].isnan().all())
    else:
        assert seen[0].tolist() == [True if dtype is torch.bool else -1] * SMALL
    with pytest.raises((TransferTimeout, TransferCancelled, PeerLostError)):
        work.wait()
    assert work.exception() is not None
    for call in (
        lambda: b.isend(torch.ones(1), 0),
        lambda: b.irecv(0),
        lambda: b.recv(0, out=device.zeros(3)),
        lambda: b.isend(torch.ones(1), 1),
        lambda: b.probe(0),
    ):
        with pytest.raises(PoisonedError, match="can't be trusted"):
            call()
    b.close()


def test_failure_without_a_waiting_stream_poisons_nothing(world: World, device: FakeDevice) -> None:
    a, b = world()
    out = device.zeros(SMALL)
    work = b.irecv(0, out=out)
    with pytest.raises(TransferTimeout):
        work.wait(0.02)
    assert work.wait_released(SECONDS)
    assert bool(out.isnan().all())
    a.send(torch.ones(SMALL), 1)
    assert float(b.recv(0)[0]) == 1.0


def test_failed_target_is_not_filled_while_queued_work_reads_it(
    world: World, device: FakeDevice, slow: threading.Event
) -> None:
    _, b = world()
    out = device.tensor(torch.ones(SMALL))
    device.default_stream.launch(lambda: wait_on(slow))
    seen = queued(device.default_stream, out)
    work = b.irecv(0, out=out)
    work.wait()
    with pytest.raises(TransferTimeout):
        work.wait(0.02)
    b.abort()
    b.connection.abort()
    assert bool((out == 1).all())
    slow.set()
    device.default_stream.synchronize()
    assert bool((seen[0] == 1).all())
    assert bool(out.isnan().all())


def test_mismatch_reaches_the_stream_as_nan(world: World, device: FakeDevice) -> None:
    a, b = world()
    for count in (SMALL, LARGE):
        out = device.zeros(count)
        work = b.irecv(0, out=out, tag=count)
        send = a.isend(torch.ones(count + 1), 1, tag=count)
        with pytest.raises(MismatchError):
            work.synchronize()
        with contextlib.suppress(MismatchError):  # A small one has left, and ended well.
            send.synchronize()
        assert work.wait_released(SECONDS)
        assert bool(out.isnan().all())


def test_send_that_fails_lets_its_stream_go_on_and_poisons(
    world: World, device: FakeDevice
) -> None:
    a, b = world()
    tensor = device.zeros(LARGE)
    work = a.isend(tensor, 1)
    work.wait()
    device.default_stream.launch(lambda: tensor.fill_(1))
    work.cancel()
    b.connection.progress.step()
    device.default_stream.synchronize()
    with pytest.raises(TransferCancelled):
        work.wait()
    with pytest.raises(PoisonedError):
        a.isend(tensor, 1)


@pytest.mark.parametrize("how", ["close", "abort", "connection"])
def test_end_of_a_communicator_lets_streams_go_on(
    world: World, device: FakeDevice, how: str
) -> None:
    _, b = world()
    out = device.zeros(SMALL)
    work = b.irecv(0, out=out)
    work.wait()
    seen = queued(device.default_stream, out)
    {"close": b.close, "abort": b.abort, "connection": b.connection.abort}[how]()
    device.default_stream.synchronize()
    assert bool(seen[0].isnan().all())
    with pytest.raises(ClosedError):
        work.wait()


def test_bytes_that_never_land_block_a_stream_for_a_bounded_time(
    fabric: LoopbackFabric, world: World, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered, "LINGER_SECONDS", 0.05)
    a, b = world()
    a.send(torch.ones(1), 1)
    b.recv(0)
    out = device.zeros(LARGE)
    work = b.irecv(0, out=out)
    work.wait()
    seen = queued(device.default_stream, out)
    fabric.delay(1)
    send = a.isend(torch.ones(LARGE), 1)
    while work.statistics().route == "eager":
        b.connection.progress.step()
    with pytest.raises(TransferTimeout):
        work.wait(0.02)
    assert not work.wait_released(0.01)
    device.default_stream.synchronize()
    # Some bytes of the message may have landed by then, at its beginning.
    assert bool(seen[0][LARGE // 2 :].isnan().all())
    with pytest.raises(PoisonedError):
        b.irecv(0)
    # What lands after all is covered again before the memory is given back.
    fabric.delay(None)
    assert work.wait_released(SECONDS)
    assert bool(out.isnan().all())
    with contextlib.suppress(TransferError):
        send.wait()


# Trees, on several devices and the host.


def test_tree_waits_for_the_streams_of_all_its_devices(world: World, slow: threading.Event) -> None:
    a, b = world()
    one, two = FakeDevice("fake:0"), FakeDevice("fake:1")
    tree = {"a": one.zeros(LARGE), "b": [two.zeros(LARGE), torch.ones(LARGE)], "c": 3}
    outs = {"a": two.zeros(LARGE), "b": [torch.zeros(LARGE), one.zeros(LARGE)], "c": 0}
    busy = one.new_stream()
    busy.launch(lambda: wait_on(slow))
    with one.stream(busy):
        receive = b.irecv_tree(0, out=outs)
    send = a.isend_tree(tree, 1)
    receive.wait()
    seen = queued(two.default_stream, outs["a"])  # type: ignore[arg-type]
    assert not receive.is_completed()
    slow.set()
    receive.synchronize()
    send.synchronize()
    two.default_stream.synchronize()
    assert outs["c"] == 3
    assert bool((seen[0] == 0).all())
    assert bool((outs["b"][1] == 1).all())  # type: ignore[index]


def test_failed_tree_leaves_nan_on_its_devices_and_host_memory_alone(world: World) -> None:
    _, b = world()
    one, two = FakeDevice("fake:0"), FakeDevice("fake:1")
    outs = [one.zeros(SMALL), two.zeros(LARGE), torch.zeros(SMALL)]
    work = b.irecv_tree(0, out=outs)
    work.wait()
    seen = [queued(one.default_stream, outs[0]), queued(two.default_stream, outs[1])]
    work.cancel()
    for device, found in zip((one, two), seen, strict=True):
        device.default_stream.synchronize()
        assert bool(found[0].isnan().all())
    assert not outs[2].any()
    with pytest.raises(PoisonedError):
        b.isend_tree(outs, 0)
    with pytest.raises(PoisonedError):
        b.irecv_tree(0)


def test_sender_hears_of_a_small_message_that_does_not_fit_a_device_tensor(
    world: World, device: FakeDevice
) -> None:
    a, b = world()
    work = b.irecv(0, out=device.zeros(SMALL))
    send = a.isend(torch.ones(3), 1)
    with pytest.raises(MismatchError):
        work.synchronize()
    assert a.connection.progress.wait_until(lambda: send.exception() is not None, None)
    with pytest.raises(MismatchError):
        send.wait()


@pytest.mark.parametrize("likeness", [False, True], ids=["", "like"])
@SIZES
def test_tree_without_tensors_for_it_lands_on_the_device(
    world: World, device: FakeDevice, count: int, likeness: bool
) -> None:
    a, b = world()
    tree = {"a": torch.full((count,), 2.0), "b": [torch.ones(3), 5]}
    like = {"a": device.zeros(count), "b": [device.zeros(3), 0]}
    with device:
        work = b.irecv_tree(0, like=like) if likeness else b.irecv_tree(0)
        send = a.isend_tree(tree, 1)
        got = work.result()
        send.wait()
        assert got["b"][1] == 5
        # They are device tensors: a send of them waits for the stream.
        device.default_stream.launch(lambda: got["a"].add_(1), seconds=0.01)
        back = b.isend(got["a"], 0)
        received = a.recv(1)
    back.synchronize()
    assert bool((received == 3).all())
    assert bool((got["b"][0] == 1).all())
    assert device.kept.count(device.default_stream) >= 2
    made = {thread for call, thread in device.calls if call == "empty"}
    assert made == {"fake-fake:0-allocate"}, "memory was made by the thread that moves bytes"


@SIZES
def test_strided_tensors_of_a_tree(
    world: World, device: FakeDevice, slow: threading.Event, count: int
) -> None:
    a, b = world()
    out = {"a": device.zeros(count, 2)[:, 0], "b": torch.zeros(3, 2)[:, 1]}
    device.default_stream.launch(lambda: wait_on(slow))
    before = queued(device.default_stream, out["a"])
    work = b.irecv_tree(0, out=out)
    work.wait()
    seen = queued(device.default_stream, out["a"])
    send = a.isend_tree({"a": torch.full((count,), 4.0), "b": torch.full((3,), 4.0)}, 1)
    assert not work.is_completed()
    slow.set()
    assert work.result() is out
    send.synchronize()
    device.default_stream.synchronize(SECONDS)
    assert bool((before[0] == 0).all())
    assert bool((seen[0] == 4).all())
    assert bool((out["b"] == 4).all())


def test_result_of_a_tree_with_one_tensor_is_the_tree(world: World, device: FakeDevice) -> None:
    a, b = world()
    out = {"a": device.zeros(SMALL), "n": 0}
    work = b.irecv_tree(0, out=out)
    a.isend_tree({"a": torch.ones(SMALL), "n": 7}, 1)
    assert work.result() is out
    assert out["n"] == 7
