"""The process group on device tensors: calls return at once, and streams wait for the results."""

from __future__ import annotations

from process_group import stream_programs
from torch_nixl.testing import RankPool


def test_streams_wait_and_the_host_does_not(rank_pool: RankPool) -> None:
    assert rank_pool.run(stream_programs.everything, world_size=2) == [[], []]


def test_failure_reaches_the_next_call(rank_pool: RankPool) -> None:
    assert rank_pool.run(stream_programs.failure, world_size=2) == [True, True]
