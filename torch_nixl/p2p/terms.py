"""What the two ends of a channel say to each other. Pure: no I/O.

    one end                          other end
    CHANNEL ────────────────────────▶  what it moves, and where that lies
         ◀────────────────── CHANNEL
    AGREE ──────────────────────────▶  the two fit, and everything is prepared
         ◀──────────────────── AGREE

Then steps, numbered from 0 on both ends. In each, one end sends and the other receives, as the
program says on both; if it says the same on both, that is an error on both.

    up to 64 KiB
    BYTES ──────────────────────────▶  copied once the step has begun here
         ◀──────────────────── MOVED
    reads (both ends reach each other by Cross Memory Attach)
    READY ──────────────────────────▶  READ
         ◀──────────────────── MOVED
    reads, 1 MiB or more, and a thread of the sender waits
    READY, WAITING ─────────────────▶  READ of the first half
         ◀───────────── READY, SPLIT
    WRITE of the second half, MOVED ▶
         ◀──────────────────── MOVED
    writes (all else)
         ◀──────────────────── READY
    WRITE, MOVED ───────────────────▶

READY grants the other end to touch this end's memory in that step until it says MOVED. An end that
need not say READY does so nevertheless once it has waited for a while: so it shows if both send.

BREAK ends a channel: whoever says it touches the other's memory no more, nor starts anything. The
other end answers with its own, once what it had started is final. One that ended before it knew of
this end's is as if it had never been: this end waits for the next.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch_nixl.errors import MetadataError
from torch_nixl.p2p.description import Description, parse
from torch_nixl.p2p.place import Place, parse_place
from torch_nixl.p2p.protocol import MAX_TEXT, Outcome

CHANNEL: Final = 48
AGREE: Final = 49
READY: Final = 50
MOVED: Final = 51
BREAK: Final = 52
BYTES: Final = 53
KINDS: Final = (CHANNEL, AGREE, READY, MOVED, BREAK, BYTES)
"""Kinds of frames; 54 and 55 are kept for channels."""

WAITING: Final = 1
SPLIT: Final = 2

MAX_PATH: Final = 1024

_CHANNEL: Final = struct.Struct("<IQqI")
_AGREE: Final = struct.Struct("<IQQB")
_READY: Final = struct.Struct("<IQQBB")
_MOVED: Final = struct.Struct("<IQQ")
BYTES_AT: Final = _MOVED.size
"""Where the tensors' bytes begin in a BYTES."""

_BREAK: Final = struct.Struct("<IQQB")
_LEAF: Final = struct.Struct("<HI")


class Role(enum.IntEnum):
    """What one end does in a step."""

    SEND = 0
    RECEIVE = 1


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One tensor of a channel.

    Attributes:
        path: Where it stands in the tree, such as ``['layers'][0]``; empty for a lone tensor.
        description: Its dtype and shape.
        place: Where its bytes lie; None if there are none.
    """

    path: str
    description: Description
    place: Place | None


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What one end of a channel moves.

    Attributes:
        number: That end's number for the channel.
        tag: Sets channels between two ranks apart.
        leaves: Its tensors, in an order that both ends agree on.
    """

    number: int
    tag: int
    leaves: tuple[Leaf, ...]


def pack_channel(
    context: int, number: int, tag: int, leaves: Sequence[tuple[str, Description, bytes]]
) -> bytes:
    """A body of CHANNEL. Of each tensor: path, description, packed place (empty for no bytes)."""
    parts = [_CHANNEL.pack(context, number, tag, len(leaves))]
    for path, description, place in leaves:
        name = path.encode()
        parts += [_LEAF.pack(len(name), len(place)), name, description.packed, place]
    return b"".join(parts)


