"""The few calls of CUDA's driver that PyTorch doesn't offer: streams that wait for host memory.

By `cuda.bindings.driver`, which CUDA builds of PyTorch bring along, or by ctypes on the driver's
library. Signatures and constants are those of CUDA's driver API, section Stream Memory Operations.
Streams are handles as PyTorch gives them (`cuda_stream`), addresses are the device's.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Final, Protocol

WAIT_GEQ: Final = 0
"""Wait until ``(int32)(*address - value) >= 0``: a comparison that outlives the counter's wrap."""

WAIT_FLUSH: Final = 1 << 30
"""And make visible what others wrote to the device before: a network adapter's writes, say."""

WRITE_DEFAULT: Final = 0
"""After a fence: what the stream wrote before is visible to whoever sees the value."""

CAN_FLUSH: Final = 98
"""CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES."""

_LIBRARY: Final = "libcuda.so.1"


class DriverError(RuntimeError):
    """A call of the driver failed, or there is no driver."""


class StreamDriver(Protocol):
    """What a device's streams need of the driver. All raise `DriverError`.

    The calling thread's current device must be the stream's, as `torch.cuda.device` sets it.
    """

    @property
    def name(self) -> str:
        """How it is reached, for people."""
        ...

    def enter(self, device: int) -> None:
        """Give the calling thread the context that PyTorch uses, if it has none yet."""
        ...

    def can_flush(self, device: int) -> bool:
        """Whether the device takes `WAIT_FLUSH`."""
        ...

    def device_address(self, host_address: int) -> int:
        """Return the address by which the device knows page-locked host memory."""
        ...

    def wait_value(self, stream: int, address: int, value: int, flags: int) -> None:
        """Queue a wait for a 32-bit value in memory."""
        ...

    def write_value(self, stream: int, address: int, value: int) -> None:
        """Queue a write of a 32-bit value to memory."""
        ...

    def fill(self, stream: int, address: int, byte: int, nbytes: int) -> None:
        """Queue the setting of bytes."""
        ...


class BindingsDriver:
    """Over `cuda.bindings.driver`.

    Args:
        module: That module, or one with the same functions.
    """

    name = "cuda.bindings"

    def __init__(self, module: Any) -> None:
        self._driver = module

    def _call(self, function: str, *args: object) -> Any:
        try:
            status, *values = getattr(self._driver, function)(*args)
        except (RuntimeError, AttributeError) as error:  # No library, or one that lacks it.
            raise DriverError(f"{function}: {error}") from error
        if int(status) != 0:
            raise DriverError(f"{function} failed: {status}")
        return values[0] if values else None

    def enter(self, device: int) -> None:
        if not int(self._call("cuCtxGetCurrent")):
            handle = self._call("cuDeviceGet", device)
            self._call("cuCtxSetCurrent", self._call("cuDevicePrimaryCtxRetain", handle))

    def can_flush(self, device: int) -> bool:
        attribute = self._driver.CUdevice_attribute(CAN_FLUSH)
        handle = self._call("cuDeviceGet", device)
        return bool(self._call("cuDeviceGetAttribute", attribute, handle))

    def device_address(self, host_address: int) -> int:
        return int(self._call("cuMemHostGetDevicePointer", host_address, 0))

    def wait_value(self, stream: int, address: int, value: int, flags: int) -> None:
        self._call("cuStreamWaitValue32", stream, address, value, flags)

    def write_value(self, stream: int, address: int, value: int) -> None:
        self._call("cuStreamWriteValue32", stream, address, value, WRITE_DEFAULT)

    def fill(self, stream: int, address: int, byte: int, nbytes: int) -> None:
        self._call("cuMemsetD8Async", address, byte, nbytes, stream)


class CtypesDriver:
    """Over the driver's library.

    Args:
        library: The library, or an object with the same functions.
    """

    name = "libcuda"

    def __init__(self, library: Any) -> None:
        pointer, address, word = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
        integer, byte, size = ctypes.c_int, ctypes.c_ubyte, ctypes.c_size_t
        out = ctypes.POINTER
        self._functions = {}
        # `_v2`: of the first versions the administrator has to allow these operations.
        for function, types in {
            "cuCtxGetCurrent": (out(pointer),),
            "cuCtxSetCurrent": (pointer,),
            "cuDeviceGet": (out(integer), integer),
            "cuDevicePrimaryCtxRetain": (out(pointer), integer),
            "cuDeviceGetAttribute": (out(integer), integer, integer),
            "cuMemHostGetDevicePointer_v2": (out(address), pointer, word),
            "cuStreamWaitValue32_v2": (pointer, address, word, word),
            "cuStreamWriteValue32_v2": (pointer, address, word, word),
            "cuMemsetD8Async": (address, byte, size, pointer),
        }.items():
            try:
                found = getattr(library, function)
            except AttributeError as error:
                raise DriverError(f"{_LIBRARY} has no {function}") from error
            found.argtypes, found.restype = types, integer
            self._functions[function] = found

    def _call(self, function: str, *args: object) -> None:
        status = self._functions[function](*args)
        if status != 0:
            raise DriverError(f"{function} failed: error {status}")

    def _device(self, device: int) -> int:
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        return handle.value

    def enter(self, device: int) -> None:
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            handle = self._device(device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._call("cuCtxSetCurrent", context)

    def can_flush(self, device: int) -> bool:
        found = ctypes.c_int()
        handle = self._device(device)
        self._call("cuDeviceGetAttribute", ctypes.byref(found), CAN_FLUSH, handle)
        return bool(found.value)

    def device_address(self, host_address: int) -> int:
        found = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), host_address, 0)
        return found.value

    def wait_value(self, stream: int, address: int, value: int, flags: int) -> None:
        self._call("cuStreamWaitValue32_v2", stream, address, value, flags)

    def write_value(self, stream: int, address: int, value: int) -> None:
        self._call("cuStreamWriteValue32_v2", stream, address, value, WRITE_DEFAULT)

    def fill(self, stream: int, address: int, byte: int, nbytes: int) -> None:
        self._call("cuMemsetD8Async", address, byte, nbytes, stream)


def find_driver() -> StreamDriver:
    """Reach the driver, by whichever way there is.

    Raises:
        DriverError: By none.
    """
    try:
        return BindingsDriver(importlib.import_module("cuda.bindings.driver"))
    except ImportError:
        pass  # Without them, the library itself.
    try:
        return CtypesDriver(ctypes.CDLL(_LIBRARY))
    except OSError as error:
        raise DriverError(f"neither cuda.bindings nor {_LIBRARY}: {error}") from error
