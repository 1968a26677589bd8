"""A registered cache, as the other side is told of it in MEET and WELCOME. Pure: no I/O.

All numbers are little-endian and unpadded; texts are a length u8 and UTF-8::

    version text, model text, kind of memory u8, number of groups u8, number of blobs u8
    for each group:
      L u32, heads of the model u32, D u32, T u32, tp rank u32, tp size u32, P u32,
      K u8, dtype u8, number of regions u32,
      page, token and head stride u64, packing text
      the model's numbers of its layers u32 [L]
      its regions: address u64, nbytes u64, device id u64
      for each layer and part: region u32 [L, K]; then offset u64 [L, K]
    for each blob: nbytes u32
    the blobs: NIXL metadata of the regions
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from torch_nixl.engine.adapter import MemoryKind, Spans
from torch_nixl.engine.blob import MAX_BLOB
from torch_nixl.errors import MetadataError
from torch_nixl.kv.compatibility import MAX_GROUPS, Compatibility
from torch_nixl.kv.layout import MAX_LAYERS, MAX_REGIONS, Geometry, Layout
from torch_nixl.p2p.description import DTYPES

MAX_BLOBS: Final = 4

_COUNTS: Final = struct.Struct("<BBB")
_GROUP: Final = struct.Struct("<IIIIIIIBBIQQQ")
_SIZE: Final = struct.Struct("<I")
_KINDS: Final = (MemoryKind.DRAM, MemoryKind.VRAM)
_DTYPE_NUMBERS: Final = {dtype: number for number, dtype in DTYPES.items()}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A registered cache.

    Attributes:
        compatibility: What it holds.
        layouts: Where pages lie, for each group of layers.
        regions: For each group ``[n, 2]`` uint64: address and device id of each region.
        kind: Which kind of memory.
        blobs: NIXL metadata of the regions.
    """

    compatibility: Compatibility
    layouts: tuple[Layout, ...]
    regions: tuple[Spans, ...] = field(repr=False)
    kind: MemoryKind
    blobs: tuple[bytes, ...] = field(repr=False)


def pack_pool(pool: Pool) -> bytes:
    """Return the bytes of a pool.

    Raises:
        ValueError: Its dtype can't be sent.
    """
    parts = [
        _text(pool.compatibility.version),
        _text(pool.compatibility.model),
        _COUNTS.pack(_KINDS.index(pool.kind), len(pool.layouts), len(pool.blobs)),
    ]
    for layout, regions, layers in zip(
        pool.layouts, pool.regions, pool.compatibility.layers, strict=True
    ):
        geometry = layout.geometry
        if geometry.dtype not in _DTYPE_NUMBERS:
            raise ValueError(f"a cache of {geometry.dtype} can't be handed over")
        parts.append(
            _GROUP.pack(
                geometry.num_layers,
                geometry.num_kv_heads,
                geometry.head_dim,
                geometry.page_size,
                geometry.tp_rank,
                geometry.tp_size,
                layout.num_pages,
                geometry.num_parts,
                _DTYPE_NUMBERS[geometry.dtype],
                len(regions),
                layout.page_stride,
                layout.token_stride,
                layout.head_stride,
            )
        )
        rows = np.empty((len(regions), 3), "<u8")
        rows[:, 0], rows[:, 2] = regions[:, 0], regions[:, 1]
        rows[:, 1] = layout.region_nbytes
        parts += [
            _text(geometry.packing),
            np.array(layers, "<u4").tobytes(),
            rows.tobytes(),
            layout.regions.astype("<u4").tobytes(),
            layout.offsets.astype("<u8").tobytes(),
        ]
    parts += [_SIZE.pack(len(blob)) for blob in pool.blobs]
    return b"".join([*parts, *pool.blobs])


