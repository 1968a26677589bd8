"""Where one message's bytes lie in this process, registered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_nixl.engine.adapter import Spans
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.p2p.place import Stretch, cut, stretches


class Layout:
    """Registered memories in the order of a message's bytes, neighbours merged.

    Attributes:
        regions: Each registration that the spans lie in, by one of its memories, and how many of
            the spans do. One may come twice.
        spans: ``[n, 3]``: address, nbytes, device id.
        nbytes: Bytes of it all.
    """

    __slots__ = ("nbytes", "regions", "spans")

    def __init__(
        self, regions: list[tuple[RegisteredMemory, int]], spans: Spans, nbytes: int
    ) -> None:
        self.regions = regions
        self.spans = spans
        self.nbytes = nbytes

    @classmethod
    def of(cls, memories: Sequence[RegisteredMemory]) -> Layout:
        """Lay out memories, none of them empty."""
        if len(memories) == 1:
            held = memories[0]
            return cls([(held, len(held.spans))], held.spans, held.memory.nbytes)
        regions: list[tuple[RegisteredMemory, int]] = []
        rows: list[list[int]] = []
        end = 0
        last: RegisteredMemory | None = None
        nbytes = 0
        for held in memories:
            nbytes += held.memory.nbytes
            same = last is not None and held.entry is last.entry
            count = 0
            for row in held.spans.tolist():
                address, size, _ = row
                if same and address == end:
                    rows[-1][1] += size
                else:
                    rows.append(row)
                    count += 1
                end = address + size
                same = True
            if last is not None and held.entry is last.entry:
                regions[-1] = (regions[-1][0], regions[-1][1] + count)
            else:
                regions.append((held, count))
            last = held
        return cls(regions, np.array(rows, np.uint64), nbytes)

    def stretches(self, start: int, stop: int) -> list[Stretch]:
        """Bytes `start` to `stop`, by kind of memory."""
        if len(self.regions) == 1:
            parts = [(self.regions[0][0].memory.kind, self.spans)]
        else:
            kinds = [(held.memory.kind, count) for held, count in self.regions]
            parts = stretches(kinds, self.spans)
        return parts if start == 0 and stop == self.nbytes else cut(parts, start, stop)

    def after(self, start: int) -> Layout:
        """What follows the first `start` bytes."""
        if start == 0:
            return self
        [(_, spans)] = cut([(self.regions[0][0].memory.kind, self.spans)], start, self.nbytes)
        if len(self.spans) == 1:
            return Layout(self.regions, spans, self.nbytes - start)
        dropped = len(self.spans) - len(spans)
        regions: list[tuple[RegisteredMemory, int]] = []
        for held, count in self.regions:
            left = min(count, count - dropped)
            dropped -= count - max(0, left)
            if left > 0:
                regions.append((held, left))
        return Layout(regions, spans, self.nbytes - start)
