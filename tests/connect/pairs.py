"""Two Connectors in one process, for tests that need no second one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from torch_nixl import connect

DEADLINE = 20.0


@dataclass(slots=True)
class Pair:
    """One exposes, the other reads or writes."""

    owner: connect.Connector
    other: connect.Connector

    def readable(self, data: object, **options: Any) -> connect.ReadableOperation:
        return connect.ReadableOperation(self.owner.connection(), describe(data), **options)

    def writable(self, data: object, **options: Any) -> connect.WritableOperation:
        return connect.WritableOperation(self.owner.connection(), describe(data), **options)

    def read(self, metadata: connect.RdmaMetadata, data: object, **options: Any) -> Any:
        connection = self.other.connection()
        return connect.ReadOperation(connection, over_json(metadata), describe(data), **options)

    def write(self, data: object, metadata: connect.RdmaMetadata, **options: Any) -> Any:
        connection = self.other.connection()
        return connect.WriteOperation(connection, describe(data), over_json(metadata), **options)

    def move(self, source: object, target: object) -> None:
        """Read `source`, exposed by the owner, into `target`, and wait for both sides."""
        exposed = self.readable(source)
        reading = self.read(exposed.metadata(), target)
        reading.wait(DEADLINE)
        exposed.wait(DEADLINE)


def describe(data: object) -> Any:
    """Return a Descriptor, or a list of them for a list."""
    if isinstance(data, list):
        return [
            one if isinstance(one, connect.Descriptor) else connect.Descriptor(one) for one in data
        ]
    return data if isinstance(data, connect.Descriptor) else connect.Descriptor(data)


def over_json(metadata: connect.RdmaMetadata) -> connect.RdmaMetadata:
    return connect.RdmaMetadata.model_validate_json(metadata.model_dump_json())


def pattern(num_bytes: int, seed: int = 1) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def bounded(scenario: Any) -> Any:
    """Run a coroutine in a loop of its own, with a deadline."""

    async def run() -> Any:
        return await asyncio.wait_for(scenario, DEADLINE)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    owner, other = connect.Connector("owner"), connect.Connector("other")
    yield Pair(owner, other)
    owner.abort()
    other.abort()
