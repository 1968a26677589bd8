"""What is made of trees and objects that come."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.memory import Memory, require_in_place, require_writable, tensor_memory
from torch_nixl.engine.streams import Landing as LandsOn
from torch_nixl.engine.streams import StreamDevice, device_of
from torch_nixl.errors import MetadataError
from torch_nixl.p2p.bundles import (
    ONE_PIECE,
    Arrangement,
    arrange,
    choose_num_apart,
    fits_one_piece,
    unpack_from,
)
from torch_nixl.p2p.description import DEVICES, Bundle, Content, Description, Form
from torch_nixl.p2p.fitting import NOTHING, build, fill, match
from torch_nixl.p2p.manifest import Packed, parse
from torch_nixl.p2p.nodes import Node
from torch_nixl.p2p.protocol import PACK_SPAN_NBYTES
from torch_nixl.p2p.tensors import (
    MismatchError,
    check_target,
    copy_into,
    landing_device,
    require_plain,
)
from torch_nixl.p2p.tree_target import TreeTarget


class TreeLanding:
    """Receives a tree. Made, and its `out` checked, before anything has come.

    Attributes:
        tensors: The tree's tensors here, in the order that it was sent in, once that is known.
    """

    def __init__(
        self, out: Any, like: Any, device: torch.device | None, lands: LandsOn | None = None
    ) -> None:
        """Check what the receiver gives.

        Args:
            out: A tree to fill, or `NOTHING`.
            like: A tree to imitate, or `NOTHING`.
            device: Where new tensors are made; by default where those of `like` are, or on the
                sender's kind of device.
            lands: Where those of a sender's kind of device are made; None for torch's choice.

        Raises:
            TypeError, ValueError: `out` can't be received into.
        """
        self._out = out
        self._like = like
        self._device = device
        self._lands = lands
        self._parsed: tuple[bytes, Node, Sequence[Description]] | None = None
        self._rooms: dict[int, torch.Tensor] = {}
        self._own: Packed | None = None
        self._root: Node | None = None
        self._memories: dict[int, Memory] = {}
        self.tensors: list[torch.Tensor] = []
        if out is not NOTHING:
            own = self._own = Packed(out, "out")
            for index, tensor in enumerate(own.tensors):
                try:
                    self._check(tensor)
                except (TypeError, ValueError):
                    check_target(tensor, name=own.path(index, out))
                    raise

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.nbytes < PACK_SPAN_NBYTES:
            check_target(tensor)
        else:
            memory = tensor_memory(tensor)
            require_writable(memory, "out")
            require_plain(tensor, "out")
            self._memories[id(tensor)] = memory

    @property
    def own_memories(self) -> list[Memory]:
        """Those of the receiver's own tensors that aren't small."""
        own = self._own
        if own is None or choose_num_apart(own.descriptions) == ONE_PIECE:
            return []
        return list(self._memories.values())

    @property
    def own_tensors(self) -> tuple[torch.Tensor, ...]:
        """The receiver's own tensors."""
        return () if self._own is None else tuple(self._own.tensors)

    def load_kernels(self) -> None:
        """Have what unpacks strided device tensors loaded, and room for small ones made.

        By the caller's thread: see [Note: no device calls in the driver] in `engine/streams.py`.
        """
        own = self._own
        if own is None:
            return
        small = fits_one_piece(own.descriptions)
        for tensor in own.tensors:
            device = None if tensor.is_contiguous() else device_of(tensor)
            if device is None:
                continue
            key = (device.name, tensor.dtype, tensor.dim())
            if small or key not in _loaded:
                room = device.buffer(tensor, device.current())
                _loaded.add(key)
                if small:
                    self._rooms[id(tensor)] = room

    def device_of(self, content: Content) -> StreamDevice | None:
        """A device on which some of a tree lands that nobody gave tensors for."""
        lands = self._lands
        if lands is None or not isinstance(content, Bundle) or content.form is not Form.TREE:
            return None
        try:
            root, descriptions = self._parse(content)
            found = [lands(what.device) for what in descriptions]
            if self._like is not NOTHING:
                found += map(device_of, match(root, descriptions, self._like, name="like"))
        except (MetadataError, MismatchError):
            return None  # Said when it is received.
        return next((device for device in found if device is not None), None)

    def _parse(self, bundle: Bundle) -> tuple[Node, Sequence[Description]]:
        parsed = self._parsed
        if parsed is None or parsed[0] != bundle.manifest:
            parsed = self._parsed = (bundle.manifest, *parse(bundle.manifest))
        return parsed[1], parsed[2]

    def take(self, content: Content, body: bytes, at: int) -> object:
        arrangement = self.begin(content)
        if arrangement.apart:
            raise MetadataError(f"{content}: in a frame, but not in one piece")
        source = ctypes.cast(ctypes.c_char_p(body), ctypes.c_void_p).value
        assert source is not None
        start = source + at
        targets = [self._rooms.get(id(one), one) for one in self.tensors]
        for piece in arrangement.pieces:
            unpack_from(start, piece, targets)
            start += piece.nbytes
        for target, tensor in zip(targets, self.tensors, strict=True):
            if target is not tensor:
                copy_into(tensor, target)
        return self.finish()

    def adopt(self, content: Content, tensors: Sequence[torch.Tensor]) -> object:
        self.begin(content)
        for target, tensor in zip(self.tensors, tensors, strict=True):
            copy_into(target, tensor)
        return self.finish()

    def target(self, content: Content) -> TreeTarget:
        return TreeTarget(self, self.begin(content))

    def begin(self, content: Content) -> Arrangement:
        """Compare what comes with what was asked for, all of it, before anything is written.

        Raises:
            MismatchError: It isn't a tree, or another one.
            MetadataError: It isn't one that this library has made.
        """
        bundle = require(content, Form.TREE)
        own = self._own
        if own is not None and own.manifest == bundle.manifest:
            descriptions, self.tensors = own.descriptions, own.tensors
        else:
            self._root, parsed = self._parse(bundle)
            descriptions = list(parsed)
        arrangement = arrange(descriptions, bundle.num_apart)
        if arrangement.nbytes != bundle.nbytes:
            raise MetadataError(f"{bundle}: its tensors have {arrangement.nbytes} bytes")
        if self._root is not None:
            self.tensors = self._find(self._root, descriptions)
        return arrangement

    def _find(self, root: Node, descriptions: Sequence[Description]) -> list[torch.Tensor]:
        if self._out is not NOTHING:
            return match(root, descriptions, self._out, name="out")
        if self._like is NOTHING:
            return [self._make(what, landing_device(what, self._device)) for what in descriptions]
        return [
            self._make(what, landing_device(what, self._device))
            if self._device is not None or tensor.device.type not in DEVICES
            else _make_at(tensor, what)
            for what, tensor in zip(
                descriptions, match(root, descriptions, self._like, name="like"), strict=True
            )
        ]

    def _make(self, what: Description, where: torch.device | None) -> torch.Tensor:
        device = None if self._lands is None else self._lands(what.device)
        if device is not None:
            return device.empty(what.shape, what.dtype)
        return torch.empty(what.shape, dtype=what.dtype, device=where)

    def share_memory(self) -> bool:
        """Whether two of the tensors may: between their first bytes and their last, they do."""
        if self._out is NOTHING:
            return False
        ranges: list[tuple[int, int]] = []
        for tensor in self.tensors:
            low, high = 0, tensor.nbytes
            if not tensor.is_contiguous():
                itemsize = tensor.element_size()
                strides = [stride * itemsize for stride in tensor.stride()]
                low, high = algebra.bounds(tensor.shape, strides, itemsize)
            if low < high:
                ranges.append((tensor.data_ptr() + low, tensor.data_ptr() + high))
        ranges.sort()
        # Sorted, the first that begins before another's end follows that one at once.
        return any(one[1] > other[0] for one, other in itertools.pairwise(ranges))

    def memory(self, index: int) -> Memory:
        """Where one of the tensors lies."""
        tensor = self.tensors[index]
        known = self._memories.get(id(tensor))
        if known is None:
            return tensor_memory(tensor)
        require_in_place(known)
        return known

    def finish(self) -> Any:
        """Make what the receiver gets, once all bytes are in place."""
        if self._out is NOTHING:
            assert self._root is not None
            return build(self._root, self.tensors, self._like)
        if self._root is not None:
            fill(self._root, self._out)
        return self._out


