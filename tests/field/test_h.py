"""Field reports, group H (groups, ranks, objects, stores), and A and D where they meet groups.

H7, H8 and H10 (what 300 groups, or an exit without destroy, leave behind) are in
`process_group/test_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from field import group_programs as programs
from torch_nixl.testing import Rank, RankPool


@pytest.mark.parametrize(
    "program",
    [
        programs.h1_by_global_and_by_group_rank,
        programs.h2_h4_roots_by_global_and_by_group_rank,
    ],
)
def test_ranks_of_a_part_are_told_by_either_number(
    rank_pool: RankPool, program: Callable[[Rank], None]
) -> None:
    rank_pool.run(program, world_size=3)


@pytest.mark.parametrize(
    "program",
    [
        programs.h5_objects,
        programs.a3_a5_strided_sends,
        programs.a6_column_in_collectives,
        programs.a8_transposed_gather,
        programs.d4_completion_without_wait,
        programs.d8_unmatched_operation_in_a_batch,
        programs.d10_tags_in_reverse,
    ],
)
def test_group_has_not_the_reported_fault(
    rank_pool: RankPool, program: Callable[[Rank], None]
) -> None:
    rank_pool.run(program, world_size=2)


def test_h12_two_worlds_at_once_on_one_host(rank_pool: RankPool) -> None:
    found = rank_pool.run(programs.h12_two_worlds_at_once, world_size=4)
    assert found == [[1.0, 1.0], [1.0, 0.0], [5.0, 3.0], [5.0, 2.0]]


def test_h12_port_that_is_taken_is_named(rank_pool: RankPool) -> None:
    rank_pool.run(programs.h12_port_is_taken, world_size=1)


def test_d5_d6_sends_come_first_and_do_not_block(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(programs.d5_d6_sends_before_receives, world_size=2)) < 1.0


def test_d23_abort_does_not_wait_for_a_rank_that_is_away(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(programs.d23_destroy_while_a_rank_is_away, world_size=3)) < 5.0
