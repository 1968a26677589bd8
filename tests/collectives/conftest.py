"""Groups of ranks in this process, on the loopback adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from p2p.conftest import World, fabric, path, world

from torch_nixl.collectives import CollectiveWork, choice
from torch_nixl.p2p.communicator import Communicator

__all__ = ["World", "fabric", "path", "world"]


def together(
    ranks: Sequence[Communicator], call: Callable[[Communicator], CollectiveWork | None]
) -> list[list[torch.Tensor]]:
    """Let every rank begin a collective, and return what each changed."""
    works = [call(rank) for rank in ranks]
    results = []
    for work in works:
        assert work is not None
        results.append(work.result(20))
    return results


@pytest.fixture(params=["at once", "segments"])
def reducing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way small tensors are reduced: all by all, or each rank its segment in chunks."""
    if request.param == "segments":
        monkeypatch.setattr(choice, "SMALL_NBYTES", -1)
        monkeypatch.setattr(choice, "MIN_CHUNK_NBYTES", 64)
        monkeypatch.setattr(choice, "CHUNK_NBYTES", 256)
    return str(request.param)
