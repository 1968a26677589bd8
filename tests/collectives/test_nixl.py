"""Collectives between processes, over NIXL."""

from __future__ import annotations

import pytest

from collectives import programs
from torch_nixl.testing import RankPool, RanksFailed, run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_is_what_torch_computes(rank_pool: RankPool, size: int) -> None:
    assert rank_pool.run(programs.everything, world_size=size, timeout=90) == [0] * size


def test_every_collective_over_tcp() -> None:
    assert run_ranks(programs.everything, 2, env={"UCX_TLS": "tcp,self"}, timeout=90) == [0, 0]


@pytest.mark.parametrize("size", [2, 3])
def test_async_collectives_overlap_and_need_nobody(rank_pool: RankPool, size: int) -> None:
    assert all(rank_pool.run(programs.overlapping, world_size=size, timeout=60))


def test_waiting_beside_a_thread_that_holds_the_gil(rank_pool: RankPool) -> None:
    run = programs.beside_a_busy_interpreter
    assert all(rank_pool.run(run, world_size=2, timeout=60))


@pytest.mark.parametrize("count", [3, programs.LARGE])
def test_killed_rank_ends_it_on_all_others(rank_pool: RankPool, count: int) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_pool.run(programs.killed, args=(count,), world_size=3, timeout=60)
    assert list(caught.value.failures) == [1], caught.value


def test_stopped_rank_is_named_at_the_deadline(rank_pool: RankPool) -> None:
    for verdict in rank_pool.run(programs.stopped, world_size=3, timeout=60):
        assert "no sign of rank 1" in verdict
        assert "collective 1, all_reduce" in verdict


@pytest.mark.parametrize("size", [2, 3])
def test_groups_of_torch_with_another_backend(rank_pool: RankPool, size: int) -> None:
    assert all(rank_pool.run(programs.beside_gloo, world_size=size, timeout=60))
