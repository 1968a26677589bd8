"""The bytes of trees: in which order they travel, where they lie, and where they land.

[Note: order of a tree's bytes]
The largest tensors, as many as the description says, travel on their own: as they lie, in the order
of the manifest; of several of one size the first in it. The others go before them, side by side,
each at a multiple of 16 bytes: those of one kind of device in one piece, CPU first. The sender
chooses the number, so that both sides know the order, and each of them decides by itself which of
those on their own it packs (scattered ones) or receives through a temporary. Where all of it fits a
frame, everything is in one piece.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from torch_nixl.engine.memory import Memory, tensor_memory
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.wire import MAX_BODY
from torch_nixl.p2p.description import DEVICES, Bundle, Description, Form
from torch_nixl.p2p.manifest import Packed
from torch_nixl.p2p.place import MAX_SPANS
from torch_nixl.p2p.protocol import EAGER_NBYTES, PACK_SPAN_NBYTES, should_pack
from torch_nixl.p2p.tensors import (
    contiguous_copy,
    copy_into,
    host_address,
    require_plain,
    sendable,
)

ONE_PIECE: Final = (1 << 64) - 1
"""Instead of a number: everything is in one piece, whatever the devices."""

MAX_APART: Final = 1000
"""Most tensors of a tree that travel on their own: each takes a span, and a region at worst."""

_ALIGNMENT: Final = 16
_ROOM: Final = MAX_SPANS * (24 + 16) + 256
_memmove = ctypes.memmove


def _aligned(nbytes: int) -> int:
    return nbytes + _ALIGNMENT - 1 & -_ALIGNMENT


@dataclass(slots=True)
class Piece:
    """Tensors that travel side by side.

    Attributes:
        device: The kind that they are sent from.
        indices: Which ones, by their place in the tree.
        offsets: Where each begins.
        nbytes: Bytes of it all, gaps included.
    """

    device: str
    indices: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0

    def add(self, index: int, nbytes: int) -> None:
        self.indices.append(index)
        self.offsets.append(self.nbytes)
        self.nbytes += _aligned(nbytes)


@dataclass(slots=True)
class Arrangement:
    """The order of a tree's bytes. See [Note: order of a tree's bytes].

    Attributes:
        pieces: What travels side by side, first.
        apart: The tensors that follow, by their place in the tree.
        nbytes: Bytes of it all.
    """

    pieces: list[Piece]
    apart: list[int]
    nbytes: int


def arrange(descriptions: Sequence[Description], num_apart: int) -> Arrangement:
    """Order a tree's tensors; those without bytes are left out."""
    together = num_apart == ONE_PIECE
    if together:
        pieces = {"cpu": Piece("cpu")}
    else:
        pieces = {device: Piece(device) for device in DEVICES}
    sizes = [what.nbytes for what in descriptions]
    alone = set() if together else _largest(sizes, num_apart)
    for index, (what, nbytes) in enumerate(zip(descriptions, sizes, strict=True)):
        if nbytes and index not in alone:
            pieces["cpu" if together else what.device].add(index, nbytes)
    found = [piece for piece in pieces.values() if piece.nbytes]
    apart = sorted(alone)
    total = sum(sizes[index] for index in apart) + sum(piece.nbytes for piece in found)
    return Arrangement(found, apart, total)


def _largest(sizes: Sequence[int], count: int) -> set[int]:
    """The places of the largest sizes; the first of those that are equal. None of them is 0."""
    places = [place for place, nbytes in enumerate(sizes) if nbytes]
    if count < len(places):
        # Sorting keeps the order of equal ones.
        places = sorted(places, key=sizes.__getitem__, reverse=True)[:count]
    return set(places)


def fits_one_piece(descriptions: Sequence[Description]) -> bool:
    """Whether a tree is small enough to travel in its frame."""
    return sum(_aligned(what.nbytes) for what in descriptions) <= EAGER_NBYTES


def choose_num_apart(descriptions: Sequence[Description]) -> int:
    """How many tensors travel on their own, or `ONE_PIECE`.

    Device memory is never put into a frame, however little it is: the host would have to wait for
    the copy. Nor is a single tensor's: see `ordering.py`.
    """
    on_host = all(what.device == "cpu" or not what.nbytes for what in descriptions)
    if on_host and fits_one_piece(descriptions):
        return ONE_PIECE
    return min(MAX_APART, sum(what.nbytes >= PACK_SPAN_NBYTES for what in descriptions))


def resolve(tensor: torch.Tensor) -> torch.Tensor:
    """What is sent of a tensor in a tree: lazy conjugation and negation resolved.

    Raises:
        TypeError, ValueError: It can't be sent; not all reasons are looked for.
    """
    require_plain(tensor, "tensor")
    return sendable(tensor) if tensor.is_conj() or tensor.is_neg() else tensor


