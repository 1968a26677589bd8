"""The tensors of a channel: where they stand in their tree, and the memory moved for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.memory import PLAIN_TYPES, Memory, tensor_memory
from torch_nixl.engine.streams import StreamDevice, device_of
from torch_nixl.p2p.description import Description, describe
from torch_nixl.p2p.protocol import EAGER_NBYTES, should_pack
from torch_nixl.p2p.terms import MAX_PATH


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Go through the tensors of nested dicts, lists and tuples, and say where each stands.

    Dicts are gone through in the order of their keys' representations, so that both ends have the
    same order however they were filled.

    Raises:
        TypeError: Something else than a tensor, dict, list or tuple is in it.
    """
    if isinstance(tree, torch.Tensor):
        if type(tree) not in PLAIN_TYPES:
            raise TypeError(f"like{path}: {type(tree).__name__} is a subclass; pass plain tensors")
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, key in sorted((repr(key), key) for key in tree):
            yield from leaves(tree[key], f"{path}[{name}]")
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from leaves(item, f"{path}[{index}]")
    else:
        raise TypeError(f"like{path}: expected tensors, got {type(tree).__name__}")


class Buffer:
    """One tensor of a channel, and the memory that is moved for it.

    That is the tensor's own, or a packed copy's where its spans are many and short.

    Attributes:
        path: Where it stands in the tree.
        tensor: The caller's.
        description: Its dtype and shape.
        memory: What is moved.
        packed: Whether that is a copy's.
        device: The device it is on, as far as its streams go; None for host memory.
        host: Where bytes of a small device tensor stop on their way to and from a frame.
        reason: Why it can't be received into, as half a sentence; empty if it can.
    """

    __slots__ = (
        "_address",
        "_base",
        "_copy",
        "_extent",
        "_shape",
        "_storage",
        "description",
        "device",
        "host",
        "memory",
        "packed",
        "path",
        "reason",
        "tensor",
    )

    def __init__(self, path: str, tensor: torch.Tensor) -> None:
        name = f"like{path}"
        if len(path.encode()) > MAX_PATH:
            raise ValueError(f"{name[:80]}...: a path of more than {MAX_PATH} bytes")
        memory = tensor_memory(tensor, name=name)
        self.path = path
        self.tensor = tensor
        self.description: Description = describe(tensor, name=name)
        self.reason = memory.reason
        self.packed = should_pack(memory.num_spans, memory.nbytes)
        self.device = device_of(tensor)
        self.host: torch.Tensor | None = None
        if self.device is not None and memory.nbytes <= EAGER_NBYTES:
            # It may travel in a frame: from and to the host go contiguous bytes only.
            self.packed = memory.num_spans > 1
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._copy: torch.Tensor | None = None
        if self.packed:
            self._copy = _copy_of(tensor, self.device, writable=not memory.reason)
        self.memory: Memory = memory if self._copy is None else tensor_memory(self._copy)
        # What tells whether the tensor still lies where it did. Of the tensor, not of the copy.
        self._address = tensor.data_ptr()
        self._shape = tensor.shape
        self._storage = tensor.untyped_storage()
        self._base = self._storage.data_ptr()
        self._extent = self._storage.nbytes()

    @property
    def in_place(self) -> bool:
        """Whether the tensor still is where, and what, it was."""
        tensor, storage = self.tensor, self._storage
        return (
            tensor.data_ptr() == self._address
            and storage.data_ptr() == self._base
            and storage.nbytes() == self._extent
            and tensor.shape == self._shape
        )

    @property
    def on_host(self) -> torch.Tensor:
        """What a frame's bytes are copied from and to."""
        return self.tensor if self.host is None else self.host

    def pack(self) -> None:
        """Bring the bytes to where they are moved from."""
        if self._copy is not None:
            self._copy.copy_(self.tensor.detach())

    def unpack(self) -> None:
        """Bring the bytes that have landed to where they belong."""
        if self._copy is not None:
            self.tensor.detach().copy_(self._copy)

    # By its device's thread.

    def pack_on(self, device: StreamDevice, *, to_host: bool) -> None:
        """Bring a device's bytes to where they are moved from, or to the host."""
        if self._copy is not None:
            device.copy(self._copy, self.tensor)
        if to_host:
            assert self.host is not None
            device.copy(self.host, self.tensor if self._copy is None else self._copy)

    def unpack_on(self, device: StreamDevice, *, from_host: bool) -> None:
        """Bring bytes that have landed on a device, or the host, to where they belong."""
        if from_host:
            assert self.host is not None
            device.copy(self.tensor if self._copy is None else self._copy, self.host)
        if self._copy is not None:
            device.copy(self.tensor, self._copy)


def _copy_of(tensor: torch.Tensor, device: StreamDevice | None, *, writable: bool) -> torch.Tensor:
    """Make room for a packed copy. On a device, load the kernels that pack and unpack it."""
    if device is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    make = device.buffer if writable else device.pack
    return make(tensor, device.current())


def buffers_of(tree: object) -> tuple[Buffer, ...]:
    """Make the buffers of a tree.

    Raises:
        TypeError, ValueError: A tensor can't be moved as it lies (sparse, meta, lazily conjugated,
            a subclass), is named; or there is none.
    """
    made = tuple(Buffer(path, tensor) for path, tensor in leaves(tree))
    if not made:
        raise ValueError("like: expected at least one tensor")
    return made


def why_not_writable(buffers: tuple[Buffer, ...]) -> str:
    """Say why the buffers can't be received into; empty if they can."""
    for one in buffers:
        if one.reason:
            return f"like{one.path}: {one.reason}"
    spans = [one.memory.spans for one in buffers if one.memory.nbytes]
    if len(spans) > 1 and algebra.overlaps(np.concatenate(spans)):
        return "like: two of its tensors share memory"
    return ""
