"""Whether bytes are metadata that NIXL itself would write, checked before NIXL reads them.

NIXL trusts what it loads: a memory type out of range is a segmentation fault, a count of 2^62 an
endless loop, a bad UCX address an abort of the process. So this module accepts what NIXL writes
and nothing else. Pure: no I/O, and no allocation that the blob's own length does not bound.

The grammar, found by looking at what NIXL 1.5.1 writes (a field is a tag, the value's length as
u64, the value, and ``|``; all numbers little-endian)::

    "nixlSerDes|"  Agent=name  Conns=u64 count
    for each connection:  t=backend  c=connection bytes
    (no tag)=MemSection  nixlSecElms=u64 count
    for each section:  bknd=backend  nixlDList=nixlSDList  t=i32 memory type  n=u64 count
        for each region, sorted:  (no tag)=u64 address, u64 nbytes, u64 device id, remote key

Only the UCX backend's connection bytes and remote keys are understood: see `ucx.py`, also for what
a valid structure can't rule out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torch_nixl.engine.adapter import MemoryKind, Spans
from torch_nixl.engine.ucx import check_address, check_remote_key, check_remote_keys
from torch_nixl.errors import MetadataError

KNOWN_VERSIONS: Final = frozenset({"1.5"})
"""Releases of NIXL, as major.minor, for which this grammar was checked."""

MAX_BLOB: Final = 4 << 20
MAX_NAME: Final = 1024
MAX_BACKEND_NAME: Final = 64

_KINDS: Final = (
    MemoryKind.DRAM,
    MemoryKind.VRAM,
    MemoryKind.BLOCK,
    MemoryKind.OBJECT,
    MemoryKind.FILE,
)

_U64: Final = struct.Struct("<Q")
_REGION: Final = struct.Struct("<QQQ")
# A region's value: its three numbers, then a remote key.
_MIN_REGION: Final = _REGION.size + 9
_MAX_REGION: Final = _REGION.size + 4096
# "|" and the shortest tag with its length: what a section or a connection takes at the least.
_MIN_FIELD: Final = 1 + _U64.size + 1


@dataclass(frozen=True, slots=True, eq=False)
class RegionList:
    """Regions of one kind of memory that one backend can reach.

    Attributes:
        backend: The backend's name, such as ``"UCX"``.
        kind: Where they lie.
        regions: ``[n, 3]`` uint64 (address, nbytes, device id), sorted by device id, then address.
    """

    backend: str
    kind: MemoryKind
    regions: Spans


@dataclass(frozen=True, slots=True, eq=False)
class BlobInfo:
    """What a blob says.

    Attributes:
        agent: Name of the agent that it describes.
        connections: For each backend that can be connected to, its name and the size in bytes of
            its connection information. Empty in partial metadata for agents that know each other.
        sections: The regions, by backend and kind.
        reach: The bytes that say which agent it is and how to reach it: another incarnation's
            differ, whatever its name.
    """

    agent: str
    connections: tuple[tuple[str, int], ...]
    sections: tuple[RegionList, ...]
    reach: bytes = b""

    @property
    def backends(self) -> frozenset[str]:
        """Names of all backends in it."""
        names = [name for name, _ in self.connections]
        return frozenset(names + [section.backend for section in self.sections])

    @property
    def kinds(self) -> frozenset[MemoryKind]:
        """Kinds of memory that it has regions of."""
        return frozenset(section.kind for section in self.sections)

    def regions(self, kind: MemoryKind) -> Spans:
        """Return all regions of one kind, ``[n, 3]`` uint64; sorted where one backend has them."""
        found = [section.regions for section in self.sections if section.kind is kind]
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty((0, 3), np.uint64)


class _Reader:
    """Reads a blob's fields from front to back and never beyond its end."""

    __slots__ = ("_at", "_blob")

    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._blob) - self._at

    @property
    def taken(self) -> bytes:
        """All bytes read so far."""
        return self._blob[: self._at]

    def literal(self, expected: bytes, what: str) -> None:
        end = self._at + len(expected)
        if self._blob[self._at : end] != expected:
            raise MetadataError(f"NIXL metadata is not as NIXL writes it: {what} differ")
        self._at = end

    def field(self, tag: bytes, least: int, most: int) -> bytes:
        """Read one field's value, of `least` to `most` bytes."""
        what = tag.decode() or "an untagged field"
        self.literal(tag, f"at {what}, the tags")
        if self.left < _U64.size:
            raise MetadataError(f"NIXL metadata is cut at {what}")
        nbytes: int = _U64.unpack_from(self._blob, self._at)[0]
        if not least <= nbytes <= most:
            raise MetadataError(f"NIXL metadata has {what} of {nbytes} bytes")
        start = self._at + _U64.size
        end = start + nbytes
        if end >= len(self._blob):
            raise MetadataError(f"NIXL metadata is cut in {what}: {nbytes} bytes claimed")
        value = self._blob[start:end]
        self._at = end
        self.literal(b"|", f"after {what}, the separators")
        return value

    def constant(self, tag: bytes, value: bytes) -> None:
        if self.field(tag, len(value), len(value)) != value:
            raise MetadataError(f"NIXL metadata does not say {value.decode()} where it has to")

    def count(self, tag: bytes, least_each: int) -> int:
        """Read how many entries follow, each of at least `least_each` bytes."""
        count: int = _U64.unpack(self.field(tag, _U64.size, _U64.size))[0]
        if count * least_each > self.left:
            raise MetadataError(
                f"NIXL metadata claims {count} entries at {tag.decode()} in {self.left} bytes"
            )
        return count

    def table(self, num_rows: int) -> npt.NDArray[np.uint8] | None:
        """Read untagged fields as rows, length and separator included, if all have one length."""
        nbytes: int = _U64.unpack_from(self._blob, self._at)[0]
        row = _U64.size + nbytes + 1
        if not _MIN_REGION <= nbytes <= _MAX_REGION or row * num_rows > self.left:
            return None
        flat = np.frombuffer(self._blob, np.uint8, row * num_rows, self._at)
        rows = flat.reshape(num_rows, row)
        if np.any(rows[:, : _U64.size] != rows[0, : _U64.size]) or np.any(rows[:, -1] != ord("|")):
            return None
        self._at += row * num_rows
        return rows


