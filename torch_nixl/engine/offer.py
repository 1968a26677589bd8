"""What a process hands to another so that it may read or write some of its memory.

The compact, binary form of the seed's RdmaMetadata: memories as spans, and the metadata that NIXL
needs to reach them, in one envelope. `docs/wire.md` draws it. Pure: no I/O, and no allocation that
the offer's own length does not bound.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from torch_nixl.engine.adapter import Direction, MemoryKind, Spans
from torch_nixl.engine.blob import MAX_NAME, BlobInfo, parse
from torch_nixl.engine.envelope import seal, unseal
from torch_nixl.engine.frames import KEY_NBYTES
from torch_nixl.errors import MetadataError

MAX_MEMORIES: Final = 1 << 16
MAX_BLOBS: Final = 16

_MAGIC: Final = b"TO"
_VERSION: Final = 1
# magic, version, direction, number of memories, key, owner nbytes, blobs, spans, zero
_HEADER: Final = struct.Struct("<2sBBI16sIIII")
# nbytes, number of spans, kind, zeros
_MEMORY: Final = np.dtype([("nbytes", "<u8"), ("num_spans", "<u4"), ("kind", "u1"), ("zero", "V3")])
_SPAN_NBYTES: Final = 24

_DIRECTIONS: Final = (Direction.READ, Direction.WRITE)
_KINDS: Final = (
    MemoryKind.DRAM,
    MemoryKind.VRAM,
    MemoryKind.FILE,
    MemoryKind.BLOCK,
    MemoryKind.OBJECT,
)


@dataclass(frozen=True, slots=True, eq=False)
class OfferedMemory:
    """One stretch of memory, which may lie in pieces.

    Attributes:
        kind: Where it lies.
        spans: ``[n, 3]`` uint64 (address, nbytes, device id), in the order of its bytes. No rows
            where it has no bytes; no row of zero bytes.
        nbytes: Sum of the spans' sizes.
    """

    kind: MemoryKind
    spans: Spans = field(repr=False)
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Memory that its owner lets a peer read or write, once.

    Attributes:
        owner: Name of the agent that the memory is registered with.
        key: 16 bytes that name the offer to its owner.
        direction: READ if others may read the memory, WRITE if they may write it.
        memories: The memory, in the order that both sides count by.
        metadata: 1 to `MAX_BLOBS` blobs from which NIXL learns how to reach the owner, and of the
            regions around the memories; not sealed.
    """

    owner: str
    key: bytes = field(repr=False)
    direction: Direction
    memories: tuple[OfferedMemory, ...]
    metadata: tuple[bytes, ...] = field(repr=False)

    def pack(self, *, key: bytes | None) -> bytes:
        """Return the offer in an envelope.

        Args:
            key: For `seal`: from `derive(secret, "metadata")`, or None.

        Raises:
            ValueError: A part is too large, or a memory's spans do not add up to its size.
        """
        owner = self.owner.encode()
        if not 1 <= len(owner) <= MAX_NAME:
            raise ValueError(f"the owner's name has {len(owner)} bytes, not 1 to {MAX_NAME}")
        if len(self.key) != KEY_NBYTES:
            raise ValueError(f"the offer's key has {len(self.key)} bytes, not {KEY_NBYTES}")
        if len(self.memories) > MAX_MEMORIES:
            raise ValueError(f"{len(self.memories)} memories are over the limit of {MAX_MEMORIES}")
        if not 1 <= len(self.metadata) <= MAX_BLOBS:
            raise ValueError(f"{len(self.metadata)} blobs of metadata are not 1 to {MAX_BLOBS}")
        for memory in self.memories:
            if memory.spans.dtype != np.uint64 or memory.spans.shape[1:] != (3,):
                raise ValueError("spans have to be an [n, 3] array of uint64")
        if sum(memory.nbytes for memory in self.memories) >> 64:
            raise ValueError("the offer has 2^64 bytes or more")
        spans = _join(memory.spans for memory in self.memories)
        table = np.zeros(len(self.memories), _MEMORY)
        table["nbytes"] = np.array([memory.nbytes for memory in self.memories], np.uint64)
        table["num_spans"] = [len(memory.spans) for memory in self.memories]
        table["kind"] = [_KINDS.index(memory.kind) for memory in self.memories]
        if not _adds_up(spans, table):
            raise ValueError("a memory's spans do not add up to its bytes, or one has none")
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            _DIRECTIONS.index(self.direction),
            len(self.memories),
            self.key,
            len(owner),
            len(self.metadata),
            len(spans),
            0,
        )
        sizes = np.array([len(blob) for blob in self.metadata], "<u4").tobytes()
        parts = [header, table.tobytes(), spans.astype("<u8", copy=False).tobytes(), sizes, owner]
        return seal(b"".join([*parts, *self.metadata]), key=key)

    @classmethod
    def unpack(
        cls,
        data: bytes,
        *,
        key: bytes | None,
        parse_metadata: Callable[[bytes], BlobInfo] = parse,
    ) -> Offer:
        """Check an offer and read it.

        Args:
            data: From `pack`.
            key: As for `pack`.
            parse_metadata: What the adapter's metadata is checked with. It has to raise
                `MetadataError` for everything that the adapter must not see.

        Raises:
            MetadataError: It is cut, altered or not authenticated as `key` demands; its metadata
                is not what the library writes, or not its owner's; or it names memory that lies in
                no region of that metadata.
        """
        body = unseal(data, key=key)
        if len(body) < _HEADER.size:
            raise MetadataError(f"offer is cut: {len(body)} bytes")
        (
            magic,
            version,
            direction,
            num_memories,
            name,
            owner_nbytes,
            num_blobs,
            num_spans,
            zero,
        ) = _HEADER.unpack_from(body)
        if magic != _MAGIC:
            raise MetadataError("not an offer: its first two bytes differ")
        if version != _VERSION or zero:
            raise MetadataError(f"offer has version {version}; this process speaks {_VERSION}")
        if direction >= len(_DIRECTIONS):
            raise MetadataError("offer has a direction that does not exist")
        if not (
            num_memories <= MAX_MEMORIES
            and 1 <= owner_nbytes <= MAX_NAME
            and 1 <= num_blobs <= MAX_BLOBS
        ):
            raise MetadataError("offer has a count or a name over its limit")
        spans_at = _HEADER.size + num_memories * _MEMORY.itemsize
        sizes_at = spans_at + num_spans * _SPAN_NBYTES
        owner_at = sizes_at + num_blobs * 4
        at = owner_at + owner_nbytes
        if at > len(body):
            raise MetadataError(f"offer of {len(body)} bytes is cut")
        sizes = np.frombuffer(body, "<u4", num_blobs, sizes_at).tolist()
        if at + sum(sizes) != len(body):
            raise MetadataError(f"offer of {len(body)} bytes has parts that don't add up to it")
        try:
            owner = body[owner_at:at].decode()
        except UnicodeDecodeError:
            raise MetadataError("offer names its owner in something else than UTF-8") from None
        blobs = []
        for size in sizes:
            blobs.append(body[at : at + size])
            at += size
        infos = [parse_metadata(blob) for blob in blobs]
        if any(info.agent != owner for info in infos):
            raise MetadataError("offer has metadata of another agent than its owner")
        table = np.frombuffer(body, _MEMORY, num_memories, _HEADER.size)
        flat = np.frombuffer(body, "<u8", num_spans * 3, spans_at)
        memories = _memories(table, flat.reshape(-1, 3).astype(np.uint64), infos)
        return cls(owner, name, _DIRECTIONS[direction], memories, tuple(blobs))


