"""What a tree is, apart from its tensors' bytes, and how that travels.

`nodes.py` says what a tree is made of. Types never travel, only the names of fields: `fitting.py`
says what is made of them. No pickle. `docs/p2p.md` draws the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import torch

from torch_nixl.errors import MetadataError
from torch_nixl.p2p.description import Description, describe, parse_tensor
from torch_nixl.p2p.nodes import EXACT_KINDS, Kind, Node, children, kind_of, path_of

MAX_MANIFEST: Final = 256 << 10
"""Most bytes of a manifest: about 4,000 tensors."""

MAX_DEPTH: Final = 64
"""Most containers within each other."""

_KINDS: Final = {int(kind): kind for kind in Kind}
_LEAF_BYTES: Final = {kind: bytes((kind,)) for kind in Kind}
_COUNTED: Final = struct.Struct("<BI")
_FLOAT: Final = struct.Struct("<Bd")
_COMPLEX: Final = struct.Struct("<Bdd")
_COUNT: Final = struct.Struct("<I")
_TENSOR_BYTE: Final = bytes((Kind.TENSOR,))
_KEY_KINDS: Final = frozenset(
    (Kind.NONE, Kind.FALSE, Kind.TRUE, Kind.INT, Kind.FLOAT, Kind.STR, Kind.BYTES)
)


class Packed:
    """A tree taken apart.

    Attributes:
        manifest: Its structure.
        tensors: Its tensors, in order.
        descriptions: What each of them is.
    """

    __slots__ = ("_parts", "_path", "_resolve", "descriptions", "manifest", "name", "tensors")

    def __init__(
        self, tree: object, name: str, resolve: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Take a tree apart.

        Args:
            tree: What it says.
            name: How errors call the tree.
            resolve: Called with each tensor, to send another in its place.

        Raises:
            TypeError, ValueError: There is something in it that can't be sent; the path is named.
        """
        self.name = name
        self.tensors: list[torch.Tensor] = []
        self.descriptions: list[Description] = []
        self._path: list[Any] = []
        self._parts: list[bytes] = []
        self._resolve = resolve
        self._add(tree)
        self.manifest = b"".join(self._parts)
        self._parts.clear()
        if len(self.manifest) > MAX_MANIFEST:
            raise ValueError(
                f"{name}: its structure takes {len(self.manifest)} bytes, expected at most "
                f"{MAX_MANIFEST}: send it in parts, and long texts and bytes as uint8 tensors"
            )

    def path(self, index: int, tree: object) -> str:
        """What errors call one of the tensors."""
        found = list(_tensor_paths(tree, []))
        return f"{self.name}: {path_of(found[index])}"

    def _add(self, value: Any) -> None:
        kind = EXACT_KINDS.get(type(value)) or kind_of(value)
        if kind is Kind.TENSOR:
            self._add_tensor(value)
        elif kind is None:
            raise TypeError(
                f"{self._where()}: a {type(value).__name__} can't be sent in a tree; expected a "
                "tensor, None, bool, int, float, complex, str, bytes, or a container of such"
            )
        elif kind < Kind.TENSOR:
            self._parts.append(pack_scalar(kind, value))
        else:
            self._add_container(kind, value)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        try:
            if self._resolve is not None:
                tensor = self._resolve(tensor)
            description = describe(tensor)
        except (TypeError, ValueError) as error:
            text = str(error).removeprefix("tensor: ")
            raise type(error)(f"{self._where()}: {text}") from None
        self.tensors.append(tensor)
        self.descriptions.append(description)
        self._parts.append(_TENSOR_BYTE)
        self._parts.append(description.packed)

    def _add_container(self, kind: Kind, value: Any) -> None:
        keys, items = children(kind, value)
        parts, path = self._parts, self._path
        if len(path) >= MAX_DEPTH:
            raise ValueError(f"{self._where()}: nested over {MAX_DEPTH} deep, or contains itself")
        parts.append(_COUNTED.pack(kind, len(items)))
        path.append(None)
        for index, item in enumerate(items):
            path[-1] = keys[index] if keys else index
            if keys:
                self._add_key(kind, keys[index])
            self._add(item)
        path.pop()

    def _add_key(self, kind: Kind, key: Any) -> None:
        if type(key) is str:
            data = key.encode("utf-8", "surrogatepass")
            if kind is not Kind.DICT:
                self._parts.append(_COUNT.pack(len(data)) + data)
            else:
                self._parts.append(_COUNTED.pack(Kind.STR, len(data)) + data)
            return
        found = kind_of(key)
        if found not in _KEY_KINDS:
            raise TypeError(
                f"{self._where()}: a key of type {type(key).__name__} can't be sent; expected "
                "str, int, bool, None, float or bytes"
            )
        self._parts.append(pack_scalar(found, key))

    def _where(self) -> str:
        return f"{self.name}: {path_of(self._path)}" if self._path else self.name


