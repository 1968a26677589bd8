"""The memory of a channel's two ends, paired and cut into rows that both of them number alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import MemoryKind, Spans
from torch_nixl.engine.indexed import IndexedRows
from torch_nixl.engine.prepared import PreparedList

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.registry import RegisteredMemory
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.p2p.place import Place

ROW_NBYTES: Final = 1 << 20
"""Longest row. Neighbours are merged when they move, so short ones cost nothing."""

SMALLEST_ROW: Final = 4096

Pair = tuple["RegisteredMemory", "Place", bytes]
"""One tensor's memory here and there, and the metadata of the region that it lies in there."""


class PairedRows:
    """What moves in a step: prepared lists, and which rows of them.

    Attributes:
        whole: All rows.
        first, second: Those of each half; empty where there is no good middle.
    """

    __slots__ = ("_lists", "first", "second", "whole")

    def __init__(self) -> None:
        self._lists: list[PreparedList] = []
        self.whole: list[IndexedRows] = []
        self.first: list[IndexedRows] = []
        self.second: list[IndexedRows] = []

    def prepare(
        self, connection: Connection, remote: Remote, pairs: Iterable[Pair], nbytes: int
    ) -> None:
        """Pair, cut and look up.

        Args:
            connection: This end's.
            remote: The other end's.
            pairs: The tensors that have bytes, in an order that both ends agree on.
            nbytes: Bytes of all of them.

        Raises:
            MetadataError, RegistrationError, PeerLostError: As `PreparedLists`.
        """
        half = -(-nbytes // 2)
        longest = min(ROW_NBYTES, -(-half // SMALLEST_ROW) * SMALLEST_ROW)
        moved = 0
        for (kind, remote_kind), group in _by_kinds(pairs).items():
            ours, theirs = algebra.pair(
                np.concatenate([mine.spans for mine, _, _ in group]),
                np.concatenate([place.spans for _, place, _ in group]),
            )
            ours, theirs = algebra.cut(ours, theirs, longest)
            here = connection.prepared.local(kind, ours)
            self._lists.append(here)
            blobs = [blob for _, _, blob in group]
            there = connection.prepared.remote(remote, remote_kind, theirs, blobs)
            self._lists.append(there)
            every = np.arange(len(ours), dtype=np.int32)
            self.whole.append(IndexedRows(here, every, there, every))
            # Both ends have the same rows, so they agree where the second half begins.
            ends: Spans = np.cumsum(ours[:, 1], dtype=np.uint64) + np.uint64(moved)
            moved = int(ends[-1])
            middle = int(np.searchsorted(ends, np.uint64(half + SMALLEST_ROW), side="right"))
            for rows, part in ((self.first, every[:middle]), (self.second, every[middle:])):
                if len(part):
                    rows.append(IndexedRows(here, part, there, part))

    def close(self) -> None:
        """Free the lists once no transfer uses them."""
        for one in self._lists:
            one.close()


def _by_kinds(pairs: Iterable[Pair]) -> dict[tuple[MemoryKind, MemoryKind], list[Pair]]:
    groups: dict[tuple[MemoryKind, MemoryKind], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair[0].memory.kind, pair[1].regions[0].kind), []).append(pair)
    return groups
