"""What ranks say to each other: frames, credits, and which way a message goes. Pure: no I/O.

A message is EAGER, its bytes in the frame, or begins with an OFFER of the sender's memory:

    sender                          receiver
    OFFER ─────────────────────────▶  matched: READ of all of it, or of the first part,
         ◀───────────────────── PUSH  and where WRITE is faster, or the sender waits, too, an
                                      invitation to write all, or the second part, here
    WRITE, then FILLED ────────────▶  (DECLINED if nobody waits there any more)
         ◀───────────────────── DONE  the receiver touches the sender's memory no more

An OFFER grants its receiver, and no one else, to read that memory until DONE; a PUSH grants the
sender to write there until FILLED. Who gives up (timeout, cancel) says CANCEL, and keeps the memory
until the other's last word, or its death.

Credits bound what waits at a receiver that posts no receive: `Allowance` on the sender's side,
`Debt` on the receiver's. A receive that waits while its source may be out of credit says WANT:
one message of that tag may then come without; `wants.py` draws how that ends. A message beyond
both is refused.
"""

from __future__ import annotations

import enum
import operator
import struct
from typing import Final, SupportsIndex

from torch_nixl.errors import MetadataError
from torch_nixl.p2p.place import MAX_SPANS, Place, parse_place

INTRO: Final = 32
EAGER: Final = 33
OFFER: Final = 34
DONE: Final = 35
PUSH: Final = 36
FILLED: Final = 37
CREDIT: Final = 38
WANT: Final = 39
CANCEL: Final = 40
LEAVE: Final = 41
HELP: Final = 42
UNWANT: Final = 43
KINDS: Final = (INTRO, EAGER, OFFER, DONE, PUSH, FILLED, CREDIT, WANT, CANCEL, LEAVE, HELP, UNWANT)
"""Kinds of frames; 48 to 55 are those of channels (`terms.py`), 60 to 62 the collectives'."""

EAGER_NBYTES: Final = 64 << 10
"""Largest message that travels in its frame."""

SPLIT_NBYTES: Final = 1 << 20
"""Smallest message of which both ends move a half, where the path allows and the sender waits."""

PACK_SPAN_NBYTES: Final = 16 << 10
"""Mean size of a span below which scattered memory is packed before it moves."""

MAX_TAG: Final = (1 << 63) - 1
MAX_TEXT: Final = 1024

CREDIT_FRAMES: Final = 256
"""Messages that one sender may have waiting at a receiver."""

CREDIT_NBYTES: Final = 1 << 20
"""Bytes of those; less where there are many ranks: see `credit_nbytes`."""

BUDGET_NBYTES: Final = 64 << 20
"""Bytes that all senders together may have waiting at a receiver of one Communicator."""

MAX_COST: Final = 2 * EAGER_NBYTES
"""Most credit that a message takes: half of what everyone has. A tree with a long manifest keeps
more in memory than that: a frame at most."""

CREDITED: Final = 1
WAITING: Final = 2

CONTEXT: Final = struct.Struct("<I")
HEAD: Final = struct.Struct("<IBqQ")
"""Of EAGER and OFFER: context, flags, tag, id. The description follows."""

_INTRO: Final = struct.Struct("<III")
_END: Final = struct.Struct("<IQB")
_PUSH: Final = struct.Struct("<IQQQ")
_CREDIT: Final = struct.Struct("<IIQ")
_WANT: Final = struct.Struct("<Iq")
_UNWANT: Final = struct.Struct("<IqB")
_NUMBER: Final = struct.Struct("<IQ")


def eager_cost(body_nbytes: int) -> int:
    """Credit that a message in its frame takes, by the size of the frame's body."""
    return min(body_nbytes, MAX_COST)


def offer_cost(num_spans: int, description_nbytes: int) -> int:
    """Credit that an offer takes: about what it keeps in memory where it waits."""
    return min(512 + 24 * num_spans + description_nbytes, MAX_COST)


def check_tag(tag: SupportsIndex) -> int:
    """Return a tag that programs may use, as an int; those below zero are the collectives'.

    Raises:
        TypeError, ValueError: It is not one.
    """
    try:
        number = operator.index(tag)
    except TypeError:
        raise TypeError(f"tag={tag!r}: expected an integer") from None
    if not 0 <= number <= MAX_TAG:
        raise ValueError(f"tag={tag}: expected 0 to 2^63 - 1")
    return number


