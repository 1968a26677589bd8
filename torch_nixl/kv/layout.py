"""Where each token's keys and values lie in a paged cache. Pure: shapes and strides, no bytes.

Legend: L layers, K parts (keys and values: 2; one latent: 1), P pages, T tokens of a page, H heads
of this rank, D values of a head. A page id is one place in each of the L x K tables of pages.

A cache is described by where its parts begin and by three strides, so that one tensor or many, keys
and values joined or apart, NHD and HND, and views of any of them are all the same to what follows.
A row, the D values of one token and head, lies in one piece; everything else may be strided.

[Note: packing] Some kernels keep the keys of a page in an order of their own, transposed or in
tiles. Such a cache names its `packing`: then a page of one head is opaque, it moves as a whole and
only to a cache of the same packing and page size.

Caches of which groups of layers have page tables of their own (sliding windows beside full
attention) are several layouts, one for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torch_nixl.engine.spans import surely_disjoint
from torch_nixl.kv.overlap import find_overlap

Pages: TypeAlias = npt.NDArray[np.int64]
"""Page ids in the order of the tokens' positions, ``[n]``."""

Table: TypeAlias = npt.NDArray[np.int64]
"""One number for each layer and part, ``[L, K]``."""

AXES: Final = "LKPTHD"
"""Letters that `describe` names a tensor's dimensions by. See the legend."""

NHD: Final = "KPTHD"
"""Axes of one tensor a layer, keys before values, a token's heads side by side."""

HND: Final = "KPHTD"
"""Axes of one tensor a layer, keys before values, a head's tokens side by side."""

MAX_LAYERS: Final = 4096
MAX_REGIONS: Final = 2 * MAX_LAYERS
MAX_PAGES: Final = 1 << 31
MAX_RANKS: Final = 4096
"""Most ranks of a tensor-parallel group."""

MAX_NBYTES: Final = 1 << 62
"""Most bytes that a region of a cache has: sums of offsets below it can't wrap."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the pages of one rank's cache hold, wherever they lie.

    Attributes:
        num_layers: L.
        num_kv_heads: Of the whole model, not of this rank. 1 for a latent.
        head_dim: D.
        dtype: Of the values; what is stored, float8 included.
        page_size: T.
        num_parts: K.
        packing: Name of an opaque packing; empty if tokens can be told apart. See [Note: packing].
        tp_rank: This rank of the tensor-parallel group.
        tp_size: Its size: a divisor of `num_kv_heads`, or a multiple, whose ranks share heads.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    num_parts: int = 2
    packing: str = ""
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size", "tp_size"):
            value = getattr(self, name)
            if not 1 <= value < MAX_PAGES:
                raise ValueError(f"{name}={value}: expected 1 or more")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers={self.num_layers}: expected at most {MAX_LAYERS}")
        if self.tp_size > MAX_RANKS:
            raise ValueError(f"tp_size={self.tp_size}: expected at most {MAX_RANKS}")
        if self.num_parts not in (1, 2):
            raise ValueError(
                f"num_parts={self.num_parts}: expected 2 (keys and values) or 1 (a latent)"
            )
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank={self.tp_rank} is no rank of {self.tp_size}")
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise ValueError(
                f"tp_size={self.tp_size} neither divides the {self.num_kv_heads} heads nor is a "
                "multiple of them"
            )

    @property
    def heads(self) -> range:
        """Which of the model's heads this rank holds."""
        if self.tp_size >= self.num_kv_heads:
            first = self.tp_rank // (self.tp_size // self.num_kv_heads)
            return range(first, first + 1)
        each = self.num_kv_heads // self.tp_size
        return range(self.tp_rank * each, (self.tp_rank + 1) * each)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token and head of one part."""
        return self.head_dim * self.dtype.itemsize

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token on this rank, all layers and parts together."""
        return self.num_layers * self.num_parts * len(self.heads) * self.row_nbytes

    def difference(self, other: Geometry) -> str:
        """Say why pages can't be converted between this cache and another; empty if they can.

        Compared in a fixed order, so that both sides name the same: the first difference.
        """
        for name in ("num_layers", "num_parts", "num_kv_heads", "head_dim", "dtype", "packing"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name} is {ours!r} here and {theirs!r} there"
        small, large = sorted((self.page_size, other.page_size))
        if self.packing and small != large:
            why = f"pages packed as {self.packing!r} can't be cut"
        elif large % small:
            why = "one has to divide the other"
        else:
            return ""
        return f"page_size is {self.page_size} here and {other.page_size} there: {why}"


@dataclass(frozen=True, slots=True)
class Share:
    """Heads that one rank has from, or for, a rank of the other side."""

    rank: int
    heads: range


