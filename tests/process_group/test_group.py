"""torch.distributed on "nixl", on real ranks."""

from __future__ import annotations

import pytest
import torch

from process_group import programs
from torch_nixl.testing import RankPool, run_ranks


def _assert_same(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> None:
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert len(mine) == len(other) > 0
        for index, (one, two) in enumerate(zip(mine, other, strict=True)):
            assert one.shape == two.shape and torch.equal(one, two), (rank, index, one, two)


@pytest.mark.parametrize(("size", "count"), [(2, 5), (3, 5), (2, 300_000)])
def test_every_operation_does_what_it_does_on_gloo(
    rank_pool: RankPool, size: int, count: int
) -> None:
    ours = rank_pool.run(programs.everything, args=("nixl", count), world_size=size)
    _assert_same(ours, rank_pool.run(programs.everything, args=("gloo", count), world_size=size))


def test_reductions_are_those_of_gloo(rank_pool: RankPool) -> None:
    ours = rank_pool.run(programs.operators, args=("nixl",), world_size=2)
    _assert_same(ours, rank_pool.run(programs.operators, args=("gloo",), world_size=2))


def test_premultiplied_sum_through_torch(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.premultiplied, world_size=2) == [[1.5, 1.5, 1.5], [1.5, 2.0, 1.5]]


def test_every_operation_over_tcp_with_a_secret(rank_pool: RankPool) -> None:
    environment = {"UCX_TLS": "tcp,self", "TORCH_NIXL_SECRET": "sesame"}
    ours = run_ranks(programs.everything, 2, args=("nixl", 50_000), env=environment)
    _assert_same(ours, rank_pool.run(programs.everything, args=("gloo", 50_000), world_size=2))


def test_empty_tensors_go_through_every_operation(rank_pool: RankPool) -> None:
    # Gloo refuses some.
    for got in rank_pool.run(programs.everything, args=("nixl", 0), world_size=2):
        assert {one.numel() for one in got} <= {0, 2, 4}


@pytest.mark.parametrize(
    ("backend", "host", "kinds"),
    [
        ("nixl", "nixl", ["cpu", "cuda"]),
        ("cpu:nixl", "nixl", ["cpu"]),
        ("cpu:gloo,cuda:nixl", "gloo", ["cpu", "cuda"]),
        ("cuda:nixl,cpu:gloo", "gloo", ["cpu", "cuda"]),
        ("cpu:nixl,cuda:gloo", "nixl", ["cpu", "cuda"]),
    ],
)
def test_backend_is_chosen_by_device(
    rank_pool: RankPool, backend: str, host: str, kinds: list[str]
) -> None:
    for result in rank_pool.run(programs.init_string, args=(backend,), world_size=2):
        assert result == (host, kinds, 4.0)


def test_groups_of_all_and_of_some_beside_gloo(rank_pool: RankPool) -> None:
    whole = rank_pool.run(programs.everything, args=("gloo", 5), world_size=3)
    part = rank_pool.run(programs.everything, args=("gloo", 5), world_size=2)
    for rank, got in enumerate(rank_pool.run(programs.beside_gloo, world_size=3)):
        expected = [*whole[rank], *(part[rank - 1] if rank else []), torch.tensor([3.0])]
        _assert_same([got], [expected])


def test_group_is_split_without_the_rest(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.splitting, world_size=3) == [[], [3.0], [3.0]]


def test_what_is_split_off_a_mixed_group_is_mixed(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.splitting_mixed, world_size=2) == [[1.0], [1.0]]


def test_torch_splits_a_group(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.split_by_torch, world_size=3) == [[1.0], [5.0], [5.0]]


def test_mesh_of_two_dimensions(rank_pool: RankPool) -> None:
    rows_and_columns = rank_pool.run(programs.mesh, world_size=4)
    assert rows_and_columns == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


def test_objects_arrive(rank_pool: RankPool) -> None:
    rank_pool.run(programs.objects, world_size=3)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_functional_collectives_do_the_same_compiled(rank_pool: RankPool, compiler: str) -> None:
    plain = rank_pool.run(programs.functionals, args=(None,), world_size=2)
    compiled = rank_pool.run(programs.functionals, args=(compiler,), world_size=2, timeout=110)
    _assert_same(compiled, plain)


def test_works_have_results_and_futures(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.futures, world_size=2) == [[2.0] * 3] * 2


def test_sparse_tensors_are_summed(rank_pool: RankPool) -> None:
    rank_pool.run(programs.sparse_sum, world_size=2)


def test_inference_tensors_are_written_to_in_any_thread(rank_pool: RankPool) -> None:
    rank_pool.run(programs.inference_tensors, world_size=2)


def test_operations_show_in_a_profile(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.profiled, world_size=2) == [(2, 1), (2, 1)]


def test_debug_level_detail_changes_no_result(rank_pool: RankPool) -> None:
    plain = rank_pool.run(programs.everything, args=("nixl", 3), world_size=2)
    _assert_same(rank_pool.run(programs.in_detail, world_size=2), plain)


@pytest.mark.parametrize(
    ("wait_all_ranks", "named"), [(True, "ranks 1, 2"), (False, "rank 1 and 1 more")]
)
def test_monitored_barrier_names_who_did_not_come(
    rank_pool: RankPool, wait_all_ranks: bool, named: str
) -> None:
    texts = rank_pool.run(programs.barrier_with_names, args=(wait_all_ranks,), world_size=4)
    assert [bool(text) for text in texts] == [True, False, False, True]
    assert texts[0] == texts[3]
    assert f"monitored_barrier #1: {named} did not come within 0.5 s" in texts[0]


def test_abort_frees_a_thread_that_waits(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.aborts, world_size=2) == [2.0, 2.0]


def test_timeouts_are_the_groups_or_the_waits_own(rank_pool: RankPool) -> None:
    assert rank_pool.run(programs.timeouts, world_size=2) == [True, True]


def test_init_and_destroy_again_and_again_over_one_store(rank_pool: RankPool) -> None:
    few = max(rank_pool.run(programs.again, args=(2,), world_size=2))
    many = max(rank_pool.run(programs.again, args=(6,), world_size=2))
    assert many == few
