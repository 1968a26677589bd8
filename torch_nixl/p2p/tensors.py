"""From tensors to bytes and back: what is sent, where it lands, and when it is copied."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from torch_nixl.engine.memory import Memory, require_writable, tensor_memory
from torch_nixl.errors import TransferError
from torch_nixl.p2p.description import Bundle, Content, Description
from torch_nixl.p2p.protocol import should_pack

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_memmove = ctypes.memmove
_string_at = ctypes.string_at

_LONG = 4096
"""Bytes from which another copy of them costs more than to avoid it."""


class MismatchError(TransferError, ValueError):
    """A message and what was to receive it differ: in shape, dtype, structure, or altogether.

    Raised on both sides. The message is gone, `out` is untouched, and the next message is intact.
    """


def sendable(tensor: torch.Tensor, *, name: str = "tensor") -> torch.Tensor:
    """Return what is sent of a tensor: its data, with lazy conjugation and negation resolved.

    Raises:
        TypeError: Not a plain tensor, or one without data of its own.
        ValueError: Its data isn't plain bytes in place (sparse, nested, quantised, meta, freed).
    """
    if host_address(tensor):
        return tensor
    if isinstance(tensor, torch.Tensor) and type(tensor) in _PLAIN_TYPES:
        if tensor.layout is torch.strided and (tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.resolve_conj().resolve_neg()
    tensor_memory(tensor, name=name)
    require_plain(tensor, name)
    return tensor


def require_plain(tensor: torch.Tensor, name: str) -> None:
    """Refuse a subclass.

    Raises:
        TypeError: It is one.
    """
    if type(tensor) not in _PLAIN_TYPES:
        raise TypeError(f"{name}: {type(tensor).__name__} is a subclass; pass the plain tensor")


def check_target(out: torch.Tensor, *, name: str = "out") -> int:
    """Refuse a tensor that can't be received into; return its `host_address`.

    Raises:
        TypeError, ValueError: As `sendable`; or some of its elements share memory.
    """
    address = host_address(out)
    if not address:
        require_writable(tensor_memory(out, name=name), name)
        require_plain(out, name)
    return address


def host_address(tensor: torch.Tensor) -> int:
    """Return where a tensor's bytes lie, if all of them are in one piece of host memory; else 0.

    Looks at the storage, too: one that was freed leaves its views with addresses that lead nowhere.
    """
    if not (
        type(tensor) in _PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    ):
        return 0
    try:
        address = tensor.data_ptr()
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        end = base + storage.nbytes()
    except RuntimeError:
        return 0
    return address if base and base <= address and address + tensor.nbytes <= end else 0


def join(head: bytes, tensor: torch.Tensor, address: int = 0) -> bytes:
    """Copy the bytes of a tensor behind a head.

    Args:
        head: What comes first.
        tensor: Of those that are `sendable`.
        address: Its `host_address`, if it is known.

    Raises:
        TypeError, ValueError: It can't be sent any more: its storage was freed, or has shrunk.
    """
    nbytes = tensor.nbytes
    if not nbytes:
        return head
    if not address:
        address = host_address(tensor)
    if not address:
        tensor_memory(tensor)  # Refuses what was freed or has shrunk meanwhile, as a copy doesn't.
        tensor = tensor.detach().cpu().contiguous()
        address = tensor.data_ptr()
    if nbytes < _LONG:
        return head + _string_at(address, nbytes)
    return b"".join((head, (ctypes.c_char * nbytes).from_address(address)))


def from_bytes(
    description: Content,
    body: bytes,
    at: int,
    out: torch.Tensor | None,
    device: torch.device | None,
    address: int = 0,
) -> torch.Tensor:
    """Copy bytes into a tensor: `out`, or a new one on `device`.

    Args:
        description: What the bytes are.
        body: What the bytes are in, to its end.
        at: Where they begin.
        out: Checked by `check_target`.
        device: For a new tensor; the sender's kind by default.
        address: What `check_target` returned.

    Raises:
        MismatchError: `out` has another shape or dtype.
    """
    description = require_tensor(description)
    if out is None:
        device = landing_device(description, device)
        out = torch.empty(description.shape, dtype=description.dtype, device=device)
    else:
        check_fits(description, out)
    nbytes = description.nbytes
    if nbytes:
        source: bytes | int | None
        if nbytes < _LONG:
            source = body[at:]
        else:
            source = ctypes.cast(ctypes.c_char_p(body), ctypes.c_void_p).value
            assert source is not None
            source += at
        if not address or out.data_ptr() != address or not _is_whole(out):
            address = host_address(out)
        if address:
            _memmove(address, source, nbytes)
        else:
            packed = torch.empty(description.shape, dtype=description.dtype)
            _memmove(packed.data_ptr(), source, nbytes)
            copy_into(out, packed)
    return out


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor in one piece still lies within its storage."""
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() - storage.data_ptr()
    return 0 <= start <= storage.nbytes() - tensor.nbytes


