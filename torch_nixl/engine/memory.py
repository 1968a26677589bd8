"""From objects to memory: where the bytes of tensors, arrays and buffers lie, or why they can't go.

Nothing here copies. Memory that isn't contiguous is described by its spans in row-major logical
order, which are built when somebody asks for them: a transposed matrix has one for each element,
and is mostly packed before it moves. What has no bytes of its own to point at (lazy views, sparse,
fake or wrapper tensors) is refused by name. Pending device work is not looked at either: ordering
is the caller's.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import MemoryKind, Spans

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_DEVICE_KINDS = {"cpu": MemoryKind.DRAM, "cuda": MemoryKind.VRAM, "xpu": MemoryKind.VRAM}
_OVERLAPPING = "some of its elements share memory (an expanded or overlapping view)"
_READ_ONLY = "it is read-only"

# DLPack: the device types that a CUDA array may name (CUDA, ROCm, CUDA managed; CPU, CUDA pinned,
# ROCm pinned), and the flags of a versioned capsule, after its version (8 bytes) and two pointers.
_DLPACK_KINDS = dict.fromkeys((2, 10, 13), MemoryKind.VRAM)
_DLPACK_KINDS.update(dict.fromkeys((1, 3, 11), MemoryKind.DRAM))
_DLPACK_FLAGS_OFFSET = 8 + 2 * ctypes.sizeof(ctypes.c_void_p)
_DLPACK_READ_ONLY, _DLPACK_IS_COPY = 1, 2
_CapsuleFunction = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = _CapsuleFunction(("PyCapsule_GetPointer", ctypes.pythonapi))


@dataclass(frozen=True, slots=True)
class Strided:
    """Where the elements of an array lie, in a few numbers.

    Attributes:
        address: Of the element whose indices are all zero.
        shape: Sizes of the dimensions.
        strides: Bytes from one element to the next along each dimension.
        itemsize: Bytes of an element.
        name: How errors call it.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    name: str

    @property
    def num_spans(self) -> int:
        """How many spans `build` returns at most."""
        return algebra.runs(self.shape, self.strides, self.itemsize)[0]

    def build(self) -> Spans:
        """Build the spans, read-only.

        Raises:
            ValueError: There would be more than `spans.MAX_SPANS`.
        """
        try:
            spans = algebra.strided(self.address, self.shape, self.strides, self.itemsize)
        except ValueError as exc:
            raise ValueError(f"{self.name}: {exc}") from exc
        spans.flags.writeable = False
        return spans

    def overlaps(self) -> bool:
        """Whether some elements share memory. Builds spans only where that isn't plain to see.

        Raises:
            ValueError: As `build`.
        """
        if algebra.surely_disjoint(self.shape, self.strides, self.itemsize):
            return False
        if any(
            size > 1 and not stride for size, stride in zip(self.shape, self.strides, strict=True)
        ):
            return True
        return algebra.overlaps(self.build())


# Not frozen, which would triple the time of making one: a tree has hundreds.
@dataclass(slots=True, eq=False)
class Memory:
    """Memory as the engine sees it. Holding it keeps the bytes in place and alive. A value.

    Attributes:
        kind: `MemoryKind.DRAM` or `MemoryKind.VRAM`.
        device_id: Index of the device as this process's runtime numbers it; 0 for host memory.
        layout: The spans, or what they can be built from.
        nbytes: Bytes of all spans together. Bytes that are repeated count each time.
        base: Address of the allocation that the spans lie in; 0 if there are no spans.
        extent: Bytes of that allocation. Where it isn't known, the bounds of the spans.
        owner: Keeps the memory alive.
        anchor: Weakly referenceable, its death ends the memory: the tensor's storage or the numpy
            array that owns the data. None where no such object is known.
        writable: Whether the memory can be a target.
        reason: Why it isn't writable, as half a sentence; empty if it is.
    """

    kind: MemoryKind
    device_id: int
    layout: Spans | Strided = field(repr=False)
    nbytes: int
    base: int
    extent: int
    owner: object = field(repr=False)
    anchor: object | None = field(repr=False)
    writable: bool
    reason: str = ""

    @property
    def spans(self) -> Spans:
        """All of it as addresses and sizes.

        ``[n, 2]`` uint64, read-only: address and nbytes, in row-major logical order of the
        elements, neighbours merged, nothing empty.

        Raises:
            ValueError: There would be more than `spans.MAX_SPANS`.
        """
        layout = self.layout
        if isinstance(layout, Strided):
            layout = layout.build()
            self.layout = layout
        return layout

    @property
    def num_spans(self) -> int:
        """How many `spans` there are, or would be at most: where none were built, none are."""
        layout = self.layout
        return layout.num_spans if isinstance(layout, Strided) else len(layout)


