"""Servers and clients of KV caches in this process, on the loopback adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kv.worlds import MODES
from torch_nixl.engine.connection import Connection
from torch_nixl.testing import LoopbackFabric

Open = Callable[..., Connection]

BOTH = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.fixture
def connect(fabric: LoopbackFabric) -> Iterator[Open]:
    """Make connections that are aborted in the end."""
    made: list[Connection] = []

    def make(name: str, **options: object) -> Connection:
        made.append(Connection(fabric.adapter(name), **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for connection in made:
        connection.abort()
