"""The bodies of the frames that hand pages over. Pure: no I/O.

Kinds 64 to 95 are the KV protocol's. All numbers are little-endian and unpadded; nothing follows
what is listed. Every frame about a request begins with the same head, so that either side finds its
own: the receiver's service, decode's number for the request, and prefill's lease.

    MEET, WELCOME     service u32 of the receiver, service u32 of the sender, a pool (`pools.py`)
    TAKE              head, service u32 of the sender, mode u8, start u64, stop u64, runs
    GRANT             head, layers that are ready u32, runs
    READY             head, layers that are ready u32
    REJECT            head, outcome u8, text
    CANCEL, DONE      as REJECT
    BEAT              head, milliseconds u32 that the lease is to last from now on; 0: nobody is
                      going to come for it

    head              service u32, number u64, slot u32, generation u32. Services of prefill have
                      even numbers, decode's odd ones; 0 and 1 stand for any of them
    runs              number u8, for each: first position u64, number of pages u32; then all
                      page ids u32. No runs where the sender's pages aren't to be touched.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torch_nixl.errors import MetadataError
from torch_nixl.kv.compatibility import MAX_GROUPS
from torch_nixl.kv.leases import LeaseId
from torch_nixl.kv.plan import Run
from torch_nixl.kv.protocol import OUTCOMES, Mode, Outcome, Role

MEET: Final = 64
WELCOME: Final = 65
TAKE: Final = 66
GRANT: Final = 67
READY: Final = 68
REJECT: Final = 69
CANCEL: Final = 70
DONE: Final = 71
BEAT: Final = 72
KINDS: Final = (MEET, WELCOME, TAKE, GRANT, READY, REJECT, CANCEL, DONE, BEAT)
"""Kinds of frames; 73 to 95 are kept."""

MAX_TEXT: Final = 1024
MAX_PAGES: Final = 1 << 17
"""Most pages that one request names, all groups together: 512 KiB."""

MAX_POSITION: Final = 1 << 40
"""Positions and numbers of tokens stay below this."""

MAX_BEAT_SECONDS: Final = 3600.0

_MEET: Final = struct.Struct("<II")
_HEAD: Final = struct.Struct("<IQII")
_TAKE: Final = struct.Struct("<IBQQ")
_COUNT: Final = struct.Struct("<I")
_RUN: Final = struct.Struct("<QI")
_MODES: Final = {int(mode): mode for mode in Mode}


@dataclass(frozen=True, slots=True)
class Head:
    """Which request a frame is about.

    Attributes:
        service: The receiver's number for the cache that it is about.
        number: Decode's for the request, unique in its process; 0 in a REJECT of a MEET.
        lease: Prefill's. In a REJECT of a MEET its slot is the service that was to be met.
    """

    service: int
    number: int
    lease: LeaseId

    def pack(self) -> bytes:
        return _HEAD.pack(self.service, self.number, self.lease.slot, self.lease.generation)


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Asks for pages.

    Attributes:
        head: Which.
        service: Of the sender, who has met the receiver in its name.
        mode: Who is to move the bytes.
        start: Position of the first token that is wanted.
        stop: Position after the last.
        runs: For PUSH, the pages that they are to go to, for each group of layers.
    """

    head: Head
    service: int
    mode: Mode
    start: int
    stop: int
    runs: tuple[Run, ...]


def role_of(service: int) -> Role:
    """Which side a service is on."""
    return Role.DECODE if service % 2 else Role.PREFILL


def any_peer_of(service: int) -> int:
    """What stands for any service on the other side."""
    return 0 if service % 2 else 1


def pack_meet(receiver: int, sender: int, pool: bytes) -> bytes:
    """A body of MEET or WELCOME: the services of both sides, and what `pools.pack_pool` made."""
    return _MEET.pack(receiver, sender) + pool


def parse_meet(body: bytes) -> tuple[int, int, int]:
    """Return the services of receiver and sender, and where the pool begins.

    Raises:
        MetadataError: It is cut.
    """
    if len(body) < _MEET.size:
        raise MetadataError("frame is cut")
    receiver, sender = _MEET.unpack_from(body)
    return receiver, sender, _MEET.size


def parse_head(body: bytes) -> Head:
    """Read the head of any frame about a request; what follows is not looked at.

    Raises:
        MetadataError: It is cut.
    """
    if len(body) < _HEAD.size:
        raise MetadataError("frame is cut")
    service, number, slot, generation = _HEAD.unpack_from(body)
    return Head(service, number, LeaseId(slot, generation))


def pack_take(take: Take) -> bytes:
    """A body of TAKE."""
    fixed = _TAKE.pack(take.service, take.mode, take.start, take.stop)
    return take.head.pack() + fixed + pack_runs(take.runs)


