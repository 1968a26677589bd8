"""Backends of other names, which serve devices beside ours in one group."""

from __future__ import annotations

import datetime
from typing import Any, TypeAlias

import torch.distributed as dist

Other: TypeAlias = Any
"""A C++ Backend, whose methods have c10d's names."""


def make_other(
    name: str, device: str, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
) -> Other:
    """Make another backend for the ranks of a group, as c10d would.

    Raises:
        ValueError: It can't be made without c10d.
    """
    own = dist.PrefixStore(f"{device}/", store)
    if name == "gloo":
        made: Other = dist.ProcessGroupGloo(own, rank, size, timeout=timeout)
    elif name == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        made = dist.ProcessGroupNCCL(own, rank, size, options)
    else:
        raise ValueError(
            f"backend {name!r} for {device} can't be made here: name it first, as in "
            f"'{device}:{name},cuda:nixl'"
        )
    made._set_sequence_number_for_group()
    return made
