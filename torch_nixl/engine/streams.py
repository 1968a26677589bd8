"""Device streams: what is queued on them runs before our transfers, and what waits runs after.

[Note: stream order]
A device runs what a program queues on a stream later, and in order. So an operation on device
memory has two edges. *Before*: its bytes may be touched once all that was queued when it was called
has run: the caller's thread records a `Point`, and the progress driver starts the operation when
the point is passed. *After*: a stream can be made to wait at a `Gate`, which the host opens once
the bytes are in place; the program goes on meanwhile, and so may drop the operation, which the
connection's tables then hold. The host waits for neither.

[Note: no device calls in the driver]
While a stream waits at a gate, any call into the device's runtime may block until that stream goes
on: allocating or freeing memory waits for all that is queued, the first use of a kernel may load
it, which does so too, and while one thread is blocked like that it may hold a lock that every other
call needs. If the thread that opens gates made such a call, nobody would ever open them. So the
progress driver makes none: to look at a point is to read host memory, to open a gate is to write
it. Whatever needs the runtime is done elsewhere:

- points, gates, registrations, packed copies: by the caller's thread, at the call. It may block
  there without harm, since the driver goes on;
- unpacking, copies from host memory, what collectives reduce, filling the target of a failed
  receive: by a thread of the device's own (`StreamDevice.run`), in memory that the caller has made
  and with kernels that it has loaded before;
- memory for messages that nobody gave a tensor for: by a second one (`StreamDevice.allocate`),
  which may be blocked by gates without keeping the first from opening them;
- the last reference to device memory: dropped by the device's thread, too (`discard`).

Where streams can't wait for the host (`holds` is false) no gate is ever closed, and none of this
can happen. What the transfer library calls by itself is beyond us: UCX copies on streams of its
own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import torch

from torch_nixl.engine.adapter import MemoryKind

if TYPE_CHECKING:
    from torch_nixl.engine.memory import Memory


class Point(Protocol):
    """A place in a stream's queue."""

    def passed(self) -> bool:
        """Whether all that was queued before it has run. Reads memory, calls nothing."""
        ...


class Gate(Protocol):
    """What streams wait at until the host opens it, once and for all."""

    def open(self) -> None:
        """Let them go on. Writes memory, calls nothing; from any thread."""
        ...


