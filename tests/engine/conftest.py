"""Adapters of both kinds for the engine's tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from torch_nixl.engine.adapter import Adapter
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.nixl import NixlAdapter

_numbers = itertools.count()


@pytest.fixture(params=["loopback", "loopback-tcp", "nixl"])
def adapter_factory(request: pytest.FixtureRequest) -> Callable[[str], Adapter]:
    """Make agents that can reach each other, of one of the adapters."""
    if request.param == "nixl":
        return lambda name: NixlAdapter(f"{name}-{next(_numbers)}")
    fabric = LoopbackFabric(mode="tcp" if request.param == "loopback-tcp" else "inline")
    return lambda name: fabric.adapter(f"{name}-{next(_numbers)}")