def require_tensor(content: Content) -> Description:
    """Refuse a message that is no tensor.

    Raises:
        MismatchError: Says which function receives it.
    """
    if isinstance(content, Bundle):
        name = content.form.name.lower()
        raise MismatchError(f"a tensor expected, {content} sent: recv_{name} receives it")
    return content


def copy_into(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a caller's tensor, in any thread.

    An inference tensor may be written to in inference mode alone, which is a thread's own.

    Raises:
        ValueError: Its storage was freed or has shrunk since it was given.
    """
    tensor_memory(out, name="out")  # torch would write where it lay.
    if out.is_inference():
        with torch.inference_mode():
            out.copy_(source)
    else:
        out.detach().copy_(source)


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """What a receiver elsewhere would be given of a tensor: the values, not the strides."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def check_fits(description: Description, out: torch.Tensor) -> None:
    """Refuse a message that `out` doesn't fit.

    Raises:
        MismatchError: Always names both.
    """
    if not description.fits(out):
        raise MismatchError(
            f"a message with {description} does not fit out= with {list(out.shape)} of {out.dtype}"
        )


def landing_device(description: Description, device: torch.device | None) -> torch.device | None:
    """Where a message lands that nobody gave a tensor for: the sender's kind of device."""
    if device is not None:
        return device
    return None if description.device == "cpu" else torch.device(description.device)


class Target(Protocol):
    """Where a large message lands.

    Attributes:
        memories: What its bytes are moved into, in their order.
        packed: Whether some of that is a temporary.
    """

    memories: Sequence[Memory]
    packed: bool

    def finish(self) -> object:
        """Unpack, where need be, and return what the receiver gets. All bytes have landed."""
        ...


class TensorTarget:
    """Where a large tensor lands: in the receiver's, or a packed temporary."""

    __slots__ = ("_buffer", "_out", "memories", "packed")

    def __init__(self, out: torch.Tensor, buffer: torch.Tensor, memory: Memory) -> None:
        self._out = out
        self._buffer = buffer
        self.memories: Sequence[Memory] = (memory,)
        self.packed = buffer is not out

    def finish(self) -> torch.Tensor:
        if self.packed:
            copy_into(self._out, self._buffer)
        return self._out


class Landing(Protocol):
    """What a receive makes of the message that it gets.

    All raise `MismatchError` if that doesn't fit, before they write anything.
    """

    def take(self, content: Content, body: bytes, at: int) -> object:
        """Return what is received of a frame's body, from byte `at` to its end."""
        ...

    def adopt(self, content: Content, tensors: Sequence[torch.Tensor]) -> object:
        """Return what is received of the tensors of a message of this rank's own."""
        ...

    def target(self, content: Content) -> Target:
        """Choose where a large message lands."""
        ...


class TensorLanding:
    """Receives one tensor.

    Args:
        out: Checked by `check_target`; None for a new tensor.
        address: What that returned.
        device: For a new tensor; the sender's kind by default.
    """

    __slots__ = ("_address", "_device", "_out")

    def __init__(self, out: torch.Tensor | None, address: int, device: torch.device | None) -> None:
        self._out = out
        self._address = address
        self._device = device

    def take(self, content: Content, body: bytes, at: int) -> torch.Tensor:
        return from_bytes(content, body, at, self._out, self._device, self._address)

    def adopt(self, content: Content, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        what = require_tensor(content)
        [tensor] = tensors
        out = self._out
        if out is None:
            return tensor if self._device is None else tensor.to(self._device)
        check_fits(what, out)
        copy_into(out, tensor)
        return out

    def target(self, content: Content) -> TensorTarget:
        what = require_tensor(content)
        dtype, shape, out = what.dtype, what.shape, self._out
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=landing_device(what, self._device))
            return TensorTarget(out, out, tensor_memory(out))
        check_fits(what, out)
        memory = tensor_memory(out, name="out")
        if should_pack(memory.num_spans, memory.nbytes):
            buffer = torch.empty(shape, dtype=dtype, device=out.device)
            return TensorTarget(out, buffer, tensor_memory(buffer))
        return TensorTarget(out, out, memory)


def make_source(tensor: torch.Tensor) -> tuple[Memory, bool]:
    """Memory to send a large tensor from: its own, or a packed copy's; and whether it is a copy."""
    memory = tensor_memory(tensor)
    if should_pack(memory.num_spans, memory.nbytes):
        return tensor_memory(tensor.detach().contiguous()), True
    return memory, False