def as_memory(data: object, *, name: str = "data") -> Memory:
    """Describe whatever `tensor_memory` or `buffer_memory` accept; return a `Memory` unchanged.

    Numbers and tuples are never taken for addresses: that is `address_memory`.

    Raises:
        TypeError, ValueError: As those functions do.
    """
    return data if isinstance(data, Memory) else buffer_memory(data, name=name)


def require_in_place(memory: Memory) -> None:
    """Refuse memory whose storage has moved or shrunk since it was described.

    Raises:
        ValueError: `Tensor.resize_`, `share_memory_`, FSDP or the like have moved it.
    """
    storage = memory.anchor
    if isinstance(storage, torch.UntypedStorage) and (
        storage.data_ptr() != memory.base or storage.nbytes() < memory.extent
    ):
        raise ValueError(
            f"the storage of {memory.nbytes} bytes has moved or shrunk since it was described "
            "(resize_, share_memory_ and the like do that): describe the tensor anew"
        )


def require_writable(memory: Memory, name: str) -> None:
    """Refuse memory that can't be the target of a transfer.

    Raises:
        ValueError: The memory is read-only, or some of its elements share bytes.
    """
    if not memory.writable:
        raise ValueError(f"{name}: expected memory that can be written to, but {memory.reason}")


def address_memory(
    address: int,
    nbytes: int,
    *,
    kind: MemoryKind,
    device_id: int = 0,
    owner: object = None,
    name: str = "address",
) -> Memory:
    """Describe memory by its address. That it exists and stays is the caller's word.

    Args:
        address: Not 0, unless `nbytes` is.
        nbytes: Size in bytes.
        kind: `MemoryKind.DRAM` or `MemoryKind.VRAM`.
        device_id: Index of the device; 0 for `MemoryKind.DRAM`.
        owner: What to hold on to, so that the memory stays.
        name: How errors call it.

    Raises:
        TypeError: A number isn't an int.
        ValueError: A number is out of range, or `kind` isn't device or host memory.
    """
    address = _integer(address, f"{name}: address")
    nbytes = _integer(nbytes, f"{name}: nbytes")
    device_id = _integer(device_id, f"{name}: device_id")
    if kind not in (MemoryKind.DRAM, MemoryKind.VRAM):
        raise ValueError(f"{name}: kind: expected MemoryKind.DRAM or VRAM, got {kind!r}")
    if kind is MemoryKind.DRAM and device_id != 0:
        raise ValueError(f"{name}: device_id: expected 0 for host memory, got {device_id}")
    if address or nbytes:
        _check_range(address, nbytes, name)
    if not nbytes:
        return _empty(kind, device_id, owner)
    spans = algebra.single(address, nbytes)
    return Memory(kind, device_id, spans, nbytes, address, nbytes, owner, None, True)


def tensor_memory(tensor: torch.Tensor, *, name: str = "tensor") -> Memory:
    """Describe a tensor's data: any strides, dtype, requires_grad or not.

    Raises:
        TypeError: Not a tensor, or one without data of its own: a wrapper subclass (DTensor,
            jagged), a fake or functional tensor, one inside a torch.func transform.
        ValueError: Its data isn't plain bytes in place: lazily conjugated or negated, sparse,
            nested, quantised, on another device, or in a storage that was freed or shrunk.
    """
    if type(tensor) in _PLAIN_TYPES:
        return _tensor_memory(tensor, name)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {_kind_of(tensor)}")
    # A subclass answers through its own methods; what counts here is the tensor underneath.
    with torch._C.DisableTorchFunctionSubclass():
        if hasattr(tensor, "__tensor_flatten__"):
            raise TypeError(
                f"{name}: {type(tensor).__name__} wraps other tensors and has no data of its own; "
                "pass what it wraps (DTensor: .to_local(), jagged: .values())"
            )
        if torch.nn.parameter.is_lazy(tensor):
            raise TypeError(f"{name}: {type(tensor).__name__} isn't initialised yet")
        if tensor.layout is torch.strided and tensor.untyped_storage().device.type == "meta":
            raise TypeError(f"{name}: {type(tensor).__name__} has no data (a fake tensor)")
        return _tensor_memory(tensor, name)


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
            f"__cuda_array_interface__, __array_interface__ or __dlpack__, got {_kind_of(data)}"
        ) from None
    return _view_memory(buffer, name)


