"""From a tree's structure and its tensors to a tree: the receiver's own, or a new one.

Which types a received tree is made of is for the receiver to say. With a pattern (`out=`,
`like=`), its own; without one dicts, lists and tuples: a dataclass or a TensorDict becomes a dict,
a namedtuple a tuple. Nothing is imported, looked up or called by a name that a peer sent.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import torch

from torch_nixl.p2p.description import Description
from torch_nixl.p2p.nodes import (
    Kind,
    Node,
    children,
    is_tensordict,
    kind_of,
    path_of,
    shown,
)
from torch_nixl.p2p.tensors import MismatchError

NOTHING: Final = object()
"""Stands for a pattern that isn't given; None is one."""


def match(
    root: Node, descriptions: Sequence[Description], pattern: object, *, name: str
) -> list[torch.Tensor]:
    """Compare a tree that was sent with a pattern, all of it.

    Args:
        root: The tree that was sent.
        descriptions: Its tensors.
        pattern: What it has to be like: containers of the same kinds with the same keys, tensors
            of the same shapes and dtypes, scalars for scalars. TensorDicts count as dicts.
        name: ``"out"`` or ``"like"``. Of `out`, what can't be changed in place (in tuples and
            frozen dataclasses) has to be equal.

    Returns:
        The pattern's tensors, in the order of the tree that was sent.

    Raises:
        MismatchError: They differ. The first difference is named.
    """
    matcher = _Matcher(descriptions, name)
    matcher.compare(root, pattern, fixed=name == "out")
    return matcher.found


class _Matcher:
    """Walks both trees at once."""

    def __init__(self, descriptions: Sequence[Description], name: str) -> None:
        self._descriptions = descriptions
        self._name = name
        self._path: list[Any] = []
        self.found: list[torch.Tensor] = []

    def compare(self, node: Node, pattern: Any, *, fixed: bool) -> None:
        kind = kind_of(pattern)
        if node.kind is Kind.TENSOR:
            described = self._descriptions[node.value]
            if kind is not Kind.TENSOR or not described.fits(pattern):
                self._refuse(_expected(kind, pattern), _tensor(described.dtype, described.shape))
            self.found.append(pattern)
        elif node.kind < Kind.TENSOR:
            if kind is None or kind >= Kind.TENSOR:
                self._refuse(_expected(kind, pattern), str(node))
            if fixed and self._name == "out" and not _same(node.value, pattern):
                self._refuse(f"{shown(pattern)}, which can't be replaced where it is,", str(node))
        elif kind is not node.kind:
            self._refuse(_expected(kind, pattern), str(node))
        else:
            self._compare_contents(node, pattern)

    def _compare_contents(self, node: Node, pattern: Any) -> None:
        keys, values = children(node.kind, pattern)
        if node.kind in (Kind.LIST, Kind.TUPLE):
            if len(values) != len(node.items):
                self._refuse(f"{len(values)} entries", str(len(node.items)))
            pairs = list(zip(range(len(values)), node.items, values, strict=True))
        else:
            theirs = dict(zip(keys, values, strict=True))
            for key in node.keys:
                if key not in theirs:
                    self._path.append(key)
                    self._refuse("nothing", "an entry of that name")
            if len(theirs) != len(node.keys):
                sent = set(node.keys)
                self._path.append(next(key for key in keys if key not in sent))
                self._refuse("an entry of that name", "none")
            pairs = [
                (key, item, theirs[key]) for key, item in zip(node.keys, node.items, strict=True)
            ]
        fixed = _is_fixed(node.kind, pattern)
        for key, item, value in pairs:
            self._path.append(key)
            self.compare(item, value, fixed=fixed)
            self._path.pop()

    def _refuse(self, expected: str, sent: str) -> None:
        raise MismatchError(
            f"{self._name}: {path_of(self._path)}: {expected} expected, {sent} sent"
        )


def _is_fixed(kind: Kind, value: Any) -> bool:
    """Whether a container's entries can't be replaced."""
    if kind is Kind.DATACLASS:
        return bool(type(value).__dataclass_params__.frozen)
    return kind in (Kind.TUPLE, Kind.NAMEDTUPLE)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _expected(kind: Kind | None, pattern: Any) -> str:
    if kind is Kind.TENSOR:
        return _tensor(pattern.dtype, pattern.shape)
    return f"a {type(pattern).__name__}"


def build(node: Node, tensors: Sequence[torch.Tensor], pattern: Any = NOTHING) -> Any:
    """Make a new tree of what was sent.

    Args:
        node: Its structure.
        tensors: Its tensors, in order.
        pattern: What `match` has found alike: gives the types of containers.
    """
    if node.kind is Kind.TENSOR:
        return tensors[node.value]
    if node.kind < Kind.TENSOR:
        return node.value
    if pattern is NOTHING:
        items = [build(item, tensors) for item in node.items]
        if node.kind is Kind.LIST:
            return items
        if node.kind in (Kind.TUPLE, Kind.NAMEDTUPLE):
            return tuple(items)
        return dict(zip(node.keys, items, strict=True))
    keys, values = children(node.kind, pattern)
    patterns = dict(zip(keys or range(len(values)), values, strict=True))
    entries = {
        key: build(item, tensors, patterns[key])
        for key, item in zip(node.keys or range(len(node.items)), node.items, strict=True)
    }
    return _like(node.kind, pattern, {key: entries[key] for key in patterns})


def _like(kind: Kind, pattern: Any, entries: dict[Any, Any]) -> Any:
    """Make a container of a pattern's type."""
    if kind is Kind.LIST:
        return list(entries.values())
    if kind is Kind.TUPLE:
        return tuple(entries.values())
    if kind is Kind.NAMEDTUPLE:
        return type(pattern)._make(entries.values())
    if is_tensordict(pattern):
        made = pattern.empty()
        for key, value in entries.items():
            made.set(key, value)
        return made
    made = copy.copy(pattern)
    if kind is Kind.DICT:
        made.update(entries)
    else:
        for name, value in entries.items():
            object.__setattr__(made, name, value)
    return made


def fill(node: Node, pattern: Any) -> None:
    """Put the scalars that were sent into a tree of the receiver's; its tensors are filled by then.

    Args:
        node: What was sent.
        pattern: What `match` has found alike.
    """
    if node.kind <= Kind.TENSOR or is_tensordict(pattern):
        return
    keys, values = children(node.kind, pattern)
    theirs = dict(zip(keys or range(len(values)), values, strict=True))
    fixed = _is_fixed(node.kind, pattern)
    for key, item in zip(node.keys or range(len(node.items)), node.items, strict=True):
        if item.kind >= Kind.TENSOR:
            fill(item, theirs[key])
        elif fixed:
            continue
        elif dataclasses.is_dataclass(pattern) and node.kind is Kind.DATACLASS:
            setattr(pattern, key, item.value)
        else:
            pattern[key] = item.value
