"""Servers and clients of KV caches in one process, on the loopback adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from torch_nixl.engine.connection import Connection
from torch_nixl.kv.cache import KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.server import KVCacheServer
from torch_nixl.testing import LoopbackFabric

LAYERS = 4
T = 16


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


Open = Callable[[str], Connection]


@pytest.fixture
def connect(fabric: LoopbackFabric) -> Iterator[Open]:
    """Make connections that are closed in the end."""
    made: list[Connection] = []

    def make(name: str) -> Connection:
        made.append(Connection(fabric.adapter(name), timeout=20.0))
        return made[-1]

    yield make
    for connection in made:
        connection.abort()


def tensors(num_pages: int, *, random: bool) -> list[torch.Tensor]:
    make = torch.randn if random else torch.zeros
    return [make(2, num_pages, T, 3, 8) for _ in range(LAYERS)]


def check(
    src: list[torch.Tensor],
    src_pages: list[int],
    dst: list[torch.Tensor],
    dst_pages: list[int],
    start: int,
    stop: int,
) -> None:
    for ours, theirs in zip(src, dst, strict=True):
        a = ours[:, src_pages].flatten(1, 2)[:, start:stop]
        b = theirs[:, dst_pages].flatten(1, 2)[:, start:stop]
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_pages_arrive_and_are_free_on_both_sides(connect: Open, mode: str) -> None:
    src, dst = tensors(20, random=True), tensors(30, random=False)
    server = KVCacheServer(connect("prefill"), KVCache(src, model="m"))
    client = KVCacheClient(connect("decode"), KVCache(dst, model="m"))
    offer = server.offer("one", [3, 1, 2], 40)
    fetch = getattr(client, mode)(offer.ticket, [10, 20, 11])
    fetch.wait(10)
    assert offer.wait_released(10) and fetch.wait_released(10)
    check(src, [3, 1, 2], dst, [10, 20, 11], 0, 40)
    assert not dst[0][:, 11, 8:].any()
    [ended] = server.poll()
    assert (ended.request, ended.pages, ended.error) == ("one", ((3, 1, 2),), None)
    [ended] = client.poll()
    assert (ended.request, ended.pages, ended.error) == ("one", ((10, 20, 11),), None)
    assert server.poll() == client.poll() == []
    assert server.statistics().held_pages == client.statistics().held_pages == 0
