"""Connections of this process on the loopback adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from torch_nixl.engine.connection import Connection
from torch_nixl.testing import LoopbackFabric


@pytest.fixture
def connect() -> Iterator[Callable[[str], Connection]]:
    """Make connections that are aborted in the end."""
    fabric = LoopbackFabric()
    made: list[Connection] = []

    def make(name: str) -> Connection:
        made.append(Connection(fabric.adapter(name)))
        return made[-1]

    yield make
    for connection in made:
        connection.abort()
