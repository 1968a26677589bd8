"""Where a message's bytes lie on one side: how that travels, and how it is cut. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import MemoryKind, Spans
from torch_nixl.errors import MetadataError

MAX_SPANS: Final = 1024
"""Most spans that a frame names: 24 KiB. What has more is packed, however long they are."""

MAX_BLOB: Final = 16 << 10

_COUNT: Final = struct.Struct("<I")
_ONE: Final = _COUNT.pack(1)
_REGION: Final = struct.Struct("<IIII")
_SPAN: Final = struct.Struct("<QQQ")
_ONE_SPAN: Final = struct.Struct("<IIIIQQQ")
_MEMORY_KINDS: Final = (MemoryKind.DRAM, MemoryKind.VRAM)

Stretch = tuple[MemoryKind, Spans]
"""Spans in a row that lie in memory of one kind."""


class PlacedRegion(NamedTuple):
    """One registered region that some of a message's bytes lie in.

    Attributes:
        kind: Which kind of memory.
        number: The owner's number for the region, counted for each peer.
        num_spans: How many spans lie in it, behind those of the regions before it.
        blob: Its metadata; empty where the other side was told before.
    """

    kind: MemoryKind
    number: int
    num_spans: int
    blob: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a message's bytes lie, or are to go, on one side.

    Attributes:
        regions: What they lie in: one for a tensor, several for a tree. One may come twice.
        spans: ``[n, 3]``: address, nbytes, device id, in the order of the message's bytes.
        nbytes: Sum of their sizes.
    """

    regions: tuple[PlacedRegion, ...]
    spans: Spans = field(repr=False)
    nbytes: int

    def stretches(self, start: int, stop: int) -> list[Stretch]:
        """Bytes `start` to `stop`, by kind of memory."""
        if len(self.regions) == 1:
            parts = [(self.regions[0].kind, self.spans)]
        else:
            parts = stretches([(one.kind, one.num_spans) for one in self.regions], self.spans)
        return parts if start == 0 and stop == self.nbytes else cut(parts, start, stop)


def pack_place(regions: Sequence[PlacedRegion], spans: Spans) -> bytes:
    """Return the bytes of a `Place`."""
    if len(spans) == 1:
        [(kind, number, _, blob)] = regions
        head = _MEMORY_KINDS.index(kind), number, 1, len(blob)
        return _ONE + _ONE_SPAN.pack(*head, *spans.tolist()[0]) + blob
    parts = [_COUNT.pack(len(regions))]
    for kind, number, num_spans, blob in regions:
        parts.append(_REGION.pack(_MEMORY_KINDS.index(kind), number, num_spans, len(blob)))
    parts.append(spans.astype("<u8", copy=False).tobytes())
    parts += [region.blob for region in regions]
    return b"".join(parts)


def parse_place(body: bytes, at: int) -> Place:
    """Read the place that takes up the rest of a body.

    Raises:
        MetadataError: It is cut, too long, or makes no sense.
    """
    if len(body) < at + _COUNT.size:
        raise MetadataError("frame is cut: no place")
    [num_regions] = _COUNT.unpack_from(body, at)
    at += _COUNT.size
    if num_regions == 1 and len(body) >= at + _ONE_SPAN.size:
        kind, number, count, blob_nbytes, *span = _ONE_SPAN.unpack_from(body, at)
        if count == 1:
            return _one_span(kind, number, blob_nbytes, body[at + _ONE_SPAN.size :], *span)
    heads_end = at + _REGION.size * num_regions
    if not 1 <= num_regions <= MAX_SPANS or len(body) < heads_end:
        raise MetadataError("place is cut, or has a number of regions that is not allowed")
    heads = list(_REGION.iter_unpack(body[at:heads_end]))
    num_spans = sum(head[2] for head in heads)
    at, end = heads_end, heads_end + _SPAN.size * num_spans
    if not num_regions <= num_spans <= MAX_SPANS or len(body) < end:
        raise MetadataError("place is cut, or has a number of spans that is not allowed")
    regions = []
    blob_at = end
    for kind, number, count, blob_nbytes in heads:
        if kind >= len(_MEMORY_KINDS) or blob_nbytes > MAX_BLOB or not count:
            raise MetadataError("place has a kind or a size that is not allowed")
        blob = body[blob_at : blob_at + blob_nbytes]
        blob_at += blob_nbytes
        regions.append(PlacedRegion(_MEMORY_KINDS[kind], number, count, blob))
    if blob_at != len(body):
        raise MetadataError("place has parts that don't add up to its frame")
    spans = np.frombuffer(body, "<u8", 3 * num_spans, at).reshape(-1, 3).astype(np.uint64)
    smallest, total = int(spans[:, 1].min()), algebra.total(spans[:, :2])
    ends = spans[:, 0] + spans[:, 1]
    fits = bool(np.all((ends >= spans[:, 0]) | (ends == 0)))
    if not smallest or total >= algebra.MAX_TOTAL or not fits:
        raise MetadataError("place has an empty span, or one beyond all addresses")
    return Place(tuple(regions), spans, total)


