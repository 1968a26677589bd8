"""Handoffs on NIXL, each rank a process, some of which are killed or stopped."""

from __future__ import annotations

import pytest

from kv import programs, stream_programs
from torch_nixl.testing import RankPool, RanksFailed, run_ranks


def test_every_rank_hands_over_to_every_rank(rank_pool: RankPool) -> None:
    for paths in rank_pool.run(programs.all_to_all, world_size=3, args=(3,), timeout=60):
        assert paths == {"cma": 18}


def test_over_tcp(rank_pool: RankPool) -> None:
    env = {"UCX_TLS": "tcp,self"}
    for paths in run_ranks(programs.all_to_all, 2, args=(2,), env=env, timeout=60):
        assert set(paths) <= {"tcp", "cma"} and sum(paths.values()) == 8


def test_ticket_travels_over_the_communicator(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.over_a_communicator, world_size=2, timeout=60) == [1, 1]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_pages_keep_the_order_of_streams(rank_pool: RankPool, mode: str) -> None:
    ranks = rank_pool.run(stream_programs.handoffs, world_size=2, args=(mode,), timeout=60)
    assert ranks == [0, 1]


def test_killed_peer_costs_only_its_own_requests() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(programs.killed, 3, timeout=60)
    assert failed.value.failures.keys() == {1}, failed.value
    assert "SIGKILL" in failed.value.failures[1]


def test_peer_killed_while_bytes_move() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(programs.killed_while_bytes_move, 2, env={"UCX_TLS": "tcp,self"}, timeout=60)
    assert failed.value.failures.keys() == {1}, failed.value
    assert "SIGKILL" in failed.value.failures[1]


def test_peer_whose_program_ends_says_so_at_once() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(programs.left, 2, timeout=60)
    assert failed.value.failures.keys() == {1}, failed.value
    assert "exited with code 0" in failed.value.failures[1]


def test_stopped_peer_ends_requests_in_time_and_keeps_pages(rank_pool: RankPool) -> None:
    names, _ = rank_pool.run(programs.stopped, world_size=2, timeout=60)
    assert names == ["TransferCancelled", "TransferCancelled", "TransferTimeout", "TransferTimeout"]


def test_restarted_prefill_refuses_tickets_of_its_former_self(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.restarted, world_size=2, timeout=60) == [0, 1]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_soak(rank_pool: RankPool) -> None:
    """1,080 handoffs between three processes."""
    rank_pool.run(programs.all_to_all, world_size=3, args=(60,), timeout=600)
