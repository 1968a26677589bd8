"""What a failed request leaves in pages on a device: nothing that could pass for data.

A program may have queued work on them that nobody can call back any more.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.deferred import when
from torch_nixl.engine.memory import Memory
from torch_nixl.engine.streams import StreamDevice, StreamOrder, device_of_memory, fill_byte
from torch_nixl.kv.plan import Run, make_plan
from torch_nixl.p2p.ordered import run_in_turn

if TYPE_CHECKING:
    from torch_nixl.kv.registered import RegisteredPool

log = logging.getLogger("torch_nixl.streams")

MAX_SPANS: Final = 4096
"""Most spans of pages that are described at a time."""


def fill(
    pool: RegisteredPool, runs: Sequence[Run], order: StreamOrder, then: Callable[[], None]
) -> None:
    """Fill pages with NaN, or 0xFF where there is none, in their devices' threads.

    Not before what was queued at the call has run: it may still use them.

    Args:
        pool: Whose pages.
        runs: Which, for each group of layers.
        order: The request's.
        then: Called in the end, without locks.
    """
    if not order.passed():
        # The connection, whose driver looks at points otherwise, may be closed by now.
        when(order.passed, lambda: fill(pool, runs, order, then))
        return

    def filled(error: BaseException | None) -> None:
        if error is not None:
            log.error("pages of a failed request could not be filled: %s", error)
        then()

    jobs = [(device, functools.partial(_fill, pool, runs, device)) for device in order.devices]
    run_in_turn(jobs, filled)


def _fill(pool: RegisteredPool, runs: Sequence[Run], device: StreamDevice) -> None:
    for memory, byte in _pieces(pool, runs):
        if device_of_memory(memory) is device:
            device.fill(memory, byte)


def _pieces(pool: RegisteredPool, runs: Sequence[Run]) -> Iterator[tuple[Memory, int]]:
    """Describe pages as memory, region by region, and tell what each is filled with."""
    at = 0
    for layout, run, owners in zip(pool.cache.layouts, runs, pool.cache.owners, strict=True):
        memories = [held.memory for held in pool.held[at : at + len(owners)]]
        at += len(owners)
        # From the pages to themselves: the one plan that has all of them, neighbours merged.
        stop = run.first + len(run.pages) * layout.geometry.page_size
        plan = make_plan(layout, run, layout, run, start=run.first, stop=stop)
        bases = np.array([(one.base, index) for index, one in enumerate(memories)], np.uint64)
        for spans, _ in plan.pieces(bases, bases, max_bytes=1 << 62, max_spans=MAX_SPANS):
            for index in np.unique(spans[:, 2]).tolist():
                rows = spans[spans[:, 2] == index, :2]
                memory = replace(memories[index], layout=rows, nbytes=algebra.total(rows))
                yield memory, fill_byte(layout.geometry.dtype)
