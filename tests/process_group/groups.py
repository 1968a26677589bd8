"""A process group for as long as a rank's function needs one."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import torch.distributed as dist

import torch_nixl  # noqa: F401 - makes the backend known
from torch_nixl.testing import Rank


@contextlib.contextmanager
def default_group(
    rank: Rank, backend: str = "nixl", *, timeout: float = 30.0
) -> Iterator[dist.ProcessGroup]:
    """Initialise `torch.distributed` over the run's own store; destroy it in the end."""
    dist.init_process_group(
        backend,
        store=rank.store(),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    except BaseException:
        # The other ranks may be anywhere: don't wait for them.
        dist.distributed_c10d._abort_process_group()
        raise
    dist.destroy_process_group()
