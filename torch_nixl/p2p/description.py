"""What a tensor is, apart from its bytes: dtype, shape and kind of device, and how they travel.

At the front of every message: dtype u8, device u8, ndim u8, zero u8, then each dimension as u64.
Programs send the same few descriptions again and again, so both directions remember them.
What isn't one tensor (a tree, a pickled object) has a number in place of the dtype that is none.
"""

from __future__ import annotations

import enum
import math
import struct
from typing import Final, TypeAlias

import torch

from torch_nixl.errors import MetadataError

MAX_NDIM: Final = 64
"""Most dimensions of a tensor, as in PyTorch."""

MAX_REMEMBERED: Final = 4096
"""Descriptions that are remembered, in each direction."""

_HEAD: Final = struct.Struct("<BBBB")
_BUNDLE: Final = struct.Struct("<BBBBIQQ")
_SHAPES: Final = tuple(struct.Struct(f"<{ndim}Q") for ndim in range(MAX_NDIM + 1))

# The place in this list is the number on the wire: new ones go to the end.
_DTYPE_NAMES: Final = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
DEVICES: Final = ("cpu", "cuda", "xpu")
"""The kinds of devices that tensors can be sent from and received on."""

# An older PyTorch lacks some: they keep their numbers, and are refused by name.
DTYPES: Final[dict[int, torch.dtype]] = {
    number: dtype
    for number, name in enumerate(_DTYPE_NAMES)
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""The dtypes that can be sent, by their number on the wire."""

_DTYPE_NUMBERS: Final = {dtype: number for number, dtype in DTYPES.items()}


class Description:
    """Everything about a tensor but its bytes. A value: never changed once made.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        device: The type of its device: ``"cpu"``, ``"cuda"`` or ``"xpu"``.
        nbytes: Bytes of its elements.
        packed: How it travels.
    """

    __slots__ = ("device", "dtype", "nbytes", "packed", "shape")

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], device: str, packed: bytes
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.device = device
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.packed = packed

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has this dtype and shape. The device may differ."""
        return tensor.dtype is self.dtype and tensor.shape == self.shape

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype}"

    def __repr__(self) -> str:
        return f"<Description {self} on {self.device}>"


class Form(enum.IntEnum):
    """What a message is that isn't a tensor. The number is its first byte."""

    OBJECT = 254
    TREE = 255


class Bundle:
    """A message that isn't one tensor, apart from its bytes. A value.

    Attributes:
        form: What it is.
        manifest: A tree's structure, not looked into yet; empty for an object.
        num_apart: How many tensors travel on their own: see [Note: order of a tree's bytes].
        nbytes: Bytes of it all.
        packed: How it travels.
        device: Where what is in one piece lands.
    """

    __slots__ = ("device", "form", "manifest", "nbytes", "num_apart", "packed")

    def __init__(self, form: Form, manifest: bytes, num_apart: int, nbytes: int) -> None:
        self.form = form
        self.manifest = manifest
        self.num_apart = num_apart
        self.nbytes = nbytes
        self.packed = _BUNDLE.pack(form, 0, 0, 0, len(manifest), num_apart, nbytes) + manifest
        self.device = "cpu"

    def __str__(self) -> str:
        what = "a tree" if self.form is Form.TREE else "an object"
        return f"{what} of {self.nbytes} bytes"


Content: TypeAlias = "Description | Bundle"
"""What a message is: one tensor, or something else."""

_described: dict[tuple[torch.dtype, tuple[int, ...], str], Description] = {}
_parsed: dict[bytes, Description] = {}


def describe(tensor: torch.Tensor, *, name: str = "tensor") -> Description:
    """Describe a tensor.

    Raises:
        TypeError: Its dtype can't be sent.
        ValueError: It is on a device that can't be sent from.
    """
    key = (tensor.dtype, tensor.shape, "cpu" if tensor.is_cpu else tensor.device.type)
    known = _described.get(key)
    return known if known is not None else _describe(key, name)


def _describe(key: tuple[torch.dtype, tuple[int, ...], str], name: str) -> Description:
    dtype, shape, device = key
    number = _DTYPE_NUMBERS.get(dtype)
    if number is None:
        raise TypeError(f"{name}: tensors of {dtype} can't be sent")
    if device not in DEVICES:
        raise ValueError(f"{name}: a tensor on {device} can't be sent")
    shape = tuple(shape)
    packed = _HEAD.pack(number, DEVICES.index(device), len(shape), 0)
    packed += _SHAPES[len(shape)].pack(*shape)
    description = Description(dtype, shape, device, packed)
    if len(_described) >= MAX_REMEMBERED:
        _described.clear()
    _described[key] = description
    return description


def parse(body: bytes, at: int) -> Content:
    """Read the description that begins at byte `at` of a frame's body.

    Raises:
        MetadataError: It is cut, or describes nothing that can exist.
    """
    if len(body) > at and body[at] >= Form.OBJECT:
        return _parse_bundle(body, at)
    return parse_tensor(body, at)


def parse_tensor(body: bytes, at: int) -> Description:
    """Read the description of a tensor.

    Raises:
        MetadataError: It is cut, or describes nothing that can exist.
    """
    ndim = body[at + 2] if len(body) >= at + 4 else MAX_NDIM + 1
    if ndim > MAX_NDIM:
        raise MetadataError("description is cut, or has too many dimensions")
    packed = body[at : at + 4 + 8 * ndim]
    known = _parsed.get(packed)
    return known if known is not None else _parse(packed, ndim)


def _parse_bundle(body: bytes, at: int) -> Bundle:
    if len(body) < at + _BUNDLE.size:
        raise MetadataError("description is cut")
    form, *zeros, manifest_nbytes, num_apart, nbytes = _BUNDLE.unpack_from(body, at)
    at += _BUNDLE.size
    if form == Form.OBJECT and (manifest_nbytes or num_apart):
        raise MetadataError("description of an object has more than its size")
    if any(zeros) or manifest_nbytes > len(body) - at or nbytes >= 1 << 63:
        raise MetadataError("description of a tree or an object is cut, or makes no sense")
    return Bundle(Form(form), body[at : at + manifest_nbytes], num_apart, nbytes)


def _parse(packed: bytes, ndim: int) -> Description:
    if len(packed) != 4 + 8 * ndim:
        raise MetadataError("description is cut")
    number, device, _, zero = _HEAD.unpack_from(packed)
    if number >= len(_DTYPE_NAMES) or device >= len(DEVICES) or zero:
        raise MetadataError("description has a dtype or a device that does not exist")
    dtype = DTYPES.get(number)
    if dtype is None:
        raise MetadataError(f"description has dtype {_DTYPE_NAMES[number]}, unknown here")
    shape = _SHAPES[ndim].unpack_from(packed, 4)
    if math.prod(size for size in shape if size) * dtype.itemsize >= 1 << 63:
        raise MetadataError("description has 2^63 bytes or more")
    description = Description(dtype, shape, DEVICES[device], packed)
    if len(_parsed) >= MAX_REMEMBERED:
        _parsed.clear()
    _parsed[packed] = description
    return description
