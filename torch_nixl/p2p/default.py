"""The Communicators of a program under torchrun: the default one, and those of its groups."""

from __future__ import annotations

import datetime
import os
import threading
import weakref
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from torch_nixl.engine.connection import DEFAULT_TIMEOUT
from torch_nixl.errors import BackendError, TransferTimeout
from torch_nixl.p2p.communicator import Communicator, seconds_of

if TYPE_CHECKING:
    Group: TypeAlias = "dist.ProcessGroup | Communicator | None"

_LONGEST = 86400.0
"""Seconds that stand for ever where a store wants a number."""

_lock = threading.RLock()
_default: Communicator | None = None
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
_made: list[Communicator] = []
"""All that were made here: also those of groups that are gone, which are closed with the others."""


def init(
    group: dist.ProcessGroup | None = None,
    *,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | datetime.timedelta | None = DEFAULT_TIMEOUT,
    prefix: str = "torch_nixl",
    meet_timeout: float | None = None,
) -> Communicator:
    """Make a Communicator. All ranks of the group do so, in the same order.

    The first one that is made without a `group`, or for the default process group, becomes the
    default that `send_tensor` and the like use.

    Args:
        group: Whose ranks; with any backend. By default the default process group, if there is
            one and no `store` is given.
        store: Through which ranks find each other, where there is no process group; needs `rank`
            and `world_size`. With neither, torchrun's environment says all three.
        rank: This rank.
        world_size: How many there are.
        timeout: Seconds after which sends and receives end with `TransferTimeout`; None for never.
        prefix: Sets apart the keys of several groups in one store.
        meet_timeout: Seconds to wait for torchrun's store, which all ranks have to reach; those of
            `timeout` by default.

    Raises:
        ValueError: Nothing says which ranks there are.
        TransferTimeout: Not all ranks came to torchrun's store in time.
        BackendError: NIXL is missing or can't be set up, or the port of the store is taken.
    """
    global _default
    with _lock:
        if store is not None:
            if group is not None or rank is None or world_size is None:
                raise ValueError("with store=, expected rank= and world_size=, and no group")
            communicator = Communicator(store, rank, world_size, prefix=prefix, timeout=timeout)
        elif group is not None or dist.is_initialized():
            communicator = _of_group(group, prefix, timeout)
        elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            found, own_rank, size = _rendezvous(timeout if meet_timeout is None else meet_timeout)
            communicator = Communicator(found, own_rank, size, prefix=prefix, timeout=timeout)
        else:
            raise ValueError(
                "no process group, no store and no torchrun: pass store=, rank= and world_size="
            )
        _made[:] = [one for one in _made if not one.closed]
        _made.append(communicator)
        world = dist.group.WORLD if dist.is_initialized() else None
        if group is not None and group is not world:
            _by_group[group] = communicator
            return communicator
        if _default is None or _default.closed:
            _default = communicator
        if store is None and world is not None:
            known = _by_group.get(world)
            if known is None or known.closed:
                _by_group[world] = communicator
        return communicator


def _of_group(
    group: dist.ProcessGroup | None,
    prefix: str,
    timeout: float | datetime.timedelta | None,
) -> Communicator:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group")
    store = dist.distributed_c10d._get_default_store()
    chosen = group if group is not None else dist.group.WORLD
    name = getattr(chosen, "group_name", "")
    size = dist.get_world_size(group)
    return Communicator(store, rank, size, prefix=f"{prefix}/{name}", timeout=timeout)


def get_communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """The Communicator of a group, made if there is none yet; the default one by default."""
    with _lock:
        known = _default if group is None else _by_group.get(group)
        return known if known is not None and not known.closed else init(group)


def shutdown() -> None:
    """Close all Communicators that `init` and `get_communicator` made. Idempotent."""
    global _default
    with _lock:
        communicators = list(_made)
        _made.clear()
        _by_group.clear()
        _default = None
    for communicator in communicators:
        communicator.close()


def _rendezvous(timeout: float | datetime.timedelta | None) -> tuple[dist.Store, int, int]:
    """What torchrun's environment says of the store, this rank and how many there are."""
    seconds = seconds_of(timeout)
    wait = datetime.timedelta(seconds=min(_LONGEST if seconds is None else seconds, _LONGEST))
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=wait))
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        text = str(error)
        if "EADDRINUSE" in text:
            raise BackendError(
                f"port {os.environ.get('MASTER_PORT', '')} of this host, where rank 0 is to make "
                "the store, is taken: set MASTER_PORT, or torchrun's --master-port, to a free one"
            ) from error
        if isinstance(error, dist.DistNetworkError) and "timed out" not in text:
            raise
        raise TransferTimeout(
            f"not all ranks came to the store of torchrun's environment within {seconds} s: {text}"
        ) from error
    return store, rank, size


def find(group: Group, timeout: float | None = None) -> Communicator:
    """The Communicator of a group; that of no group is the default one, made if there is none.

    Args:
        group: A Communicator, a process group, or None.
        timeout: Seconds to wait for torchrun's store, where that makes the default one.
    """
    if group is None:
        default = _default
        if default is not None and not default.closed:
            return default
        if timeout is not None and not dist.is_initialized():
            with _lock:
                if _default is None or _default.closed:
                    return init(meet_timeout=timeout)
        return get_communicator()
    return group if isinstance(group, Communicator) else get_communicator(group)


def rank_in(group: Group, rank: int) -> int:
    """Ranks are global where a process group is given, as in c10d."""
    if group is None or isinstance(group, Communicator):
        return rank
    return dist.get_group_rank(group, rank)


def source_in(group: Group, src: int | None) -> int | None:
    """The same of a rank to receive from, where None is any."""
    return None if src is None else rank_in(group, src)


def _after_fork_in_child() -> None:
    # Another thread may have held it at the fork.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
