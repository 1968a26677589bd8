"""Stretches of addresses that may nest and overlap, and which of them hold a given one.

They lie in layers: the first holds all that lie in no other, the next all that lie in no other but
those of the first, and so on. Within a layer none lies in another, so both starts and ends rise,
and a bisection finds the neighbours; what lies in none of a layer lies in none of those below it
either. Nothing is nested mostly, and there is one layer. Pure.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

Extent = tuple[int, int]
"""First address, and the first behind it."""


class Extents:
    """A set of extents. To add, remove or find one takes a bisection in each layer.

    Besides, the lists' items behind the place are moved, and one step is taken for each extent
    that holds or lies in the given one.
    """

    def __init__(self) -> None:
        self._layers: list[list[Extent]] = []
        self._ages: dict[Extent, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._ages)

    def add(self, start: int, end: int) -> None:
        """Add what lies in none of the set.

        What lies in it moves one layer down, and may push others before it.
        """
        assert start < end
        assert self.oldest_around(start, end) is None, "lies in one of the set"
        self._ages[start, end] = next(self._numbers)
        coming = [(start, end)]
        for layer in self._layers:
            leaving: list[Extent] = []
            for extent in coming:
                inside = _inside(layer, extent)
                leaving += layer[inside]
                layer[inside] = [extent]
            coming = leaving
            if not coming:
                return
        self._layers.append(coming)

    def remove(self, start: int, end: int) -> None:
        """Remove one. What lay in no other of its layer rises, and lets others rise behind it.

        Raises:
            KeyError: It isn't in the set.
        """
        del self._ages[start, end]
        gone = [(start, end)]
        depth = next(n for n, layer in enumerate(self._layers) if _take(layer, gone[0]))
        for layer, below in itertools.pairwise(self._layers[depth:]):
            rising: list[Extent] = []
            for extent in gone:
                inside = _inside(below, extent)
                staying: list[Extent] = []
                for one in below[inside]:
                    if any(_around(layer, *one)):
                        staying.append(one)
                    else:
                        bisect.insort(layer, one)
                        rising.append(one)
                below[inside] = staying
            gone = rising
            if not gone:
                break
        while self._layers and not self._layers[-1]:
            self._layers.pop()

    def oldest_around(self, start: int, end: int) -> Extent | None:
        """Return, of those that the given one lies in, the one that was added first."""
        found: list[Extent] = []
        for layer in self._layers:
            before = len(found)
            found += _around(layer, start, end)
            if len(found) == before:
                break
        return min(found, key=self._ages.__getitem__, default=None)

    def touching(self, start: int, end: int) -> Extent | None:
        """Return one that shares an address with the given one, if there is any."""
        if not self._layers:
            return None
        # Of those that begin before its end, none ends later.
        last = bisect.bisect_left(self._layers[0], (end,)) - 1
        return self._layers[0][last] if last >= 0 and self._layers[0][last][1] > start else None


def _inside(layer: list[Extent], extent: Extent) -> slice:
    """Where those of a layer stand that lie in an extent."""
    start, end = extent
    first = stop = bisect.bisect_left(layer, (start,))
    while stop < len(layer) and layer[stop][1] <= end:
        stop += 1
    return slice(first, stop)


def _around(layer: list[Extent], start: int, end: int) -> Iterator[Extent]:
    """Those of a layer that a stretch lies in."""
    at = bisect.bisect_left(layer, (start + 1,))
    while at and layer[at - 1][1] >= end:
        at -= 1
        yield layer[at]


def _take(layer: list[Extent], extent: Extent) -> bool:
    """Remove an extent from a layer; return whether it was there."""
    at = bisect.bisect_left(layer, extent)
    found = at < len(layer) and layer[at] == extent
    if found:
        del layer[at]
    return found
