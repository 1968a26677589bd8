"""Collectives over p2p: every rank of a group calls the same, in the same order."""

from __future__ import annotations

from torch_nixl.collectives.functions import (
    all_gather_tensor,
    all_reduce_tensor,
    all_to_all_tensor,
    barrier,
    broadcast_tensor,
    gather_tensor,
    reduce_scatter_tensor,
    reduce_tensor,
    scatter_tensor,
)
from torch_nixl.collectives.work import CollectiveWork

__all__ = [
    "CollectiveWork",
    "all_gather_tensor",
    "all_reduce_tensor",
    "all_to_all_tensor",
    "barrier",
    "broadcast_tensor",
    "gather_tensor",
    "reduce_scatter_tensor",
    "reduce_tensor",
    "scatter_tensor",
]
