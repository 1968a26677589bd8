"""A device without a device: host memory whose work runs later, on streams that are threads.

What is launched on a stream has not happened when `launch` returns; streams run side by side, and
nothing but events, points and gates orders one against another or against the host. So a program
that forgets to wait sees old bytes here as it would on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from torch_nixl.engine import streams
from torch_nixl.engine.deferred import Worker, perform
from torch_nixl.engine.memory import Memory
from torch_nixl.engine.streams import Gate, Point, StreamDevice
from torch_nixl.errors import TransferError


class FakeEvent:
    """A place in a fake stream's queue, passed once the stream gets there. Also a `Point`."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def passed(self) -> bool:
        return self._reached.is_set()

    def stall(self) -> None:
        self._reached.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is passed; return False if it isn't within `timeout` seconds."""
        return self._reached.wait(timeout)


class FakeGate:
    """What fake streams wait at until the host opens it."""

    def __init__(self, on_open: Callable[[], None]) -> None:
        self._opened = threading.Event()
        self._on_open = on_open

    def open(self) -> None:
        self._on_open()
        self._opened.set()

    def wait(self) -> None:
        self._opened.wait()


class FakeStream:
    """A queue of work, and the thread that does it. Made by `FakeDevice.new_stream`."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device = device
        self.name = name
        self._worker = Worker(f"fake-{name}")
        self._errors: list[BaseException] = []

    def launch(self, work: Callable[[], object], *, seconds: float = 0.0) -> None:
        """Queue work that takes at least `seconds`, as a kernel does.

        What it raises waits for `synchronize`.
        """

        def job() -> None:
            if seconds:
                time.sleep(seconds)
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised by synchronize
                self._errors.append(error)

        self._worker.submit(job)

    def record(self) -> FakeEvent:
        """Note what is queued by now."""
        event = FakeEvent()
        self._worker.submit(event.reach)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """Have what is queued from now on wait for another stream's event."""
        self._worker.submit(event.stall)

    def wait_gate(self, gate: FakeGate) -> None:
        """Have what is queued from now on wait for the host."""
        self._worker.submit(gate.wait)

    def synchronize(self, timeout: float = 30.0) -> None:
        """Block until all that is queued by now has run.

        Raises:
            TimeoutError: It has not within `timeout` seconds.
            Exception: What work raised.
        """
        if not self.record().wait(timeout):
            raise TimeoutError(f"{self!r} is still busy after {timeout} s")
        if self._errors:
            raise self._errors.pop(0)

    def __repr__(self) -> str:
        return f"<FakeStream {self.name}>"


class FakeDevice:
    """A device whose memory is host memory. Implements `StreamDevice`.

    Tensors that it makes (`tensor`, `empty`, `zeros`) are CPU tensors to torch, and device tensors
    to torch_nixl, as are all their views. A context: within it, messages that are received without
    a tensor for them land here.

    Args:
        name: For messages.
        holds: Whether its streams can wait for the host, as some devices' can't.

    Attributes:
        calls: Names of the threads that called for what a real device's runtime would be needed.
        kept: Streams that tensors were kept for, as `record_stream` would.
        captured: Streams on which operations are refused, as in a graph capture.
    """

    torch_device = None

    def __init__(self, name: str = "fake:0", *, holds: bool = True) -> None:
        self.name = name
        self.holds = holds
        self.calls: list[tuple[str, str]] = []
        self.kept: list[FakeStream] = []
        self.captured: set[FakeStream] = set()
        self.num_opened = 0
        self._local = threading.local()
        self._num_streams = 0
        self._worker = Worker(f"fake-{name}-run")
        self._allocator = Worker(f"fake-{name}-allocate")
        self.default_stream = self.new_stream()
        self._side = self.new_stream()
        self._landing = self.new_stream()

    # For programs.

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy of a CPU tensor, contiguous, in this device's memory. Done at once."""
        made = torch.empty(data.shape, dtype=data.dtype)
        made.copy_(data)
        return self.adopt(made)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.adopt(torch.zeros(shape, dtype=dtype))

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a CPU tensor's storage this device's memory."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address:
            streams.FAKES[address] = self
            weakref.finalize(storage, _forget, address, self).atexit = False
        return tensor

    def new_stream(self) -> FakeStream:
        self._num_streams += 1
        return FakeStream(self, f"{self.name}/{self._num_streams}")

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[FakeStream]:
        """Make a stream the calling thread's current one."""
        before = self.current()
        self._local.stream = stream
        try:
            yield stream
        finally:
            self._local.stream = before

    def __enter__(self) -> FakeDevice:
        self._local.before = streams.set_fake_landing(self)
        return self

    def __exit__(self, *_: object) -> None:
        streams.set_fake_landing(self._local.before)

    # For torch_nixl.

    def current(self) -> FakeStream:
        return getattr(self._local, "stream", None) or self.default_stream

    def owns(self, stream: object) -> bool:
        return isinstance(stream, FakeStream) and stream.device is self

    def check_capture(self, stream: object = None) -> None:
        if (self.current() if stream is None else stream) in self.captured:
            raise TransferError(f"a stream of {self.name} is being captured into a graph")

    def record(self, stream: object) -> Point:
        return self._own("record", stream).record()

    def gate(self) -> Gate:
        self._called("gate")
        return FakeGate(self._count_opened)

    def hold(self, stream: object, gate: Gate) -> None:
        assert self.holds and isinstance(gate, FakeGate)
        self._own("hold", stream).wait_gate(gate)

    def keep(self, tensor: torch.Tensor, stream: object) -> None:
        self.kept.append(self._own("keep", stream))

    def pack(self, tensor: torch.Tensor, stream: object) -> torch.Tensor:
        packed = self.adopt(torch.empty(tensor.shape, dtype=tensor.dtype))
        self._own("pack", stream).launch(lambda: packed.copy_(tensor.detach()))
        return packed

    def buffer(self, out: torch.Tensor, stream: object) -> torch.Tensor:
        self._own("buffer", stream)
        return self.adopt(torch.empty(out.shape, dtype=out.dtype))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._called("copy")
        target.detach().copy_(source.detach())

    def fill(self, memory: Memory, byte: int) -> None:
        self._called("fill")
        for address, nbytes in memory.spans.tolist():
            ctypes.memset(address, byte, nbytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self._called("empty")
        return self.adopt(torch.empty(tuple(shape), dtype=dtype))

    def run(self, work: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        self._worker.submit(lambda: perform(lambda: self._do(self._side, work), then))

    def allocate(
        self, work: Callable[[], None], then: Callable[[BaseException | None], None]
    ) -> None:
        self._allocator.submit(lambda: perform(lambda: self._do(self._landing, work), then))

    def _do(self, stream: FakeStream, work: Callable[[], None]) -> None:
        with self.stream(stream):
            work()
            stream.synchronize()

    def discard(self, box: list[object]) -> None:
        self._worker.submit(box.clear)

    def _own(self, call: str, stream: object) -> FakeStream:
        self._called(call)
        assert isinstance(stream, FakeStream) and stream.device is self
        return stream

    def _called(self, call: str) -> None:
        self.calls.append((call, threading.current_thread().name))

    def _count_opened(self) -> None:
        self.num_opened += 1

    def __repr__(self) -> str:
        return f"<FakeDevice {self.name}>"


def _forget(address: int, device: StreamDevice) -> None:
    # Its address may have been given to another device's memory already.
    if streams.FAKES.get(address) is device:
        del streams.FAKES[address]
