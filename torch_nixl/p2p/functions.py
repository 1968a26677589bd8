"""Sends and receives on the default Communicator: what a program under torchrun calls."""

from __future__ import annotations

import datetime
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from torch_nixl.engine.connection import DEFAULT_TIMEOUT
from torch_nixl.errors import TransferTimeout
from torch_nixl.p2p.channel import Channel
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.fitting import NOTHING
from torch_nixl.p2p.values import SendOrReceive
from torch_nixl.p2p.work import TreeWork, Work

if TYPE_CHECKING:
    Group: TypeAlias = "dist.ProcessGroup | Communicator | None"

T = TypeVar("T")

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
    default that the functions of this module use.

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
        BackendError: NIXL is missing or can't be set up.
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
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    wait = datetime.timedelta(seconds=min(_LONGEST if seconds is None else seconds, _LONGEST))
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=wait))
    except dist.DistStoreError as error:
        raise TransferTimeout(
            f"not all ranks came to the store of torchrun's environment within {seconds} s: {error}"
        ) from error
    return store, rank, size


def _find(group: Group, timeout: float | None = None) -> Communicator:
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


def _rank_in(group: Group, rank: int) -> int:
    """Ranks are global where a process group is given, as in c10d."""
    if group is None or isinstance(group, Communicator):
        return rank
    return dist.get_group_rank(group, rank)


def send_tensor(
    tensor: torch.Tensor,
    dst: int,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
    stream: object = None,
) -> None:
    """Send a tensor. See `Communicator.send`.

    With a process group, `dst` is a global rank, as in c10d.
    """
    _find(group, timeout).send(
        tensor, _rank_in(group, dst), tag=tag, timeout=timeout, stream=stream
    )


def recv_tensor(
    src: int | None = None,
    *,
    out: torch.Tensor | None = None,
    tag: int = 0,
    device: torch.device | str | None = None,
    group: Group = None,
    timeout: float | None = None,
    stream: object = None,
) -> torch.Tensor:
    """Receive a tensor, whatever its shape and dtype. See `Communicator.recv`."""
    source = None if src is None else _rank_in(group, src)
    return _find(group, timeout).recv(
        source, out=out, tag=tag, device=device, timeout=timeout, stream=stream
    )


def isend_tensor(
    tensor: torch.Tensor,
    dst: int,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
    stream: object = None,
) -> Work:
    """Begin to send a tensor. See `Communicator.isend`."""
    return _find(group, timeout).isend(
        tensor, _rank_in(group, dst), tag=tag, timeout=timeout, stream=stream
    )


def irecv_tensor(
    src: int | None = None,
    *,
    out: torch.Tensor | None = None,
    tag: int = 0,
    device: torch.device | str | None = None,
    group: Group = None,
    timeout: float | None = None,
    stream: object = None,
) -> Work:
    """Begin to receive a tensor. See `Communicator.irecv`."""
    source = None if src is None else _rank_in(group, src)
    return _find(group, timeout).irecv(
        source, out=out, tag=tag, device=device, timeout=timeout, stream=stream
    )


def send_tree(
    tree: object,
    dst: int,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> None:
    """Send a tree of tensors and scalars as one message. See `Communicator.send_tree`."""
    _find(group, timeout).send_tree(tree, _rank_in(group, dst), tag=tag, timeout=timeout)


def recv_tree(
    src: int | None = None,
    *,
    out: Any = NOTHING,
    like: Any = NOTHING,
    tag: int = 0,
    device: torch.device | str | None = None,
    group: Group = None,
    timeout: float | None = None,
) -> Any:
    """Receive a tree, whatever it is made of. See `Communicator.recv_tree`."""
    source = None if src is None else _rank_in(group, src)
    return _find(group, timeout).recv_tree(
        source, out=out, like=like, tag=tag, device=device, timeout=timeout
    )


def isend_tree(
    tree: object,
    dst: int,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> Work:
    """Begin to send a tree. See `Communicator.isend_tree`."""
    return _find(group, timeout).isend_tree(tree, _rank_in(group, dst), tag=tag, timeout=timeout)


def irecv_tree(
    src: int | None = None,
    *,
    out: Any = NOTHING,
    like: Any = NOTHING,
    tag: int = 0,
    device: torch.device | str | None = None,
    group: Group = None,
    timeout: float | None = None,
) -> TreeWork:
    """Begin to receive a tree. See `Communicator.irecv_tree`."""
    source = None if src is None else _rank_in(group, src)
    return _find(group, timeout).irecv_tree(
        source, out=out, like=like, tag=tag, device=device, timeout=timeout
    )


def send_object(
    value: object,
    dst: int,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> None:
    """Pickle a Python object and send it. See `Communicator.send_object`."""
    _find(group, timeout).send_object(value, _rank_in(group, dst), tag=tag, timeout=timeout)


def recv_object(
    src: int | None = None,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> Any:
    """Receive a Python object and unpickle it, which runs what its sender wrote.

    Only from ranks that are trusted like this process itself: see `Communicator.recv_object`.
    """
    source = None if src is None else _rank_in(group, src)
    return _find(group, timeout).recv_object(source, tag=tag, timeout=timeout)


def isend_object(
    value: object,
    dst: int,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> Work:
    """Begin to send a pickled object. See `Communicator.isend_object`."""
    return _find(group, timeout).isend_object(value, _rank_in(group, dst), tag=tag, timeout=timeout)


def irecv_object(
    src: int | None = None,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> TreeWork:
    """Begin to receive an object; `result()` unpickles it. See `Communicator.recv_object`."""
    source = None if src is None else _rank_in(group, src)
    return _find(group, timeout).irecv_object(source, tag=tag, timeout=timeout)


def batch_isend_irecv(operations: Iterable[SendOrReceive]) -> list[Work]:
    """Begin several sends and receives. See `Communicator.batch_isend_irecv`.

    `torch.distributed.P2POp` serves as it is: its group and its global ranks are understood.

    Raises:
        ValueError: The operations are of several groups.
    """
    operations = list(operations)
    groups = {getattr(one, "group", None) for one in operations}
    if len(groups) > 1:
        raise ValueError("expected operations of one group")
    group: Group = groups.pop() if groups else None
    entries: Sequence[SendOrReceive] = operations
    if group is not None and not isinstance(group, Communicator):
        entries = [
            _Entry(one.op, one.tensor, _rank_in(group, one.peer), one.tag or 0)
            for one in operations
        ]
    return _find(group).batch_isend_irecv(entries)


def channel(
    peer: int,
    *,
    like: T,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> Channel[T]:
    """Make a channel: the same tensors, moved again and again. See `Communicator.channel`.

    With a process group, `peer` is a global rank, as in c10d.
    """
    return _find(group, timeout).channel(_rank_in(group, peer), like=like, tag=tag, timeout=timeout)


class _Entry:
    def __init__(self, op: object, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.tag = tag


def _after_fork_in_child() -> None:
    # Another thread may have held it at the fork.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
