"""The suites by name."""

from __future__ import annotations

from torch_nixl.bench import collectives, connect, kv, metrics, p2p
from torch_nixl.bench.session import Suite

_SUITES = {"p2p": p2p, "collectives": collectives, "connect": connect, "kv": kv, "metrics": metrics}


def find(name: str) -> tuple[Suite, tuple[int, ...]]:
    """A suite, and the sizes that it measures by default."""
    module = _SUITES[name]
    return module.suite, module.SIZES