def shares(ours: Geometry, other_size: int) -> tuple[Share, ...]:
    """Choose from which ranks of the other side ours gets its heads, each head from one of them.

    Where several ranks hold a head, those that want it are spread over them.

    Args:
        ours: Geometry of the rank that receives.
        other_size: Size of the tensor-parallel group that the heads come from.

    Raises:
        ValueError: That size does not fit the number of heads.
    """
    num_heads = ours.num_kv_heads
    if other_size < 1 or (num_heads % other_size and other_size % num_heads):
        raise ValueError(f"tp_size={other_size} does not fit {num_heads} heads")
    if other_size > num_heads:
        replicas = other_size // num_heads
        wanted_by = max(1, ours.tp_size // num_heads)
        choice = ours.tp_rank % wanted_by % replicas
        return tuple(Share(head * replicas + choice, range(head, head + 1)) for head in ours.heads)
    each = num_heads // other_size
    first, last = ours.heads.start // each, (ours.heads.stop - 1) // each
    return tuple(
        Share(rank, intersect(ours.heads, range(rank * each, (rank + 1) * each)))
        for rank in range(first, last + 1)
    )


def takers(ours: Geometry, other: Geometry) -> tuple[int, ...]:
    """Return the ranks of the other side that have a share in what ours holds.

    Args:
        ours: Geometry of the rank that the heads come from.
        other: Geometry of any rank of the group that receives them.

    Raises:
        ValueError: Our group's size does not fit the other's number of heads.
    """
    return tuple(
        rank
        for rank in range(other.tp_size)
        if any(
            share.rank == ours.tp_rank
            for share in shares(replace(other, tp_rank=rank), ours.tp_size)
        )
    )


def intersect(one: range, other: range) -> range:
    """Return what two ranges of step 1 have in common; an empty range if nothing."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the pages of one cache lie, relative to the regions that hold them.

    Token `t` of page `p`, head `h` (counted on this rank), part `k` of layer `l` has its row at
    ``offsets[l, k] + p * page_stride + t * token_stride + h * head_stride`` in region
    ``regions[l, k]``. Whoever makes one, out of tensors or of what a peer says, gets one in which
    all rows lie in their regions and no two rows of a part overlap.

    Attributes:
        geometry: What the pages hold.
        num_pages: P.
        regions: ``[L, K]``: indices into `region_nbytes`.
        offsets: ``[L, K]``: bytes.
        page_stride: Bytes, as the other two.
        token_stride: See above.
        head_stride: See above.
        region_nbytes: Size of each region.
    """

    geometry: Geometry
    num_pages: int
    regions: Table = field(repr=False)
    offsets: Table = field(repr=False)
    page_stride: int
    token_stride: int
    head_stride: int
    region_nbytes: tuple[int, ...] = field(repr=False)

    def __post_init__(self) -> None:
        geometry = self.geometry
        shape = (geometry.num_layers, geometry.num_parts)
        if self.regions.shape != shape or self.offsets.shape != shape:
            raise ValueError(f"regions and offsets have to be of shape {shape}")
        if not 1 <= self.num_pages <= MAX_PAGES:
            raise ValueError(f"num_pages={self.num_pages}: expected 1 to {MAX_PAGES}")
        if not 1 <= len(self.region_nbytes) <= MAX_REGIONS:
            raise ValueError(f"{len(self.region_nbytes)} regions: expected 1 to {MAX_REGIONS}")
        strides = (self.page_stride, self.token_stride, self.head_stride)
        sizes = (self.num_pages, geometry.page_size, len(geometry.heads))
        if not all(0 <= stride <= MAX_NBYTES for stride in strides):
            raise ValueError(f"strides {strides}: expected 0 to {MAX_NBYTES}")
        row = geometry.row_nbytes
        if not surely_disjoint((*sizes, row), (*strides, 1), 1):
            raise ValueError(
                f"pages overlap: sizes {sizes}, strides {strides}, rows of {row} bytes"
            )
        if geometry.packing and geometry.page_size > 1 and self.token_stride != row:
            raise ValueError(
                f"a page packed as {geometry.packing!r} has to be one piece for each head, "
                f"not have a stride of {self.token_stride} bytes over rows of {row}"
            )
        # In Python's integers, which don't wrap: the numbers may be a peer's.
        reach = row + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        places = list(zip(self.regions.flat, self.offsets.flat, strict=True))
        for region, offset in places:
            if not 0 <= region < len(self.region_nbytes):
                raise ValueError(f"region {region} of {len(self.region_nbytes)} does not exist")
            nbytes = self.region_nbytes[region]
            if not 0 <= int(offset) <= int(offset) + reach <= nbytes <= MAX_NBYTES:
                raise ValueError(
                    f"pages reach from byte {offset} over {reach} bytes of a region of {nbytes}"
                )
        if len(set(places)) != len(places):
            raise ValueError("two layers or parts lie in the same place")

    def check_pages(self, pages: Pages, what: str = "pages") -> None:
        """Check that page ids exist.

        Raises:
            ValueError: One doesn't.
        """
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self.num_pages:
            wrong = pages[(pages < 0) | (pages >= self.num_pages)][0]
            raise ValueError(f"{what}: page {wrong} does not exist; there are {self.num_pages}")


def describe(
    tensors: Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]],
    axes: str = NHD,
    *,
    num_kv_heads: int | None = None,
    packing: str = "",
    tp_rank: int = 0,
    tp_size: int = 1,
) -> tuple[Layout, list[torch.Tensor]]:
    """Describe a paged cache by its tensors.

    Args:
        tensors: One for each layer, or for each layer a pair of keys and values; or, with an L in
            `axes`, the one that holds all layers, or the pair that does. Views are fine.
        axes: What each dimension of a tensor is, in order: L, K, P, T, H, D. L is left out where
            each layer has a tensor of its own, K where keys and values have, or where there is
            only a latent, H where there is only one head.
        num_kv_heads: Of the whole model. Default: the tensors' own, times `tp_size`.
        packing: See [Note: packing]; the tensors are then viewed as if they were plain.
        tp_rank: This rank of the tensor-parallel group.
        tp_size: Its size.

    Returns:
        The layout, and for each of its regions one tensor whose storage is that region.

    Raises:
        ValueError: The tensors differ in shape, strides, dtype or device, have no such axes, or
            overlap.
    """
    if not set("PTD") <= set(axes) <= set(AXES) or len(set(axes)) != len(axes):
        raise ValueError(f"axes={axes!r}: expected P, T, D and some of L, K, H, each once")
    groups = [[one] if isinstance(one, torch.Tensor) else list(one) for one in tensors]
    if not groups or any(len(group) != len(groups[0]) or not group for group in groups):
        raise ValueError("tensors: expected one or more, each alone or each a pair")
    if "L" in axes and len(groups) != 1:
        raise ValueError(f"axes={axes!r} has an L: expected one tensor or pair, not {len(groups)}")
    if "K" in axes and len(groups[0]) != 1:
        raise ValueError(f"axes={axes!r} has a K: expected single tensors, not pairs")
    sample = groups[0][0]
    if sample.dim() != len(axes):
        raise ValueError(f"axes={axes!r} does not fit a tensor of shape {list(sample.shape)}")
    for tensor in (tensor for group in groups for tensor in group):
        for name in ("shape", "dtype", "device"):
            ours, theirs = getattr(tensor, name), getattr(sample, name)
            if ours != theirs:
                raise ValueError(f"tensors differ in {name}: {theirs} and {ours}")
        if tensor.stride() != sample.stride():
            raise ValueError(f"tensors differ in strides: {sample.stride()} and {tensor.stride()}")
    itemsize = sample.element_size()
    size = dict(zip(axes, sample.shape, strict=True))
    stride = {a: s * itemsize for a, s in zip(axes, sample.stride(), strict=True)}
    if size["D"] > 1 and stride["D"] != itemsize:
        raise ValueError(f"a head's values are {stride['D']} bytes apart: they have to be adjacent")
    num_local = size.get("H", 1)
    if num_kv_heads is None:
        num_kv_heads = num_local * tp_size
    geometry = Geometry(
        num_layers=size.get("L", len(groups)),
        num_kv_heads=num_kv_heads,
        head_dim=size["D"],
        dtype=sample.dtype,
        page_size=size["T"],
        num_parts=size.get("K", len(groups[0])),
        packing=packing,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
    if len(geometry.heads) != num_local:
        raise ValueError(
            f"tensors have {num_local} heads; rank {tp_rank} of {tp_size} holds "
            f"{len(geometry.heads)} of {num_kv_heads}"
        )
    owners: list[torch.Tensor] = []
    index: dict[int, int] = {}
    regions = np.empty((geometry.num_layers, geometry.num_parts), np.int64)
    offsets = np.empty_like(regions)
    for layer in range(geometry.num_layers):
        for part in range(geometry.num_parts):
            group = groups[0 if "L" in axes else layer]
            tensor = group[0 if "K" in axes else part]
            storage = tensor.untyped_storage().data_ptr()
            if storage not in index:
                index[storage] = len(owners)
                owners.append(tensor)
            regions[layer, part] = index[storage]
            offsets[layer, part] = tensor.data_ptr() - storage
            offsets[layer, part] += layer * stride.get("L", 0) + part * stride.get("K", 0)
    layout = Layout(
        geometry,
        num_pages=size["P"],
        regions=regions,
        offsets=offsets,
        # The strides of dimensions of size 1 mean nothing.
        page_stride=stride["P"],
        token_stride=stride["T"] if size["T"] > 1 else geometry.row_nbytes,
        head_stride=stride["H"] if num_local > 1 else geometry.row_nbytes,
        region_nbytes=tuple(owner.untyped_storage().nbytes() for owner in owners),
    )
    found = find_overlap(layout)
    if found is not None:
        parts = geometry.num_parts
        one, other = (f"layer {at // parts}, part {at % parts}" for at in sorted(found))
        raise ValueError(f"tensors overlap: {one} and {other} have bytes in common")
    return layout, owners
