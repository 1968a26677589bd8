"""Descriptor: memory of this worker, or of another as it was told of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NoReturn

import torch

from torch_nixl.connect.connection import Connection
from torch_nixl.connect.device import Device, DeviceKind
from torch_nixl.connect.metadata import SerializedDescriptor
from torch_nixl.engine import spans
from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.engine.arrays import as_memory
from torch_nixl.engine.memory import Memory, address_memory
from torch_nixl.errors import RegistrationError

if TYPE_CHECKING:
    from torch_nixl.engine.operation import Operation

NOWHERE: Final = 1
"""Address given in JSON for memory without one: nobody has memory there.

JSON has an address and a size for each descriptor. What is not one stretch, a torch_nixl peer finds
in the notification key; any other peer must find nothing rather than other bytes.
"""


MAX_SPANS: Final = 200_000
"""Most stretches of memory that one operation exposes: its metadata has to name each."""

_registering = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Registration:
    """What `Descriptor.register_with_connector` holds."""

    connection: Connection
    release: Callable[[], None]
    finalizer: weakref.finalize[[Callable[[], None]], Descriptor]


class Descriptor:
    """Memory that can be exposed to, read from or written to another worker.

    Nothing is copied and nothing is registered: operations do that, once for each storage. Tensors
    of any strides work between torch_nixl workers; their bytes count in the order of `flatten()`.
    The storage has to stay where it is: after `resize_`, `share_memory_` and the like, operations
    refuse the descriptor with ValueError. Up to `MAX_SPANS` stretches can be exposed at a time.

    Args:
        data: A tensor; bytes, bytearray or memoryview; a numpy array or anything with
            ``__array_interface__``, ``__cuda_array_interface__`` or DLPack; a pair of such an array
            and its `Device` or a device's name; or a tuple ``(address, nbytes)``, which may go on
            with a device (host memory by default) and an object to keep alive.

    Raises:
        TypeError: None of these.
        ValueError: None; or memory that can't be described: see `engine.memory`. Read-only memory
            is refused where it is to be written.
    """

    def __init__(self, data: object) -> None:
        if data is None:
            raise ValueError("data: expected memory, got None")
        self._data_ref: object = data
        if isinstance(data, tuple):
            memory, self._device, self._data_ref = _from_tuple(data)
        else:
            memory = as_memory(data)
            self._device = _device_of(memory, data)
        self._memory: Memory | None = memory
        self._address = int(memory.spans[0, 0]) if len(memory.spans) else 0
        self._serialized: SerializedDescriptor | None = None
        self._begin(memory.nbytes)

    def _begin(self, size: int) -> None:
        # Public programs written for dynamo make a descriptor of a pool smaller for each use by
        # setting this attribute, so it is read late.
        self._data_size = size
        self._registration: _Registration | None = None
        self._used_by: weakref.ref[Operation] | None = None

    @staticmethod
    def from_serialized(serialized: SerializedDescriptor) -> Descriptor:
        """Return a descriptor of memory that another worker told of.

        Raises:
            TypeError: Not a SerializedDescriptor.
            ValueError: There can be no such memory.
        """
        if not isinstance(serialized, SerializedDescriptor):
            raise TypeError(
                f"serialized: expected a SerializedDescriptor, got {type(serialized).__name__}"
            )
        # Mostly it is only looked at, by an operation on the other worker's memory.
        found = Descriptor.__new__(Descriptor)
        found._data_ref = None
        found._device = Device(serialized.device)
        found._memory = None
        found._address = serialized.ptr
        found._serialized = serialized
        found._begin(serialized.size)
        return found

    @property
    def device(self) -> Device:
        return self._device

    @property
    def ptr(self) -> int:
        """Address of its first byte; 0 if it has no bytes."""
        return self._address

    @property
    def size(self) -> int:
        """Bytes."""
        return self._data_size

    @property
    def is_contiguous(self) -> bool:
        """Whether its bytes lie in one stretch, as peers that aren't torch_nixl's need it."""
        return self._memory is None or len(self._memory.spans) <= 1

    @property
    def is_registered(self) -> bool:
        """Whether `register_with_connector` or an operation under way keeps it registered."""
        registration = self._registration
        if registration is not None and not registration.connection.engine.closed:
            return True
        operation = self._used_by() if self._used_by is not None else None
        return operation is not None and not operation.released

    @property
    def metadata(self) -> SerializedDescriptor:
        """What another worker is told of it. The same object each time."""
        size = self._data_size
        if self._serialized is None or self._serialized.size != size:
            address = self.ptr if self.is_contiguous and self.ptr else NOWHERE
            self._serialized = SerializedDescriptor(
                device=str(self._device), ptr=address, size=size
            )
        return self._serialized

    def register_with_connector(self, connection: Connection) -> None:
        """Keep the memory registered until `deregister_with_connector`.

        Worthwhile for memory without an owner whose end can be noticed (addresses, foreign
        buffers); tensors and arrays stay registered for as long as they live, anyway.

        Raises:
            TypeError: Not a Connection.
            RuntimeError: It is registered with another one.
            RegistrationError: NIXL refused.
            ClosedError: The connection is closed.
        """
        _check_connection(connection)
        engine = connection.engine
        with _registering:
            registration = self._registration
            if registration is not None and not registration.connection.engine.closed:
                if registration.connection is connection:
                    return
                raise RegistrationError(f"{self!r} is registered with {registration.connection}")
            if registration is not None:
                # Python holds what a finalizer is given, here the whole closed engine.
                registration.finalizer.detach()
                self._registration = None
            held = engine.register(self.memory(), public=engine.metadata_key is None)

            def release() -> None:
                if not engine.closed:
                    engine.registry.release(held)

            # A forgotten one is let go by the driver: no finalizer may enter the library.
            finalizer = weakref.finalize(self, engine.progress.call_from_finalizer, release)
            finalizer.atexit = False
            self._registration = _Registration(connection, release, finalizer)

    def deregister_with_connector(self, connection: Connection) -> None:
        """Undo `register_with_connector`. Operations under way keep what they use.

        Raises:
            TypeError: Not a Connection.
            RuntimeError: It isn't registered with that one.
        """
        _check_connection(connection)
        with _registering:
            registration = self._registration
            if registration is None or registration.connection is not connection:
                raise RegistrationError(f"{self!r} is not registered with {connection}")
            self._registration = None
        registration.finalizer.detach()
        registration.release()

    def memory(self) -> Memory:
        """Describe the memory for the engine.

        Raises:
            TypeError: ``_data_size`` was set to something else than an int.
            ValueError: ``_data_size`` was set beyond the memory, or on memory in several pieces.
        """
        if self._memory is None:
            self._memory = _at(self.ptr, self._data_size, self._device, None)
        memory, size = self._memory, self._data_size
        if not isinstance(size, int):
            raise TypeError(f"_data_size: expected an int, got {type(size).__name__}")
        if size == memory.nbytes:
            return memory
        if not 0 <= size < memory.nbytes or len(memory.spans) != 1:
            raise ValueError(f"_data_size: {size} bytes of {memory.nbytes} can't be described")
        rows = spans.single(self.ptr, size) if size else spans.EMPTY
        return replace(memory, layout=rows, nbytes=size)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Descriptor names memory of this process: send its metadata instead")

    def use(self, operation: Operation) -> None:
        """Note which operation uses it, for `is_registered`."""
        self._used_by = weakref.ref(operation)

    def __str__(self) -> str:
        return f"ptr={self.ptr:#x}, size={self.size}, device={self._device}"

    def __repr__(self) -> str:
        return f"Descriptor({self})"


def as_descriptors(value: object, name: str = "local_descriptors") -> tuple[Descriptor, ...]:
    """Return one descriptor or a list of them as a tuple.

    Raises:
        TypeError: Anything else; the message names the index.
        ValueError: The list is empty.
    """
    if isinstance(value, Descriptor):
        return (value,)
    if not isinstance(value, list):
        raise TypeError(
            f"{name}: expected a Descriptor or a list of them, got {type(value).__name__}"
        )
    for index, item in enumerate(value):
        if not isinstance(item, Descriptor):
            raise TypeError(f"{name}[{index}]: expected a Descriptor, got {type(item).__name__}")
    if not value:
        raise ValueError(f"{name}: the list is empty")
    return tuple(value)


def _check_connection(connection: object) -> None:
    if not isinstance(connection, Connection):
        raise TypeError(f"connection: expected a Connection, got {type(connection).__name__}")


def _from_tuple(data: tuple[object, ...]) -> tuple[Memory, Device, object]:
    if not 2 <= len(data) <= 4:
        raise TypeError(
            "data: expected a tuple (array, device) or (address, nbytes, device, reference), got "
            f"{len(data)} elements"
        )
    first = data[0]
    if isinstance(first, int):
        address, nbytes = first, data[1]
        device = _as_device(data[2] if len(data) > 2 else "cpu", "data[2]")
        if not isinstance(nbytes, int):
            raise TypeError(f"data[1]: expected a size in bytes, got {type(nbytes).__name__}")
        reference = data[3] if len(data) > 3 else None
        return _at(address, nbytes, device, reference), device, reference
    if len(data) != 2:
        raise TypeError(f"data[0]: expected an address, got {type(first).__name__}")
    device = _as_device(data[1], "data[1]")
    memory = as_memory(first, name="data[0]")
    actual = _device_of(memory, first)
    if actual.kind is not device.kind:
        raise ValueError(f"data: the array lies on {actual}, not on {device}")
    return memory, actual, first


def _at(address: int, nbytes: int, device: Device, reference: object) -> Memory:
    return address_memory(
        address,
        nbytes,
        kind=device.memory_kind,
        device_id=device.id,
        owner=reference,
        name="data",
    )


def _as_device(value: object, name: str) -> Device:
    if isinstance(value, Device):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a Device or a str, got {type(value).__name__}")
    return Device(value)


def _device_of(memory: Memory, data: object) -> Device:
    if memory.kind is MemoryKind.DRAM:
        return Device((DeviceKind.HOST, 0))
    is_xpu = isinstance(data, torch.Tensor) and data.device.type == "xpu"
    return Device((DeviceKind.XPU if is_xpu else DeviceKind.CUDA, memory.device_id))
