"""PyTorch's own libraries on "nixl" compute what they compute on Gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from process_group import users
from torch_nixl.testing import Rank, RankPool


@pytest.mark.parametrize(
    "program",
    [
        users.ddp,
        users.fsdp2,
        users.dtensor,
        users.pipelining,
        users.checkpoint,
        users.experts,
    ],
)
def test_library_computes_what_it_does_on_gloo(
    rank_pool: RankPool, program: Callable[[Rank, str], users.Results]
) -> None:
    ours = rank_pool.run(program, args=("nixl",), world_size=2, timeout=90)
    gloos = rank_pool.run(program, args=("gloo",), world_size=2, timeout=90)
    for rank in range(2):
        assert len(ours[rank]) == len(gloos[rank]) > 0
        for index, (mine, theirs) in enumerate(zip(ours[rank], gloos[rank], strict=True)):
            assert torch.equal(mine, theirs), (rank, index)
