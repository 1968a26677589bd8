"""What a tree is made of, as nodes: which value becomes which, and what errors call it.

Dicts, lists, tuples, namedtuples, dataclasses and TensorDicts; its leaves are tensors, None, bool,
int, float, complex, str and bytes.
"""

from __future__ import annotations

import dataclasses
import sys
from enum import IntEnum
from typing import Any, Final

import torch

MAX_SHOWN: Final = 200
"""Most characters of a scalar that an error shows."""


class Kind(IntEnum):
    """What a node is. The number is the first byte of the node."""

    NONE = 0
    FALSE = 1
    TRUE = 2
    INT = 3
    FLOAT = 4
    COMPLEX = 5
    STR = 6
    BYTES = 7
    TENSOR = 8
    LIST = 9
    TUPLE = 10
    DICT = 11
    NAMEDTUPLE = 12
    DATACLASS = 13


_NAMES: Final = {
    Kind.TENSOR: "a tensor",
    Kind.LIST: "a list",
    Kind.TUPLE: "a tuple",
    Kind.DICT: "a dict",
    Kind.NAMEDTUPLE: "a namedtuple",
    Kind.DATACLASS: "a dataclass",
}


class Node:
    """One node of a tree that was sent. A value.

    Attributes:
        kind: What it is.
        value: A scalar's value; a tensor's place among the tree's tensors.
        items: A container's contents, in order.
        keys: Keys or names of fields of `items`; empty where there are none.
    """

    __slots__ = ("items", "keys", "kind", "value")

    def __init__(
        self, kind: Kind, value: Any, items: list[Node] | None = None, keys: tuple[Any, ...] = ()
    ) -> None:
        self.kind = kind
        self.value = value
        self.items = items or []
        self.keys = keys

    def __str__(self) -> str:
        return _NAMES.get(self.kind) or shown(self.value)


def shown(value: object) -> str:
    """What errors show of a scalar or a key."""
    # Python refuses to write down an int of thousands of digits.
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def path_of(parts: list[Any]) -> str:
    """Join keys and indices to what errors call a place in a tree."""
    return ".".join(part if isinstance(part, str) else shown(part) for part in parts) or "(root)"


def kind_of(value: object) -> Kind | None:
    """Tell which kind of node a value becomes; None if it can't be sent."""
    kind = EXACT_KINDS.get(type(value))
    if kind is not None:
        return kind
    if isinstance(value, torch.Tensor):
        return Kind.TENSOR
    if isinstance(value, dict) or is_tensordict(value):
        return Kind.DICT
    if isinstance(value, tuple):
        return Kind.NAMEDTUPLE if _is_namedtuple(value) else Kind.TUPLE
    if isinstance(value, list):
        return Kind.LIST
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return Kind.DATACLASS
    if value is True or value is False:
        return Kind.TRUE if value else Kind.FALSE
    return None


EXACT_KINDS: Final[dict[type, Kind]] = {
    torch.Tensor: Kind.TENSOR,
    torch.nn.Parameter: Kind.TENSOR,
    type(None): Kind.NONE,
    int: Kind.INT,
    float: Kind.FLOAT,
    complex: Kind.COMPLEX,
    str: Kind.STR,
    bytes: Kind.BYTES,
    dict: Kind.DICT,
    list: Kind.LIST,
    tuple: Kind.TUPLE,
}
"""Kinds by exact type, so that most values need no further look."""


def _is_namedtuple(value: tuple[Any, ...]) -> bool:
    names = getattr(type(value), "_fields", None)
    return isinstance(names, tuple) and len(names) == len(value)


def is_tensordict(value: object) -> bool:
    """Whether a value is a TensorDict; never imports the library, which made it if it is."""
    library = sys.modules.get("tensordict")
    base = getattr(library, "TensorDictBase", None)
    return base is not None and isinstance(value, base)


def children(kind: Kind, value: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Return keys (or names of fields, or nothing) and contents of a container."""
    if kind is Kind.DICT:
        return tuple(value.keys()), list(value.values())
    if kind is Kind.NAMEDTUPLE:
        return tuple(type(value)._fields), list(value)
    if kind is Kind.DATACLASS:
        names = tuple(field.name for field in dataclasses.fields(value))
        return names, [getattr(value, name) for name in names]
    return (), list(value)