class StreamDevice(Protocol):
    """One device, as far as its streams go.

    `stream` is the device's own kind of object (`torch.cuda.Stream`) throughout. All methods are
    for the caller's thread or the device's own ones: see [Note: no device calls in the driver].

    Attributes:
        name: ``"cuda:0"``.
        holds: Whether streams can wait at gates. If not, those who wait block the host.
        torch_device: As `torch.futures.Future` wants it; None where torch knows no such device.
    """

    @property
    def name(self) -> str: ...

    @property
    def holds(self) -> bool: ...

    @property
    def torch_device(self) -> torch.device | None: ...

    def current(self) -> object:
        """The calling thread's current stream."""
        ...

    def owns(self, stream: object) -> bool:
        """Whether a stream is one of this device's."""
        ...

    def check_capture(self, stream: object = None) -> None:
        """Refuse to go on while a stream, by default the current one, is captured into a graph.

        Raises:
            TransferError: It is.
        """
        ...

    def record(self, stream: object) -> Point:
        """Note what is queued on a stream by now."""
        ...

    def gate(self) -> Gate:
        """Make a closed gate."""
        ...

    def hold(self, stream: object, gate: Gate) -> None:
        """Have all that is queued on a stream from now on wait until a gate is open."""
        ...

    def keep(self, tensor: torch.Tensor, stream: object) -> None:
        """Have a tensor's memory not given to others before what is queued on a stream has run."""
        ...

    def pack(self, tensor: torch.Tensor, stream: object) -> torch.Tensor:
        """Queue a contiguous copy of a tensor on a stream."""
        ...

    def buffer(self, out: torch.Tensor, stream: object) -> torch.Tensor:
        """Make a contiguous tensor like `out`, and load what will copy it to `out`."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now. For work given to `run` and `allocate`."""
        ...

    def fill(self, memory: Memory, byte: int) -> None:
        """Set all bytes now. For work given to `run`."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a tensor. For callers' threads, and for work given to `allocate`."""
        ...

    def run(self, work: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        """Have work done by the device's own thread, then tell how it ended, in that thread.

        The current stream is one that no program uses and that waits for no gate. All that the work
        has queued has run by then.
        """
        ...

    def allocate(
        self, work: Callable[[], None], then: Callable[[BaseException | None], None]
    ) -> None:
        """Do the same in another thread, for work that allocates and so may wait for gates."""
        ...

    def discard(self, box: list[object]) -> None:
        """Empty a list of what may be the last references to device memory, in the own thread.

        Whoever calls it keeps no other reference to what is in the list.
        """
        ...


FAKES: Final[dict[int, StreamDevice]] = {}
"""Fake devices by the address of the host storages that count as theirs. Empty but in tests."""

_devices: dict[tuple[str, int], StreamDevice | None] = {}
_making = threading.Lock()


def device_of(tensor: torch.Tensor) -> StreamDevice | None:
    """The device whose streams a tensor's memory is used by; None for plain host memory."""
    if tensor.is_cpu:
        return _fake_of(tensor) if FAKES else None
    device = tensor.device
    return accelerator(device.type, device.index or 0)


def _fake_of(tensor: torch.Tensor) -> StreamDevice | None:
    try:
        return FAKES.get(tensor.untyped_storage().data_ptr())
    except RuntimeError:
        return None  # Without data of its own; refused elsewhere.


def device_of_memory(memory: Memory) -> StreamDevice | None:
    """The same for described memory, which need not be a tensor's."""
    if memory.kind is MemoryKind.VRAM:
        owner = memory.owner
        kind = owner.device.type if isinstance(owner, torch.UntypedStorage | torch.Tensor) else ""
        return accelerator(kind or "cuda", memory.device_id)
    return FAKES.get(memory.base) if FAKES else None


def accelerator(kind: str, index: int) -> StreamDevice | None:
    """A device by its kind and number, as torch names it; None where torch can't use such devices.

    Of those (CUDA arrays of other libraries under a torch without CUDA) the order is the caller's.
    """
    key = (kind, index)
    if key not in _devices:
        with _making:
            if key not in _devices:
                from torch_nixl.engine.device_streams import make_device

                _devices[key] = make_device(kind, index)
    return _devices[key]


# Whether a message may land on a device if nobody says where: where torch was built without any,
# only on a fake one.
_may_land = torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None
_may_land = _may_land or getattr(torch.version, "xpu", None) is not None
_local = threading.local()

Landing: TypeAlias = Callable[[str], StreamDevice | None]
"""Tells for a sender's kind of device where a message lands that nobody gave a tensor for."""


def set_fake_landing(device: StreamDevice | None) -> StreamDevice | None:
    """Have the calling thread's new messages land on a fake device; return what was set before."""
    global _may_land
    before: StreamDevice | None = getattr(_local, "fake", None)
    _local.fake = device
    _may_land = True
    return before


def may_use_devices() -> bool:
    """Whether this process can have device tensors at all."""
    return _may_land or bool(FAKES)


def landing(device: torch.device | None) -> Landing | None:
    """Where messages land that the calling thread receives without a tensor; None for the host.

    Args:
        device: Where the caller wants them; None for the sender's kind of device.
    """
    if not _may_land:
        return None
    if device is not None:
        if device.type == "cpu":
            return None
        where = accelerator(device.type, _index(device))
        return lambda kind: where
    fake: StreamDevice | None = getattr(_local, "fake", None)
    if fake is not None:
        return lambda kind: fake
    index = _current_index()
    if _uses_cuda():
        accelerator("cuda", index)  # Made here, since the driver must not.
    return lambda kind: None if kind == "cpu" else accelerator(kind, index)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _index(device: torch.device) -> int:
    return _current_index() if device.index is None else device.index


def _current_index() -> int:
    """The calling thread's current device; the first where it uses none yet."""
    return torch.cuda.current_device() if _uses_cuda() else 0


class StreamOrder:
    """An operation's place among the work queued on its devices' streams.

    Made by the caller's thread before the operation is started. Settled once, when no byte of it
    moves any more and its memory holds what it is to hold.

    Args:
        devices: Of the operation's memory, at least one.
        stream: After what is queued on this stream instead of its device's current one.

    Attributes:
        devices: As given, each once.
        held: Whether a stream waits, or has waited, for the operation.
    """

    __slots__ = ("_gates", "_lock", "_points", "_settled", "devices", "held")

    def __init__(self, devices: Iterable[StreamDevice], stream: object = None) -> None:
        self.devices = tuple(dict.fromkeys(devices))
        if stream is not None and not any(one.owns(stream) for one in self.devices):
            names = ", ".join(one.name for one in self.devices)
            raise ValueError(f"stream={stream!r}: expected a stream of {names}")
        self.held = False
        self._points: list[Point] = []
        self._gates: dict[StreamDevice, Gate] = {}
        self._lock = threading.Lock()
        self._settled = False
        given = [
            stream if stream is not None and one.owns(stream) else None for one in self.devices
        ]
        for device, chosen in zip(self.devices, given, strict=True):
            device.check_capture(chosen)
        for device, chosen in zip(self.devices, given, strict=True):
            self._points.append(device.record(device.current() if chosen is None else chosen))

    def passed(self) -> bool:
        """Whether all that was queued when this was made has run."""
        points = self._points
        if points:
            with self._lock:
                while points and points[-1].passed():
                    points.pop()
        return not points

    def hold(self) -> bool:
        """Have the current stream of each device wait until this is settled.

        Returns:
            False if it is settled already, or a device's streams can't: the host has to wait.
        """
        if not all(one.holds for one in self.devices):
            return False
        for device in self.devices:
            device.check_capture()
        # Neither under the lock, which the driver takes, too: to make a gate may wait for streams
        # that are at others, and a full queue blocks until the device has run some of it.
        made = {one: one.gate() for one in self.devices if one not in self._gates}
        gates: dict[StreamDevice, Gate] = {}
        with self._lock:
            settled = self._settled
            if not settled:
                self.held = True
                self._gates = {**made, **self._gates}
                gates = dict(self._gates)
        for device, gate in made.items():
            if gates.get(device) is not gate:
                gate.open()  # Nobody's: settled, or another thread was first.
        if settled:
            return False
        # A gate that is opened by now stays open.
        for device in self.devices:
            device.hold(device.current(), gates[device])
        return True

    def settle(self, failed: Callable[[], None] | None = None) -> None:
        """Let the streams go on. Idempotent.

        Args:
            failed: Called first, if they go on although the operation has failed.
        """
        with self._lock:
            self._settled = True
            gates, self._gates = self._gates, {}
        if failed is not None and gates:
            failed()
        for gate in gates.values():
            gate.open()


def order_of(tensors: Iterable[torch.Tensor], *, stream: object = None) -> StreamOrder | None:
    """Record what is queued for several tensors, on whatever devices; None if all are host memory.

    Raises:
        ValueError: `stream` is of none of their devices.
        TransferError: A stream is being captured into a graph.
    """
    found = [device for tensor in tensors if (device := device_of(tensor)) is not None]
    return StreamOrder(found, stream) if found else None


def order_of_memories(memories: Iterable[Memory], *, stream: object = None) -> StreamOrder | None:
    """The same for described memory."""
    found = [device for one in memories if (device := device_of_memory(one)) is not None]
    return StreamOrder(found, stream) if found else None


_MINUS_ZERO_IS_NAN: Final = tuple(
    dtype
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz")
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
)


def fill_byte(dtype: torch.dtype) -> int:
    """The byte that fills the target of a failed receive.

    Of 0xFF bytes every float, complex and float8 is NaN, but for two kinds of float8, whose only
    NaN is 0x80. Integers become -1 or their maximum. A bool becomes True, since it has to be 0 or
    1; float4, which has no NaN, its lowest value (-6).
    """
    if dtype is torch.bool:
        return 0x01
    return 0x80 if dtype in _MINUS_ZERO_IS_NAN else 0xFF
