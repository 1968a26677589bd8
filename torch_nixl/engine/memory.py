"""From tensors to memory: where their bytes lie, or why they can't go. `arrays.py` has the others.

Nothing here copies. Memory that isn't contiguous is described by its spans in row-major logical
order, which are built when somebody asks for them: a transposed matrix has one for each element,
and is mostly packed before it moves. What has no bytes of its own to point at (lazy views, sparse,
fake or wrapper tensors) is refused by name. Pending device work is not looked at either: ordering
is the caller's.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import SupportsIndex

import torch

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import MemoryKind, Spans

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Tensors that answer for themselves, as no subclass does."""

_DEVICE_KINDS = {"cpu": MemoryKind.DRAM, "cuda": MemoryKind.VRAM, "xpu": MemoryKind.VRAM}
OVERLAPPING = "some of its elements share memory (an expanded or overlapping view)"


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
        check_range(address, nbytes, name)
    if not nbytes:
        return empty_memory(kind, device_id, owner)
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
    if type(tensor) in PLAIN_TYPES:
        return _tensor_memory(tensor, name)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {kind_name(tensor)}")
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


def _tensor_memory(tensor: torch.Tensor, name: str) -> Memory:
    if tensor.is_cpu:
        kind, device_id = MemoryKind.DRAM, 0
    else:
        kind, device_id = device_place(tensor.device, name)
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
        return empty_memory(kind, device_id, tensor)
    try:
        storage = tensor.untyped_storage()
        extent = storage.nbytes()
        address = tensor.data_ptr()
        base = storage.data_ptr() if address else 0
    except RuntimeError as exc:
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
    reason = OVERLAPPING if layout.overlaps() else ""
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


def empty_memory(kind: MemoryKind, device_id: int, owner: object) -> Memory:
    """Describe memory without bytes."""
    return Memory(kind, device_id, algebra.EMPTY, 0, 0, 0, owner, None, True)


def device_place(device: torch.device, name: str) -> tuple[MemoryKind, int]:
    """Return kind of memory and index of a device.

    Raises:
        ValueError: Nothing can be moved from or to it.
    """
    kind = _DEVICE_KINDS.get(device.type)
    if kind is None:
        hint = "it has no data" if device.type == "meta" else "expected cpu, cuda or xpu"
        raise ValueError(f"{name}: a tensor on {device} can't be moved: {hint}")
    return kind, 0 if kind is MemoryKind.DRAM else device.index or 0


def check_range(address: int, nbytes: int, name: str) -> None:
    """Refuse addresses at which nothing can lie.

    Raises:
        ValueError: A null pointer, or not in the address space.
    """
    if address == 0:
        raise ValueError(f"{name}: a null pointer with {nbytes} bytes")
    if address < 0 or address + nbytes > algebra.ADDRESS_LIMIT:
        raise ValueError(f"{name}: {nbytes} bytes from {address:#x} aren't in the address space")


def _integer(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: expected an int, got {kind_name(value)}")
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"{name}: expected 0 or more, got {number}")
    return number


def kind_name(value: object) -> str:
    """How errors call what isn't what it should be."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
