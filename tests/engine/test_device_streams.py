"""The CUDA side of streams over a stub: see `cuda_stub` for what that can show."""

from __future__ import annotations

import ctypes
import threading
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch
from engine.cuda_stub import Recorder, StubDriver, StubModule, StubStream

from torch_nixl.engine import device_streams
from torch_nixl.engine.cuda_driver import (
    CAN_FLUSH,
    WAIT_FLUSH,
    BindingsDriver,
    CtypesDriver,
    DriverError,
    find_driver,
)
from torch_nixl.engine.device_streams import PAGE_WORDS, DeviceStreams, WordGate, make_device
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.streams import StreamOrder
from torch_nixl.errors import TransferError


def pin(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


@pytest.fixture
def module() -> StubModule:
    return StubModule()


def make(module: StubModule, driver: StubDriver | None, index: int = 0) -> DeviceStreams:
    return DeviceStreams("cuda", index, driver, module=module, pin=pin)


def test_point_is_passed_once_the_stream_has_got_there(module: StubModule) -> None:
    device = make(module, StubDriver(module))
    stream = module.default[0]
    before = [False]
    stream.queue.append(lambda: before[0])
    point = device.record(stream)
    stream.run()
    assert not point.passed()
    before[0] = True
    stream.run()
    assert point.passed()
    assert point.passed()


def test_gate_holds_every_stream_until_it_is_opened(module: StubModule) -> None:
    device = make(module, StubDriver(module))
    first, second = module.Stream(0), module.Stream(0)
    gate = device.gate()
    ran: list[int] = []
    for number, stream in enumerate((first, second)):
        device.hold(stream, gate)
        stream.queue.append(lambda number=number: not ran.append(number))  # type: ignore[func-returns-value, misc]
        stream.run()
    assert ran == []
    gate.open()
    second.run()
    first.run()
    assert ran == [1, 0]
    gate.open()


def test_late_stream_passes_a_gate_whose_word_serves_another(module: StubModule) -> None:
    device = make(module, StubDriver(module))
    late = module.Stream(0)
    gate = device.gate()
    device.hold(late, gate)
    gate.open()
    # Every word is used again, and none goes back.
    others = [device.gate() for _ in range(PAGE_WORDS)]
    late.run()
    assert not late.queue
    blocked = module.Stream(0)
    for other in others:
        device.hold(blocked, other)
        blocked.run()
        assert len(blocked.queue) == 1
        other.open()
        blocked.run()
        assert not blocked.queue


def test_words_outlive_their_wrap(module: StubModule) -> None:
    device = make(module, StubDriver(module))
    stream = module.Stream(0)
    assert device._words is not None
    word = device._words.take()
    word.reach(0xFFFFFFFE)
    word.value = 0xFFFFFFFE
    device._words._free.appendleft(word)
    for _ in range(4):
        gate = device.gate()
        assert isinstance(gate, WordGate)
        device.hold(stream, gate)
        stream.run()
        assert stream.queue
        gate.open()
        stream.run()
        assert not stream.queue
        device._words._free.remove(word)
        device._words._free.appendleft(word)


def test_word_of_a_point_is_not_reused_before_it_is_written(module: StubModule) -> None:
    device = make(module, StubDriver(module))
    stream = module.Stream(0)
    stream.queue.append(lambda: False)
    points = [device.record(stream) for _ in range(2 * PAGE_WORDS)]
    addresses = {point._word.address for point in points}  # type: ignore[attr-defined]
    assert len(addresses) == 2 * PAGE_WORDS
    stream.queue.popleft()
    stream.run()
    assert all(point.passed() for point in points)


def test_flush_is_asked_for_where_the_device_takes_it(module: StubModule) -> None:
    driver = StubDriver(module, flush=True)
    device = make(module, driver)
    device.hold(module.Stream(0), device.gate())
    assert driver.flags[-1] == WAIT_FLUSH
    assert driver.flags[0] == 0


def test_device_without_stream_memory_operations_uses_events_and_says_so(
    module: StubModule,
) -> None:
    for driver in (None, StubDriver(module, fails=True)):
        device = make(module, driver)
        assert not device.holds
        assert "blocks the host" in device.describe()
        stream = module.default[0]
        stream.queue.append(lambda: False)
        point = device.record(stream)
        stream.run()
        assert not point.passed()
        stream.queue.popleft()
        stream.run()
        assert point.passed()
    assert "NOT_SUPPORTED" in device.describe()


def test_every_call_is_made_with_the_streams_own_device_current(module: StubModule) -> None:
    """The stub refuses what is called otherwise; the current device is another one here."""
    one = make(module, StubDriver(module), index=1)
    order = StreamOrder([one])
    module.default[1].run()
    assert order.passed()
    assert order.hold()
    module.default[1].run()
    assert module.default[1].queue
    order.settle()
    module.default[1].run()
    assert not module.default[1].queue
    assert not module.default[0].queue
    assert module.index == 0


def test_stream_of_another_device_is_not_owned(module: StubModule) -> None:
    device = make(module, StubDriver(module))
    assert device.owns(module.default[0])
    assert not device.owns(module.default[1])
    assert not device.owns(object())
    with pytest.raises(ValueError, match="cuda:0"):
        StreamOrder([device], StubStream(module, 1))


def test_capture_is_refused(module: StubModule) -> None:
    device = make(module, StubDriver(module))
    module.captured.add(module.default[0])
    with pytest.raises(TransferError, match=r"cuda:0 is being captured.*torch\.cuda\.graph"):
        StreamOrder([device])
    other = StubStream(module, 0)
    StreamOrder([device], other)
    module.captured.clear()
    module.captured.add(other)
    StreamOrder([device])
    with pytest.raises(TransferError, match="is being captured"):
        StreamOrder([device], other)


@pytest.mark.parametrize("holds", [True, False])
def test_failed_target_is_filled_on_a_stream_of_its_own(module: StubModule, holds: bool) -> None:
    device = make(module, StubDriver(module) if holds else None)
    out = torch.zeros(4, 3)
    column = out[:, 1]
    ended = threading.Event()
    errors: list[BaseException | None] = []

    def then(error: BaseException | None) -> None:
        errors.append(error)
        ended.set()

    device.run(lambda: device.fill(tensor_memory(column), 0xFF), then)
    assert ended.wait(20)
    assert errors == [None]
    assert bool(column.isnan().all())
    assert not out[:, [0, 2]].any()
    assert not module.default[0].queue


def test_own_threads_tell_what_went_wrong(module: StubModule) -> None:
    device = make(module, StubDriver(module))
    ended = threading.Event()
    errors: list[BaseException | None] = []

    def work() -> None:
        raise RuntimeError("no memory")

    def then(error: BaseException | None) -> None:
        errors.append(error)
        ended.set()

    for run in (device.run, device.allocate):
        ended.clear()
        run(work, then)
        assert ended.wait(20)
    assert [str(error) for error in errors] == ["no memory"] * 2


def test_packing_and_buffers_change_no_value(module: StubModule) -> None:
    device = make(module, StubDriver(module))
    out = torch.arange(12.0).reshape(4, 3)[:, 1].requires_grad_()
    kept = out.detach().clone()
    packed = device.pack(out, module.default[0])
    buffer = device.buffer(out, module.default[0])
    for made in (packed, buffer):
        assert made.is_contiguous()
        assert torch.equal(made, kept)
        assert not made.requires_grad
    assert torch.equal(out, kept)


def test_there_is_no_device_where_torch_has_none() -> None:
    for kind in ("cpu", "meta", "cuda", "xpu"):
        if not getattr(getattr(torch, kind, None), "is_available", lambda: False)():
            assert make_device(kind, 0) is None
    assert make_device("cpu", 0) is None


def test_doctor_is_told_how_streams_wait(
    module: StubModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {0: make(module, StubDriver(module)), 1: make(module, None, index=1)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(device_streams, "accelerator", lambda kind, index: made[index])
    assert device_streams.describe_devices() == (
        "cuda:0: streams wait for transfers, by stub",
        "cuda:1: wait() blocks the host: there is no driver for it",
    )


def test_torch_has_the_names_that_are_used() -> None:
    """They exist in torch builds without CUDA, too, so that a change of names shows here."""
    for name in ("device", "stream", "current_stream", "Stream", "Event", "current_device"):
        assert hasattr(torch.cuda, name), name
        assert hasattr(torch.xpu, name), name
    assert hasattr(torch.cuda, "is_current_stream_capturing")
    assert {"query", "record"} <= set(dir(torch.cuda.Event))
    assert {"synchronize", "query"} <= set(dir(torch.cuda.Stream))


# The two ways to the driver.


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


def test_bindings_are_called_as_documented() -> None:
    called: list[tuple[object, ...]] = []

    def answer(name: str, *values: object) -> object:
        def function(*args: object) -> tuple[object, ...]:
            called.append((name, *args))
            return (Status.CUDA_SUCCESS, *values)

        return function

    module = SimpleNamespace(
        CUdevice_attribute=lambda number: ("attribute", number),
        cuCtxGetCurrent=answer("get", 0),
        cuCtxSetCurrent=answer("set"),
        cuDeviceGet=answer("device", 5),
        cuDevicePrimaryCtxRetain=answer("retain", 77),
        cuDeviceGetAttribute=answer("query", 1),
        cuMemHostGetDevicePointer=answer("pointer", 4096),
        cuStreamWaitValue32=answer("wait"),
        cuStreamWriteValue32=answer("write"),
        cuMemsetD8Async=answer("fill"),
    )
    driver = BindingsDriver(module)
    driver.enter(1)
    assert driver.can_flush(1)
    assert driver.device_address(64) == 4096
    driver.wait_value(9, 4096, 3, 0)
    driver.write_value(9, 4096, 3)
    driver.fill(9, 128, 0xFF, 10)
    assert called == [
        ("get",),
        ("device", 1),
        ("retain", 5),
        ("set", 77),
        ("device", 1),
        ("query", ("attribute", CAN_FLUSH), 5),
        ("pointer", 64, 0),
        ("wait", 9, 4096, 3, 0),
        ("write", 9, 4096, 3, 0),
        ("fill", 128, 0xFF, 10, 9),
    ]


def test_bindings_errors_are_named() -> None:
    def refuse(*_: object) -> tuple[object]:
        return (Status.CUDA_ERROR_NOT_SUPPORTED,)

    def missing(*_: object) -> tuple[object]:
        raise RuntimeError("libcuda.so.1 is not there")

    driver = BindingsDriver(SimpleNamespace(cuStreamWaitValue32=refuse, cuMemsetD8Async=missing))
    with pytest.raises(DriverError, match="cuStreamWaitValue32 failed"):
        driver.wait_value(1, 2, 3, 0)
    with pytest.raises(DriverError, match="libcuda"):
        driver.fill(1, 2, 3, 4)
    with pytest.raises(DriverError, match="cuStreamWriteValue32"):
        driver.write_value(1, 2, 3)


def test_library_is_called_as_documented() -> None:
    library = Recorder(
        {
            "cuCtxGetCurrent": (ctypes.c_uint64, 0),
            "cuDeviceGet": (ctypes.c_int, 5),
            "cuDevicePrimaryCtxRetain": (ctypes.c_uint64, 77),
            "cuDeviceGetAttribute": (ctypes.c_int, 1),
            "cuMemHostGetDevicePointer_v2": (ctypes.c_uint64, 1 << 40),
        }
    )
    driver = CtypesDriver(library)
    driver.enter(1)
    assert driver.can_flush(1)
    assert driver.device_address(64) == 1 << 40
    driver.wait_value(9, 1 << 40, 3, WAIT_FLUSH)
    driver.write_value(9, 1 << 40, 3)
    driver.fill(9, 128, 0xFF, 10)
    names = [name for name, _ in library.called]
    assert names == [
        "cuCtxGetCurrent",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuMemHostGetDevicePointer_v2",
        "cuStreamWaitValue32_v2",
        "cuStreamWriteValue32_v2",
        "cuMemsetD8Async",
    ]
    assert library.called[2][1][1] == 5
    assert library.called[3][1][0].value == 77
    assert library.called[-3][1] == (9, 1 << 40, 3, WAIT_FLUSH)
    assert library.called[-2][1] == (9, 1 << 40, 3, 0)
    assert library.called[-1][1] == (128, 0xFF, 10, 9)


def test_old_or_failing_library_is_named() -> None:
    with pytest.raises(DriverError, match="has no cuStreamWaitValue32_v2"):
        CtypesDriver(Recorder({"missing": ("cuStreamWaitValue32_v2", 0)}))
    driver = CtypesDriver(Recorder({}, status=801))
    with pytest.raises(DriverError, match="error 801"):
        driver.wait_value(1, 2, 3, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_real_bindings_and_library_fail_cleanly_without_a_driver() -> None:
    with pytest.raises(DriverError):
        find_driver().enter(0)
