"""Two ranks in one process, each with a NIXL agent of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.distributed import HashStore

from torch_nixl.engine.connection import Connection
from torch_nixl.p2p import protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import LoopbackFabric

DEADLINE = 20.0
LARGE = 4 * protocol.EAGER_NBYTES
"""Elements, of any dtype, of a message whose bytes don't come in its frame."""


@dataclass(slots=True)
class Two:
    """Rank 0 and rank 1."""

    a: Communicator
    b: Communicator

    def move(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Send from rank 0 to rank 1, and wait for both."""
        work = self.a.isend(tensor, 1)
        received = self.b.recv(0, out=out)
        work.wait()
        return received


@contextlib.contextmanager
def two_ranks(fabric: LoopbackFabric | None = None) -> Iterator[Two]:
    """Make two ranks, over NIXL or on a fake network."""
    store = HashStore()
    a, b = (
        Communicator(store, rank, 2, timeout=DEADLINE, connection=_connect(f"two{rank}", fabric))
        for rank in range(2)
    )
    try:
        yield Two(a, b)
    finally:
        for communicator in (a, b):
            communicator.abort()
        for communicator in (a, b):
            communicator.connection.abort()


def _connect(name: str, fabric: LoopbackFabric | None) -> Connection:
    return Connection.open(name) if fabric is None else Connection(fabric.adapter(name))


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other threads bring about."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.001)


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with two_ranks() as ranks:
        yield ranks
