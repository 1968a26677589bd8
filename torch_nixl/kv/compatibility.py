"""What two caches must have in common before pages move between them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from torch_nixl import __version__
from torch_nixl.kv.layout import Geometry, shares, takers

MAX_NAME: Final = 255
"""Most bytes of the name of a model, of a version, or of a packing, as UTF-8."""

MAX_GROUPS: Final = 32
"""Most groups of layers with page tables of their own."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What a cache holds, for the other side to compare with its own.

    Attributes:
        model: Whatever tells models apart: name, revision, adapter.
        geometries: One for each group of layers that share a page table.
        layers: Which of the model's layers each group holds, ascending.
        version: Of this library.
    """

    model: str
    geometries: tuple[Geometry, ...]
    layers: tuple[tuple[int, ...], ...]
    version: str = __version__

    def __post_init__(self) -> None:
        for what, text in (("model", self.model), ("version", self.version)):
            if len(text.encode()) > MAX_NAME:
                raise ValueError(f"{what}: expected at most {MAX_NAME} bytes")
        if not 1 <= len(self.geometries) <= MAX_GROUPS:
            raise ValueError(f"{len(self.geometries)} groups: expected 1 to {MAX_GROUPS}")
        if [geometry.num_layers for geometry in self.geometries] != [*map(len, self.layers)]:
            raise ValueError("layers: expected one number for each layer of each group")
        for numbers in self.layers:
            if list(numbers) != sorted(set(numbers)) or numbers[0] < 0:
                raise ValueError("layers: expected ascending numbers")
        if len(set().union(*self.layers)) != sum(map(len, self.layers)):
            raise ValueError("layers: one is in two groups")
        ranks = {(geometry.tp_rank, geometry.tp_size) for geometry in self.geometries}
        if len(ranks) != 1:
            raise ValueError("all groups have to be of one rank")
        for geometry in self.geometries:
            if len(geometry.packing.encode()) > MAX_NAME:
                raise ValueError(f"packing: expected at most {MAX_NAME} bytes")

    @property
    def tp_rank(self) -> int:
        """This rank of the tensor-parallel group."""
        return self.geometries[0].tp_rank

    @property
    def tp_size(self) -> int:
        """Size of the tensor-parallel group."""
        return self.geometries[0].tp_size

    def difference(self, other: Compatibility) -> str:
        """Say what keeps pages from moving between two caches; empty if nothing does.

        The first difference in a fixed order: version, model, groups, and then each group's.
        """
        if _release(self.version) != _release(other.version):
            return f"torch_nixl is {self.version!r} here and {other.version!r} there"
        if self.model != other.model:
            return f"model is {self.model!r} here and {other.model!r} there"
        ours, theirs = len(self.geometries), len(other.geometries)
        if ours != theirs:
            return f"number of groups of layers is {ours} here and {theirs} there"
        for index in range(ours):
            where = f" (group {index})" if ours > 1 else ""
            why = self.geometries[index].difference(other.geometries[index])
            if why:
                return why + where
            if self.layers[index] != other.layers[index]:
                return (
                    f"layers are {_short(self.layers[index])} here and "
                    f"{_short(other.layers[index])} there{where}"
                )
        return ""

    def shares(self, other_size: int) -> dict[int, tuple[range, ...]]:
        """From which ranks of the other side this one has its heads: for each group of layers.

        Raises:
            ValueError: That size does not fit a group's number of heads.
        """
        nothing = tuple(range(0) for _ in self.geometries)
        found: dict[int, tuple[range, ...]] = {}
        for group, geometry in enumerate(self.geometries):
            for share in shares(geometry, other_size):
                heads = found.get(share.rank, nothing)
                found[share.rank] = (*heads[:group], share.heads, *heads[group + 1 :])
        return found

    def spare(self, other_size: int) -> set[int]:
        """Which ranks of the other side no rank of ours has heads from: replicas of others.

        Raises:
            ValueError: As for `shares`.
        """
        used = {
            share.rank
            for geometry in self.geometries
            for rank in range(self.tp_size)
            for share in shares(replace(geometry, tp_rank=rank), other_size)
        }
        return set(range(other_size)) - used

    def takers(self, other: Compatibility) -> tuple[int, ...]:
        """Which ranks of the other side have heads from this one.

        Raises:
            ValueError: Our group's size does not fit the other's number of heads.
        """
        pairs = zip(self.geometries, other.geometries, strict=True)
        return tuple(sorted(set().union(*(takers(ours, theirs) for ours, theirs in pairs))))


def _release(version: str) -> list[str]:
    """The part of a version that decides about the protocol: its first two numbers."""
    return version.split(".")[:2]


def _short(numbers: tuple[int, ...]) -> str:
    if len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    text = ", ".join(map(str, numbers[:8]))
    return text if len(numbers) <= 8 else text + ", ..."
