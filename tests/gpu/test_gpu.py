"""Device streams on a real GPU, where there is one; their programs on a CPU everywhere."""

from __future__ import annotations

import pytest
import torch

from gpu.check import main
from gpu.programs import CHECKS, HOST_SECONDS
from torch_nixl.testing import RankPool

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", sorted(CHECKS))
def test_check_holds_on_a_gpu(rank_pool: RankPool, name: str) -> None:
    results = rank_pool.run(CHECKS[name], args=("cuda",), world_size=2, timeout=90.0)
    if name == "ordering":
        assert max(map(float, results)) < HOST_SECONDS


def test_programs_run_without_a_gpu(rank_pool: RankPool) -> None:
    """The whole script, its ranks and its report, with host memory in the device's place."""
    said: list[str] = []
    assert main(rank_pool, "cpu", said.append, nbytes=1 << 20)
    assert [line.split(":")[0] for line in said[1:]] == [*CHECKS, "torch_nixl", "torch copy"]
    assert all(": ok" in line for line in said[1 : 1 + len(CHECKS)])