def parse_take(body: bytes) -> Take:
    """Read a TAKE.

    Raises:
        MetadataError: It is cut, too long, or makes no sense.
    """
    head = parse_head(body)
    if len(body) < _HEAD.size + _TAKE.size:
        raise MetadataError("frame is cut")
    service, number, start, stop = _TAKE.unpack_from(body, _HEAD.size)
    mode = _MODES.get(number)
    if mode is None or not start <= stop < MAX_POSITION:
        raise MetadataError("TAKE has a mode or positions that don't exist")
    runs = parse_runs(body, _HEAD.size + _TAKE.size)
    if bool(runs) is not (mode is Mode.PUSH):
        raise MetadataError("TAKE has pages of its own exactly where prefill is to write them")
    return Take(head, service, mode, start, stop, runs)


def pack_count(head: Head, count: int, runs: bytes = b"") -> bytes:
    """A body of READY or BEAT; of GRANT, with `pack_runs`."""
    return head.pack() + _COUNT.pack(count) + runs


def parse_count(body: bytes) -> int:
    """Return the number in a READY or BEAT.

    Raises:
        MetadataError: The body has another size.
    """
    if len(body) != _HEAD.size + _COUNT.size:
        raise MetadataError(f"frame has a body of {len(body)} bytes")
    return int(_COUNT.unpack_from(body, _HEAD.size)[0])


def parse_grant(body: bytes) -> tuple[int, tuple[Run, ...]]:
    """Return how many layers are ready, and the pages.

    Raises:
        MetadataError: It is cut, too long, or makes no sense.
    """
    if len(body) < _HEAD.size + _COUNT.size:
        raise MetadataError("frame is cut")
    (ready,) = _COUNT.unpack_from(body, _HEAD.size)
    return ready, parse_runs(body, _HEAD.size + _COUNT.size)


def pack_end(head: Head, outcome: Outcome, text: str = "") -> bytes:
    """A body of REJECT, CANCEL or DONE."""
    data = text.encode("utf-8", "replace")[:MAX_TEXT].decode("utf-8", "ignore").encode()
    return head.pack() + bytes((outcome,)) + data


def parse_end(body: bytes) -> tuple[Outcome, str]:
    """Return outcome and text of a REJECT, CANCEL or DONE.

    Raises:
        MetadataError: It is cut, too long, or has no such outcome.
    """
    at = _HEAD.size
    if not at < len(body) <= at + 1 + MAX_TEXT:
        raise MetadataError(f"frame has a body of {len(body)} bytes")
    outcome = OUTCOMES.get(body[at])
    if outcome is None:
        raise MetadataError(f"frame has outcome {body[at]}, which does not exist")
    try:
        return outcome, body[at + 1 :].decode()
    except UnicodeDecodeError:
        raise MetadataError("frame has a text that isn't UTF-8") from None


def pack_runs(runs: Sequence[Run]) -> bytes:
    """Pages for each group of layers.

    Raises:
        ValueError: There are too many.
    """
    total = sum(len(run.pages) for run in runs)
    if total > MAX_PAGES or len(runs) > MAX_GROUPS:
        raise ValueError(
            f"{total} pages in {len(runs)} groups: one request has at most {MAX_PAGES}"
        )
    heads = b"".join(_RUN.pack(run.first, len(run.pages)) for run in runs)
    pages = b"".join(run.pages.astype("<u4").tobytes() for run in runs)
    return bytes((len(runs),)) + heads + pages


def parse_runs(body: bytes, at: int) -> tuple[Run, ...]:
    """Read the runs that take up the rest of a body.

    Raises:
        MetadataError: They are cut, too many, too long, or begin beyond all positions.
    """
    if len(body) <= at:
        raise MetadataError("frame is cut: no pages")
    num_runs = body[at]
    at += 1
    end = at + num_runs * _RUN.size
    if num_runs > MAX_GROUPS or len(body) < end:
        raise MetadataError("frame is cut, or has too many groups of pages")
    heads = [_RUN.unpack_from(body, at + index * _RUN.size) for index in range(num_runs)]
    total = sum(count for _, count in heads)
    if total > MAX_PAGES or any(first >= MAX_POSITION for first, _ in heads):
        raise MetadataError(f"frame has {total} pages, or positions that don't exist")
    if len(body) != end + 4 * total:
        raise MetadataError("frame has pages that don't add up to its size")
    pages = np.frombuffer(body, "<u4", total, end).astype(np.int64)
    runs = []
    start = 0
    for first, count in heads:
        runs.append(Run(pages[start : start + count], first))
        start += count
    return tuple(runs)