def check_rank(rank: SupportsIndex, world_size: int, name: str) -> int:
    """Return a rank as an int.

    Args:
        rank: What a program gave.
        world_size: How many there are.
        name: How errors call it.

    Raises:
        ValueError: There is no such rank.
    """
    number = integer_of(rank)
    if number is None or not 0 <= number < world_size:
        raise ValueError(f"{name}={rank!r}: expected a rank, 0 to {world_size - 1}")
    return number


def integer_of(value: SupportsIndex) -> int | None:
    """An integer of any kind, numpy's too, as an int; None of all else, truth values included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


class Outcome(enum.IntEnum):
    """How one side's part of a message ended.

    DECLINED: the sender writes nothing, the receiver has to read that part, too. PART: the receiver
    has read its part, and reads no more unless the sender declined the rest.
    """

    COMPLETE = 0
    FAILED = 1
    MISMATCH = 2
    CANCELLED = 3
    TIMED_OUT = 4
    DECLINED = 5
    PART = 6


class Unwanted(enum.IntEnum):
    """What an UNWANT says.

    ASKED: forget one WANT of the tag. FORGOTTEN: that is done. SERVED: there was none left, since
    its message has gone.
    """

    ASKED = 0
    FORGOTTEN = 1
    SERVED = 2


_UNWANTED: Final = {int(state): state for state in Unwanted}
_OUTCOMES: Final = {int(outcome): outcome for outcome in Outcome}


class Route(enum.Enum):
    """Which way a message's bytes go."""

    EAGER = "eager"
    READ = "read"
    WRITE = "write"
    SPLIT = "split"
    LOCAL = "local"

    __hash__ = object.__hash__


def choose_route(path: str, nbytes: int, *, dense: bool, sender_waits: bool) -> Route:
    """Choose how an offered message moves. The one place where that is decided.

    Args:
        path: `Connection.path` to the sender.
        nbytes: Size of the message.
        dense: Whether it lies in one piece on both sides.
        sender_waits: Whether a thread of the sender waits for this message.
    """
    if path != "cma":
        return Route.WRITE  # READ over TCP is 2 to 7 times slower.
    if dense and sender_waits and nbytes >= SPLIT_NBYTES:
        return Route.SPLIT
    return Route.READ


def should_pack(num_spans: int, nbytes: int) -> bool:
    """Whether scattered memory is better packed before it moves than moved in its pieces."""
    return num_spans > 1 and (num_spans > MAX_SPANS or nbytes < num_spans * PACK_SPAN_NBYTES)


def credit_nbytes(num_ranks: int) -> int:
    """Bytes that each sender may have waiting at a receiver, among so many ranks."""
    share = BUDGET_NBYTES // max(1, num_ranks - 1)
    return max(2 * MAX_COST, min(CREDIT_NBYTES, share))


class Allowance:
    """A sender's credit with one receiver. Not locked."""

    __slots__ = ("_max_frames", "_max_nbytes", "frames", "nbytes")

    def __init__(self, frames: int, nbytes: int) -> None:
        self._max_frames = self.frames = frames
        self._max_nbytes = self.nbytes = nbytes

    def take(self, nbytes: int) -> bool:
        """Use credit for one message; return False if there isn't enough."""
        if self.frames < 1 or self.nbytes < nbytes:
            return False
        self.frames -= 1
        self.nbytes -= nbytes
        return True

    def give(self, frames: int, nbytes: int) -> None:
        """Get credit back.

        Raises:
            MetadataError: It is more than was ever used.
        """
        if frames + self.frames > self._max_frames or nbytes + self.nbytes > self._max_nbytes:
            raise MetadataError(f"credit of {frames} frames, {nbytes} bytes that was never used")
        self.frames += frames
        self.nbytes += nbytes


