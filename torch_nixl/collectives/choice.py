"""Which algorithm a collective takes: the one place where that is decided. Pure.

Measured by ``benchmarks/collectives.py`` on one host; see its README.
"""

from __future__ import annotations

from typing import Final

SMALL_NBYTES: Final = 64 << 10
"""Most bytes that a rank sends at once for which the number of messages is all that counts."""

FLAT_RANKS: Final = 8
"""Up to so many ranks the root of a broadcast serves all others itself; beyond, a tree."""

CHUNK_NBYTES: Final = 2 << 20
"""Bytes that are reduced at a time: what was just received is still in the cache."""

MIN_CHUNK_NBYTES: Final = 64 << 10
"""Fewest bytes that are worth a message of their own."""


def reduces_at_once(nbytes: int, world_size: int) -> bool:
    """Whether all ranks send all they have to all, and each reduces everything by itself.

    Args:
        nbytes: What each rank has.
        world_size: How many there are.
    """
    return nbytes * (world_size - 1) <= SMALL_NBYTES


def chunk_nbytes(segment_nbytes: int, output_nbytes: int, world_size: int) -> int:
    """How many bytes of a rank's segment are reduced at a time.

    Chunks of all other ranks are in memory together, and from the second on those that come next:
    no more than the output, unless that is tiny.

    Args:
        segment_nbytes: What one rank reduces.
        output_nbytes: What the collective gives each rank.
        world_size: How many ranks there are.
    """
    others = max(1, world_size - 1)
    most = max(MIN_CHUNK_NBYTES, min(CHUNK_NBYTES, 2 * CHUNK_NBYTES // others))
    if segment_nbytes <= most and segment_nbytes * others <= output_nbytes:
        return segment_nbytes
    return max(MIN_CHUNK_NBYTES, min(most, output_nbytes // (2 * others)))
