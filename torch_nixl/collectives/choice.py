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

MIN_TOTAL_NUMEL: Final = 16 << 10
"""Fewest elements that are worth calls of their own."""


def reduces_at_once(nbytes: int, world_size: int) -> bool:
    """Whether all ranks send all they have to all, and each reduces everything by itself.

    Args:
        nbytes: What each rank has.
        world_size: How many there are.
    """
    return nbytes * (world_size - 1) <= SMALL_NBYTES


def num_chunks(segment_nbytes: int, output_nbytes: int, world_size: int) -> int:
    """In how many pieces of one size a rank's segment is reduced.

    Memory holds those of all other ranks, from the second on those that come next, and what they
    are accumulated in: together no more than the output, unless that is tiny.

    Args:
        segment_nbytes: What one rank reduces.
        output_nbytes: What the collective gives each rank.
        world_size: How many ranks there are.
    """
    others = max(1, world_size - 1)
    most = max(MIN_CHUNK_NBYTES, min(CHUNK_NBYTES, 2 * CHUNK_NBYTES // others))
    if segment_nbytes > most or segment_nbytes * others >= output_nbytes:
        most = max(MIN_CHUNK_NBYTES, min(most, -(-output_nbytes // (2 * others + 1))))
    return -(-segment_nbytes // most)


def total_numel(numel: int) -> int:
    """How many elements of a chunk are accumulated at a time, where that takes memory of its own.

    A quarter of what is long.

    Args:
        numel: Elements of a chunk.
    """
    return min(numel, max(MIN_TOTAL_NUMEL, -(-numel // 256) * 64))
