"""Which Communicators `init`, `get_communicator` and `shutdown` know."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import torch_nixl
from torch_nixl.engine.connection import Connection
from torch_nixl.p2p import default
from torch_nixl.testing import LoopbackFabric


@pytest.fixture(autouse=True)
def alone(fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one rank, on the loopback adapter."""
    monkeypatch.setattr(Connection, "open", lambda name: Connection(fabric.adapter(name)))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch_nixl.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("first", ["by default", "by name"])
def test_world_has_one_communicator(first: str) -> None:
    world = dist.group.WORLD
    made = torch_nixl.init() if first == "by default" else torch_nixl.init(world)
    assert torch_nixl.get_communicator() is made
    assert torch_nixl.get_communicator(world) is made
    torch_nixl.send_tensor(torch.ones(3), 0)
    assert torch_nixl.recv_tensor(0, group=world).shape == (3,)
    entry = SimpleNamespace(op="isend", tensor=torch.ones(2), peer=0, tag=0, group=world)
    torch_nixl.batch_isend_irecv([entry])
    assert torch_nixl.recv_tensor(0).shape == (2,)


def test_world_is_not_the_default_of_another_store() -> None:
    other = torch_nixl.init(store=HashStore(), rank=0, world_size=1)
    assert torch_nixl.get_communicator() is other
    world = torch_nixl.get_communicator(dist.group.WORLD)
    assert world is not other
    assert torch_nixl.get_communicator(dist.group.WORLD) is world


def test_shutdown_closes_all_that_were_made() -> None:
    store = HashStore()
    made = [
        torch_nixl.init(store=store, rank=0, world_size=1),
        torch_nixl.init(store=store, rank=0, world_size=1, prefix="second"),
        torch_nixl.init(),
        torch_nixl.init(),
    ]
    group = dist.new_group([0])
    made.append(torch_nixl.init(group))
    dist.destroy_process_group()
    del group
    gc.collect()
    assert not any(one.closed for one in made)
    torch_nixl.shutdown()
    assert all(one.closed for one in made)
    torch_nixl.shutdown()


@pytest.fixture
def rank_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process a rank of two, whose store is at a port."""

    def be(rank: int, port: int) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("MASTER_PORT", port)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    return be


def test_a_port_that_is_taken_is_named(rank_of_torchrun: Callable[[int, int], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rank_of_torchrun(0, port)
        with pytest.raises(torch_nixl.BackendError, match=f"port {port} of this host, .* is taken"):
            default._rendezvous(5.0)


def test_a_store_that_nobody_makes_is_a_timeout(
    rank_of_torchrun: Callable[[int, int], None],
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # Bound, so nobody else's, and nobody listens.
        rank_of_torchrun(1, listener.getsockname()[1])
        with pytest.raises(torch_nixl.TransferTimeout, match="not all ranks came to the store"):
            default._rendezvous(1.0)
