"""Where a tree lands: what its bytes are moved into, and what is unpacked when all are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_nixl.engine.memory import Memory, tensor_memory
from torch_nixl.p2p.bundles import Arrangement, Piece, scattered_ones, unpack_from, view_of
from torch_nixl.p2p.tensors import copy_into

if TYPE_CHECKING:
    from torch_nixl.p2p.landing import TreeLanding


class TreeTarget:
    """Where a tree lands.

    Attributes:
        memories: What its bytes are moved into, in their order.
        packed: Whether some of that is a temporary, besides what travels side by side.
    """

    __slots__ = (
        "_arrangement",
        "_buffers",
        "_copies",
        "_landing",
        "_share",
        "memories",
        "packed",
    )

    def __init__(self, landing: TreeLanding, arrangement: Arrangement) -> None:
        self._landing = landing
        self._arrangement = arrangement
        self._buffers = [
            torch.empty(
                piece.nbytes,
                dtype=torch.uint8,
                device=landing.tensors[piece.indices[0]].device,
            )
            for piece in arrangement.pieces
        ]
        self._share = landing.share_memory()
        self._copies: list[tuple[int, torch.Tensor]] = []
        memories = [landing.memory(index) for index in arrangement.apart]
        direct = set(range(len(memories)))
        direct -= set(scattered_ones(memories, len(arrangement.pieces)))
        if self._share:
            direct -= set(_shared(landing, arrangement, memories))
        for place in sorted(set(range(len(memories))) - direct):
            index = arrangement.apart[place]
            tensor = landing.tensors[index]
            temporary = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            self._copies.append((index, temporary))
            memories[place] = tensor_memory(temporary)
        self.packed = bool(self._copies)
        self.memories: Sequence[Memory] = [*map(tensor_memory, self._buffers), *memories]

    def finish(self) -> object:
        """Unpack, where need be, and make the tree. All bytes have landed."""
        landing, tensors = self._landing, self._landing.tensors
        if self._share:
            self._finish_in_order()
            return landing.finish()
        for index, temporary in self._copies:
            copy_into(tensors[index], temporary)
        for piece, buffer in zip(self._arrangement.pieces, self._buffers, strict=True):
            _unpack(piece, buffer, tensors)
        return landing.finish()

    def _finish_in_order(self) -> None:
        """Unpack in the order of the tree, so that the bytes of the last tensor stay."""
        tensors = self._landing.tensors
        steps: list[tuple[int, Piece | None, torch.Tensor]] = [
            (index, None, temporary) for index, temporary in self._copies
        ]
        for piece, buffer in zip(self._arrangement.pieces, self._buffers, strict=True):
            for at, index in zip(piece.offsets, piece.indices, strict=True):
                steps.append((index, Piece(piece.device, [index], [at]), buffer))
        steps.sort(key=lambda step: step[0])
        for index, part, source in steps:
            if part is None:
                copy_into(tensors[index], source)
            else:
                _unpack(part, source, tensors)


def _unpack(piece: Piece, buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy a piece's tensors from its buffer to where they belong."""
    if buffer.is_cpu:
        unpack_from(buffer.data_ptr(), piece, tensors)
        return
    for at, index in zip(piece.offsets, piece.indices, strict=True):
        copy_into(tensors[index], view_of(buffer, at, tensors[index]))


def _shared(
    landing: TreeLanding, arrangement: Arrangement, memories: Sequence[Memory]
) -> list[int]:
    """Which memories can't be written to directly: they share bytes with a tensor before them.

    Tied weights, say, or a view and the tensor that it shows. What lands there is copied when all
    has landed, so that the bytes of the last one stay, as if the tensors had come one by one.

    Args:
        landing: Whose tensors they are.
        arrangement: How those come.
        memories: Of the ones that travel on their own.
    """
    together = sorted(index for piece in arrangement.pieces for index in piece.indices)
    everything = [*memories, *(landing.memory(index) for index in together)]
    rows = [
        (memory.spans[:, 0], memory.spans[:, 1], np.full(len(memory.spans), index))
        for index, memory in zip([*arrangement.apart, *together], everything, strict=True)
    ]
    addresses, sizes, indices = (np.concatenate(column) for column in zip(*rows, strict=True))
    order = np.argsort(addresses, kind="stable")
    ends = np.maximum.accumulate((addresses + sizes)[order])
    touching = np.flatnonzero(addresses[order][1:] < ends[:-1])
    # All that share, but for the first in the tree.
    found = set(indices[order][touching].tolist()) | set(indices[order][touching + 1].tolist())
    late = set(sorted(found)[1:])
    return [place for place, index in enumerate(arrangement.apart) if index in late]
