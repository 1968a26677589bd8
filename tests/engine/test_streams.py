"""Points, gates and orders; what a failed receive is filled with; the fake device."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from torch_nixl.engine import streams
from torch_nixl.engine.deferred import Deferred, Worker, when
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.streams import StreamOrder, device_of, fill_byte, landing, order_of
from torch_nixl.p2p.description import DTYPES
from torch_nixl.testing import FakeDevice

SECONDS = 20.0


def test_host_memory_has_no_order() -> None:
    FakeDevice().zeros(3)
    assert device_of(torch.zeros(3)) is None
    assert order_of([torch.zeros(3), torch.zeros(0)]) is None
    assert streams.order_of_memories([tensor_memory(torch.zeros(3))]) is None
    assert landing(torch.device("cpu")) is None


def test_views_and_memories_of_a_fake_tensor_are_its_devices() -> None:
    device = FakeDevice()
    tensor = device.zeros(4, 4)
    for view in (tensor, tensor[1], tensor.t(), tensor.view(torch.uint8), tensor.detach()):
        assert device_of(view) is device
        assert streams.device_of_memory(tensor_memory(view)) is device
    assert device_of(tensor + 1) is None


def test_fake_memory_is_forgotten_with_its_storage() -> None:
    device = FakeDevice()
    tensor = device.zeros(1000)
    address = tensor.data_ptr()
    assert streams.FAKES[address] is device
    del tensor
    gc.collect()
    assert address not in streams.FAKES


def test_order_of_several_tensors_waits_for_all_their_devices() -> None:
    one, two = FakeDevice("fake:0"), FakeDevice("fake:1")
    go = {device: threading.Event() for device in (one, two)}
    for device, event in go.items():
        device.default_stream.launch(lambda event=event: event.wait(SECONDS))  # type: ignore[misc]
    order = order_of([one.zeros(2), torch.zeros(2), two.zeros(2), one.zeros(3)])
    assert order is not None
    assert order.devices == (one, two)
    go[two].set()
    two.default_stream.synchronize()
    assert not order.passed()
    go[one].set()
    one.default_stream.synchronize()
    assert order.passed()
    assert order.hold()
    seen: list[str] = []
    for device in (one, two):
        device.default_stream.launch(lambda device=device: seen.append(device.name))  # type: ignore[misc]
    assert seen == []
    order.settle()
    for device in (one, two):
        device.default_stream.synchronize()
    assert sorted(seen) == ["fake:0", "fake:1"]
    assert not order.hold(), "what is settled needs no wait"


def test_failure_is_told_before_streams_go_on_and_only_if_one_waited() -> None:
    device = FakeDevice()
    told: list[int] = []
    StreamOrder([device]).settle(lambda: told.append(device.num_opened))
    assert told == []
    order = StreamOrder([device])
    order.hold()
    order.settle(lambda: told.append(device.num_opened))
    order.settle(lambda: told.append(-1))
    assert told == [0]
    assert device.num_opened == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", sorted(DTYPES.values(), key=str), ids=str)
def test_fill_is_nan_wherever_there_is_one(dtype: torch.dtype) -> None:
    filled = torch.full((4 * dtype.itemsize,), fill_byte(dtype), dtype=torch.uint8).view(dtype)
    if dtype is torch.bool:
        assert filled.tolist() == [True] * 4
    elif "float4" in str(dtype):
        assert bool((filled.view(torch.uint8) == 0xFF).all())
    elif dtype.is_complex:
        parts = torch.view_as_real(filled).float()
        assert bool(parts.isnan().all())
    elif dtype.is_floating_point:
        assert bool(filled.float().isnan().all())
    else:
        assert bool((filled.view(torch.uint8) == 0xFF).all())


def test_fake_streams_run_later_in_order_and_side_by_side() -> None:
    device = FakeDevice()
    first, second = device.new_stream(), device.new_stream()
    go = threading.Event()
    order: list[str] = []
    first.launch(lambda: go.wait(SECONDS))
    first.launch(lambda: order.append("first"))
    event = first.record()
    second.launch(lambda: order.append("second"))
    second.wait_event(event)
    second.launch(lambda: order.append("third"))
    while not order:
        time.sleep(0)
    assert order == ["second"]
    go.set()
    second.synchronize()
    assert order == ["second", "first", "third"]
    with device.stream(second) as current:
        assert device.current() is current is second
    assert device.current() is device.default_stream


def test_fake_stream_raises_what_its_work_raised() -> None:
    stream = FakeDevice().new_stream()

    def work() -> None:
        raise ZeroDivisionError

    stream.launch(work)
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    stream.synchronize()
    stream.launch(lambda: None, seconds=0.2)
    with pytest.raises(TimeoutError, match="busy"):
        stream.synchronize(0.01)


def test_landing_is_of_the_thread_and_the_block() -> None:
    outer, inner = FakeDevice("outer"), FakeDevice("inner")
    with outer:
        with inner:
            found = landing(None)
            assert found is not None
            assert found("cpu") is inner
        found = landing(None)
        assert found is not None
        assert found("cpu") is outer
        elsewhere: list[object] = []
        thread = threading.Thread(target=lambda: elsewhere.append(landing(None)))
        thread.start()
        thread.join()
        assert elsewhere[0] is None or elsewhere[0]("cpu") is None  # type: ignore[operator]


def test_deferred_runs_what_is_ready_and_survives_what_raises() -> None:
    deferred = Deferred()
    ran: list[int] = []
    ready = [False]
    deferred.add(lambda: ready[0], lambda: ran.append(1))
    deferred.add(lambda: True, lambda: ran.append(2))
    deferred.add(lambda: True, lambda: ran.append(1 // 0))
    assert deferred.run()
    assert ran == [2]
    assert not deferred.run()
    ready[0] = True
    assert deferred.run()
    assert ran == [2, 1]
    assert not deferred.entries


def test_watcher_waits_and_ends() -> None:
    done = threading.Event()
    ready = threading.Event()
    when(ready.is_set, done.set)
    assert not done.is_set()
    ready.set()
    assert done.wait(SECONDS)


def test_worker_keeps_no_reference_to_what_it_has_done() -> None:
    worker = Worker("worker")
    box: list[object] = [torch.zeros(1000)]
    storage = box[0].untyped_storage()  # type: ignore[attr-defined]
    done = threading.Event()
    worker.submit(box.clear)
    worker.submit(done.set)
    assert done.wait(SECONDS)
    assert box == []
    assert storage.nbytes() == 4000


def test_threads_of_a_forgotten_device_end() -> None:
    device = FakeDevice("gone")
    device.default_stream.launch(lambda: None)
    device.default_stream.synchronize()
    of_it = [one for one in threading.enumerate() if one.name.startswith("fake-gone")]
    assert of_it
    del device
    gc.collect()
    for thread in of_it:
        thread.join(10)
        assert not thread.is_alive()
