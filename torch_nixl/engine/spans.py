"""Span algebra: where bytes lie, as numpy arrays, and how two such lists are matched and cut.

Spans are uint64 arrays of shape ``[n, 2]`` with the columns address and nbytes, in the order in
which the bytes follow each other. They may repeat or overlap (an expanded tensor is read so).
Functions here never write to their arguments and may return them, or views of them.

Expected of every span unless a function says otherwise: ``nbytes > 0`` and
``address + nbytes <= 2**64``. `merge` drops empty spans, `within` is safe on anything a peer sent.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torch_nixl.engine.adapter import Spans

ADDRESS_LIMIT = 2**64
"""One past the highest address."""

MAX_TOTAL = 2**63
"""Bytes that a transfer stays below, so that positions in it can be added without a wrap."""

MAX_SPANS = 2**26
"""Most spans that `strided` builds: 1 GiB of descriptors, which no transfer library digests."""

_UINT64 = np.dtype(np.uint64)
_PACK_SPAN = struct.Struct("=QQ").pack
_PACK_ROW = struct.Struct("=QQQ").pack

EMPTY: Spans = np.empty((0, 2), dtype=_UINT64)
"""No spans at all; read-only."""
EMPTY.flags.writeable = False


def single(address: int, nbytes: int) -> Spans:
    """Return one span, read-only.

    An array over packed bytes: twice as fast as `np.array`, and read-only from the start.
    """
    return np.ndarray((1, 2), _UINT64, _PACK_SPAN(address, nbytes))


def row(address: int, nbytes: int, device_id: int) -> Spans:
    """Return one span with its device id, ``[1, 3]``, read-only."""
    return np.ndarray((1, 3), _UINT64, _PACK_ROW(address, nbytes, device_id))


def total(spans: Spans) -> int:
    """Return the bytes of all spans together, exact also where a uint64 would wrap."""
    num_spans = len(spans)
    if num_spans <= 1:
        return int(spans[0, 1]) if num_spans else 0
    lengths = spans[:, 1]
    if int(lengths.max()) * num_spans < ADDRESS_LIMIT:
        return int(lengths.sum())
    return sum(lengths.tolist())


def merge(spans: Spans) -> Spans:
    """Join each span with the next where it ends at the next one's address; drop empty spans.

    Only neighbours in the list are joined, so the order of bytes is kept.

    Args:
        spans: ``[n, 2]``; empty spans are allowed.

    Returns:
        ``[m, 2]`` with ``m <= n``.
    """
    if len(spans) and not spans[:, 1].all():
        spans = spans[spans[:, 1] != 0]
    if len(spans) < 2:
        return spans
    breaks = _breaks(spans)
    if breaks.all():
        return spans
    return _join_at(spans, breaks)


def runs(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return how many spans `strided` would build at most and the bytes of each, building none.

    Args:
        shape: Sizes of the dimensions.
        strides: Bytes from one element to the next along each dimension; may be negative.
        itemsize: Bytes of an element.
    """
    if itemsize == 0 or 0 in shape:
        return 0, 0
    outer, run = _fold(shape, strides, itemsize)
    return math.prod(size for size, _ in outer), run