def _tensor_paths(value: Any, path: list[Any]) -> Any:
    kind = kind_of(value)
    if kind is Kind.TENSOR:
        yield path
    elif kind is not None and kind > Kind.TENSOR:
        keys, items = children(kind, value)
        for index, item in enumerate(items):
            yield from _tensor_paths(item, [*path, keys[index] if keys else index])


def pack_scalar(kind: Kind, value: Any) -> bytes:
    """Return the bytes of a node without contents."""
    if kind is Kind.STR:
        value = value.encode("utf-8", "surrogatepass")
    elif kind is Kind.INT:
        value = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    elif kind is Kind.FLOAT:
        return _FLOAT.pack(kind, value)
    elif kind is Kind.COMPLEX:
        return _COMPLEX.pack(kind, value.real, value.imag)
    elif kind is not Kind.BYTES:
        return _LEAF_BYTES[kind]
    return _COUNTED.pack(kind, len(value)) + bytes(value)


def parse(manifest: bytes) -> tuple[Node, list[Description]]:
    """Read a manifest.

    Returns:
        The root, and what each tensor is.

    Raises:
        MetadataError: It is cut, longer than it should be, or not what `Packed` writes.
    """
    if len(manifest) > MAX_MANIFEST:
        raise MetadataError(f"manifest of {len(manifest)} bytes is over its limit")
    reader = _Reader(manifest)
    try:
        root = reader.node(0)
    except (struct.error, UnicodeDecodeError):
        raise MetadataError("manifest is cut, or has a text that isn't one") from None
    if reader.at != len(manifest):
        raise MetadataError("manifest has bytes behind its end")
    return root, reader.descriptions


class _Reader:
    """Reads one manifest from front to back."""

    __slots__ = ("at", "data", "descriptions")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.descriptions: list[Description] = []

    def node(self, depth: int) -> Node:
        data, at = self.data, self.at
        if at >= len(data):
            raise MetadataError("manifest is cut")
        kind = _KINDS.get(data[at])
        if kind is Kind.TENSOR:
            description = parse_tensor(data, at + 1)
            self.at = at + 1 + len(description.packed)
            self.descriptions.append(description)
            return Node(kind, len(self.descriptions) - 1)
        if kind is None:
            raise MetadataError("manifest has a node of a kind that does not exist")
        if kind > Kind.TENSOR:
            return self.container(kind, depth)
        return Node(kind, self.scalar(kind))

    def container(self, kind: Kind, depth: int) -> Node:
        if depth >= MAX_DEPTH:
            raise MetadataError(f"manifest is nested over {MAX_DEPTH} deep")
        self.at += 1
        count = self.count()
        # Each takes a byte at least: nothing is made that the manifest's own length doesn't bound.
        if count > len(self.data) - self.at:
            raise MetadataError("manifest is cut")
        items: list[Node] = []
        if kind in (Kind.LIST, Kind.TUPLE):
            items.extend(self.node(depth + 1) for _ in range(count))
            return Node(kind, None, items)
        keys: list[Any] = []
        for _ in range(count):
            keys.append(self.key() if kind is Kind.DICT else self.text())
            items.append(self.node(depth + 1))
        if len(set(keys)) != count:
            raise MetadataError("manifest has a key twice")
        return Node(kind, None, items, tuple(keys))

    def key(self) -> Any:
        kind = _KINDS.get(self.data[self.at]) if self.at < len(self.data) else None
        if kind is None or kind not in _KEY_KINDS:
            raise MetadataError("manifest has a key that can't be one")
        return self.scalar(kind)

    def scalar(self, kind: Kind) -> Any:
        at = self.at
        if kind is Kind.STR:
            self.at += 1
            return self.text()
        if kind is Kind.FLOAT:
            self.at += _FLOAT.size
            return _FLOAT.unpack_from(self.data, at)[1]
        if kind is Kind.COMPLEX:
            self.at += _COMPLEX.size
            return complex(*_COMPLEX.unpack_from(self.data, at)[1:])
        self.at += 1
        if kind is Kind.BYTES:
            return self.counted()
        if kind is Kind.INT:
            value = self.counted()
            number = int.from_bytes(value, "little", signed=True)
            if len(value) != number.bit_length() // 8 + 1:
                raise MetadataError("manifest has an int that isn't in its shortest form")
            return number
        return None if kind is Kind.NONE else kind is Kind.TRUE

    def count(self) -> int:
        [count] = _COUNT.unpack_from(self.data, self.at)
        self.at += _COUNT.size
        return int(count)

    def counted(self) -> bytes:
        count = self.count()
        end = self.at + count
        if end > len(self.data):
            raise MetadataError("manifest is cut")
        value = self.data[self.at : end]
        self.at = end
        return value

    def text(self) -> str:
        return self.counted().decode("utf-8", "surrogatepass")
