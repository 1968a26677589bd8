"""What the ranks of the memory test run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

import torch_nixl as nixl
from collectives.programs import make
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import Rank

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
"""Has larger memory mapped, and unmapped when it is freed, so that it counts no longer."""

_libc = ctypes.CDLL(None)


def peaks(rank: Rank, nbytes: int, dtype: torch.dtype, gaps: bool) -> dict[str, float]:
    """Run every collective; for each, the most memory it held besides, as a multiple of its output.

    Where only one rank has an output, the others' is counted as that.

    Args:
        rank: This rank.
        nbytes: Size of each output.
        dtype: Of all tensors.
        gaps: Whether all are spread over twice as much memory.
    """
    size, last = rank.world_size, rank.world_size - 1
    # Rows that no rank's part ends at.
    count = nbytes // dtype.itemsize // (5 * size) * size

    def tensor(count: int) -> torch.Tensor:
        return torch.ones(5, count, 2 if gaps else 1, dtype=dtype)[..., 0]

    whole, out, part = tensor(count), tensor(count), tensor(count // size)
    parts = [tensor(count // size) for _ in range(size)]
    others = [tensor(count // size) for _ in range(size)]
    several = [tensor(500) for _ in range(40)]
    many = [tensor(count) for _ in range(size)]
    large = torch.cat([one.reshape(-1) for one in many]).view(count, 5 * size)
    if gaps:
        large = large.repeat_interleave(2, 1).view(count, 5 * size, 2)[..., 0]
    group = make(rank)
    root = rank.rank == last
    collectives: dict[str, Callable[[Communicator], object]] = {
        "broadcast": lambda g: nixl.broadcast_tensor(whole, last, group=g),
        "scatter": lambda g: nixl.scatter_tensor(out, many if root else None, last, group=g),
        "gather": lambda g: nixl.gather_tensor(part, parts if root else None, last, group=g),
        "all_gather": lambda g: nixl.all_gather_tensor(out, part, group=g),
        "all_gather of a list": lambda g: nixl.all_gather_tensor(parts, part, group=g),
        "all_to_all": lambda g: nixl.all_to_all_tensor(out.t(), whole.t(), group=g),
        "all_to_all of lists": lambda g: nixl.all_to_all_tensor(parts, others, group=g),
        "reduce": lambda g: nixl.reduce_tensor(whole, last, group=g),
        "all_reduce": lambda g: nixl.all_reduce_tensor(whole, group=g),
        "all_reduce of a list": lambda g: nixl.all_reduce_tensor([*several, whole], group=g),
        "reduce_scatter": lambda g: nixl.reduce_scatter_tensor(out, large, group=g),
        "reduce_scatter of a list": lambda g: nixl.reduce_scatter_tensor(out, many, group=g),
    }
    found = {}
    try:
        for name, call in collectives.items():
            call(group)  # Code that is loaded at its first use counts, too.
            nixl.barrier(group=group)
            _libc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
            before = _resident("VmRSS")
            call(group)
            found[name] = (_resident("VmHWM") - before) / nbytes
    finally:
        group.close()
    return found


def _resident(name: str) -> int:
    """Bytes of memory: now, or at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"this system does not tell {name}")
