"""Which bytes parts of caches have in common. Pure: numbers only.

A part (the keys of a layer, say) is one place at which a layout's pattern of rows lies. Two of them
share a byte if their distance is a sum of so many steps over pages, tokens and heads, give or take
less than a row. Strides nest, so that at each of them two numbers of steps come into question.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch_nixl.kv.layout import Layout

_Numbers = npt.NDArray[np.int64]
_FAR: Final = 1 << 62


class Sharing(enum.Enum):
    """What the pages of two caches have to do with each other."""

    APART = enum.auto()
    """They have no byte in common."""
    SAME = enum.auto()
    """Where they share bytes, a page of one is the page of that number of the other."""
    CROSSED = enum.auto()
    """A page of one shares bytes with another number of the other, or may do so."""


def find_overlap(layout: Layout) -> tuple[int, int] | None:
    """Find two parts of a cache that have a byte in common, by their numbers in ``[L * K]``."""
    regions, offsets = layout.regions.reshape(-1), layout.offsets.reshape(-1)
    reach = _reach(layout) + (layout.num_pages - 1) * layout.page_stride
    order = np.lexsort((offsets, regions))
    regions, offsets = regions[order], offsets[order]
    for index in range(len(offsets) - 1):
        stop = int(np.searchsorted(regions, regions[index], side="right"))
        distances = offsets[index + 1 : stop] - offsets[index]
        distances = distances[: int(np.searchsorted(distances, reach))]
        if len(distances):
            rows, _ = _touching(distances, layout)
            if len(rows):
                return int(order[index]), int(order[index + 1 + int(rows.min())])
    return None


def sharing(
    one: Layout, bases: Sequence[int], other: Layout, other_bases: Sequence[int]
) -> Sharing:
    """Tell whether the pages of two caches are the same memory.

    Args:
        one: A cache.
        bases: Addresses of its regions.
        other: Another.
        other_bases: Addresses of that one's.
    """
    ours, theirs = _places(one, bases), _places(other, other_bases)
    end = _reach(one) + (one.num_pages - 1) * one.page_stride
    other_end = _reach(other) + (other.num_pages - 1) * other.page_stride
    paged = (one.num_pages, one.page_stride) == (other.num_pages, other.page_stride)
    alike = paged and _pattern(one) == _pattern(other)
    found = Sharing.APART
    for place in ours:
        distances = theirs - place
        near = distances[(distances < end) & (distances > -other_end)]
        if not len(near):
            continue
        if alike:
            shifts = _touching(near, one)[1]
        elif paged and max(_reach(one), _reach(other)) <= one.page_stride:
            shifts = _touching_pages(near, one, other)
        else:
            return Sharing.CROSSED
        if shifts.any():
            return Sharing.CROSSED
        if len(shifts):
            found = Sharing.SAME
    return found


def _touching(distances: _Numbers, layout: Layout) -> tuple[_Numbers, _Numbers]:
    """At which distances two equal parts share a byte.

    Returns:
        Indices of those distances, not each once, and by how many pages the two are shifted there.
    """
    dims = [
        (layout.page_stride, layout.num_pages, 1),
        (layout.token_stride, layout.geometry.page_size, 0),
        (layout.head_stride, len(layout.geometry.heads), 0),
    ]
    rest = distances.astype(np.int64)[:, None]
    shifts = np.zeros_like(rest)
    for stride, size, pages in sorted(dims, reverse=True):
        if size == 1:
            continue
        down = rest // stride
        steps = np.concatenate((down, down + 1), axis=1)
        rest, shifts = np.tile(rest, 2), np.tile(shifts, 2)
        rest = np.where(abs(steps) < size, rest - steps * stride, _FAR)
        shifts += steps * pages
    hits = abs(rest) < layout.geometry.row_nbytes
    return hits.nonzero()[0], shifts[hits]


def _touching_pages(distances: _Numbers, one: Layout, other: Layout) -> _Numbers:
    """The same for parts of which only pages are alike, each in one stretch: the shifts."""
    down = distances // one.page_stride
    steps = np.stack((down - 1, down, down + 1), axis=1)
    rest = distances[:, None] - steps * one.page_stride
    hits = (rest < _reach(one)) & (rest > -_reach(other)) & (abs(steps) < one.num_pages)
    return steps[hits]


def _places(layout: Layout, bases: Sequence[int]) -> _Numbers:
    """Addresses of all parts. Below 2**63, as all that a process can have."""
    regions = np.array(bases, np.int64)[layout.regions.reshape(-1)]
    return regions + layout.offsets.reshape(-1)


def _pattern(layout: Layout) -> tuple[int, ...]:
    geometry = layout.geometry
    sizes = (geometry.page_size, len(geometry.heads), geometry.row_nbytes)
    return (*sizes, layout.token_stride, layout.head_stride)


def _reach(layout: Layout) -> int:
    """Bytes from the first of a page's part to the last."""
    geometry = layout.geometry
    tokens = (geometry.page_size - 1) * layout.token_stride
    return geometry.row_nbytes + tokens + (len(geometry.heads) - 1) * layout.head_stride