def _make_at(tensor: torch.Tensor, what: Description) -> torch.Tensor:
    """Make a tensor on the device of another."""
    device = device_of(tensor)
    if device is not None:
        return device.empty(what.shape, what.dtype)
    return torch.empty(what.shape, dtype=what.dtype, device=tensor.device)


_loaded: set[tuple[str, torch.dtype, int]] = set()


def require(content: Content, form: Form) -> Bundle:
    """Refuse a message of another form.

    Raises:
        MismatchError: Names both.
    """
    if not isinstance(content, Bundle):
        raise MismatchError(
            f"{_FORMS[form]} expected, a tensor sent ({content}): recv_tensor receives it"
        )
    if content.form is not form:
        what = content.form.name.lower()
        raise MismatchError(f"{_FORMS[form]} expected, {content} sent: recv_{what} receives it")
    return content


_FORMS: Final = {Form.TREE: "a tree", Form.OBJECT: "an object"}


class ObjectLanding:
    """Receives a pickled object: what it makes is the pickle."""

    __slots__ = ()

    def take(self, content: Content, body: bytes, at: int) -> Pickle:
        require(content, Form.OBJECT)
        return Pickle(body[at:])

    def adopt(self, content: Content, tensors: Sequence[torch.Tensor]) -> Pickle:
        require(content, Form.OBJECT)
        return Pickle(tensors[0].numpy().tobytes())

    def target(self, content: Content) -> ObjectTarget:
        return ObjectTarget(require(content, Form.OBJECT).nbytes)


class ObjectTarget:
    """Where a large pickle lands."""

    __slots__ = ("_buffer", "memories", "packed")

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.memories: Sequence[Memory] = (tensor_memory(self._buffer),)
        self.packed = False

    def finish(self) -> Pickle:
        return Pickle(self._buffer.numpy().tobytes())


class Pickle(bytes):
    """A pickle that nobody has loaded yet. A type of its own: it may turn into bytes."""
