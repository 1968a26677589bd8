"""PyTorch's own tests of its backends: some here, all with `python tests/upstream/run.py`."""

from __future__ import annotations

import pytest

from upstream import run

SOME = (
    "test_DistributedDataParallelCPU",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_cuda",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_to_all_single_unequal_split",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather_checks",
    "test_get_future",
    "test_irecv",
    "test_reduce_group_sum",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
)
"""All without the pool that stands in for Gloo, which would cost as much again."""


def test_some_of_torchs_own_tests_pass() -> None:
    results = {result.name: result for result in run.run(SOME)}
    assert set(results) == set(SOME)
    assert [one for one in results.values() if one.outcome == "failed"] == []
    # More, and a rule for what is not applicable has swallowed them.
    skipped = [one.name for one in results.values() if one.outcome == "not applicable"]
    assert set(skipped) <= {"test_all_gather_cuda"}


@pytest.mark.soak
def test_all_of_torchs_own_tests_pass() -> None:
    assert {one.name: one.reason for one in run.run() if one.outcome == "failed"} == {}
