"""Fixtures of the interoperation tests.

``TORCH_NIXL_DYNAMO_PYTHON`` names the Python of an environment with ai-dynamo-runtime 1.6.1,
torch, numpy and nixl. Without it these tests are skipped.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from interop.client import Peer

DYNAMO = "dynamo.nixl_connect"


@pytest.fixture(scope="session")
def dynamo_python() -> str:
    path = os.environ.get("TORCH_NIXL_DYNAMO_PYTHON", "")
    if not path:
        pytest.skip("TORCH_NIXL_DYNAMO_PYTHON is not set: no dynamo to interoperate with")
    return path


@pytest.fixture
def start_dynamo(dynamo_python: str) -> Iterator[Callable[..., Peer]]:
    """Start dynamo processes that belong to one test alone, for tests that harm them."""
    started: list[Peer] = []

    def start(worker_id: str = "") -> Peer:
        started.append(Peer(dynamo_python, DYNAMO, worker_id=worker_id))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


@pytest.fixture
def start_own_process() -> Iterator[Callable[[dict[str, str]], Peer]]:
    """Start processes that run torch_nixl.connect with environment variables of their own."""
    started: list[Peer] = []

    def start(env: dict[str, str]) -> Peer:
        started.append(Peer(sys.executable, "torch_nixl.connect", env=env))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


@pytest.fixture(scope="module")
def dynamo(dynamo_python: str) -> Iterator[Peer]:
    """A dynamo process shared by the tests of a module."""
    peer = Peer(dynamo_python, DYNAMO)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def other_dynamo(dynamo_python: str) -> Iterator[Peer]:
    """A second dynamo process, for the harness's own test."""
    peer = Peer(dynamo_python, DYNAMO)
    yield peer
    peer.close()


@pytest.fixture(scope="session")
def connect(dynamo_python: str) -> ModuleType:
    """The library under test; the variable lets the tests be proved on dynamo itself."""
    return importlib.import_module(
        os.environ.get("TORCH_NIXL_CONNECT_MODULE", "torch_nixl.connect")
    )


@pytest.fixture(scope="module")
def connector(connect: ModuleType) -> Iterator[Any]:
    """A Connector of the library under test, closed at the end if it can be."""
    made = connect.Connector()
    yield made
    close = getattr(made, "close", None)
    if close is not None:
        close()
