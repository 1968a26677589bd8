"""Sends and receives on the default Communicator: what a program under torchrun calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torch_nixl.p2p.channel import Channel
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.default import find, rank_in, source_in
from torch_nixl.p2p.fitting import NOTHING
from torch_nixl.p2p.values import SendOrReceive
from torch_nixl.p2p.work import TreeWork, Work

if TYPE_CHECKING:
    from torch_nixl.p2p.default import Group

T = TypeVar("T")


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
    find(group, timeout).send(tensor, rank_in(group, dst), tag=tag, timeout=timeout, stream=stream)


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
    source = source_in(group, src)
    return find(group, timeout).recv(
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
    return find(group, timeout).isend(
        tensor, rank_in(group, dst), tag=tag, timeout=timeout, stream=stream
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
    source = source_in(group, src)
    return find(group, timeout).irecv(
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
    find(group, timeout).send_tree(tree, rank_in(group, dst), tag=tag, timeout=timeout)


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
    source = source_in(group, src)
    return find(group, timeout).recv_tree(
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
    return find(group, timeout).isend_tree(tree, rank_in(group, dst), tag=tag, timeout=timeout)


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
    source = source_in(group, src)
    return find(group, timeout).irecv_tree(
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
    find(group, timeout).send_object(value, rank_in(group, dst), tag=tag, timeout=timeout)


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
    source = source_in(group, src)
    return find(group, timeout).recv_object(source, tag=tag, timeout=timeout)


def isend_object(
    value: object,
    dst: int,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> Work:
    """Begin to send a pickled object. See `Communicator.isend_object`."""
    return find(group, timeout).isend_object(value, rank_in(group, dst), tag=tag, timeout=timeout)


def irecv_object(
    src: int | None = None,
    *,
    tag: int = 0,
    group: Group = None,
    timeout: float | None = None,
) -> TreeWork:
    """Begin to receive an object; `result()` unpickles it. See `Communicator.recv_object`."""
    source = source_in(group, src)
    return find(group, timeout).irecv_object(source, tag=tag, timeout=timeout)


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
            _Entry(one.op, one.tensor, rank_in(group, one.peer), one.tag or 0) for one in operations
        ]
    return find(group).batch_isend_irecv(entries)


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
    return find(group, timeout).channel(rank_in(group, peer), like=like, tag=tag, timeout=timeout)


class _Entry:
    def __init__(self, op: object, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