def _memories(
    table: npt.NDArray[np.void], spans: Spans, infos: Sequence[BlobInfo]
) -> tuple[OfferedMemory, ...]:
    kinds = table["kind"]
    if np.any(kinds >= len(_KINDS)) or any(table["zero"].tobytes()):
        raise MetadataError("offer has a memory of a kind that does not exist")
    counts = table["num_spans"].astype(np.int64)
    if int(counts.sum()) != len(spans):
        raise MetadataError(f"offer's memories do not share out its {len(spans)} spans")
    if not _adds_up(spans, table):
        raise MetadataError("offer has spans that do not add up to its memories, or an empty one")
    span_kinds = np.repeat(kinds, counts)
    for number in np.unique(span_kinds).tolist():
        kind = _KINDS[number]
        regions = _join(info.regions(kind) for info in infos)
        if not _all_inside(spans[span_kinds == number], regions):
            raise MetadataError(
                f"offer has {kind.value} spans that lie in no region of its metadata"
            )
    spans.flags.writeable = False
    ends = np.cumsum(counts)
    columns = (kinds, ends - counts, ends, table["nbytes"])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(
        OfferedMemory(_KINDS[number], spans[start:end], nbytes)
        for number, start, end, nbytes in rows
    )


def _join(parts: Iterable[Spans]) -> Spans:
    return np.concatenate([np.empty((0, 3), np.uint64), *parts])


def _adds_up(spans: Spans, table: npt.NDArray[np.void]) -> bool:
    """Return whether no span is empty and each memory's add up to its size, all to under 2^64."""
    sizes = spans[:, 1]
    high = int((sizes >> np.uint64(32)).sum())
    low = int((sizes & np.uint64(0xFFFFFFFF)).sum())
    if not sizes.all() or (high << 32) + low >= 1 << 64:
        return False
    # No sum of some of them can wrap, then.
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes)])
    counts = table["num_spans"].astype(np.int64)
    ends = np.cumsum(counts)
    return bool(np.all(sums[ends] - sums[ends - counts] == table["nbytes"]))


def _all_inside(spans: Spans, regions: Spans) -> bool:
    """Return whether each span lies in the region of its device that begins last before it.

    NIXL looks no further than that one, so a span in an outer region only would be refused later.
    """
    # One sort puts each span behind its region; a running maximum then names it.
    both = np.concatenate([regions, spans])
    is_span = np.arange(len(both)) >= len(regions)
    order = np.lexsort((both[:, 1], is_span, both[:, 0], both[:, 2]))
    sorted_spans = is_span[order]
    place = np.where(sorted_spans, -1, np.arange(len(both)))
    place = np.maximum.accumulate(place)[sorted_spans]
    if np.any(place < 0):
        return False
    region = both[order[place]]
    span = both[order[sorted_spans]]
    offset = span[:, 0] - region[:, 0]
    # In this order none of the subtractions wraps, and no end has to be computed.
    fits = (region[:, 2] == span[:, 2]) & (offset <= region[:, 1])
    return bool(np.all(fits & (span[:, 1] <= region[:, 1] - np.minimum(offset, region[:, 1]))))
