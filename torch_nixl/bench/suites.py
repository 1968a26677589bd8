"""The suites by name."""

from __future__ import annotations

from torch_nixl.bench import collectives, connect, kv, metrics, p2p
from torch_nixl.bench.session import Suite

_SUITES = {"p2p": p2p, "collectives": collectives, "connect": connect, "kv": kv, "metrics": metrics}


def find(name: str, *, full: bool = False) -> tuple[Suite, tuple[int, ...]]:
    """A suite, and the sizes that it measures by default, or in full."""
    module = _SUITES[name]
    return module.suite, p2p.FULL_SIZES if module is p2p and full else module.SIZES