def _one_span(
    kind: int, number: int, blob_nbytes: int, blob: bytes, address: int, nbytes: int, device_id: int
) -> Place:
    """The common case, checked in the same way."""
    if kind >= len(_MEMORY_KINDS) or blob_nbytes > MAX_BLOB or blob_nbytes != len(blob):
        raise MetadataError("place has a kind or a size that is not allowed")
    if not 0 < nbytes < algebra.MAX_TOTAL or address + nbytes > algebra.ADDRESS_LIMIT:
        raise MetadataError("place has an empty span, or one beyond all addresses")
    region = PlacedRegion(_MEMORY_KINDS[kind], number, 1, blob)
    return Place((region,), algebra.row(address, nbytes, device_id), nbytes)


def stretches(kinds: Sequence[tuple[MemoryKind, int]], spans: Spans) -> list[Stretch]:
    """Part spans by kind of memory.

    Args:
        kinds: For each region its kind, and how many of the spans lie in it.
        spans: All of them.
    """
    first = kinds[0][0]
    if all(kind is first for kind, _ in kinds):
        return [(first, spans)]
    result: list[Stretch] = []
    start = 0
    for index, (kind, count) in enumerate(kinds):
        stop = start + count
        if index and kind is kinds[index - 1][0]:
            begin = stop - count - len(result[-1][1])
            result[-1] = (kind, spans[begin:stop])
        else:
            result.append((kind, spans[start:stop]))
        start = stop
    return result


def cut(parts: Sequence[Stretch], start: int, stop: int) -> list[Stretch]:
    """Return bytes `start` to `stop` of what the stretches describe together."""
    if len(parts) == 1 and len(parts[0][1]) == 1:
        # The common case without numpy, whose calls take microseconds.
        [(kind, spans)] = parts
        [[address, nbytes, device_id]] = spans.tolist()
        size = min(stop, nbytes) - start
        return [(kind, algebra.row(address + start, size, device_id))] if size > 0 else []
    result: list[Stretch] = []
    at = 0
    for kind, spans in parts:
        end = at + algebra.total(spans[:, :2])
        low, high = max(start, at), min(stop, end)
        if low < high:
            whole = low == at and high == end
            result.append((kind, spans if whole else algebra.clip(spans, low - at, high - at)))
        at = end
    return result


def align(ours: Sequence[Stretch], theirs: Sequence[Stretch]) -> list[tuple[Stretch, Stretch]]:
    """Cut two lists of stretches of as many bytes in all where the other's kind changes."""
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    borders = sorted({*_borders(ours), *_borders(theirs)})
    pairs = []
    start = 0
    for stop in borders:
        [mine], [other] = cut(ours, start, stop), cut(theirs, start, stop)
        pairs.append((mine, other))
        start = stop
    return pairs


def _borders(parts: Sequence[Stretch]) -> list[int]:
    result, at = [], 0
    for _, spans in parts:
        at += algebra.total(spans[:, :2])
        result.append(at)
    return result
