"""What the loopback fake knows of memory: NIXL's way of looking regions up, and its own metadata.

[Note: look-up]
NIXL keeps regions in order of (address, length), apart for each kind and device id, and for a span
looks only at the entry at or just before it. So a region that lies inside another hides the rest
of it, and a span that crosses two regions is in none. `RegionTable` does the same on purpose.
"""

from __future__ import annotations

import bisect
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from torch_nixl.engine.adapter import MemoryKind, Region, Spans
from torch_nixl.engine.blob import BlobInfo, RegionList
from torch_nixl.errors import MetadataError

# Magic, version, whether a connection is told, incarnation, length of the name, number of regions.
_HEAD = struct.Struct("<4sBBQHI")
# Kind, address, length, device id, key.
_ENTRY = struct.Struct("<BQQQI")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"LOOP"
_VERSION = 1
_KINDS = tuple(MemoryKind)


class RegionTable:
    """Regions in NIXL's order. Registering one twice counts twice."""

    def __init__(self) -> None:
        self._counts: Counter[Region] = Counter()
        self._keys: dict[Region, int] = {}
        self._order: dict[tuple[MemoryKind, int], list[tuple[int, int]]] = {}

    def __contains__(self, region: Region) -> bool:
        return region in self._keys

    def add(self, region: Region, key: int) -> None:
        self._counts[region] += 1
        if region not in self._keys:
            self._keys[region] = key
            order = self._order.setdefault((region.kind, region.device_id), [])
            bisect.insort(order, (region.address, region.nbytes))

    def remove(self, region: Region) -> None:
        self._counts[region] -= 1
        if self._counts[region] == 0:
            del self._counts[region], self._keys[region]
            self._order[region.kind, region.device_id].remove((region.address, region.nbytes))

    def count(self, region: Region) -> int:
        return self._counts[region]

    def key(self, region: Region) -> int:
        return self._keys[region]

    def first_missing(self, kind: MemoryKind, spans: Spans) -> int | None:
        """Return the row of the first span that is in no region. See [Note: look-up]."""
        for row, (address, nbytes, device_id) in enumerate(spans.tolist()):
            order = self._order.get((kind, device_id), [])
            at = bisect.bisect_left(order, (address, nbytes))
            near = order[max(at - 1, 0) : at + 1]
            if not any(
                start <= address and address + nbytes <= start + size for start, size in near
            ):
                return row
        return None


@dataclass(frozen=True, slots=True)
class Blob:
    """Decoded metadata.

    Attributes:
        name: The agent that tells.
        incarnation: Which of the agents that had this name.
        connection: Whether the blob says how to reach the agent.
        keys: Each region that is told, with its key.
    """

    name: str
    incarnation: int
    connection: bool
    keys: Mapping[Region, int]

    def encode(self) -> bytes:
        name = self.name.encode()
        head = _HEAD.pack(
            _MAGIC, _VERSION, self.connection, self.incarnation, len(name), len(self.keys)
        )
        entries = (
            _ENTRY.pack(
                _KINDS.index(region.kind), region.address, region.nbytes, region.device_id, key
            )
            for region, key in self.keys.items()
        )
        body = head + name + b"".join(entries)
        return body + _CHECKSUM.pack(zlib.crc32(body))

    def info(self) -> BlobInfo:
        """Return what the blob says in the words of NIXL's."""
        sections = []
        for kind in _KINDS:
            rows = sorted(
                (region.device_id, region.address, region.nbytes)
                for region in self.keys
                if region.kind is kind
            )
            if rows:
                spans = np.array(rows, np.uint64)[:, [1, 2, 0]]
                sections.append(RegionList("LOOPBACK", kind, np.ascontiguousarray(spans)))
        connections = (("LOOPBACK", 8),) if self.connection else ()
        reach = f"{self.incarnation} {self.name}".encode()
        return BlobInfo(self.name, connections, tuple(sections), reach)

    @staticmethod
    def decode(data: bytes) -> Blob:
        """Return what `encode` was given, or raise MetadataError."""
        body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
        if len(body) < _HEAD.size or _CHECKSUM.pack(zlib.crc32(body)) != checksum:
            raise MetadataError(f"{len(data)} bytes aren't loopback metadata, or were altered")
        magic, version, connection, incarnation, name_size, count = _HEAD.unpack_from(body)
        if (magic, version) != (_MAGIC, _VERSION) or connection > 1:
            raise MetadataError(f"loopback metadata of version {version} can't be read")
        if len(body) != _HEAD.size + name_size + count * _ENTRY.size:
            raise MetadataError("loopback metadata have a wrong length")
        entries = _HEAD.size + name_size
        try:
            name = body[_HEAD.size : entries].decode()
        except UnicodeDecodeError as exc:
            raise MetadataError(
                "loopback metadata name an agent in bytes that aren't text"
            ) from exc
        keys = {}
        for kind, address, nbytes, device_id, key in _ENTRY.iter_unpack(body[entries:]):
            if kind >= len(_KINDS):
                raise MetadataError(f"loopback metadata tell a kind of memory {kind}")
            keys[Region(_KINDS[kind], address, nbytes, device_id)] = key
        return Blob(name, incarnation, bool(connection), keys)


def check_tellable(regions: Sequence[Region], *, connection: bool) -> None:
    """Raise ValueError for what NIXL's blobs can't hold: several kinds of memory, or nothing."""
    if not regions and not connection:
        raise ValueError("metadata of no regions and no connection says nothing")
    if len({region.kind for region in regions}) > 1:
        raise ValueError("one blob can tell regions of one kind of memory only")
