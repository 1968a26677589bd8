"""The far ends of a connection: what is known of each, and whether it is still there."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.nixl_environment import ucx_settings
from torch_nixl.errors import PeerLostError, TorchNixlError

if TYPE_CHECKING:
    from torch_nixl.engine.wire import Identity

MAX_KNOWN_REGIONS = 1 << 16
"""Regions of one remote after which it is forgotten and learned anew once nothing is under way."""

SETTLING_LOOKS = 25
"""Looks at a dead remote after which nothing of it is under way in this process any more."""

SETTLING_SECONDS = 0.02
"""Least time between two such looks that count; the driver polls between them."""

SEEK_SECONDS = 1.0
"""How long after the first attempt to contact a lost peer anew, that may hold memory, the second
comes; doubled each time, up to `MAX_SEEK_SECONDS`."""

MAX_SEEK_SECONDS = 30.0

MAX_LEARNED = 4096
"""Blobs that are remembered as known, so that their regions aren't looked up one by one."""


class Settling:
    """Whether what a peer had begun has ended in this process, too, now that its own end of it has.

    Over TCP it is this process that moves the bytes for it: what the peer had sent may still lie in
    a socket, and be answered from memory or written to it by the next few polls.
    """

    __slots__ = ("_looked_at", "_num_looks")

    def __init__(self) -> None:
        self._looked_at = 0.0
        self._num_looks = 0

    def has_passed(self, now: float) -> bool:
        """To be asked by the driver again and again; that it has polled in between counts."""
        if now - self._looked_at >= SETTLING_SECONDS:
            self._looked_at = now
            self._num_looks += 1
        return self._num_looks > SETTLING_LOOKS


class Contact(enum.Enum):
    """How far the two sides have come."""

    GREETING = enum.auto()  # we sent HELLO and wait for the answer
    READY = enum.auto()  # both sides can send
    FOREIGN = enum.auto()  # speaks no frames of ours (dynamo): only transfers and keys
    LOST = enum.auto()  # died, left, or can't be reached


