"""Control frames: what peers say to each other, as bytes in NIXL notifications.

A frame is a header of 48 bytes and a body; `docs/wire.md` draws both. `Codec` packs and unpacks,
authenticates (see [Note: keys] in `envelope.py`) and refuses what was seen before. Pure: no I/O,
and no allocation that the frame's own length does not bound.

[Note: authentication] With a secret, the MAC is keyed BLAKE2b of 16 bytes: for frames of this size
it takes 0.3 us where HMAC-SHA256 takes 1.3 us. Without one, the field holds a CRC-32: NIXL's
transports lose nothing, so it catches software mistakes, and promises no more. It covers the header
and the first `CHECKED_NBYTES` of the body, which is all of most frames. What lies beyond, mostly a
tensor's bytes, is as safe as what NIXL moves from memory to memory, which nobody sums up.

[Note: bound names] NIXL lets a sender call itself what it likes, so a frame overheard on its way
to B could be sent on to C, or to B in another name. A codec that knows its own agent's name mixes
the sender's and the receiver's names into every MAC; both ends must do so, and flag 1 says it.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
import threading
from typing import Final
from zlib import crc32

from torch_nixl.engine.envelope import check_key_id, derive, key_id
from torch_nixl.engine.frames import (
    FRAMES,
    KEY_NBYTES,
    MAX_ASSIST_OFFER,
    MAX_HELLO_METADATA,
    MAX_TEXT,
    Assist,
    Bye,
    Claim,
    Done,
    Frame,
    Granted,
    Hello,
    HelloAck,
    Identity,
    Outcome,
    Ping,
    Pong,
    RawFrame,
    Reason,
    Refuse,
    Revoke,
)
from torch_nixl.errors import MetadataError

__all__ = [
    "CHECKED_NBYTES",
    "FIRST_RAW_KIND",
    "HEADER_NBYTES",
    "KEY_NBYTES",
    "LAST_RAW_KIND",
    "MAX_ASSIST_OFFER",
    "MAX_BODY",
    "MAX_FRAME",
    "MAX_HELLO_METADATA",
    "MAX_TEXT",
    "VERSION",
    "Assist",
    "Bye",
    "Claim",
    "Codec",
    "Done",
    "Frame",
    "Granted",
    "Hello",
    "HelloAck",
    "Identity",
    "Outcome",
    "Ping",
    "Pong",
    "RawFrame",
    "Reason",
    "Refuse",
    "ReplayGuard",
    "Revoke",
    "Sequencer",
]

VERSION: Final = 1
MAX_FRAME: Final = 1 << 20
FIRST_RAW_KIND: Final = 32
LAST_RAW_KIND: Final = 127

MAGIC: Final = b"TN"
_NAMES_BOUND: Final = 1
_BYE_START: Final = MAGIC + bytes((VERSION, Bye.KIND))
# magic, version, kind, key id, flags, zero, body nbytes, zero, incarnation, counter
_HEADER: Final = struct.Struct("<2sBBBBHIIQQ")
_MAC_NBYTES: Final = 16
HEADER_NBYTES: Final = _HEADER.size + _MAC_NBYTES
MAX_BODY: Final = MAX_FRAME - HEADER_NBYTES
CHECKED_NBYTES: Final = 2048
"""How much of a body the checksum covers. 64 KiB would take 10 us on each side."""

_U32: Final = struct.Struct("<I")
_CHECKSUM: Final = struct.Struct("<I12x")


class Sequencer:
    """Numbers the frames of one agent: 1, 2, 3 and so on. Any thread may call it."""

    __slots__ = ("_counter",)

    def __init__(self) -> None:
        self._counter = itertools.count(1)

    def next(self) -> int:
        """Return the next number. Never returns one twice."""
        return next(self._counter)


class ReplayGuard:
    """Accepts each frame of one sender at most once, and none of its earlier incarnations.

    Threads that pack side by side may send in another order than they counted in, so a number may
    come late, by at most `WINDOW`. Not locked: `Codec` does that.
    """

    WINDOW: Final = 256

    __slots__ = ("_highest", "_incarnation", "_seen")

    def __init__(self) -> None:
        self._incarnation = 0
        self._highest = 0
        self._seen = 1  # bit i: highest - i has been seen

    def accept(self, incarnation: int, counter: int) -> bool:
        """Return whether this is news, and remember it."""
        if incarnation != self._incarnation:
            if incarnation < self._incarnation or counter == 0:
                return False
            self._incarnation, self._highest, self._seen = incarnation, counter, 1
            return True
        ahead = counter - self._highest
        if ahead > 0:
            if ahead < self.WINDOW:
                self._seen = (self._seen << ahead | 1) & ((1 << self.WINDOW) - 1)
            else:
                self._seen = 1
            self._highest = counter
            return True
        if ahead <= -self.WINDOW or counter == 0 or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


class Codec:
    """Packs one agent's frames and unpacks its peers'. Any thread may call it.

    Args:
        incarnation: 1 to 2^64 - 1; of two agents that ever bear the same name, the later one's is
            greater. Nanoseconds since the epoch at the agent's birth serve.
        secret: What the job's processes share, or None to go without authentication.
        name: The agent's name, to bind frames to their ends; see [Note: bound names]. Then every
            `pack` says whom the frame is for, and all peers' codecs have names too.

    Raises:
        ValueError: The incarnation is out of range or the secret empty.
    """

    MAX_SENDERS: Final = 65536
    """Senders whose frames are told apart; beyond, the one longest known is forgotten."""

    def __init__(self, incarnation: int, secret: bytes | None, *, name: str = "") -> None:
        if not 0 < incarnation < 1 << 64:
            raise ValueError(f"incarnation is {incarnation}; it has to be 1 to 2^64 - 1")
        key = None if secret is None else derive(secret, "frames")
        self._incarnation = incarnation
        self._key_id = key_id(key)
        self._keyed = None if key is None else hashlib.blake2b(digest_size=_MAC_NBYTES, key=key)
        self._name = name
        self._flags = _NAMES_BOUND if name else 0
        # One for all receivers, who take gaps: one for each would be kept for ever.
        self._sequencer = Sequencer()
        self._guards: dict[str, ReplayGuard] = {}
        self._guards_lock = threading.Lock()

    def pack(self, frame: Frame, *, to: str = "") -> bytes:
        """Return the bytes of a frame. Texts are cut to `MAX_TEXT` bytes.

        Args:
            frame: What to say.
            to: The receiving agent's name, if this codec has a name.

        Raises:
            ValueError: A value does not fit its field.
        """
        values, tail = frame.parts()
        for value in values:
            if type(value) is bytes and len(value) != KEY_NBYTES:
                raise ValueError(f"{type(frame).__name__} has a key of {len(value)} bytes, not 16")
        if len(tail) > frame.MAX_TAIL:
            raise ValueError(
                f"{type(frame).__name__} carries {len(tail)} bytes; the limit is {frame.MAX_TAIL}"
            )
        try:
            body = frame.FIXED.pack(*values) + tail
        except struct.error as exc:
            raise ValueError(f"{type(frame).__name__} has a value out of range: {exc}") from exc
        return self._finish(frame.KIND, body, to)

    def pack_raw(self, kind: int, body: bytes, *, to: str = "") -> bytes:
        """Return the bytes of a frame of a layer above.

        Raises:
            ValueError: The kind is not one of theirs, or the body is too large.
        """
        if not FIRST_RAW_KIND <= kind <= LAST_RAW_KIND:
            raise ValueError(f"frame kind {kind} is not {FIRST_RAW_KIND} to {LAST_RAW_KIND}")
        if len(body) > MAX_BODY:
            raise ValueError(f"frame body of {len(body)} bytes is over the limit of {MAX_BODY}")
        return self._finish(kind, body, to)

    def unpack(self, sender: str, data: bytes) -> Frame | RawFrame:
        """Check a frame and read it: `open` and `read` in one.

        Args:
            sender: The agent that NIXL says it came from.
            data: The notification.

        Raises:
            MetadataError: As those do.
        """
        kind, body = self.open(sender, data)
        return RawFrame(kind, body) if kind >= FIRST_RAW_KIND else self.read(kind, body)

    def is_bye(self, sender: str, data: bytes) -> bool:
        """Whether a frame is a BYE and genuine, without taking it in: it is still to be opened.

        One that is repeated passes here. Nobody has one of an agent that lives.
        """
        if not data.startswith(_BYE_START):
            return False
        try:
            self.open(sender, data, look=True)
        except MetadataError:
            return False
        return True

    def open(self, sender: str, data: bytes, *, look: bool = False) -> tuple[int, bytes]:
        """Check a frame, and return its kind and body.

        Args:
            sender: The agent that NIXL says it came from.
            data: The notification.
            look: Neither ask whether it was seen before nor remember that it was.

        Raises:
            MetadataError: It is cut, altered, of another version or an unknown kind, not
                authenticated as this codec demands, meant for another agent, or seen before.
        """
        if not HEADER_NBYTES <= len(data) <= MAX_FRAME:
            raise MetadataError(
                f"frame of {len(data)} bytes; it has to be {HEADER_NBYTES} to {MAX_FRAME}"
            )
        (magic, version, kind, found_id, flags, zero, nbytes, zeros, incarnation, counter) = (
            _HEADER.unpack_from(data)
        )
        if magic != MAGIC:
            raise MetadataError(f"not a frame: {len(data)} bytes that begin differently")
        if version != VERSION:
            raise MetadataError(f"frame has version {version}; this process speaks {VERSION}")
        if zero or zeros or flags & ~_NAMES_BOUND:
            raise MetadataError("frame has bits set that version 1 keeps at zero")
        if nbytes != len(data) - HEADER_NBYTES:
            raise MetadataError(
                f"frame claims a body of {nbytes} bytes and has {len(data) - HEADER_NBYTES}"
            )
        if found_id != self._key_id:
            check_key_id(found_id, self._key_id, "frame")
        if flags != self._flags:
            raise MetadataError("only one of the two ends binds frames to names")
        body = data[HEADER_NBYTES:]
        if self._keyed is None:
            checksum = crc32(body[:CHECKED_NBYTES], crc32(data[: _HEADER.size]))
            genuine = data[_HEADER.size : HEADER_NBYTES] == _CHECKSUM.pack(checksum)
        else:
            expected = self._mac(data[: _HEADER.size], body, sender, self._name)
            genuine = hmac.compare_digest(data[_HEADER.size : HEADER_NBYTES], expected)
        if not genuine:
            raise MetadataError(
                f"frame of {len(data)} bytes is damaged, or not from or for whom it says"
            )
        if self._keyed is not None and not look:
            self._check_news(sender, incarnation, counter)
        if not FIRST_RAW_KIND <= kind <= LAST_RAW_KIND and kind not in FRAMES:
            raise MetadataError(f"frame has kind {kind}, which version 1 does not know")
        return kind, body

    def read(self, kind: int, body: bytes) -> Frame:
        """Read the body of a frame of this layer.

        Raises:
            MetadataError: It says what makes no sense.
        """
        frame = FRAMES[kind]
        size = frame.FIXED.size
        if not size <= len(body) <= size + frame.MAX_TAIL:
            raise MetadataError(
                f"frame of kind {kind} has a body of {len(body)} bytes; it has to be {size} to "
                f"{size + frame.MAX_TAIL}"
            )
        try:
            return frame.make(body[:size], body[size:])
        except (KeyError, UnicodeDecodeError):
            raise MetadataError(f"frame of kind {kind} has a value that does not exist") from None

    @property
    def unnumbered(self) -> bool:
        """Whether frames may be sent in another order than packed in: without a secret, yes."""
        return self._keyed is None

    def forget(self, peer: str) -> None:
        """Drop what is remembered of a peer that no frames are exchanged with any more."""
        with self._guards_lock:
            self._guards.pop(peer, None)

    def _finish(self, kind: int, body: bytes, to: str) -> bytes:
        if bool(to) is not bool(self._name):
            raise ValueError("a codec with a name has to say whom a frame is for, others must not")
        counter = 0 if self._keyed is None else self._sequencer.next()
        nbytes, flags, born = len(body), self._flags, self._incarnation
        head = _HEADER.pack(MAGIC, VERSION, kind, self._key_id, flags, 0, nbytes, 0, born, counter)
        if self._keyed is None:
            # Against accidents only. Binding names would add nothing: whoever can alter a frame
            # can make its checksum fit.
            checksum = crc32(
                body if nbytes <= CHECKED_NBYTES else body[:CHECKED_NBYTES], crc32(head)
            )
            return head + _CHECKSUM.pack(checksum) + body
        return head + self._mac(head, body, self._name, to) + body

    def _mac(self, head: bytes, body: bytes, sender: str, receiver: str) -> bytes:
        assert self._keyed is not None
        if self._name:
            # NIXL's names may hold any characters, so the first one's length keeps them apart.
            first = sender.encode("utf-8", "surrogatepass")
            names = _U32.pack(len(first)) + first + receiver.encode("utf-8", "surrogatepass")
            head = _U32.pack(len(names)) + names + head
        mac = self._keyed.copy()
        mac.update(head + body)
        return mac.digest()

    def _check_news(self, sender: str, incarnation: int, counter: int) -> None:
        with self._guards_lock:
            guard = self._guards.get(sender)
            if guard is None:
                if len(self._guards) >= self.MAX_SENDERS:
                    del self._guards[next(iter(self._guards))]
                guard = self._guards[sender] = ReplayGuard()
            if not guard.accept(incarnation, counter):
                raise MetadataError("frame was seen before, or is too old to tell")
