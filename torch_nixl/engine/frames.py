"""The frames that version 1 knows: what they carry, and how it lies in a frame's body.

A body is fixed fields, little-endian, without padding, then at most one field of free length: the
rest of the body. Each class says how its own values lie there; `wire.Codec` does the rest.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeAlias

from torch_nixl.engine.adapter import Direction

MAX_TEXT: Final = 1024
"""Most bytes of a text, as UTF-8."""

MAX_HELLO_METADATA: Final = 256 << 10
MAX_ASSIST_OFFER: Final = 64 << 10
KEY_NBYTES: Final = 16

Values: TypeAlias = "tuple[int | bytes, ...]"


def _encode(text: str) -> bytes:
    """Encode a text and cut it to `MAX_TEXT` bytes, between characters."""
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_TEXT:
        data = data[:MAX_TEXT].decode("utf-8", "ignore").encode()
    return data


class Reason(enum.Enum):
    """Why an owner refuses a claim or withdraws what it offered."""

    UNKNOWN = 1
    REVOKED = 2
    EXPIRED = 3
    TAKEN = 4
    WRONG_DIRECTION = 5
    WRONG_SIZE = 6
    CLOSED = 7
    NOT_READY = 8
    FAILED = 9


class Outcome(enum.Enum):
    """How a claimant's transfer ended."""

    COMPLETE = 1
    FAILED = 2
    CANCELLED = 3
    TIMED_OUT = 4
    DECLINED = 5  # of a part that the owner was asked to move: it has moved none of it