def strided(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Spans:
    """Build the spans of a strided array in row-major logical order, neighbours merged.

    Args:
        address: Address of the element whose indices are all zero.
        shape: Sizes of the dimensions.
        strides: Bytes from one element to the next along each dimension; may be negative or zero.
        itemsize: Bytes of an element.

    Raises:
        ValueError: The array would need more than `MAX_SPANS` spans.
    """
    if itemsize == 0 or 0 in shape:
        return EMPTY
    outer, run = _fold(shape, strides, itemsize)
    num_spans = math.prod(size for size, _ in outer)
    if num_spans > MAX_SPANS:
        raise ValueError(
            f"{num_spans} separate spans of {run} bytes, expected at most {MAX_SPANS}: "
            "make a contiguous copy"
        )
    if num_spans == 1:
        return single(address, run)
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in outer:
        steps = np.arange(size, dtype=np.int64) * stride
        offsets = np.add.outer(offsets, steps).reshape(-1)
    spans = np.empty((num_spans, 2), dtype=_UINT64)
    # Modulo 2**64 a negative offset added to an address is the address below it.
    np.add(offsets.view(_UINT64), _UINT64.type(address), out=spans[:, 0])
    spans[:, 1] = run
    return merge(spans)


def bounds(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return where a strided array begins and ends, in bytes from its element zero.

    The end is exclusive. An array without elements has the bounds ``(0, 0)``.
    """
    if itemsize == 0 or 0 in shape:
        return 0, 0
    low, high = 0, itemsize
    for size, stride in zip(shape, strides, strict=True):
        reach = (size - 1) * stride
        if reach < 0:
            low += reach
        else:
            high += reach
    return low, high


def surely_disjoint(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Tell, without building spans, that no two elements of a strided array share a byte.

    False means undecided: build the spans and ask `overlaps`.
    """
    reach = itemsize
    for stride, size in sorted((abs(s), n) for n, s in zip(shape, strides, strict=True) if n != 1):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def overlaps(spans: Spans) -> bool:
    """Tell whether any byte lies in two of the spans."""
    if len(spans) < 2:
        return False
    if not (spans[1:, 0] >= spans[:-1, 0]).all():
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
    # Inclusive ends, since the exclusive one of the highest span may be 2**64.
    last = spans[:-1, 0] + (spans[:-1, 1] - _UINT64.type(1))
    return bool((spans[1:, 0] <= last).any())


def with_device(spans: Spans, device_id: int) -> Spans:
    """Return ``[n, 3]`` C-contiguous uint64: the spans and `device_id` in a third column."""
    if len(spans) == 1:
        address, nbytes = spans.tolist()[0]
        return row(address, nbytes, device_id)
    result = np.empty((len(spans), 3), dtype=_UINT64)
    result[:, :2] = spans
    result[:, 2] = device_id
    return result


def pair(a: Spans, b: Spans) -> tuple[Spans, Spans]:
    """Cut two span lists at each other's boundaries, so that row i of both has the same nbytes.

    Args:
        a: ``[n, 2]``, or ``[n, 3]`` with a device id that goes along; empty spans are dropped.
        b: ``[m, 2]`` or ``[m, 3]``; the same.

    Returns:
        Two lists of ``k <= n + m`` spans, each describing the bytes it described before.

    Raises:
        ValueError: The totals differ, or reach `MAX_TOTAL`.
    """
    if len(a) == len(b):
        if len(a) == 1:
            nbytes = a[0, 1]
            if nbytes == b[0, 1]:
                return (a, b) if nbytes else (a[:0], b[:0])
        elif np.array_equal(a[:, 1], b[:, 1]) and a[:, 1].all():
            return a, b
    total_a, total_b = total(a), total(b)
    if total_a != total_b:
        raise ValueError(f"sizes differ: {total_a} bytes on one side, {total_b} on the other")
    if total_a >= MAX_TOTAL:
        raise ValueError(f"{total_a} bytes in total, expected fewer than 2**63")
    ends_a, ends_b = np.cumsum(a[:, 1], dtype=_UINT64), np.cumsum(b[:, 1], dtype=_UINT64)
    ends = np.concatenate((ends_a, ends_b))
    ends.sort(kind="stable")  # Timsort: linear, as both halves are sorted already.
    begins = np.concatenate((np.zeros(1, dtype=_UINT64), ends[:-1]))
    lengths = ends - begins
    kept = lengths != 0
    begins, lengths = begins[kept], lengths[kept]
    return _cut_at(a, ends_a, begins, lengths), _cut_at(b, ends_b, begins, lengths)


def merge_pairs(a: Spans, b: Spans, *, except_device: int) -> tuple[Spans, Spans]:
    """Join each pair of spans with the next where both sides' end at the next one's address.

    Only under one device id on either side, and not under `except_device`.

    Args:
        a: ``[n, 3]``: address, nbytes, device id.
        b: ``[n, 3]``, row by row as large as `a`: what `pair` returned.
        except_device: The device id under which neighbours may lie in different regions.

    Returns:
        Two lists of ``m <= n`` spans, row by row as large as each other; `a` and `b` themselves
        if nothing was joined.
    """
    if len(a) < 2:
        return a, b
    breaks = _breaks(a)
    if breaks.all():
        return a, b
    breaks |= _breaks(b)
    for side in (a, b):
        devices = side[:, 2]
        breaks |= (devices[1:] != devices[:-1]) | (devices[1:] == except_device)
    if breaks.all():
        return a, b
    return _join_at(a, breaks), _join_at(b, breaks)


def pieces(a: Spans, b: Spans, *, max_bytes: int, max_spans: int) -> list[tuple[Spans, Spans]]:
    """Group paired spans into consecutive pieces that are small enough to post one by one.

    A piece takes as many whole spans as fit. Only a span larger than `max_bytes` is cut.

    Args:
        a: ``[n, 2]``, or ``[n, 3]`` with a device id that goes along.
        b: ``[n, 2]`` or ``[n, 3]``, row by row as large as `a`: what `pair` returned.
        max_bytes: Most bytes of a piece.
        max_spans: Most spans of a piece.

    Returns:
        The pieces in order, each a pair of C-contiguous views.

    Raises:
        ValueError: A limit is below 1.
    """
    if max_bytes < 1 or max_spans < 1:
        raise ValueError(f"max_bytes={max_bytes}, max_spans={max_spans}: expected at least 1")
    if not len(a):
        return []
    longest = int(a[:, 1].max())
    if len(a) == 1 and longest <= max_bytes:
        return [(a, b)]
    if longest > max_bytes:
        a, b = cut(a, b, max_bytes)
    lengths = a[:, 1]
    ends = np.cumsum(lengths, dtype=_UINT64)
    limit = _UINT64.type(min(max_bytes, int(ends[-1])))
    # For every row: where a piece that begins there ends.
    stops = np.searchsorted(ends, ends - lengths + limit, side="right")
    np.minimum(stops, np.arange(len(a)) + max_spans, out=stops)
    result = []
    start = 0
    while start < len(a):
        stop = int(stops[start])
        result.append((a[start:stop], b[start:stop]))
        start = stop
    return result


def _fold(
    shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[list[tuple[int, int]], int]:
    """Split a strided array into outer dimensions (size, stride) and the bytes of an inner run.

    Outer dimensions that step evenly through memory are folded into one.
    """
    dims = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    run = itemsize
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    outer: list[tuple[int, int]] = []
    for size, stride in dims:
        if outer and outer[-1][1] == size * stride:
            outer[-1] = (outer[-1][0] * size, stride)
        else:
            outer.append((size, stride))
    return outer, run


def _breaks(spans: Spans) -> npt.NDArray[np.bool_]:
    """For each of two or more spans but the last: whether the next one begins elsewhere."""
    addresses = spans[:, 0]
    ends = addresses[:-1] + spans[:-1, 1]
    # A span that reaches the end of the address space has the end 0 here and joins with nothing.
    breaks: npt.NDArray[np.bool_] = (ends != addresses[1:]) | (ends <= addresses[:-1])
    return breaks


def _join_at(spans: Spans, breaks: npt.NDArray[np.bool_]) -> Spans:
    """Return one span for each run of spans without a break."""
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    joined = spans[first]
    joined[:, 1] = np.add.reduceat(spans[:, 1], first)
    return joined


def _cut_at(spans: Spans, ends: Spans, begins: Spans, lengths: Spans) -> Spans:
    """Return the stretches of `lengths` bytes at `begins` of the byte sequence `spans` describes.

    `ends` is the running sum of the spans' sizes. No stretch may cross the end of a span.
    """
    rows = np.searchsorted(ends, begins, side="right")
    result = spans[rows]
    result[:, 0] += begins - (ends[rows] - result[:, 1])
    result[:, 1] = lengths
    return result


def clip(spans: Spans, start: int, stop: int) -> Spans:
    """Return the bytes from `start` to `stop`, which is more, of what `spans` describe."""
    ends = np.cumsum(spans[:, 1], dtype=_UINT64)
    first = int(np.searchsorted(ends, _UINT64.type(start), side="right"))
    last = int(np.searchsorted(ends, _UINT64.type(stop), side="left"))
    result: Spans = spans[first : last + 1].copy()
    result[-1, 1] -= ends[last] - _UINT64.type(stop)
    skipped = _UINT64.type(start) - (ends[first] - spans[first, 1])
    result[0, 0] += skipped
    result[0, 1] -= skipped
    return result


def cut(a: Spans, b: Spans, max_bytes: int) -> tuple[Spans, Spans]:
    """Cut paired spans longer than `max_bytes` into spans of that size and a rest.

    Args:
        a: ``[n, 2]``, or ``[n, 3]`` with a device id that goes along.
        b: ``[n, 2]`` or ``[n, 3]``, row by row as large as `a`: what `pair` returned.
        max_bytes: Most bytes of a span.
    """
    limit = _UINT64.type(max_bytes)
    lengths = a[:, 1]
    counts = (lengths - _UINT64.type(1)) // limit + _UINT64.type(1)
    stops = np.cumsum(counts, dtype=_UINT64)
    rows = np.repeat(np.arange(len(a)), counts.astype(np.int64))
    offsets = (np.arange(int(stops[-1]), dtype=_UINT64) - (stops - counts)[rows]) * limit
    cut = np.minimum(limit, lengths[rows] - offsets)
    results = []
    for spans in (a, b):
        result = spans[rows]
        result[:, 0] += offsets
        result[:, 1] = cut
        results.append(result)
    return results[0], results[1]
