"""Streams of CUDA devices, and of others that torch knows: see `streams` for what they are for.

Points and gates are words of page-locked host memory: a stream writes the one when it gets there,
and waits for the host to write the other. Where the driver offers neither (ROCm, XPU, some virtual
devices), points are torch's events, and whoever waits blocks the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from torch_nixl.engine.cuda_driver import (
    WAIT_FLUSH,
    WAIT_GEQ,
    DriverError,
    StreamDriver,
    find_driver,
)
from torch_nixl.engine.deferred import Worker, perform
from torch_nixl.engine.memory import Memory
from torch_nixl.engine.streams import Gate, Point, StreamDevice, accelerator
from torch_nixl.errors import TransferError

log = logging.getLogger("torch_nixl.streams")

PAGE_WORDS: Final = 1024
"""Words that are page-locked at a time: as many operations of one device can be under way."""

_ALL: Final = (1 << 32) - 1
_HALF: Final = 1 << 31


class Word:
    """A counter that host and device share.

    It only grows, so that a wait that a stream meets late, after the word serves another
    purpose, is still satisfied.

    Attributes:
        address: The device's address of it.
        value: What it is to reach next.
    """

    __slots__ = ("_cell", "address", "value")

    def __init__(self, cell: ctypes.c_uint32, address: int) -> None:
        self._cell = cell
        self.address = address
        self.value = 0

    def reached(self, value: int) -> bool:
        return (self._cell.value - value) & _ALL < _HALF

    def reach(self, value: int) -> None:
        # An aligned word is stored as one.
        self._cell.value = value


class Words:
    """All words of a device. Made and grown in callers' threads."""

    def __init__(self, driver: StreamDriver, pin: Callable[[int], torch.Tensor]) -> None:
        self._driver = driver
        self._pin = pin
        self._free: deque[Word] = deque()
        self._pages: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self) -> Word:
        """Take a word that nobody uses, and raise what it is to reach."""
        try:
            word = self._free.popleft()
        except IndexError:
            with self._lock:
                if not self._free:
                    self._grow()
                word = self._free.popleft()
        word.value = (word.value + 1) & _ALL
        return word

    def give(self, word: Word) -> None:
        """Give a word back that has reached its value. Calls nothing of the device."""
        self._free.append(word)

    def _grow(self) -> None:
        page = self._pin(PAGE_WORDS)
        host = page.data_ptr()
        device = self._driver.device_address(host)
        self._pages.append(page)
        self._free.extend(
            Word(ctypes.c_uint32.from_address(host + at), device + at)
            for at in range(0, 4 * PAGE_WORDS, 4)
        )


class WordPoint:
    """A point that a stream marks by writing a word."""

    __slots__ = ("_value", "_word", "_words")

    def __init__(self, words: Words, word: Word) -> None:
        self._words = words
        self._word: Word | None = word
        self._value = word.value

    def passed(self) -> bool:
        word = self._word
        if word is None:
            return True
        if not word.reached(self._value):
            return False
        # Not before: a write that is still queued would take the next user by surprise.
        self._word = None
        self._words.give(word)
        return True


class WordGate:
    """A gate that the host opens by writing a word."""

    __slots__ = ("_word", "_words", "address", "value")

    def __init__(self, words: Words, word: Word) -> None:
        self._words = words
        self._word: Word | None = word
        self.address = word.address
        self.value = word.value

    def open(self) -> None:
        word, self._word = self._word, None
        if word is not None:
            word.reach(self.value)
            self._words.give(word)


@dataclass(slots=True)
class EventPoint:
    """A point that a stream marks by an event. Only where no stream ever waits for the host."""

    event: Any

    def passed(self) -> bool:
        return bool(self.event.query())


