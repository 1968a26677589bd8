"""Which bytes go where when tokens move from the pages of one cache to those of another. Pure.

Both caches name their pages in the order of the tokens' positions in the prompt, so a position
decides which page and slot a token leaves and which it enters. What differs between the two (page
size, order of heads and tokens, number of ranks) only decides how long the pieces are: the longest
runs of bytes that are adjacent on both sides.

All layers are paged alike, so a plan is one pattern of runs and one pair of places for each layer
and part that the pattern repeats at. Spans are made from it a few MiB at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import Spans
from torch_nixl.kv.layout import Layout, Pages, Table, intersect

_Numbers = npt.NDArray[np.int64]
_UINT64: Final = np.dtype(np.uint64)


@dataclass(frozen=True, slots=True)
class Run:
    """Pages that hold consecutive tokens of one prompt.

    Attributes:
        pages: Page ids in the order of positions, each full but for the last.
        first: Position of the first page's first token; a multiple of the page size.
    """

    pages: Pages = field(repr=False)
    first: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Bytes to move, as a pattern and the places where it applies.

    Attributes:
        src: The pattern where the bytes come from, ``[m, 2]`` uint64: offset, nbytes.
        dst: The pattern where they go; the same sizes row by row.
        src_places: Where it applies, ``[b, 2]`` int64: region, offset.
        dst_places: The same at the other side.
        layers: ``[b]``: the layer of each place; -1 if a pattern spans all of them.
        nbytes: Bytes that move.
    """

    src: Spans = field(repr=False)
    dst: Spans = field(repr=False)
    src_places: Table = field(repr=False)
    dst_places: Table = field(repr=False)
    layers: _Numbers = field(repr=False)
    nbytes: int

    @property
    def num_spans(self) -> int:
        """How many pairs of spans the bytes lie in, neighbours merged."""
        return len(self.src) * len(self.layers)

    def pieces(
        self,
        src_regions: Spans,
        dst_regions: Spans,
        *,
        max_bytes: int,
        max_spans: int,
        layers: range | None = None,
    ) -> Iterator[tuple[Spans, Spans]]:
        """Make spans, a piece at a time, to be posted one by one.

        Args:
            src_regions: ``[n, 2]`` uint64: address and device id of each region of the source.
            dst_regions: The same of the target.
            max_bytes: Most bytes of a piece.
            max_spans: Most spans of a piece.
            layers: Only these; the plan has to be made `by_layer`. Default: all.

        Yields:
            Source and target spans, ``[k, 3]`` each, row by row equally large.
        """
        rows = np.arange(len(self.layers))
        if layers is not None:
            rows = rows[(self.layers >= layers.start) & (self.layers < layers.stop)]
        if not len(rows) or not len(self.src):
            return
        cut = algebra.pieces(self.src, self.dst, max_bytes=max_bytes, max_spans=max_spans)
        batch = 1
        if len(cut) == 1:
            each = algebra.total(self.src)
            batch = max(1, min(max_bytes // each, max_spans // len(self.src)))
        for start in range(0, len(rows), batch):
            chosen = rows[start : start + batch]
            ours, theirs = self.src_places[chosen], self.dst_places[chosen]
            for src, dst in cut:
                yield _spread(src, ours, src_regions), _spread(dst, theirs, dst_regions)


def make_plan(
    src: Layout,
    src_run: Run,
    dst: Layout,
    dst_run: Run,
    *,
    start: int,
    stop: int,
    heads: range | None = None,
    by_layer: bool = False,
) -> Plan:
    """Plan to move the tokens at positions `start` to `stop` from one cache to another.

    Args:
        src: The cache that they come from.
        src_run: Its pages.
        dst: The cache that they go to.
        dst_run: Its pages.
        start: Position of the first token.
        stop: Position after the last. Nothing else moves, whatever room its page has; of pages
            with a packing, all that have a token in the range move as a whole.
        heads: Which of the model's heads; both sides must hold them. Default: what they share.
        by_layer: Keep layers apart, so that `Plan.pieces` can make one after the other.

    Raises:
        ValueError: The caches can't be converted (see `Geometry.difference`), a page does not
            exist or is the target of two, or the pages don't hold these positions.
    """
    why = src.geometry.difference(dst.geometry)
    if why:
        raise ValueError(f"pages can't be converted: {why}")
    if not 0 <= start <= stop:
        raise ValueError(f"positions {start} to {stop}: expected 0 or more, in this order")
    shared = intersect(src.geometry.heads, dst.geometry.heads)
    if heads is None:
        heads = shared
    elif intersect(heads, shared) != heads:
        raise ValueError(f"heads {heads}: the two sides share {shared}")
    _check_run(src, src_run, start, stop, "source")
    _check_run(dst, dst_run, start, stop, "target")
    _check_exclusive(dst_run)
    begins, counts = _chunks(src, dst, start, stop)
    src_offsets = _locate(src, src_run, begins)
    src_offsets += (heads.start - src.geometry.heads.start) * src.head_stride
    dst_offsets = _locate(dst, dst_run, begins)
    dst_offsets += (heads.start - dst.geometry.heads.start) * dst.head_stride

    # Parts and layers that lie inside of a page on both sides are part of the pattern.
    axes = [(len(heads), src.head_stride, dst.head_stride)]
    src_places, dst_places = _places(src), _places(dst)
    layers = np.arange(src.geometry.num_layers).repeat(src.geometry.num_parts)
    num_layers, num_parts = src.regions.shape
    parts = _inner(src, dst, axis=1)
    if parts is not None:
        axes.append((num_parts, *parts))
        src_places, dst_places = src_places[::num_parts], dst_places[::num_parts]
        layers = layers[::num_parts]
        num_parts = 1
    deep = None if by_layer else _inner(src, dst, axis=0)
    if deep is not None:
        axes.append((num_layers, *deep))
        src_places, dst_places = src_places[:num_parts], dst_places[:num_parts]
        layers = np.full(num_parts, -1)

    pattern = [
        _expand(
            src_offsets[group],
            dst_offsets[group],
            [*axes, (int(counts[group.start]), src.token_stride, dst.token_stride)],
            src.geometry.row_nbytes,
        )
        for group in _groups(counts)
        if len(heads)
    ]
    froms, tos = _merge(pattern)
    return Plan(froms, tos, src_places, dst_places, layers, algebra.total(froms) * len(layers))


def _chunks(src: Layout, dst: Layout, start: int, stop: int) -> tuple[_Numbers, _Numbers]:
    """Cut positions where either side turns a page; return positions and numbers of tokens."""
    unit = min(src.geometry.page_size, dst.geometry.page_size)
    if src.geometry.packing:
        start, stop = start // unit * unit, -(-stop // unit) * unit if stop > start else start
    if start == stop:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    begins = np.arange(start // unit * unit, stop, unit, dtype=np.int64)
    ends = begins + unit
    begins[0], ends[-1] = start, stop
    return begins, ends - begins


def _check_run(layout: Layout, run: Run, start: int, stop: int, what: str) -> None:
    """Check that pages exist and hold positions, before anything is made that long."""
    size = layout.geometry.page_size
    if run.first % size or run.first < 0:
        raise ValueError(f"{what} pages begin at position {run.first}: not a page's first")
    last = run.first + len(run.pages) * size
    if start < stop and not run.first <= start <= stop <= last:
        raise ValueError(
            f"{what} pages hold positions {run.first} to {last}, not {start} to {stop}"
        )
    layout.check_pages(run.pages, what)


def _locate(layout: Layout, run: Run, positions: _Numbers) -> _Numbers:
    """Return offsets of tokens, relative to the first head of page 0 of their part.

    Positions ascend, by a page at most.
    """
    size = layout.geometry.page_size
    if not len(positions):
        return np.empty(0, np.int64)
    index, slot = divmod(int(positions[0]) - run.first, size)
    if (int(positions[-1]) - run.first) // size - index == len(positions) - 1:
        # One in each page, of which only the first may lie inside: no division for each.
        offsets = run.pages[index : index + len(positions)] * layout.page_stride
        offsets[0] += slot * layout.token_stride
        return offsets
    indices, slots = np.divmod(positions - run.first, size)
    offsets = run.pages[indices] * layout.page_stride
    offsets += slots * layout.token_stride
    return offsets


def _check_exclusive(run: Run) -> None:
    if len(run.pages) > 1:
        pages = np.sort(run.pages)
        if (pages[1:] == pages[:-1]).any():
            raise ValueError("target pages: one is named twice")


def _places(layout: Layout) -> Table:
    return np.stack((layout.regions.reshape(-1), layout.offsets.reshape(-1)), axis=1)


def _inner(src: Layout, dst: Layout, *, axis: int) -> tuple[int, int] | None:
    """Return the strides of layers or parts, if on both sides they lie evenly inside of a page."""
    steps = []
    for layout in (src, dst):
        if layout.regions.shape[axis] == 1 or np.diff(layout.regions, axis=axis).any():
            return None
        step = np.diff(layout.offsets, axis=axis)
        first = int(step.flat[0])
        if not 0 < first < layout.page_stride or (step != first).any():
            return None
        steps.append(first)
    return steps[0], steps[1]


def _groups(counts: _Numbers) -> Iterator[slice]:
    """Cut chunks into stretches of the same number of tokens: at most three."""
    edges = np.flatnonzero(np.diff(counts)) + 1
    bounds = [0, *edges.tolist(), len(counts)]
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            yield slice(begin, end)


def _expand(
    froms: _Numbers, tos: _Numbers, axes: Sequence[tuple[int, int, int]], run: int
) -> tuple[_Numbers, _Numbers, int]:
    """Repeat offsets along axes (size, source stride, target stride), the evenest ones folded.

    Returns:
        Source and target offsets, and the bytes at each.
    """
    # The target's order: writes that follow each other are the ones that merge there.
    left = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: (-axis[2], -axis[1]))
    while left and left[-1][1] == left[-1][2] == run:
        run *= left.pop()[0]
    for size, src_stride, dst_stride in left:
        steps = np.arange(size, dtype=np.int64)
        froms = np.add.outer(froms, steps * src_stride).reshape(-1)
        tos = np.add.outer(tos, steps * dst_stride).reshape(-1)
    return froms, tos, run


def _merge(pattern: Sequence[tuple[_Numbers, _Numbers, int]]) -> tuple[Spans, Spans]:
    """Join runs with the next where they are adjacent on both sides."""
    if not pattern:
        return algebra.EMPTY, algebra.EMPTY
    froms = np.concatenate([part[0] for part in pattern])
    tos = np.concatenate([part[1] for part in pattern])
    sizes = np.repeat([part[2] for part in pattern], [len(part[0]) for part in pattern])
    ends = froms[:-1] + sizes[:-1]
    broken = (ends != froms[1:]) | (tos[:-1] + sizes[:-1] != tos[1:])
    first = np.concatenate(([0], np.flatnonzero(broken) + 1))
    if len(first) < len(froms):
        froms, tos, sizes = froms[first], tos[first], np.add.reduceat(sizes, first)
    return _pair(froms, sizes), _pair(tos, sizes)


def _pair(offsets: _Numbers, sizes: _Numbers) -> Spans:
    result = np.empty((len(offsets), 2), _UINT64)
    result[:, 0], result[:, 1] = offsets, sizes
    return result


def _spread(pattern: Spans, places: Table, regions: Spans) -> Spans:
    """Apply a pattern at places: ``[len(places) * len(pattern), 3]`` spans."""
    held = regions[places[:, 0]]
    result = np.empty((len(places), len(pattern), 3), _UINT64)
    starts = held[:, 0] + places[:, 1].astype(_UINT64)
    np.add(starts[:, None], pattern[:, 0], out=result[:, :, 0])
    result[:, :, 1] = pattern[:, 1]
    result[:, :, 2] = held[:, 1][:, None]
    return result.reshape(-1, 3)