class Debt:
    """What a receiver has had from one sender and not given credit back for. Not locked."""

    __slots__ = (
        "_half_frames",
        "_half_nbytes",
        "_max_frames",
        "_max_nbytes",
        "frames",
        "nbytes",
        "owed_frames",
        "owed_nbytes",
    )

    def __init__(self, frames: int, nbytes: int) -> None:
        self._max_frames = frames
        self._max_nbytes = nbytes
        self._half_frames = frames // 2
        self._half_nbytes = nbytes // 2
        self.frames = 0
        self.nbytes = 0
        self.owed_frames = 0
        self.owed_nbytes = 0

    @property
    def strained(self) -> bool:
        """Whether the sender may be out of credit, as far as that shows here.

        It may be from half on, since no message takes more than that. Messages on their way don't
        show yet: this turns true when they arrive. Credit that is owed counts as used.
        """
        return self.frames >= self._half_frames or self.nbytes >= self._half_nbytes

    def arrive(self, nbytes: int) -> bool:
        """Note a message that came on credit; return False if its sender had none left for it."""
        if self.frames >= self._max_frames or self.nbytes + nbytes > self._max_nbytes:
            return False
        self.frames += 1
        self.nbytes += nbytes
        return True

    def settle(self, nbytes: int) -> tuple[int, int] | None:
        """Note that such a message waits no more; return credit to give back, if it is time."""
        self.owed_frames += 1
        self.owed_nbytes += nbytes
        if self.owed_frames < self._half_frames and self.owed_nbytes < self._half_nbytes:
            return None
        due = self.owed_frames, self.owed_nbytes
        self.owed_frames = self.owed_nbytes = 0
        self.frames -= due[0]
        self.nbytes -= due[1]
        return due


def pack_intro(context: int, rank: int, num_ranks: int) -> bytes:
    """A body of INTRO: which rank the sender is in a context."""
    return _INTRO.pack(context, rank, num_ranks)


def parse_intro(body: bytes) -> tuple[int, int]:
    """Return rank and number of ranks."""
    _, rank, num_ranks = _unpack(_INTRO, body)
    return rank, num_ranks


def pack_end(context: int, number: int, outcome: Outcome, text: str = "") -> bytes:
    """A body of DONE or FILLED."""
    if not text:
        return _END.pack(context, number, outcome)
    data = text.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore").encode()
    return _END.pack(context, number, outcome) + data


def parse_end(body: bytes) -> tuple[int, Outcome, str]:
    """Return id, outcome and text of a DONE or FILLED."""
    if not _END.size <= len(body) <= _END.size + MAX_TEXT:
        raise MetadataError(f"frame has a body of {len(body)} bytes")
    _, number, outcome = _END.unpack_from(body)
    try:
        return number, _OUTCOMES[outcome], body[_END.size :].decode()
    except (KeyError, UnicodeDecodeError):
        raise MetadataError("frame has a value that does not exist") from None


def pack_push(context: int, send: int, receive: int, start: int, place: bytes) -> bytes:
    """A body of PUSH. See `parse_push`."""
    return _PUSH.pack(context, send, receive, start) + place


def parse_push(body: bytes) -> tuple[int, int, int, Place]:
    """Return send id, receive id, first byte that is asked for, and where it is to go."""
    if len(body) < _PUSH.size:
        raise MetadataError("frame is cut")
    _, send, receive, start = _PUSH.unpack_from(body)
    return send, receive, start, parse_place(body, _PUSH.size)


def pack_credit(context: int, frames: int, nbytes: int) -> bytes:
    """A body of CREDIT."""
    return _CREDIT.pack(context, frames, nbytes)


def parse_credit(body: bytes) -> tuple[int, int]:
    """Return messages and bytes."""
    _, frames, nbytes = _unpack(_CREDIT, body)
    return frames, nbytes


def pack_want(context: int, tag: int) -> bytes:
    """A body of WANT."""
    return _WANT.pack(context, tag)


def parse_want(body: bytes) -> int:
    """Return the tag."""
    return _unpack(_WANT, body)[1]


def pack_unwant(context: int, tag: int, state: Unwanted) -> bytes:
    """A body of UNWANT."""
    return _UNWANT.pack(context, tag, state)


def parse_unwant(body: bytes) -> tuple[int, Unwanted]:
    """Return the tag, and what is said of a WANT of it."""
    _, tag, state = _unpack(_UNWANT, body)
    if state not in _UNWANTED:
        raise MetadataError("frame has a value that does not exist")
    return tag, _UNWANTED[state]


def pack_number(context: int, number: int) -> bytes:
    """A body of CANCEL or HELP."""
    return _NUMBER.pack(context, number)


def parse_number(body: bytes) -> int:
    """Return the id in a CANCEL or HELP."""
    return _unpack(_NUMBER, body)[1]


def _unpack(layout: struct.Struct, body: bytes) -> tuple[int, ...]:
    if len(body) != layout.size:
        raise MetadataError(f"frame has a body of {len(body)} bytes; it has to be {layout.size}")
    return layout.unpack(body)
