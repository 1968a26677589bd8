"""Two ranks in one process, each with a NIXL agent of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.distributed import HashStore

from torch_nixl.engine.connection import Connection
from torch_nixl.p2p import protocol
from torch_nixl.p2p.communicator import Communicator

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
def two_ranks() -> Iterator[Two]:
    store = HashStore()
    a, b = (
        Communicator(store, rank, 2, timeout=DEADLINE, connection=Connection.open(f"two{rank}"))
        for rank in range(2)
    )
    try:
        yield Two(a, b)
    finally:
        for communicator in (a, b):
            communicator.abort()
        for communicator in (a, b):
            communicator.connection.abort()


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with two_ranks() as ranks:
        yield ranks
