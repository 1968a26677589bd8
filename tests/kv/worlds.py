"""A prefill and a decode side with caches of known contents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from torch_nixl.engine.connection import Connection
from torch_nixl.kv.cache import KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.fetch import Fetch
from torch_nixl.kv.offer import Offer
from torch_nixl.kv.server import KVCacheServer
from torch_nixl.kv.statistics import KVStatistics
from torch_nixl.testing import FakeDevice

LAYERS = 4
PAGE = 16
HEADS = 2
DIM = 8

MODES = ("pull", "push")
"""How decode gets pages, as `Decode.fetch` names it."""


def tensors(num_pages: int, seed: int | None = None, *, layers: int = LAYERS) -> list[torch.Tensor]:
    """One tensor a layer: random with a seed, else zero."""
    shape = (2, num_pages, PAGE, HEADS, DIM)
    if seed is None:
        return [torch.zeros(shape) for _ in range(layers)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(layers)]


def placed(made: list[torch.Tensor], device: FakeDevice | None) -> list[torch.Tensor]:
    """The same in a device's memory."""
    return made if device is None else [device.adopt(one) for one in made]


class Prefill:
    """A server and its cache."""

    def __init__(
        self,
        connection: Connection,
        *,
        num_pages: int = 32,
        seed: int = 1,
        device: FakeDevice | None = None,
        **options: float,
    ) -> None:
        self.tensors = placed(tensors(num_pages, seed), device)
        self.server = KVCacheServer(connection, KVCache(self.tensors, model="m"), **options)
        self.connection = connection


class Decode:
    """A client and its cache."""

    def __init__(
        self,
        connection: Connection,
        *,
        num_pages: int = 32,
        device: FakeDevice | None = None,
        **options: float,
    ) -> None:
        self.tensors = placed(tensors(num_pages), device)
        self.client = KVCacheClient(connection, KVCache(self.tensors, model="m"), **options)
        self.connection = connection

    def fetch(self, mode: str, ticket: str, pages: Sequence[int], **options: object) -> Fetch:
        fetch: Fetch = getattr(self.client, mode)(ticket, pages, **options)
        return fetch


def arrived(
    src: list[torch.Tensor],
    src_pages: Sequence[int],
    dst: list[torch.Tensor],
    dst_pages: Sequence[int],
    start: int,
    stop: int,
) -> bool:
    """Whether the tokens at these positions are equal in all layers."""
    return all(
        torch.equal(
            ours[:, list(src_pages)].flatten(1, 2)[:, start:stop],
            theirs[:, list(dst_pages)].flatten(1, 2)[:, start:stop],
        )
        for ours, theirs in zip(src, dst, strict=True)
    )


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what other threads bring about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.001)


def nothing_held(*statistics: KVStatistics) -> bool:
    return all(one.held_pages == one.open_requests == 0 for one in statistics)


def over(offer: Offer, *fetches: Fetch) -> bool:
    """Wait until all pages are free."""
    return all(one.wait_released(10) for one in (offer, *fetches))
