"""From arrays and buffers to memory: anything that tells where its bytes lie. See `memory.py`."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import MemoryKind, Spans
from torch_nixl.engine.memory import (
    OVERLAPPING,
    Memory,
    Strided,
    check_range,
    device_place,
    empty_memory,
    kind_name,
    tensor_memory,
)

_READ_ONLY = "it is read-only"

# DLPack: the device types that a CUDA array may name (CUDA, ROCm, CUDA managed; CPU, CUDA pinned,
# ROCm pinned), and the flags of a versioned capsule, after its version (8 bytes) and two pointers.
_DLPACK_KINDS = dict.fromkeys((2, 10, 13), MemoryKind.VRAM)
_DLPACK_KINDS.update(dict.fromkeys((1, 3, 11), MemoryKind.DRAM))
_DLPACK_FLAGS_OFFSET = 8 + 2 * ctypes.sizeof(ctypes.c_void_p)
_DLPACK_READ_ONLY, _DLPACK_IS_COPY = 1, 2
_CapsuleFunction = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = _CapsuleFunction(("PyCapsule_GetPointer", ctypes.pythonapi))


def as_memory(data: object, *, name: str = "data") -> Memory:
    """Describe whatever `tensor_memory` or `buffer_memory` accept; return a `Memory` unchanged.

    Numbers and tuples are never taken for addresses: that is `address_memory`.

    Raises:
        TypeError, ValueError: As those functions do.
    """
    return data if isinstance(data, Memory) else buffer_memory(data, name=name)


def buffer_memory(data: object, *, name: str = "data") -> Memory:
    """Describe the memory of anything that tells where it lies, without copying it.

    Args:
        data: A tensor, a numpy array, bytes, bytearray, memoryview, or an object with the buffer
            protocol, ``__cuda_array_interface__``, ``__array_interface__`` or ``__dlpack__``.
        name: How errors call it.

    Raises:
        TypeError: Not such an object, or one that holds Python objects.
        ValueError: Its description is wrong, or its memory can't be used as it is.
    """
    if isinstance(data, torch.Tensor):
        return tensor_memory(data, name=name)
    if isinstance(data, np.ndarray):
        return _array_memory(data, name)
    if isinstance(data, (bytes, bytearray, memoryview)):
        return _view_memory(memoryview(data), name)
    if isinstance(data, np.generic):
        raise TypeError(f"{name}: a numpy scalar has no memory to share; pass a 0-d array")
    for protocol in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(data, protocol, None)
        if interface is not None:
            return _interface_memory(data, interface, protocol, name)
    if hasattr(data, "__dlpack__"):
        return _dlpack_memory(data, name)
    try:
        buffer = memoryview(data)  # type: ignore[arg-type]  # asking is the only way to know
    except TypeError:
        raise TypeError(
            f"{name}: expected a tensor, a numpy array or an object with the buffer protocol, "
            f"__cuda_array_interface__, __array_interface__ or __dlpack__, got {kind_name(data)}"
        ) from None
    return _view_memory(buffer, name)


def _array_memory(array: npt.NDArray[np.generic], name: str) -> Memory:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: a masked array's mask would be lost; pass .data or .filled()")
    if array.dtype.hasobject:
        raise TypeError(f"{name}: expected plain data, got dtype {array.dtype} (Python objects)")
    nbytes = array.nbytes
    if nbytes == 0:
        return empty_memory(MemoryKind.DRAM, 0, array)
    address: int = array.__array_interface__["data"][0]
    shape, strides, itemsize = array.shape, array.strides, array.itemsize
    contiguous = array.flags.c_contiguous
    first, end = (0, nbytes) if contiguous else algebra.bounds(shape, strides, itemsize)
    low, high = address + first, address + end
    check_range(low, high - low, name)
    layout: Spans | Strided = algebra.single(address, nbytes)
    reason = ""
    if not contiguous:
        layout = Strided(address, shape, strides, itemsize, name)
        reason = OVERLAPPING if layout.overlaps() else ""
    if not array.flags.writeable:
        reason = _READ_ONLY
    base, extent, anchor = _allocation(array)
    if not base <= low < high <= base + extent:
        base, extent, anchor = low, high - low, None
    kind, writable = MemoryKind.DRAM, not reason
    return Memory(kind, 0, layout, nbytes, base, extent, array, anchor, writable, reason)


def _allocation(array: npt.NDArray[np.generic]) -> tuple[int, int, object]:
    """Return base, extent and owner of the allocation that `array` shows, or 0, 0, None.

    Only numpy's and torch's own: of others (bytearray, mmap, foreign objects) it isn't known that
    they end with the memory, and of a large mapped file only what moves should be registered.
    """
    root: object = array
    while True:
        if isinstance(root, memoryview):
            root = root.obj
        elif isinstance(root, torch.Tensor):
            storage = root.untyped_storage()
            return storage.data_ptr(), storage.nbytes(), storage
        elif isinstance(root, np.ndarray) and root.base is not None:
            root = root.base
        elif not isinstance(root, np.ndarray) or not root.flags.owndata:
            return 0, 0, None
        else:
            return root.__array_interface__["data"][0], root.nbytes, root


def _view_memory(view: memoryview, name: str) -> Memory:
    try:
        if view.c_contiguous and "O" not in view.format:
            return _array_memory(np.frombuffer(view, dtype=np.uint8), name)
        return _array_memory(np.asarray(view), name)
    except (ValueError, NotImplementedError) as exc:
        raise ValueError(f"{name}: a buffer that can't be described: {exc}") from exc


def _interface_memory(data: object, interface: object, protocol: str, name: str) -> Memory:
    label = f"{name}: {protocol}"
    if not isinstance(interface, Mapping):
        raise TypeError(f"{label}: expected a dict, got {kind_name(interface)}")
    if interface.get("mask") is not None:
        raise ValueError(f"{label}: a mask would be lost")
    given = interface.get("data")  # None: the object has the buffer protocol.
    shown = {"version": 3, **interface, "data": data if given is None else given}
    try:
        # Behind a stand-in numpy can't copy. It computes with the address, also of device memory,
        # and does not look behind it.
        array = np.asarray(SimpleNamespace(__array_interface__=shown, owner=data))
    except (AttributeError, OverflowError, TypeError, ValueError) as exc:
        raise ValueError(f"{label} is invalid: {exc}") from exc
    memory = _array_memory(array, label)
    if protocol == "__array_interface__":
        return memory
    kind, device_id = _cuda_place(data, memory.base, name)
    return replace(memory, kind=kind, device_id=device_id, owner=data)


def _cuda_place(data: object, address: int, name: str) -> tuple[MemoryKind, int]:
    """Find the device of a CUDA array, whose interface doesn't say."""
    ask = getattr(data, "__dlpack_device__", None)
    if ask is not None:
        device_type, device_id = map(int, ask())
        if device_type not in _DLPACK_KINDS:
            raise ValueError(f"{name}: DLPack device type {device_type} isn't supported")
        kind = _DLPACK_KINDS[device_type]
        return kind, 0 if kind is MemoryKind.DRAM else device_id
    if not torch.cuda.is_available():
        raise ValueError(f"{name}: can't tell which device it lies on: this torch has no CUDA")
    if not address:
        return MemoryKind.VRAM, torch.cuda.current_device()
    byte = {"shape": (1,), "typestr": "|u1", "data": (address, False), "version": 2}
    return device_place(
        torch.as_tensor(SimpleNamespace(__cuda_array_interface__=byte)).device, name
    )


def _dlpack_memory(data: object, name: str) -> Memory:
    flags = 0
    try:
        # Both errors are of producers that know no versions, and so no flags.
        with contextlib.suppress(TypeError, ValueError):
            capsule = data.__dlpack__(max_version=(1, 0))  # type: ignore[attr-defined]
            pointer = _capsule_pointer(capsule, b"dltensor_versioned")
            flags = ctypes.c_uint64.from_address(pointer + _DLPACK_FLAGS_OFFSET).value
        tensor = from_dlpack(data)
    except (BufferError, RuntimeError, TypeError, ValueError, AttributeError) as exc:
        raise TypeError(f"{name}: {kind_name(data)} can't be shared by DLPack: {exc}") from exc
    memory = tensor_memory(tensor, name=name)
    if not flags & (_DLPACK_READ_ONLY | _DLPACK_IS_COPY):
        return memory
    reason = _READ_ONLY if flags & _DLPACK_READ_ONLY else "DLPack shares only a copy of it"
    return replace(memory, writable=False, reason=reason)