def _name(value: bytes, what: str) -> str:
    try:
        name = value.decode()
    except UnicodeDecodeError:
        raise MetadataError(f"NIXL metadata: {what} is not UTF-8") from None
    if not name.isprintable():
        raise MetadataError(f"NIXL metadata: {what} has unprintable characters")
    return name


def _backend(value: bytes) -> str:
    if value != b"UCX":
        raise MetadataError("NIXL metadata is of another backend than UCX, which can't be checked")
    return "UCX"


def knows(version: str) -> bool:
    """Return whether metadata of this NIXL release (such as ``"1.5.1"``) can be checked."""
    return ".".join(version.split(".")[:2]) in KNOWN_VERSIONS


def parse(blob: bytes) -> BlobInfo:
    """Check that `blob` is what NIXL's ``getLocalMD`` or ``getLocalPartialMD`` writes, and read it.

    Args:
        blob: At most `MAX_BLOB` bytes, as NIXL gave them: not sealed, not compressed.

    Raises:
        MetadataError: It is anything else. The message names the field and never quotes bytes.
    """
    if len(blob) > MAX_BLOB:
        raise MetadataError(f"NIXL metadata of {len(blob)} bytes is over the limit of {MAX_BLOB}")
    reader = _Reader(blob)
    reader.literal(b"nixlSerDes|", "its first bytes")
    agent = _name(reader.field(b"Agent", 1, MAX_NAME), "the agent's name")
    connections = _connections(reader)
    reach = reader.taken
    reader.constant(b"", b"MemSection")
    sections = _sections(reader)
    if reader.left:
        raise MetadataError(f"NIXL metadata has {reader.left} bytes after its end")
    return BlobInfo(agent, connections, sections, reach)


def _connections(reader: _Reader) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for _ in range(reader.count(b"Conns", 2 * _MIN_FIELD)):
        backend = _backend(reader.field(b"t", 1, MAX_BACKEND_NAME))
        value = reader.field(b"c", 1, MAX_BLOB)
        if backend in found:
            raise MetadataError("NIXL metadata has two connections for one backend")
        check_address(value)
        found[backend] = len(value)
    return tuple(found.items())


def _sections(reader: _Reader) -> tuple[RegionList, ...]:
    found: dict[tuple[str, MemoryKind], RegionList] = {}
    for _ in range(reader.count(b"nixlSecElms", 4 * _MIN_FIELD)):
        backend = _backend(reader.field(b"bknd", 1, MAX_BACKEND_NAME))
        reader.constant(b"nixlDList", b"nixlSDList")
        number = int.from_bytes(reader.field(b"t", 4, 4), "little", signed=True)
        if not 0 <= number < len(_KINDS):
            raise MetadataError("NIXL metadata names a memory type that does not exist")
        kind = _KINDS[number]
        # UCX reaches host and device memory; files and objects are never told to remotes.
        if kind not in (MemoryKind.DRAM, MemoryKind.VRAM):
            raise MetadataError(f"NIXL metadata has {kind.value} regions for backend {backend}")
        if (backend, kind) in found:
            raise MetadataError("NIXL metadata has two sections for one backend and memory type")
        num_regions = reader.count(b"n", _U64.size + _MIN_REGION + 1)
        if num_regions == 0:
            raise MetadataError("NIXL metadata has a section without regions")
        found[backend, kind] = RegionList(backend, kind, _regions(reader, num_regions))
    return tuple(found.values())


def _regions(reader: _Reader, num_regions: int) -> Spans:
    """Read the regions of a section: a table where all have one size, else one by one."""
    rows = reader.table(num_regions)
    if rows is None:
        regions = np.empty((num_regions, 3), np.uint64)
        seen: set[bytes] = set()
        for i in range(num_regions):
            value = reader.field(b"", _MIN_REGION, _MAX_REGION)
            regions[i] = _REGION.unpack_from(value)
            key = value[_REGION.size :]
            if key not in seen:
                check_remote_key(key)
                seen.add(key)
    else:
        numbers = rows[:, _U64.size : _U64.size + _REGION.size]
        regions = np.ascontiguousarray(numbers).view("<u8").astype(np.uint64, copy=False)
        check_remote_keys(np.ascontiguousarray(rows[:, _U64.size + _REGION.size : -1]))
    _check_order(regions)
    return regions


def _check_order(regions: Spans) -> None:
    address, nbytes, device = regions.T
    # A region may end at 2^64 but not beyond.
    if bool(np.any((nbytes > 0) & (address > np.uint64(2**64 - 1) - (nbytes - np.uint64(1))))):
        raise MetadataError("NIXL metadata has a region that ends beyond 2^64")
    after = device[1:] > device[:-1]
    tied = device[1:] == device[:-1]
    after |= tied & (address[1:] > address[:-1])
    tied &= address[1:] == address[:-1]
    after |= tied & (nbytes[1:] >= nbytes[:-1])
    if not bool(np.all(after)):
        raise MetadataError("NIXL metadata has regions out of order")
