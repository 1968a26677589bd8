"""Caches of every shape for the tests, and bytes moved by plan and by torch's own indexing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from torch_nixl.engine.adapter import Spans
from torch_nixl.kv.layout import Geometry, Layout, Pages, describe
from torch_nixl.kv.plan import Plan

# Axes, and whether each layer has a tensor of its own for each part.
SHAPES = {
    "joined NHD": "KPTHD",
    "joined HND": "KPHTD",
    "joined in the page": "PKTHD",
    "joined in the head": "PHTKD",
    "apart NHD": "PTHD",
    "apart HND": "PHTD",
    "one tensor": "LKPTHD",
    "one tensor, pages first": "PLKTHD",
    "one pair": "LPHTD",
}


@dataclass(slots=True)
class Cache:
    """A cache's tensors, and its storages as bytes."""

    layout: Layout
    owners: list[torch.Tensor]
    parts: list[list[torch.Tensor]]
    """For each layer and part a view ``[P, T, H, D]`` of raw values."""

    def storage(self, region: int) -> torch.Tensor:
        return torch.tensor([], dtype=torch.uint8).set_(self.owners[region].untyped_storage())

    def snapshot(self) -> list[torch.Tensor]:
        return [self.storage(region).clone() for region in range(len(self.owners))]


def make(
    axes: str,
    geometry: Geometry,
    num_pages: int,
    seed: int,
    *,
    one_storage: bool = False,
) -> Cache:
    """Make a cache of random bytes. Axes without K are pairs, or latents where K is 1."""
    size = {
        "L": geometry.num_layers,
        "K": geometry.num_parts,
        "P": num_pages,
        "T": geometry.page_size,
        "H": len(geometry.heads),
        "D": geometry.head_dim,
    }
    num_groups = 1 if "L" in axes else geometry.num_layers
    num_members = 1 if "K" in axes else geometry.num_parts
    shape = [size[axis] for axis in axes]
    each = int(np.prod(shape))
    count = num_groups * num_members
    # 64 bytes before the first: layers are often views that begin inside of a storage.
    pads = 64 // geometry.dtype.itemsize
    if one_storage:
        whole = torch.zeros(pads + each * count, dtype=geometry.dtype)
        flat = [whole[pads + i * each : pads + (i + 1) * each] for i in range(count)]
    else:
        flat = [torch.zeros(pads + each, dtype=geometry.dtype)[pads:] for _ in range(count)]
    generator = torch.Generator().manual_seed(seed)
    for one in flat:
        one.view(torch.uint8).copy_(
            torch.randint(0, 256, (each * geometry.dtype.itemsize,), generator=generator)
        )
    tensors = [one.view(shape) for one in flat]
    groups = [tensors[i * num_members : (i + 1) * num_members] for i in range(num_groups)]
    layout, owners = describe(
        groups,
        axes,
        num_kv_heads=geometry.num_kv_heads,
        packing=geometry.packing,
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
    )
    assert layout.geometry == geometry
    parts = []
    for layer in range(geometry.num_layers):
        row = []
        for part in range(geometry.num_parts):
            tensor = groups[0 if "L" in axes else layer][0 if "K" in axes else part]
            left = axes
            for letter, index in (("L", layer), ("K", part)):
                if letter in left:
                    tensor = tensor.select(left.index(letter), index)
                    left = left.replace(letter, "")
            if "H" not in left:
                tensor, left = tensor.unsqueeze(0), "H" + left
            row.append(tensor.permute([left.index(letter) for letter in "PTHD"]))
        parts.append(row)
    return Cache(layout, owners, parts)


def regions(cache: Cache) -> Spans:
    """Addresses, and device ids that differ between regions."""
    rows = [
        (owner.untyped_storage().data_ptr(), 100 + index)
        for index, owner in enumerate(cache.owners)
    ]
    return np.array(rows, np.uint64)


def move(
    plan: Plan,
    src: Cache,
    dst: Cache,
    *,
    max_bytes: int = 1 << 20,
    max_spans: int = 4096,
    layers: range | None = None,
) -> int:
    """Move bytes as a plan says, checking every span; return how many moved."""
    froms, tos = regions(src), regions(dst)
    total = 0
    for ours, theirs in plan.pieces(
        froms, tos, max_bytes=max_bytes, max_spans=max_spans, layers=layers
    ):
        assert 1 <= len(ours) == len(theirs) <= max_spans
        assert ours.dtype == theirs.dtype == np.uint64
        assert ours.flags.c_contiguous and theirs.flags.c_contiguous
        assert int(ours[:, 1].sum()) <= max_bytes
        for (address, nbytes, device), (remote, same, other) in zip(
            ours.tolist(), theirs.tolist(), strict=True
        ):
            assert nbytes == same > 0
            begin = address - int(froms[device - 100, 0])
            to = remote - int(tos[other - 100, 0])
            assert begin >= 0 and to >= 0
            data = src.storage(device - 100)[begin : begin + nbytes]
            dst.storage(other - 100)[to : to + nbytes] = data
            total += nbytes
    return total


def oracle(
    src: Cache,
    src_pages: Pages,
    src_first: int,
    dst: Cache,
    dst_pages: Pages,
    dst_first: int,
    start: int,
    stop: int,
    heads: range,
    layers: range,
) -> None:
    """Move the same with torch's indexing, one token at a time."""
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[src.layout.geometry.dtype.itemsize]
    for position in range(start, stop):
        at, slot = divmod(position - src_first, src.layout.geometry.page_size)
        to, place = divmod(position - dst_first, dst.layout.geometry.page_size)
        for layer in layers:
            for ours, theirs in zip(src.parts[layer], dst.parts[layer], strict=True):
                a = slice(
                    heads.start - src.layout.geometry.heads.start,
                    heads.stop - src.layout.geometry.heads.start,
                )
                b = slice(
                    heads.start - dst.layout.geometry.heads.start,
                    heads.stop - dst.layout.geometry.heads.start,
                )
                values = ours.view(raw)[int(src_pages[at]), slot, a]
                theirs.view(raw)[int(dst_pages[to]), place, b] = values
