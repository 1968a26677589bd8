"""What ranks of a group say to each other about their collectives. Pure: no I/O.

The bytes of a collective travel as messages of `p2p`. Each has a tag below zero, which no program
can use, made of the collective's number in its group, the phase within it, and a checksum of its
signature: what is called, with which shapes, dtype, operation and root. So calls that don't belong
together never exchange a byte, at no cost; they wait. Whoever has waited for a while says ASK and
what it waits in; the others answer TELL with what their collective of that number is, as soon as
they have begun it. Whoever sees that the two differ, or fails otherwise, says FAIL to all.
"""

from __future__ import annotations

import functools
import struct
import zlib
from dataclasses import dataclass
from typing import Final

from torch_nixl.errors import (
    ClosedError,
    MetadataError,
    PeerLostError,
    TorchNixlError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p.tensors import MismatchError

ASK: Final = 60
TELL: Final = 61
FAIL: Final = 62

MAX_TEXT: Final = 4096
MAX_PHASE: Final = 3

MAX_SIGNATURE: Final = 1024
"""Characters of a signature that are told; a long list of tensors goes on in its checksum."""

_MARK_BITS: Final = 30
_PHASE_BITS: Final = 2
_NUMBER_BITS: Final = 31
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1
_SHIFT: Final = _MARK_BITS + _PHASE_BITS

_CALL: Final = struct.Struct("<IQ")
_FAIL: Final = struct.Struct("<IQB")

# The place in this list is the number on the wire.
_ERRORS: Final[tuple[type[TorchNixlError], ...]] = (
    TransferError,
    TransferTimeout,
    TransferCancelled,
    PeerLostError,
    ClosedError,
    MismatchError,
)


@dataclass(frozen=True, slots=True)
class Signature:
    """What has to be the same on all ranks of one collective.

    Attributes:
        name: Which collective.
        text: All of it, for people.
        mark: A checksum of the text.
    """

    name: str
    text: str
    mark: int

    def __str__(self) -> str:
        return self.text


def sign(name: str, details: str) -> Signature:
    """Make a signature: `details` says with what the collective `name` was called."""
    # Those of long lists are not worth their memory.
    return _sign(name, details) if len(details) <= MAX_SIGNATURE else _make(name, details)


def _make(name: str, details: str) -> Signature:
    text = f"{name}({details})"
    mark = zlib.crc32(text.encode()) & ((1 << _MARK_BITS) - 1)
    if len(text) > MAX_SIGNATURE:
        text = f"{text[:MAX_SIGNATURE]}... and more, {mark:08x})"
    return Signature(name, text, mark)


_sign = functools.lru_cache(maxsize=4096)(_make)


def tag_of(number: int, mark: int, phase: int) -> int:
    """The tag of a collective's messages: -1 or less."""
    return -1 - ((number & _NUMBER_MASK) << _SHIFT | phase << _MARK_BITS | mark)


def number_of(tag: int, near: int) -> int:
    """The number of the collective that a tag below zero belongs to.

    Args:
        tag: From `tag_of`.
        near: A number that is less than 2^30 away: tags hold only the low bits.
    """
    low = (-1 - tag) >> _SHIFT
    ahead = (low - near) & _NUMBER_MASK
    return near + (ahead if ahead <= _NUMBER_MASK >> 1 else ahead - _NUMBER_MASK - 1)


def pack_call(context: int, number: int, text: str) -> bytes:
    """A body of ASK or TELL: the sender's collective of that number."""
    return _CALL.pack(context, number) + _encode(text)


def parse_call(body: bytes) -> tuple[int, str]:
    """Return number and text of an ASK or TELL."""
    _, number = _unpack(_CALL, body)
    return number, _decode(body[_CALL.size :])


def pack_fail(context: int, number: int, error: BaseException) -> bytes:
    """A body of FAIL: the collective of that number failed, and with it the group."""
    code = max((index for index, kind in enumerate(_ERRORS) if isinstance(error, kind)), default=0)
    return _FAIL.pack(context, number, code) + _encode(str(error))


def parse_fail(body: bytes) -> tuple[int, type[TorchNixlError], str]:
    """Return number, type of the error and its text."""
    _, number, code = _unpack(_FAIL, body)
    if code >= len(_ERRORS):
        raise MetadataError("frame has a value that does not exist")
    return number, _ERRORS[code], _decode(body[_FAIL.size :])


def _unpack(layout: struct.Struct, body: bytes) -> tuple[int, ...]:
    if not layout.size <= len(body) <= layout.size + MAX_TEXT:
        raise MetadataError(f"frame has a body of {len(body)} bytes")
    return layout.unpack_from(body)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore").encode()


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MetadataError("frame has a text that is none") from None