class DeviceStreams:
    """One CUDA or XPU device. Implements `StreamDevice`.

    Args:
        kind: ``"cuda"`` or ``"xpu"``.
        index: Its number.
        driver: What lets streams wait for host memory; None where nothing does.
        module: `torch.cuda` or `torch.xpu`, or what behaves like it.
        pin: Makes page-locked zeros: a tensor of so many 32-bit words.
    """

    def __init__(
        self,
        kind: str,
        index: int,
        driver: StreamDriver | None,
        *,
        module: Any,
        pin: Callable[[int], torch.Tensor],
    ) -> None:
        self.name = f"{kind}:{index}"
        self.torch_device = torch.device(kind, index)
        self.why_not = ""
        self._index = index
        self._module = module
        self._flush = 0
        self._driver = driver
        self._words: Words | None = None
        self._worker = Worker(f"torch_nixl-{self.name}")
        self._allocator = Worker(f"torch_nixl-{self.name}-allocate")
        with module.device(index):
            # Of torch's pool: such streams don't wait for the default stream, nor it for them.
            self._side = module.Stream(device=index)
            self._landing = module.Stream(device=index)
            if driver is None:
                self.why_not = "there is no driver for it"
            else:
                self._try(driver, pin)

    def _try(self, driver: StreamDriver, pin: Callable[[int], torch.Tensor]) -> None:
        """See whether streams can write and wait for words, before anything depends on it."""
        words = Words(driver, pin)
        try:
            driver.enter(self._index)
            word = words.take()
            driver.write_value(self._side.cuda_stream, word.address, word.value)
            driver.wait_value(self._side.cuda_stream, word.address, word.value, WAIT_GEQ)
            self._side.synchronize()  # A stream of our own with nothing else on it.
            if not word.reached(word.value):
                raise DriverError("a word that a stream wrote does not show")
            words.give(word)
            self._flush = WAIT_FLUSH if driver.can_flush(self._index) else 0
        except (DriverError, RuntimeError) as error:
            self.why_not = str(error)
        else:
            self._words = words

    @property
    def holds(self) -> bool:
        return self._words is not None

    def describe(self) -> str:
        """Say how streams wait, for people."""
        if self._words is not None:
            assert self._driver is not None
            return f"streams wait for transfers, by {self._driver.name}"
        return f"wait() blocks the host: {self.why_not}"

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """Make this the current device, and give the thread its context."""
        with self._module.device(self._index):
            if self._words is not None:
                assert self._driver is not None
                self._driver.enter(self._index)
            yield

    def current(self) -> object:
        return self._module.current_stream(self._index)

    def owns(self, stream: object) -> bool:
        device = getattr(stream, "device", None)
        if not isinstance(device, torch.device) or device.type != self.torch_device.type:
            return False
        return (device.index or 0) == self._index

    def check_capture(self, stream: object = None) -> None:
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        if capturing is None:
            return
        # Asks about the current device's current stream.
        chosen = contextlib.nullcontext() if stream is None else self._module.stream(stream)
        with self._module.device(self._index), chosen:
            if capturing():
                raise TransferError(
                    f"a stream of {self.name} is being captured into a graph: transfers need the "
                    "host and can't be replayed; call them outside of torch.cuda.graph"
                )

    def record(self, stream: object) -> Point:
        if self._words is None:
            with self._module.device(self._index):
                event = self._module.Event()
                event.record(stream)
            return EventPoint(event)
        assert self._driver is not None
        with self._entered():
            word = self._words.take()
            self._driver.write_value(_handle(stream), word.address, word.value)
        return WordPoint(self._words, word)

    def gate(self) -> Gate:
        assert self._words is not None, "gates are for devices whose streams can wait"
        with self._entered():
            return WordGate(self._words, self._words.take())

    def hold(self, stream: object, gate: Gate) -> None:
        assert self._driver is not None and isinstance(gate, WordGate)
        with self._entered():
            self._driver.wait_value(
                _handle(stream), gate.address, gate.value, WAIT_GEQ | self._flush
            )

    def keep(self, tensor: torch.Tensor, stream: object) -> None:
        tensor.record_stream(cast(torch.Stream, stream))

    def pack(self, tensor: torch.Tensor, stream: object) -> torch.Tensor:
        with self._module.device(self._index), self._module.stream(stream):
            return tensor.detach().clone(memory_format=torch.contiguous_format)

    def buffer(self, out: torch.Tensor, stream: object) -> torch.Tensor:
        with self._module.device(self._index), self._module.stream(stream):
            out = out.detach()
            buffer = torch.empty_like(out, memory_format=torch.contiguous_format)
            # Changes no value, and loads the kernels: see [Note: no device calls in the driver].
            buffer.copy_(out)
            out.copy_(buffer)
            return buffer

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.detach().copy_(source)

    def fill(self, memory: Memory, byte: int) -> None:
        if self._words is not None:
            assert self._driver is not None
            for address, nbytes in memory.spans.tolist():
                self._driver.fill(self._side.cuda_stream, address, byte, nbytes)
            return
        storage = memory.owner
        assert isinstance(storage, torch.UntypedStorage)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for address, nbytes in memory.spans.tolist():
            start = address - memory.base
            whole[start : start + nbytes].fill_(byte)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def run(self, work: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        self._worker.submit(lambda: perform(lambda: self._do(self._side, work), then))

    def allocate(
        self, work: Callable[[], None], then: Callable[[BaseException | None], None]
    ) -> None:
        self._allocator.submit(lambda: perform(lambda: self._do(self._landing, work), then))

    def _do(self, stream: Any, work: Callable[[], None]) -> None:
        with self._entered(), self._module.stream(stream):
            work()
            stream.synchronize()

    def discard(self, box: list[object]) -> None:
        self._worker.submit(box.clear)

    def __repr__(self) -> str:
        return f"<DeviceStreams {self.name}: {self.describe()}>"


def _handle(stream: object) -> int:
    handle: int = cast(Any, stream).cuda_stream
    return handle


def make_device(kind: str, index: int) -> StreamDevice | None:
    """Make the streams of a device; None where this torch can't use such devices."""
    module = getattr(torch, kind, None) if kind in ("cuda", "xpu") else None
    if module is None or not module.is_available():
        return None
    driver: StreamDriver | None = None
    why_not = ""
    if kind == "cuda" and torch.version.hip is None:
        try:
            driver = find_driver()
        except DriverError as error:
            why_not = str(error)
    device = DeviceStreams(kind, index, driver, module=module, pin=_pin)
    device.why_not = device.why_not if driver is not None else why_not or device.why_not
    if not device.holds:
        log.warning("%s: %s", device.name, device.describe())
    return device


def describe_devices() -> tuple[str, ...]:
    """Say for each device that torch can use how its streams wait, for people."""
    lines = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        for index in range(module.device_count()):
            try:
                device = accelerator(kind, index)
            except RuntimeError as error:  # Busy, or out of memory.
                lines.append(f"{kind}:{index}: {error}")
            else:
                assert isinstance(device, DeviceStreams)
                lines.append(f"{device.name}: {device.describe()}")
    return tuple(lines)


def _pin(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, pin_memory=True)