def parse_pool(body: bytes, at: int) -> Pool:
    """Read the pool that takes up the rest of a body.

    That the regions are the sender's to tell is not known here: compare them with its metadata.

    Raises:
        MetadataError: It is cut, too long, or makes no sense: pages beyond their regions, say.
    """
    reader = _Reader(body, at)
    version, model = reader.text(), reader.text()
    kind, num_groups, num_blobs = reader.unpack(_COUNTS)
    if kind >= len(_KINDS) or not 1 <= num_groups <= MAX_GROUPS or num_blobs > MAX_BLOBS:
        raise MetadataError("pool has a kind of memory, or a number of parts, that can't be")
    groups = [_parse_group(reader) for _ in range(num_groups)]
    sizes = [reader.unpack(_SIZE)[0] for _ in range(num_blobs)]
    if any(not 1 <= size <= MAX_BLOB for size in sizes):
        raise MetadataError("pool has metadata of a size that can't be")
    blobs = tuple(reader.take(size) for size in sizes)
    reader.end()
    layouts = tuple(layout for layout, _, _ in groups)
    compatibility = _checked(
        lambda: Compatibility(
            model,
            tuple(layout.geometry for layout in layouts),
            tuple(layers for _, _, layers in groups),
            version,
        )
    )
    return Pool(
        compatibility, layouts, tuple(regions for _, regions, _ in groups), _KINDS[kind], blobs
    )


class _Reader:
    """Reads fields one after the other, none beyond the end."""

    def __init__(self, body: bytes, at: int) -> None:
        self._body = body
        self._at = at

    def take(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > len(self._body):
            raise MetadataError("pool is cut")
        data = self._body[self._at : end]
        self._at = end
        return data

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def text(self) -> str:
        try:
            return self.take(self.take(1)[0]).decode()
        except UnicodeDecodeError:
            raise MetadataError("pool has a text that isn't UTF-8") from None

    def array(self, dtype: str, count: int) -> npt.NDArray[Any]:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype)

    def end(self) -> None:
        if self._at != len(self._body):
            raise MetadataError("pool is longer than it says")


def _parse_group(reader: _Reader) -> tuple[Layout, Spans, tuple[int, ...]]:
    (
        num_layers,
        num_kv_heads,
        head_dim,
        page_size,
        tp_rank,
        tp_size,
        num_pages,
        num_parts,
        dtype,
        num_regions,
        page_stride,
        token_stride,
        head_stride,
    ) = reader.unpack(_GROUP)
    packing = reader.text()
    if not (1 <= num_layers <= MAX_LAYERS and num_parts in (1, 2) and num_regions <= MAX_REGIONS):
        raise MetadataError("pool has a number of layers, parts or regions that can't be")
    if dtype not in DTYPES:
        raise MetadataError(f"pool has dtype {dtype}, which this PyTorch does not know")
    layers = tuple(reader.array("<u4", num_layers).tolist())
    rows = reader.array("<u8", 3 * num_regions).reshape(-1, 3)
    shape = (num_layers, num_parts)
    table = reader.array("<u4", num_layers * num_parts).astype(np.int64).reshape(shape)
    offsets = reader.array("<u8", num_layers * num_parts).reshape(shape)
    ends = [address + nbytes for address, nbytes, _ in rows.tolist()]
    if any(end > 1 << 64 for end in ends) or (offsets >> np.uint64(63)).any():
        raise MetadataError(
            "pool has a region beyond all addresses, or an offset beyond its region"
        )

    def make() -> Layout:
        return Layout(
            Geometry(
                num_layers,
                num_kv_heads,
                head_dim,
                DTYPES[dtype],
                page_size,
                num_parts,
                packing,
                tp_rank,
                tp_size,
            ),
            num_pages,
            table,
            offsets.astype(np.int64),
            page_stride,
            token_stride,
            head_stride,
            tuple(rows[:, 1].tolist()),
        )

    return _checked(make), np.ascontiguousarray(rows[:, [0, 2]], np.uint64), layers


def _checked(make: Callable[[], _T]) -> _T:
    try:
        return make()
    except ValueError as error:
        raise MetadataError(f"pool makes no sense: {error}") from None


def _text(text: str) -> bytes:
    data = text.encode()
    return bytes((len(data),)) + data
