"""Fixtures for all tests: processes that stay warm, and devices that are slow."""

from __future__ import annotations

import faulthandler
import gc
import threading
from collections.abc import Iterator

import pytest

# Before anything imports it, so that a failing check says what it compared.
pytest.register_assert_rewrite("torch_nixl._testing")

from torch_nixl.testing import FakeDevice, RankPool  # noqa: E402 - after the line above


def pytest_collection_finish() -> None:
    """Keep what torch and the tests are made of out of later garbage collections.

    A full one of that many objects holds the GIL for half a second: longer than the limits of
    requests that are meant to fail soon, so that others would, too.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _stacks_of_a_crash() -> None:
    # NIXL and UCX are C++: what kills the process there would otherwise leave no word.
    if not faulthandler.is_enabled():
        faulthandler.enable()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Four warm ranks, started as needed: `rank_pool.run(fn, world_size=2)` uses two of them."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def slow() -> Iterator[threading.Event]:
    """What a slow kernel waits for. Set at the end, so that no stream's thread is left behind."""
    event = threading.Event()
    yield event
    event.set()
