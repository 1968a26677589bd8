"""A program's paged cache, as it hands it over to this package: tensors, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from torch_nixl.kv.compatibility import Compatibility
from torch_nixl.kv.layout import NHD, Layout, Pages, describe
from torch_nixl.kv.plan import Run

PageIds: TypeAlias = Sequence[int] | torch.Tensor | Pages
"""Page ids of one group, in the order of the tokens' positions."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheGroup:
    """Layers that share a page table. Arguments as for `layout.describe`.

    Attributes:
        tensors: One for each layer, a pair for each, or one for all; views are fine.
        axes: What each dimension of a tensor is.
        layers: The model's numbers of the layers, ascending; 0, 1, ... by default.
        num_kv_heads: Of the whole model; by default the tensors' own, times `tp_size`.
        packing: Name of an opaque packing; empty for none.
        tp_rank: This rank of the tensor-parallel group.
        tp_size: Its size.
    """

    tensors: Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]] = field(repr=False)
    axes: str = NHD
    layers: Sequence[int] | None = None
    num_kv_heads: int | None = None
    packing: str = ""
    tp_rank: int = 0
    tp_size: int = 1


class KVCache:
    """A paged KV cache of one rank.

    Which pages are in use is known for each connection: several caches of one pool there know it of
    each other. Its tensors have to stay where they are.

    Args:
        tensors: By default one for each layer, ``[2, num_pages, page_size, num_kv_heads,
            head_dim]``, any dtype, contiguous or not; other forms with `axes`. See `CacheGroup`.
        axes: What each dimension is: L layers, K keys and values, P pages, T tokens of a page,
            H heads, D values of a head.
        model: Whatever tells models apart: name, revision, adapter. Both sides have to say the
            same.
        layers: See `CacheGroup`, as the rest.

    Attributes:
        layouts: Where pages lie, for each group of layers.
        owners: For each group and region, a tensor whose storage is that region.
        compatibility: What the other side compares with its own.

    Raises:
        ValueError: The tensors differ in shape, strides, dtype or device, have no such axes, or
            overlap.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]],
        axes: str = NHD,
        *,
        model: str,
        layers: Sequence[int] | None = None,
        num_kv_heads: int | None = None,
        packing: str = "",
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        group = CacheGroup(tensors, axes, layers, num_kv_heads, packing, tp_rank, tp_size)
        self._describe([group], model)

    @classmethod
    def of_groups(cls, groups: Sequence[CacheGroup], *, model: str) -> KVCache:
        """Make a cache of several groups of layers with page tables of their own.

        Args:
            groups: Each names its `layers`.
            model: See the class.

        Raises:
            ValueError: As for the class; or a layer is in two groups.
        """
        cache = cls.__new__(cls)
        cache._describe(groups, model)
        return cache

    def _describe(self, groups: Sequence[CacheGroup], model: str) -> None:
        described = [
            describe(
                group.tensors,
                group.axes,
                num_kv_heads=group.num_kv_heads,
                packing=group.packing,
                tp_rank=group.tp_rank,
                tp_size=group.tp_size,
            )
            for group in groups
        ]
        self.layouts: tuple[Layout, ...] = tuple(layout for layout, _ in described)
        self.owners: tuple[tuple[torch.Tensor, ...], ...] = tuple(
            tuple(owners) for _, owners in described
        )
        self.compatibility = Compatibility(
            model,
            tuple(layout.geometry for layout in self.layouts),
            tuple(
                tuple(range(layout.geometry.num_layers) if group.layers is None else group.layers)
                for group, layout in zip(groups, self.layouts, strict=True)
            ),
        )

    @property
    def num_layers(self) -> int:
        """Layers of all groups together."""
        return sum(map(len, self.compatibility.layers))

    def runs(
        self, pages: PageIds | Sequence[PageIds], first: int | Sequence[int] = 0
    ) -> tuple[Run, ...]:
        """Check page ids.

        Args:
            pages: Ids of one group, or for each group its ids.
            first: Position of the first page's first token; for all groups, or for each.

        Returns:
            A run for each group.

        Raises:
            ValueError: A page does not exist, or there are not as many lists as groups.
        """
        given = _lists(pages, len(self.layouts))
        firsts = [first] * len(given) if isinstance(first, int) else list(first)
        if len(given) != len(self.layouts) or len(firsts) != len(given):
            raise ValueError(
                f"{len(given)} lists of pages and {len(firsts)} first positions for "
                f"{len(self.layouts)} groups of layers"
            )
        runs = []
        for layout, ids, begin in zip(self.layouts, given, firsts, strict=True):
            size = layout.geometry.page_size
            if begin < 0 or begin % size:
                raise ValueError(f"first={begin}: expected a page's first position, of {size} each")
            layout.check_pages(ids)
            runs.append(Run(ids, begin))
        return tuple(runs)

    def cover(self, runs: Sequence[Run], start: int, stop: int) -> tuple[Run, ...]:
        """Keep the pages that have a token at positions `start` to `stop`.

        Raises:
            ValueError: They end before `stop`.
        """
        return tuple(
            _cover(layout, run, start, stop) for layout, run in zip(self.layouts, runs, strict=True)
        )

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{layout.num_pages} pages of {layout.geometry.page_size} tokens"
            for layout in self.layouts
        )
        return f"<KVCache {self.compatibility.model!r} layers={self.num_layers} {sizes}>"


def _lists(pages: PageIds | Sequence[PageIds], num_groups: int) -> list[Pages]:
    if isinstance(pages, (torch.Tensor, np.ndarray)):
        return [_ids(pages)]
    nested = len(pages) and not isinstance(pages[0], (int, np.integer))
    if not nested and (num_groups == 1 or len(pages)):
        return [_ids(pages)]  # type: ignore[arg-type]
    return [_ids(one) for one in pages]  # type: ignore[arg-type]


def _ids(pages: PageIds) -> Pages:
    ids = np.asarray(pages)
    if not ids.size:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"pages: expected a list of ids, got {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int64)


def _cover(layout: Layout, run: Run, start: int, stop: int) -> Run:
    size = layout.geometry.page_size
    if start >= stop:
        return Run(run.pages[:0], run.first)
    last = run.first + len(run.pages) * size
    if stop > last:
        raise ValueError(f"pages hold positions {run.first} to {last}, not {start} to {stop}")
    begin = max(0, start - run.first) // size
    end = max(begin, -(-(stop - run.first) // size))
    return Run(run.pages[begin:end], run.first + begin * size)