def parse_channel(body: bytes) -> Terms:
    """Read a CHANNEL.

    Raises:
        MetadataError: It is cut, or makes no sense.
    """
    if len(body) < _CHANNEL.size:
        raise MetadataError("frame is cut")
    _, number, tag, count = _CHANNEL.unpack_from(body)
    if tag < 0 or count * _LEAF.size > len(body):
        raise MetadataError("channel has a tag or a number of tensors that can't be")
    at = _CHANNEL.size
    leaves: dict[str, Leaf] = {}
    for _ in range(count):
        if len(body) < at + _LEAF.size:
            raise MetadataError("channel is cut")
        path_nbytes, place_nbytes = _LEAF.unpack_from(body, at)
        at += _LEAF.size
        name = body[at : at + path_nbytes]
        at += path_nbytes
        description = parse(body, at)
        if not isinstance(description, Description):
            raise MetadataError("channel has something that is not a tensor")
        at += len(description.packed)
        end = at + place_nbytes
        if path_nbytes > MAX_PATH or end > len(body):
            raise MetadataError("channel is cut, or has a path that is too long")
        place = parse_place(body[at:end], 0) if place_nbytes else None
        at = end
        if place is not None and len(place.regions) != 1:
            raise MetadataError("channel has a tensor in several regions")
        if (0 if place is None else place.nbytes) != description.nbytes:
            raise MetadataError(f"channel has a place of another size than {description}")
        path = _text(name)
        leaves[path] = Leaf(path, description, place)
    if at != len(body) or len(leaves) != count:
        raise MetadataError("channel has bytes behind its last tensor, or two of one path")
    return Terms(number, tag, tuple(leaves.values()))


def difference(
    ours: Sequence[tuple[str, Description]], theirs: Sequence[tuple[str, Description]]
) -> str:
    """Say in which tensor two trees first differ; empty if in none. Devices may differ."""
    here, there = dict(ours), dict(theirs)
    for path, what in ours:
        other = there.get(path)
        if other is None:
            return f"{_name(path)}: {what} here, nothing there"
        if (what.dtype, what.shape) != (other.dtype, other.shape):
            return f"{_name(path)}: {what} here, {other} there"
    for path, what in theirs:
        if path not in here:
            return f"{_name(path)}: nothing here, {what} there"
    return ""


def _name(path: str) -> str:
    return path or "the tensor"


def pack_agree(context: int, number: int, answered: int, *, reads: bool) -> bytes:
    """A body of AGREE: this end's number, the other's, and whether it would rather read."""
    return _AGREE.pack(context, number, answered, reads)


def parse_agree(body: bytes) -> tuple[int, int, bool]:
    """Return the sender's number, the receiver's, and whether the sender would rather read."""
    _, number, answered, reads = _unpack(_AGREE, body)
    if reads > 1:
        raise MetadataError("frame has a value that does not exist")
    return number, answered, bool(reads)


def pack_ready(context: int, number: int, step: int, role: Role, flags: int) -> bytes:
    """A body of READY."""
    return _READY.pack(context, number, step, role, flags)


def parse_ready(body: bytes) -> tuple[int, int, Role, int]:
    """Return the sender's number, the step, what the sender does in it, and flags."""
    _, number, step, role, flags = _unpack(_READY, body)
    if role > 1 or flags > WAITING | SPLIT:
        raise MetadataError("frame has a value that does not exist")
    return number, step, Role(role), flags


def pack_moved(context: int, number: int, step: int) -> bytes:
    """A body of MOVED."""
    return _MOVED.pack(context, number, step)


def parse_moved(body: bytes) -> tuple[int, int]:
    """Return the sender's number and the step."""
    _, number, step = _unpack(_MOVED, body)
    return number, step


def parse_bytes(body: bytes) -> tuple[int, int]:
    """Return the sender's number and the step of a BYTES, which begins as a MOVED does."""
    return parse_moved(body[: _MOVED.size])


def pack_break(context: int, number: int, answered: int, outcome: Outcome, text: str) -> bytes:
    """A body of BREAK: this end's number, the other's (0 if it isn't known), and why."""
    data = text.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore").encode()
    return _BREAK.pack(context, number, answered, outcome) + data


def parse_break(body: bytes) -> tuple[int, int, Outcome, str]:
    """Return the sender's number, the receiver's, and why the sender ends the channel."""
    if not _BREAK.size <= len(body) <= _BREAK.size + MAX_TEXT:
        raise MetadataError(f"frame has a body of {len(body)} bytes")
    _, number, answered, outcome = _BREAK.unpack_from(body)
    if not Outcome.FAILED <= outcome <= Outcome.TIMED_OUT:
        raise MetadataError("frame has a value that does not exist")
    return number, answered, Outcome(outcome), _text(body[_BREAK.size :])


def _unpack(layout: struct.Struct, body: bytes) -> tuple[int, ...]:
    if len(body) != layout.size:
        raise MetadataError(f"frame has a body of {len(body)} bytes; it has to be {layout.size}")
    return layout.unpack(body)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MetadataError("frame has a text that isn't UTF-8") from None
