"""Channels on NIXL, each rank a process."""

from __future__ import annotations

import signal

import pytest

from p2p import channel_programs
from torch_nixl.testing import RankPool, run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_steps_move_trees_between_all_ranks(rank_pool: RankPool, size: int) -> None:
    results = rank_pool.run(channel_programs.steps, world_size=size, timeout=60)
    assert {"eager", "read"} <= set(results[0].split(",")) <= {"eager", "read", "split"}
    assert size == 3 or "split" in results[1]


def test_over_tcp_with_a_secret_the_sender_writes() -> None:
    environment = {"UCX_TLS": "tcp,self", "TORCH_NIXL_SECRET": "sesame"}
    assert run_ranks(channel_programs.steps, 2, env=environment, timeout=60) == ["eager,write"] * 2


def test_a_stopped_rank_meets_the_deadline_and_goes_on_later(rank_pool: RankPool) -> None:
    assert rank_pool.run(channel_programs.stopped, world_size=2, timeout=60) == [True, True]


def test_a_channel_goes_on_with_a_rank_that_was_killed_and_started_again(
    rank_pool: RankPool,
) -> None:
    survivor, codes = rank_pool.run(channel_programs.restart, world_size=2, timeout=90)
    assert survivor == []
    assert codes == [-signal.SIGKILL, 0]


def test_what_arrives_is_whole_whatever_fails_between(rank_pool: RankPool) -> None:
    results = rank_pool.run(channel_programs.troubled, args=(1, 3.0), world_size=2, timeout=60)
    for good, failed in results:
        assert good > 5 and failed > 5, results