def _tensor_memory(tensor: torch.Tensor, name: str) -> Memory:
    if tensor.is_cpu:
        kind, device_id = MemoryKind.DRAM, 0
    else:
        kind, device_id = _place(tensor.device, name)
    if tensor.is_nested:
        raise ValueError(f"{name}: nested tensors aren't supported; pass the parts")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: layout {tensor.layout} isn't supported; pass .to_dense()")
    if tensor.is_quantized:
        raise ValueError(f"{name}: quantised tensors aren't supported; pass .int_repr()")
    if tensor.is_conj():
        raise ValueError(f"{name}: a lazily conjugated view; pass .resolve_conj()")
    if tensor.is_neg():
        raise ValueError(f"{name}: a lazily negated view; pass .resolve_neg()")
    nbytes = tensor.nbytes
    if nbytes == 0:
        return _empty(kind, device_id, tensor)
    try:
        storage = tensor.untyped_storage()
        extent = storage.nbytes()
        address = tensor.data_ptr()
        base = storage.data_ptr() if address else 0
    except (RuntimeError, NotImplementedError) as exc:
        raise TypeError(f"{name}: no data of its own (inside a torch.func transform?)") from exc
    if tensor.is_contiguous():
        _check_storage(address, address + nbytes, base, extent, name)
        spans = algebra.single(address, nbytes)
        return Memory(kind, device_id, spans, nbytes, base, extent, storage, storage, True)
    itemsize, shape = tensor.itemsize, tuple(tensor.shape)
    strides = tuple(stride * itemsize for stride in tensor.stride())
    end = address + algebra.bounds(shape, strides, itemsize)[1]
    _check_storage(address, end, base, extent, name)
    layout = Strided(address, shape, strides, itemsize, name)
    reason = _OVERLAPPING if layout.overlaps() else ""
    writable = not reason
    return Memory(kind, device_id, layout, nbytes, base, extent, storage, storage, writable, reason)


def _check_storage(address: int, end: int, base: int, extent: int, name: str) -> None:
    if base <= address and end <= base + extent and address:
        return
    if not address and end <= extent:
        raise TypeError(f"{name}: a fake, functional or wrapper tensor without data")
    raise ValueError(
        f"{name}: the elements reach over {end - address} bytes but the storage holds {extent}: it "
        "was freed or shrunk (as FSDP does to parameters outside of forward and backward)"
    )


def _array_memory(array: npt.NDArray[np.generic], name: str) -> Memory:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name}: a masked array's mask would be lost; pass .data or .filled()")
    if array.dtype.hasobject:
        raise TypeError(f"{name}: expected plain data, got dtype {array.dtype} (Python objects)")
    nbytes = array.nbytes
    if nbytes == 0:
        return _empty(MemoryKind.DRAM, 0, array)
    address: int = array.__array_interface__["data"][0]
    shape, strides, itemsize = array.shape, array.strides, array.itemsize
    contiguous = array.flags.c_contiguous
    first, end = (0, nbytes) if contiguous else algebra.bounds(shape, strides, itemsize)
    low, high = address + first, address + end
    _check_range(low, high - low, name)
    layout: Spans | Strided = algebra.single(address, nbytes)
    reason = ""
    if not contiguous:
        layout = Strided(address, shape, strides, itemsize, name)
        reason = _OVERLAPPING if layout.overlaps() else ""
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
        raise TypeError(f"{label}: expected a dict, got {_kind_of(interface)}")
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
    return _place(torch.as_tensor(SimpleNamespace(__cuda_array_interface__=byte)).device, name)


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
        raise TypeError(f"{name}: {_kind_of(data)} can't be shared by DLPack: {exc}") from exc
    memory = tensor_memory(tensor, name=name)
    if not flags & (_DLPACK_READ_ONLY | _DLPACK_IS_COPY):
        return memory
    reason = _READ_ONLY if flags & _DLPACK_READ_ONLY else "DLPack shares only a copy of it"
    return replace(memory, writable=False, reason=reason)


def _empty(kind: MemoryKind, device_id: int, owner: object) -> Memory:
    return Memory(kind, device_id, algebra.EMPTY, 0, 0, 0, owner, None, True)


def _place(device: torch.device, name: str) -> tuple[MemoryKind, int]:
    kind = _DEVICE_KINDS.get(device.type)
    if kind is None:
        hint = "it has no data" if device.type == "meta" else "expected cpu, cuda or xpu"
        raise ValueError(f"{name}: a tensor on {device} can't be moved: {hint}")
    return kind, 0 if kind is MemoryKind.DRAM else device.index or 0


def _check_range(address: int, nbytes: int, name: str) -> None:
    if address == 0:
        raise ValueError(f"{name}: a null pointer with {nbytes} bytes")
    if address < 0 or address + nbytes > algebra.ADDRESS_LIMIT:
        raise ValueError(f"{name}: {nbytes} bytes from {address:#x} aren't in the address space")


def _integer(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: expected an int, got {_kind_of(value)}")
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"{name}: expected 0 or more, got {number}")
    return number


def _kind_of(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
