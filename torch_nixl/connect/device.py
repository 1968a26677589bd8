"""Where memory lies: on the host, or on which device of which kind."""

from __future__ import annotations

import enum
import re
from typing import Final

from torch_nixl.engine.adapter import MemoryKind

_FORM: Final = re.compile(r"(cpu|host|cuda|gpu|xpu)(?::(\d{1,4}))?")


class DeviceKind(enum.IntEnum):
    """Kind of memory."""

    UNSPECIFIED = 0
    HOST = 1
    CUDA = 2
    XPU = 3

    @property
    def nixl_mem_type(self) -> str:
        """What NIXL calls it: ``"DRAM"`` for host memory, ``"VRAM"`` for all else."""
        return "DRAM" if self is DeviceKind.HOST else "VRAM"

    def __str__(self) -> str:
        return _KIND_TEXTS[self]

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


_KIND_TEXTS: Final = {
    DeviceKind.UNSPECIFIED: "<invalid>",
    DeviceKind.HOST: "cpu",
    DeviceKind.CUDA: "cuda",
    DeviceKind.XPU: "xpu",
}
_KINDS_BY_NAME: Final = {
    "cpu": DeviceKind.HOST,
    "host": DeviceKind.HOST,
    "cuda": DeviceKind.CUDA,
    "gpu": DeviceKind.CUDA,
    "xpu": DeviceKind.XPU,
}


class Device:
    """One device.

    Args:
        metadata: ``"cpu"`` or ``"host"``; ``"cuda"``, ``"gpu"`` or ``"xpu"``, alone or with a
            number (``"cuda:1"``); upper case and surrounding blanks are allowed, nothing else is.
            Or a pair of a `DeviceKind` and a number.

    Raises:
        TypeError: Neither a str nor such a pair.
        ValueError: None, or no such device.
    """

    __slots__ = ("_id", "_kind")

    def __init__(self, metadata: str | tuple[DeviceKind, int]) -> None:
        if metadata is None:
            raise ValueError("metadata: expected a device, got None")
        if isinstance(metadata, str):
            self._kind, self._id = _parse(metadata)
        elif (
            isinstance(metadata, tuple)
            and len(metadata) == 2
            and isinstance(metadata[0], DeviceKind)
            and isinstance(metadata[1], int)
        ):
            self._kind, self._id = metadata
            if self._id < 0:
                raise ValueError(f"metadata: a device number of {self._id}")
        else:
            raise TypeError(
                f"metadata: expected a str or a tuple (DeviceKind, int), got {metadata!r}"
            )

    @property
    def id(self) -> int:
        """Number among the devices of its kind; 0 for host memory."""
        return self._id

    @property
    def kind(self) -> DeviceKind:
        return self._kind

    @property
    def memory_kind(self) -> MemoryKind:
        """The same in the engine's words."""
        return MemoryKind.DRAM if self._kind is DeviceKind.HOST else MemoryKind.VRAM

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Device):
            return NotImplemented
        return (self._kind, self._id) == (other._kind, other._id)

    def __hash__(self) -> int:
        return hash((self._kind, self._id))

    def __str__(self) -> str:
        if self._kind in (DeviceKind.HOST, DeviceKind.UNSPECIFIED):
            return str(self._kind)
        return f"{self._kind}:{self._id}"

    def __repr__(self) -> str:
        return f"Device(kind={self._kind}, id={self._id})"


def _parse(text: str) -> tuple[DeviceKind, int]:
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"metadata: {text!r} names no device; expected cpu, cuda:N or xpu:N")
    kind = _KINDS_BY_NAME[match[1]]
    number = int(match[2] or 0)
    if kind is DeviceKind.HOST and number:
        raise ValueError(f"metadata: {text!r}: host memory has no number but 0")
    return kind, number