# Look-ups of what a peer says; a number that isn't there is a KeyError. Faster than Enum's own.
_REASONS: Final = {reason.value: reason for reason in Reason}
_OUTCOMES: Final = {outcome.value: outcome for outcome in Outcome}
_DIRECTION_NUMBERS: Final = {Direction.READ: 1, Direction.WRITE: 2}
_DIRECTIONS: Final = {number: direction for direction, number in _DIRECTION_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process an agent lives in, so that a peer on its host can tell whether it died.

    Attributes:
        host: 16 bytes that differ between machines, boots and process id namespaces.
        pid: Process id in that namespace.
        start_time: When the process began, in the kernel's clock ticks since boot.
    """

    FIXED: ClassVar = struct.Struct("<16sIQ")

    host: bytes
    pid: int
    start_time: int

    def parts(self) -> Values:
        return self.host, self.pid, self.start_time

    def pack(self) -> bytes:
        """Return it as `FIXED.size` bytes."""
        return self.FIXED.pack(*self.parts())

    @classmethod
    def unpack(cls, data: bytes) -> Identity:
        """Read what `pack` returned."""
        return cls(*cls.FIXED.unpack(data))


@dataclass(frozen=True, slots=True)
class Hello:
    """First word to a peer: who speaks, which versions, and how to answer.

    Attributes:
        nonce: 16 random bytes that the answer repeats.
        identity: The sender's process.
        min_version: Oldest version of this protocol that the sender speaks.
        max_version: Newest.
        metadata: The sender's metadata in an envelope, at most `MAX_HELLO_METADATA` bytes.
    """

    KIND: ClassVar = 1
    FIXED: ClassVar = struct.Struct("<16s16sIQBB")
    MAX_TAIL: ClassVar = MAX_HELLO_METADATA

    nonce: bytes
    identity: Identity
    min_version: int
    max_version: int
    metadata: bytes = field(repr=False)

    def parts(self) -> tuple[Values, bytes]:
        return (
            self.nonce,
            *self.identity.parts(),
            self.min_version,
            self.max_version,
        ), self.metadata

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Hello:
        nonce, host, pid, start, oldest, newest = cls.FIXED.unpack(fixed)
        return cls(nonce, Identity(host, pid, start), oldest, newest, tail)


@dataclass(frozen=True, slots=True)
class HelloAck:
    """Answer to `Hello`: contact is made, in both directions."""

    KIND: ClassVar = 2
    FIXED: ClassVar = struct.Struct("<16s16s16sIQ")
    MAX_TAIL: ClassVar = 0

    nonce: bytes
    own_nonce: bytes
    identity: Identity

    def parts(self) -> tuple[Values, bytes]:
        return (self.nonce, self.own_nonce, *self.identity.parts()), b""

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> HelloAck:
        nonce, own_nonce, host, pid, start = cls.FIXED.unpack(fixed)
        return cls(nonce, own_nonce, Identity(host, pid, start))


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender closes and will not answer any more."""

    KIND: ClassVar = 3
    FIXED: ClassVar = struct.Struct("<")
    MAX_TAIL: ClassVar = MAX_TEXT

    text: str

    def parts(self) -> tuple[Values, bytes]:
        return (), _encode(self.text)

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Bye:
        return cls(tail.decode())


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a `Pong` with the same token."""

    KIND: ClassVar = 4
    FIXED: ClassVar = struct.Struct("<Q")
    MAX_TAIL: ClassVar = 0

    token: int

    def parts(self) -> tuple[Values, bytes]:
        return (self.token,), b""

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Ping:
        return cls(*cls.FIXED.unpack(fixed))


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers a `Ping`."""

    KIND: ClassVar = 5
    FIXED: ClassVar = struct.Struct("<Q")
    MAX_TAIL: ClassVar = 0

    token: int

    def parts(self) -> tuple[Values, bytes]:
        return (self.token,), b""

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Pong:
        return cls(*cls.FIXED.unpack(fixed))


@dataclass(frozen=True, slots=True)
class Claim:
    """Asks to take up an offer.

    Attributes:
        key: The offer's 16 bytes.
        claim: The claimant's number for its operation.
        direction: What the claimant is going to do.
        nbytes: How much it is going to move.
        num_memories: In how many memories.
    """

    KIND: ClassVar = 6
    FIXED: ClassVar = struct.Struct("<16sQBQI")
    MAX_TAIL: ClassVar = 0

    key: bytes
    claim: int
    direction: Direction
    nbytes: int
    num_memories: int

    def parts(self) -> tuple[Values, bytes]:
        return (
            self.key,
            self.claim,
            _DIRECTION_NUMBERS[self.direction],
            self.nbytes,
            self.num_memories,
        ), b""

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Claim:
        key, claim, direction, nbytes, num_memories = cls.FIXED.unpack(fixed)
        return cls(key, claim, _DIRECTIONS[direction], nbytes, num_memories)


@dataclass(frozen=True, slots=True)
class Granted:
    """The claim is granted: from now on the claimant may move bytes."""

    KIND: ClassVar = 7
    FIXED: ClassVar = struct.Struct("<16sQ")
    MAX_TAIL: ClassVar = 0

    key: bytes
    claim: int

    def parts(self) -> tuple[Values, bytes]:
        return (self.key, self.claim), b""

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Granted:
        key, claim = cls.FIXED.unpack(fixed)
        return cls(key, claim)


@dataclass(frozen=True, slots=True)
class Refuse:
    """The claim is refused: nothing may be moved."""

    KIND: ClassVar = 8
    FIXED: ClassVar = struct.Struct("<16sQB")
    MAX_TAIL: ClassVar = MAX_TEXT

    key: bytes
    claim: int
    reason: Reason
    text: str

    def parts(self) -> tuple[Values, bytes]:
        return (self.key, self.claim, self.reason.value), _encode(self.text)

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Refuse:
        key, claim, number = cls.FIXED.unpack(fixed)
        return cls(key, claim, _REASONS[number], tail.decode())


@dataclass(frozen=True, slots=True)
class Done:
    """The claimant has ended and touches the memory no more."""

    KIND: ClassVar = 9
    FIXED: ClassVar = struct.Struct("<16sQB")
    MAX_TAIL: ClassVar = MAX_TEXT

    key: bytes
    claim: int
    outcome: Outcome
    text: str

    def parts(self) -> tuple[Values, bytes]:
        return (self.key, self.claim, self.outcome.value), _encode(self.text)

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Done:
        key, claim, number = cls.FIXED.unpack(fixed)
        return cls(key, claim, _OUTCOMES[number], tail.decode())


@dataclass(frozen=True, slots=True)
class Revoke:
    """The owner withdraws a grant: what was read since may be wrong."""

    KIND: ClassVar = 10
    FIXED: ClassVar = struct.Struct("<16sQB")
    MAX_TAIL: ClassVar = MAX_TEXT

    key: bytes
    claim: int
    reason: Reason
    text: str

    def parts(self) -> tuple[Values, bytes]:
        return (self.key, self.claim, self.reason.value), _encode(self.text)

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Revoke:
        key, claim, number = cls.FIXED.unpack(fixed)
        return cls(key, claim, _REASONS[number], tail.decode())


@dataclass(frozen=True, slots=True)
class Assist:
    """Asks the owner to move a part of what it granted, and grants it leave to: see `assist.py`.

    Attributes:
        key: The offer's 16 bytes.
        claim: The claimant's number for its operation, and for the part.
        start: The first byte of the part. It goes on to the last one.
        offer: The claimant's memory, all of it, in an envelope. Its own key names the part.
    """

    KIND: ClassVar = 11
    FIXED: ClassVar = struct.Struct("<16sQQ")
    MAX_TAIL: ClassVar = MAX_ASSIST_OFFER

    key: bytes
    claim: int
    start: int
    offer: bytes = field(repr=False)

    def parts(self) -> tuple[Values, bytes]:
        return (self.key, self.claim, self.start), self.offer

    @classmethod
    def make(cls, fixed: bytes, tail: bytes) -> Assist:
        key, claim, start = cls.FIXED.unpack(fixed)
        return cls(key, claim, start, tail)


@dataclass(frozen=True, slots=True)
class RawFrame:
    """A frame of a layer above, which knows what its body means.

    Attributes:
        kind: 32 to 63 for p2p, 64 to 95 for KV pages, 96 to 127 for tests.
        body: At most `wire.MAX_BODY` bytes.
    """

    kind: int
    body: bytes = field(repr=False)


Frame: TypeAlias = (
    Hello | HelloAck | Bye | Ping | Pong | Claim | Granted | Refuse | Done | Revoke | Assist
)

FRAMES: Final[dict[int, type[Frame]]] = {
    frame.KIND: frame
    for frame in (Hello, HelloAck, Bye, Ping, Pong, Claim, Granted, Refuse, Done, Revoke, Assist)
}
"""Every frame by its kind."""
