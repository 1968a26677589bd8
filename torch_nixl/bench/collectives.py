"""Collectives over all ranks: ours against Gloo's or NCCL's.

Sizes are those of one rank's tensor: what is broadcast, scattered, reduced or sent; for all_gather
what each rank gives, for reduce_scatter what each gets, for all_to_all what each sends in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import torch_nixl
from torch_nixl.bench.report import OURS
from torch_nixl.bench.session import Case, Contestant, Session

SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)

NAMES = (
    *("broadcast", "scatter", "gather", "all_gather", "all_to_all"),
    *("reduce", "all_reduce", "reduce_scatter"),
)

ROOT = 0


def suite(session: Session) -> list[Case]:
    """Each collective at each size, and the barrier."""
    cases = [
        Case(name, nbytes, partial(_make, session, name, nbytes), contestants=2)
        for nbytes in session.options.sizes
        for name in NAMES
    ]
    return [*cases, Case("barrier", 0, partial(_make, session, "barrier", 0), contestants=2)]


def _make(session: Session, name: str, nbytes: int) -> dict[str, Contestant]:
    ours, theirs = _Calls(session, nbytes).calls(name)
    contestants = {OURS: session.timed(ours)}
    for rival, group in session.rivals().items():
        contestants[rival] = session.timed(partial(theirs, group=group))
    return contestants


class _Calls:
    """The tensors of one size, and what is called with them."""

    def __init__(self, session: Session, nbytes: int) -> None:
        self._group = session.communicator
        self._size = session.world_size
        self._count = max(1, nbytes // 4)
        self._device = session.device
        self._is_root = session.rank == ROOT

    def calls(self, name: str) -> tuple[Callable[[], object], Callable[..., object]]:
        """A collective: ours, and the one of c10d, which takes ``group``."""
        if name == "barrier":
            return partial(torch_nixl.barrier, group=self._group), dist.barrier
        one = self._new(self._count)
        if name in ("broadcast", "reduce", "all_reduce"):
            root = () if name == "all_reduce" else (ROOT,)
            return self._pair(f"{name}_tensor", getattr(dist, name), one, *root)
        if name == "all_to_all":
            # Each rank's share has to be whole.
            count = max(1, self._count // self._size) * self._size
            sent, got = self._new(count), self._new(count)
            return self._pair("all_to_all_tensor", dist.all_to_all_single, got, sent)
        whole = self._new(self._count * self._size)
        if name == "all_gather":
            theirs = _newest("all_gather_single", "all_gather_into_tensor")
            return self._pair("all_gather_tensor", theirs, whole, one)
        if name == "reduce_scatter":
            theirs = _newest("reduce_scatter_single", "reduce_scatter_tensor")
            return self._pair("reduce_scatter_tensor", theirs, one, whole)
        parts = list(whole.chunk(self._size)) if self._is_root else None
        return self._pair(f"{name}_tensor", getattr(dist, name), one, parts, ROOT)

    def _pair(
        self, ours: str, theirs: Callable[..., object], *arguments: object
    ) -> tuple[Callable[[], object], Callable[..., object]]:
        call = getattr(torch_nixl, ours)
        return partial(call, *arguments, group=self._group), partial(theirs, *arguments)

    def _new(self, count: int) -> torch.Tensor:
        return torch.zeros(count, device=self._device)


def _newest(*names: str) -> Callable[..., object]:
    """What torch calls it: the old names warn from some version on."""
    found: Callable[..., object] = next(
        getattr(dist, name) for name in names if hasattr(dist, name)
    )
    return found
