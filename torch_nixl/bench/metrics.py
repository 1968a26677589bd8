"""What metrics, traces and spans cost: half a round trip with each of them on, against off."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

import torch_nixl
from torch_nixl.bench.p2p import one_by_one
from torch_nixl.bench.report import OURS
from torch_nixl.bench.session import Case, Contestant, Session

SIZES = (8, 64 << 10, 1 << 20, 64 << 20)

OFF = "off"


def suite(session: Session) -> list[Case]:
    """Each of what watches, at each size; and nothing, which tells how far to trust the rest."""
    directory = session.stack.enter_context(tempfile.TemporaryDirectory())
    watchers: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "nothing": nullcontext,
        "trace": partial(torch_nixl.trace, Path(directory) / "trace.json"),
    }
    for name, module, watcher in (
        ("metrics", "prometheus_client", _metrics),
        ("spans", "opentelemetry", _spans),
    ):
        if find_spec(module) is None:
            session.missing[name] = f"{module} is not installed: pip install 'torch-nixl[metrics]'"
        else:
            watchers[name] = watcher
    return [
        Case(f"{name} on", nbytes, partial(_make, session, watcher, nbytes), 2.0, 2)
        for name, watcher in watchers.items()
        for nbytes in session.options.sizes
    ]


def _make(
    session: Session, watcher: Callable[[], AbstractContextManager[object]], nbytes: int
) -> dict[str, Contestant]:
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=session.device)
    plain = one_by_one(session, [tensor])

    def watched(count: int) -> list[float]:
        with watcher():
            return list(plain(count))

    return {OURS: watched, OFF: plain}


def _metrics() -> AbstractContextManager[object]:
    from prometheus_client import CollectorRegistry

    return closing(torch_nixl.metrics.expose(CollectorRegistry()))


def _spans() -> AbstractContextManager[object]:
    return closing(torch_nixl.metrics.export_spans())
