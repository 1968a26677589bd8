"""Communicators of several ranks in this process, on the loopback adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from torch_nixl.engine.connection import Connection
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import LoopbackFabric

World = Callable[..., list[Communicator]]


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.fixture
def world(fabric: LoopbackFabric) -> Iterator[World]:
    """Make the Communicators of a world; all are closed in the end."""
    made: list[Communicator] = []

    def make(
        size: int = 2, *, timeout: float | None = 20.0, prefix: str = "t"
    ) -> list[Communicator]:
        store = HashStore()
        ranks = [
            Communicator(
                store,
                rank,
                size,
                prefix=prefix,
                timeout=timeout,
                connection=Connection(fabric.adapter(f"{prefix}{len(made)}-{rank}")),
            )
            for rank in range(size)
        ]
        made.extend(ranks)
        return ranks

    yield make
    for communicator in made:
        communicator.abort()
    for communicator in made:
        communicator.connection.abort()


@pytest.fixture(params=["cma", "tcp"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which way bytes take: by READ on one host, by WRITE over TCP."""
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    return str(request.param)