class Remote:
    """One far end.

    Attributes:
        name: The agent's name, unique to its incarnation.
        contact: See `Contact`.
        connection_blob: What NIXL needs to reach it, to learn it anew.
        reach: Of that blob: see `BlobInfo`.
        identity: Which process it is; None until it, or who told of it, has said so.
        nonce: What we asked it to echo.
        heard: Whether anything has come from it.
        heard_at: `time.monotonic()` of its last frame, or of this object's making.
        silent_since: When the first ping since then went out; None if none has.
        answered: It has had our HELLO, or, if foreign, we have moved bytes of it: what we send
            arrives, also if we end right after.
        broken: Why nothing can be sent to it any more; it is lost once what it sent is taken in.
        closed: It said that it leaves and won't touch our memory any more.
        greeted: Our HELLO is out, if it takes one: other frames may follow.
        flight: Number of our operations that may have transfers to it under way.
        epoch: How often the library has forgotten its regions: what was looked up in one epoch is
            of no use in the next.
        lost_at: `time.monotonic()` of its loss.
        learning: Held while the library is told of its regions.
        crowded: An operation waits for all others to end, so that regions can be forgotten.
        seek_at: When it is to be contacted anew, if it is lost, lives, and holds memory of ours.
        seek_after: Seconds between that and the time after.
        settling: Since its process was found dead.
        sending: Held while a numbered frame is packed and sent, so that none overtakes another.
    """

    __slots__ = (
        "_known",
        "_learned",
        "answered",
        "broken",
        "closed",
        "connection_blob",
        "contact",
        "crowded",
        "epoch",
        "flight",
        "greeted",
        "heard",
        "heard_at",
        "identity",
        "learning",
        "lost_at",
        "lost_error",
        "name",
        "nonce",
        "num_known",
        "ping_after",
        "pinged_at",
        "reach",
        "seek_after",
        "seek_at",
        "sending",
        "settling",
        "silent_since",
    )

    def __init__(self, name: str, contact: Contact, connection_blob: bytes) -> None:
        self.name = name
        self.contact = contact
        self.connection_blob = connection_blob
        self.reach = b""
        self.identity: Identity | None = None
        self.nonce = b""
        self.heard = False
        self.heard_at = time.monotonic()
        self.pinged_at = 0.0
        self.ping_after = 0.0
        self.silent_since: float | None = None
        self.closed = False
        self.greeted = False
        self.flight = 0
        self.answered = False
        self.broken: BaseException | None = None
        self.lost_error: BaseException | None = None
        self.lost_at = 0.0
        self.learning = threading.Lock()
        self.crowded = False
        self.epoch = 0
        self.sending = threading.Lock()
        self.num_known = 0
        self.settling = Settling()
        self.seek_at = 0.0
        self.seek_after = SEEK_SECONDS
        self._known: dict[tuple[MemoryKind, int], list[tuple[int, int]]] = {}
        # By identity: a tree brings the same few hundred with each message.
        self._learned: dict[int, BlobInfo] = {}

    def knows(self, info: BlobInfo) -> bool:
        """Whether all regions of a blob have been learned."""
        if self._learned.get(id(info)) is info:
            return True
        known = all(region in self._known.get(key, ()) for key, region in _regions(info))
        if known:
            if len(self._learned) >= MAX_LEARNED:
                self._learned.clear()
            self._learned[id(info)] = info
        return known

    def has_room(self, info: BlobInfo) -> bool:
        """Whether a blob's regions can be learned beside the known ones.

        False if one would nest in a known region of the same device id, or overlap it: the
        library would then no longer find what lies in one of the two. See [Note: device ids].
        """
        if self.num_known >= MAX_KNOWN_REGIONS:
            return False
        for key, region in _regions(info):
            known = self._known.get(key, ())
            if region not in known and any(_touch(region, other) for other in known):
                return False
        return True

    def has_room_for(self, infos: Iterable[BlobInfo]) -> bool:
        """Whether all blobs' regions are known or can be learned, without waiting for anything."""
        return not self.crowded and all(self.knows(one) or self.has_room(one) for one in infos)

    def learn(self, info: BlobInfo) -> None:
        """Note that the library was given a blob."""
        if info.connections:
            self.reach = info.reach
        for key, region in _regions(info):
            regions = self._known.setdefault(key, [])
            if region not in regions:
                regions.append(region)
                self.num_known += 1

    def some_address(self) -> int:
        """Where some host memory of it lies, or lay; 0 if none is known."""
        for (kind, _), regions in list(self._known.items()):  # Other threads learn.
            if kind is MemoryKind.DRAM:
                return regions[0][0]
        return 0

    def forget_regions(self) -> None:
        """Note that the library has forgotten this remote."""
        self._known.clear()
        self._learned.clear()
        self.num_known = 0
        self.epoch += 1

    def hear(self, now: float) -> None:
        """Note a frame from it."""
        self.heard = True
        self.heard_at = now
        self.pinged_at = 0.0
        self.ping_after = 0.0
        self.silent_since = None

    def advice(self) -> str:
        """What to add to an error: that no way may lead there, unless one is known to."""
        if self.heard or self.answered:
            return ""
        return (
            f"; it has never answered, so perhaps no network device leads from this side "
            f"({ucx_settings()}) to it and back"
        )

    def explain(self, error: TorchNixlError) -> TorchNixlError:
        """Return an error that a transfer or message met, a loss with `advice`."""
        advice = self.advice()
        # What follows a loss has been explained with it.
        if not advice or self.lost_error is not None or not isinstance(error, PeerLostError):
            return error
        explained = PeerLostError(f"{error}{advice}", remote=self.name)
        explained.__cause__ = error.__cause__
        return explained

    def __repr__(self) -> str:
        return f"<Remote {self.name} {self.contact.name} regions={self.num_known}>"


def _regions(info: BlobInfo) -> Iterator[tuple[tuple[MemoryKind, int], tuple[int, int]]]:
    for section in info.sections:
        for address, nbytes, device_id in section.regions.tolist():
            yield (section.kind, device_id), (address, nbytes)


def _touch(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]
