"""Communicators on NIXL, each rank a process."""

from __future__ import annotations

import pytest

from p2p import programs
from torch_nixl.testing import RankPool, RanksFailed, run_ranks

TCP = {"UCX_TLS": "tcp,self"}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_sends_to_every_rank(rank_pool: RankPool, size: int) -> None:
    for routes in rank_pool.run(programs.all_to_all, world_size=size, timeout=60):
        assert routes == "eager,local,read"


@pytest.mark.parametrize("size", [2, 4])
def test_both_ends_move_halves_round_a_ring(rank_pool: RankPool, size: int) -> None:
    for routes in rank_pool.run(programs.ring_of_halves, world_size=size, timeout=60):
        assert set(routes.split(",")) <= {"split", "read"}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_sends_trees_to_every_rank(rank_pool: RankPool, size: int) -> None:
    for routes in rank_pool.run(programs.trees, world_size=size, timeout=60):
        assert routes == "eager,local,read"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_both_ends_move_halves_of_trees(rank_pool: RankPool, size: int) -> None:
    for routes in rank_pool.run(programs.ring_of_trees, world_size=size, timeout=60):
        assert set(routes.split(",")) <= {"split", "read"}


def test_over_tcp_the_sender_writes_trees() -> None:
    for routes in run_ranks(programs.trees, 2, env=TCP, timeout=60):
        assert routes == "eager,local,write"


def test_death_in_mid_tree_is_noticed(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_pool.run(programs.tree_to_the_killed, world_size=2, timeout=60)
    assert list(caught.value.failures) == [1], caught.value


def test_over_tcp_the_sender_writes() -> None:
    for routes in run_ranks(programs.all_to_all, 2, env=TCP, timeout=60):
        assert routes == "eager,local,write"


@pytest.mark.parametrize("size", [2, 3])
def test_functions_work_beside_gloo_and_on_its_groups(rank_pool: RankPool, size: int) -> None:
    results = rank_pool.run(programs.beside_gloo, world_size=size, timeout=60)
    total = sum(range(size))
    assert results[-1] == [total, 2 * total, 3 * total]


def test_five_communicators_one_after_another_over_one_store(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(programs.again_and_again, world_size=2, timeout=60)
    assert max(first, second) <= 4, "keys stay behind"


def test_killed_rank_is_noticed_by_all_who_wait(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_pool.run(programs.killed, world_size=2, timeout=60)
    assert list(caught.value.failures) == [1], caught.value


def test_stopped_rank_meets_the_deadline_and_goes_on_later(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.stopped, world_size=2, timeout=60) == [True, True]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_storm_of_messages_arrives_whole(rank_pool: RankPool, size: int, seed: int) -> None:
    counts = rank_pool.run(programs.storm, args=(seed, 150), world_size=size, timeout=90)
    assert sum(counts) == 150 * size


def test_storm_over_tcp_with_a_secret() -> None:
    environment = {**TCP, "TORCH_NIXL_SECRET": "sesame"}
    counts = run_ranks(programs.storm, 2, args=(3, 100), env=environment, timeout=90)
    assert sum(counts) == 200


def test_abort_ends_waits_on_both_sides(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.aborts, world_size=2, timeout=60) == [True, True]


@pytest.mark.timeout(200)
def test_flood_to_a_sleeping_rank_costs_little_and_loses_nothing() -> None:
    count = 100_000
    (sender, queued), (receiver, last) = run_ranks(programs.flood, 2, args=(count,), timeout=150)
    assert queued > count * 0.9
    assert last == 2
    assert sender < 100 << 20, f"{sender >> 20} MiB in the sender"
    assert receiver < 100 << 20, f"{receiver >> 20} MiB in the receiver"
