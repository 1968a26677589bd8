"""No collective holds more than twice its output in temporary memory, over NIXL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from collectives import memory
from torch_nixl.testing import RankPool

MOST = 2.0
NOISE = 512 << 10
"""Frames, Python's own memory, and what the kernel counts late."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4, env=memory.ENVIRONMENT) as pool:
        yield pool


@pytest.mark.parametrize("gaps", [False, True], ids=["contiguous", "with gaps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "nbytes"), [(2, 3 << 20), (2, 6 << 20), (4, 6 << 20)])
def test_no_collective_holds_more_than_twice_its_output(
    ranks: RankPool, size: int, nbytes: int, dtype: torch.dtype, gaps: bool
) -> None:
    found = ranks.run(memory.peaks, args=(nbytes, dtype, gaps), world_size=size)
    limit = MOST + NOISE / nbytes
    most = {name: max(one[name] for one in found) for name in found[0]}
    assert {name: round(one, 2) for name, one in most.items() if one > limit} == {}
    if gaps:
        # What is sure to need a copy: if it shows nothing, nothing was measured.
        assert most["all_reduce"] > 1