def pack_into(buffer: torch.Tensor, piece: Piece, tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors side by side into a buffer of uint8.

    Args:
        buffer: Contiguous, of the piece's size.
        piece: Which of the tensors go there.
        tensors: All of the tree's.

    Raises:
        TypeError, ValueError: One can't be sent.
    """
    base = host_address(buffer)
    for at, index in zip(piece.offsets, piece.indices, strict=True):
        tensor = tensors[index]
        address = host_address(tensor)
        if not address:
            sendable(tensor)
        if address and base:
            _memmove(base + at, address, tensor.nbytes)
        else:
            view_of(buffer, at, tensor).copy_(tensor.detach())


def unpack_from(source: int, piece: Piece, tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors that lie side by side in host memory to where they belong.

    Args:
        source: The address of the first.
        piece: Which of the tensors they are.
        tensors: All of the tree's.
    """
    for at, index in zip(piece.offsets, piece.indices, strict=True):
        tensor = tensors[index]
        address = host_address(tensor)
        if address:
            _memmove(address, source + at, tensor.nbytes)
        else:
            packed = torch.empty(tensor.shape, dtype=tensor.dtype)
            _memmove(packed.data_ptr(), source + at, packed.nbytes)
            copy_into(tensor, packed)


def view_of(buffer: torch.Tensor, at: int, tensor: torch.Tensor) -> torch.Tensor:
    """The part of a buffer of uint8 where a tensor like this one lies."""
    return buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def one_piece(tree: Packed) -> tuple[Bundle, torch.Tensor]:
    """Copy all of a small tree into one buffer on the CPU.

    Raises:
        TypeError, ValueError: A tensor can't be sent.
    """
    arrangement = arrange(tree.descriptions, ONE_PIECE)
    buffer = torch.zeros(arrangement.nbytes, dtype=torch.uint8)
    for piece in arrangement.pieces:
        pack_into(buffer, piece, tree.tensors)
    return Bundle(Form.TREE, tree.manifest, ONE_PIECE, buffer.nbytes), buffer


def copy_all(tree: Packed) -> tuple[Bundle, list[torch.Tensor]]:
    """Copy all tensors of a tree that this rank sends itself.

    Raises:
        TypeError, ValueError: A tensor can't be sent.
    """
    nbytes = arrange(tree.descriptions, ONE_PIECE).nbytes
    copies = [contiguous_copy(sendable(tensor)) for tensor in tree.tensors]
    return Bundle(Form.TREE, tree.manifest, ONE_PIECE, nbytes), copies


class TreeSource:
    """The bytes of a tree that is sent.

    Attributes:
        bundle: Its description.
        memories: What its bytes lie in, in their order; holds copies where they were packed.
        num_apart: Tensors that travel on their own.
        packed: Whether scattered ones of them were packed.
    """

    __slots__ = ("bundle", "memories", "num_apart", "packed")

    def __init__(self, tree: Packed, num_apart: int) -> None:
        """Find where a tree's bytes lie, and pack what is small or scattered.

        Raises:
            TypeError, ValueError: A tensor can't be sent.
        """
        arrangement = arrange(tree.descriptions, num_apart)
        memories = [tensor_memory(tree.tensors[index]) for index in arrangement.apart]
        scattered = scattered_ones(memories, len(arrangement.pieces))
        for place in scattered:
            copy = tree.tensors[arrangement.apart[place]].detach().contiguous()
            memories[place] = tensor_memory(copy)
        self.packed = bool(scattered)
        self.num_apart = len(memories)
        pieces = []
        for piece in arrangement.pieces:
            device = tree.tensors[piece.indices[0]].device
            buffer = torch.zeros(piece.nbytes, dtype=torch.uint8, device=device)
            pack_into(buffer, piece, tree.tensors)
            pieces.append(tensor_memory(buffer))
        # Copies on devices are queued on their current streams: see `order_of`.
        self.memories = pieces + memories
        self.bundle = Bundle(Form.TREE, tree.manifest, num_apart, arrangement.nbytes)


def scattered_ones(memories: Sequence[Memory], num_pieces: int) -> list[int]:
    """Which memories are better packed: those in short spans, all in pieces if there are many."""
    num_spans = [memory.num_spans for memory in memories]
    found = [
        place
        for place, memory in enumerate(memories)
        if num_spans[place] > 1 and should_pack(num_spans[place], memory.nbytes)
    ]
    left = sum(num_spans) - sum(num_spans[place] - 1 for place in found)
    if left + num_pieces > MAX_SPANS:
        return [place for place, count in enumerate(num_spans) if count > 1]
    return found


def fits_frame(bundle: Bundle | None, memories: Sequence[RegisteredMemory]) -> bool:
    """Whether a frame has room for a description and all that is said of so many regions."""
    blobs = {one.blob for one in memories}
    nbytes = sum(map(len, blobs)) + (0 if bundle is None else len(bundle.packed))
    return nbytes + _ROOM <= MAX_BODY
