"""A stand-in for `torch.cuda` and for CUDA's driver, to run what we wrote over them on a CPU.

It keeps what the documentation says of the calls used: work of one stream runs in order, when the
test says so; a wait for a value holds up its stream until the memory has it, by the cyclic
comparison; a call with the wrong device current, or from a thread without a context, is an error.
It proves our side of the contract, and nothing about CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

DEVICE_OFFSET = 1 << 20
"""Addresses of the device differ from the host's, so that none is taken for the other."""


class StubEvent:
    def __init__(self) -> None:
        self.reached = False

    def record(self, stream: StubStream) -> None:
        stream.queue.append(self._reach)

    def _reach(self) -> bool:
        self.reached = True
        return True

    def query(self) -> bool:
        return self.reached


class StubStream:
    """Work is run by `run`: each piece returns whether the stream can go on."""

    def __init__(self, module: StubModule, index: int) -> None:
        module.num_streams += 1
        self.cuda_stream = 0x1000 * module.num_streams
        self.device = torch.device("cuda", index)
        self.index = index
        self.queue: deque[Callable[[], bool]] = deque()
        module.streams[self.cuda_stream] = self

    def run(self) -> None:
        while self.queue and self.queue[0]():
            self.queue.popleft()

    def synchronize(self) -> None:
        self.run()
        assert not self.queue, "the host was blocked by a stream that waits for it"


class StubModule:
    """What `DeviceStreams` uses of `torch.cuda`."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.streams: dict[int, StubStream] = {}
        self.local = threading.local()
        self.captured: set[StubStream] = set()
        self.default = {index: StubStream(self, index) for index in range(2)}

    @property
    def index(self) -> int:
        return getattr(self.local, "index", 0)

    Event = StubEvent

    def Stream(self, device: int) -> StubStream:  # noqa: N802 - torch's name
        return StubStream(self, device)

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.local.index = self.index, index
        yield
        self.local.index = before

    @contextlib.contextmanager
    def stream(self, stream: StubStream) -> Iterator[None]:
        before = getattr(self.local, "stream", None)
        self.local.stream = stream
        yield
        self.local.stream = before

    def current_stream(self, index: int) -> StubStream:
        stream: StubStream | None = getattr(self.local, "stream", None)
        return stream if stream is not None and stream.index == index else self.default[index]

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream(self.index) in self.captured


class StubDriver:
    """What `DeviceStreams` uses of the driver."""

    name = "stub"

    def __init__(self, module: StubModule, *, fails: bool = False, flush: bool = False) -> None:
        self.module = module
        self.fails = fails
        self.flush = flush
        self.flags: list[int] = []
        self.calls: list[str] = []

    def enter(self, device: int) -> None:
        self.module.local.entered = device

    def _stream(self, call: str, handle: int) -> StubStream:
        from torch_nixl.engine.cuda_driver import DriverError

        self.calls.append(call)
        if self.fails:
            raise DriverError(f"{call} failed: CUDA_ERROR_NOT_SUPPORTED")
        stream = self.module.streams[handle]
        assert self.module.index == stream.index, "another device is current"
        assert self.module.local.entered == stream.index, "the thread has no context"
        return stream

    def can_flush(self, device: int) -> bool:
        return self.flush

    def device_address(self, host_address: int) -> int:
        return host_address + DEVICE_OFFSET

    def wait_value(self, stream: int, address: int, value: int, flags: int) -> None:
        cell = ctypes.c_uint32.from_address(address - DEVICE_OFFSET)
        self.flags.append(flags)

        def work() -> bool:
            return (cell.value - value) & 0xFFFFFFFF < 1 << 31

        self._stream("wait", stream).queue.append(work)

    def write_value(self, stream: int, address: int, value: int) -> None:
        cell = ctypes.c_uint32.from_address(address - DEVICE_OFFSET)

        def work() -> bool:
            cell.value = value
            return True

        self._stream("write", stream).queue.append(work)

    def fill(self, stream: int, address: int, byte: int, nbytes: int) -> None:
        def work() -> bool:
            ctypes.memset(address, byte, nbytes)
            return True

        self._stream("fill", stream).queue.append(work)


class Recorder:
    """Functions of a C library: keep their arguments, write their results, return a status."""

    def __init__(self, results: dict[str, tuple[Any, int]], status: int = 0) -> None:
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self._results = results
        self._status = status

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("_") or name in self._results.get("missing", ()):
            raise AttributeError(name)

        def function(*args: Any) -> int:
            self.called.append((name, args))
            if name in self._results:
                kind, value = self._results[name]
                ctypes.cast(args[0], ctypes.POINTER(kind))[0] = kind(value)
            return self._status

        self.__dict__[name] = function
        return function
