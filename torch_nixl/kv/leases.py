"""What prefill has on offer, under which number, and for how long. Pure: no I/O, no clock.

[Note: leases] A lease is named by a slot and a generation, which counts how often the slot was
given away. Slots are used again, the one that has been free longest first, and not before
`KEPT_LEASES` others are free: so there is an exact answer to every late ticket for a long time, and
an honest one (reused) for ever after, in bounded memory.

A lease can be taken by several ranks: if decode's tensor-parallel group has more ranks than
prefill's, each of them needs some of the heads. The first that comes says how many there are; each
may take once, and the pages are free when all are done with.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from torch_nixl.errors import (
    LeaseConsumed,
    LeaseExpired,
    LeaseOutOfRange,
    LeaseReused,
    LeaseUnknown,
    TransferCancelled,
)
from torch_nixl.kv.layout import Pages
from torch_nixl.kv.protocol import Event, Outcome, Phase, Side

KEPT_LEASES: Final = 1024
"""Ended leases that are remembered at least."""

MAX_LEASES: Final = 1 << 20
"""Leases that one server has at a time: those on offer, and those whose pages are still held."""

MAX_GENERATION: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True, order=True)
class LeaseId:
    """Name of a lease: see [Note: leases]."""

    slot: int
    generation: int


@dataclass(slots=True, eq=False)
class Lease:
    """Pages on offer, and those who took them.

    Attributes:
        name: What tickets call it.
        request: What the program calls it.
        num_tokens: Positions 0 to this are on offer.
        expires_at: When it lapses for those that have not come.
        sides: One for each rank of decode's that takes a share, by that rank; before the first
            came, one under -1.
        group_size: Size of decode's tensor-parallel group; 0 before the first of it came.
        taken: Ranks that came.
    """

    name: LeaseId
    request: str
    num_tokens: int
    expires_at: float
    sides: dict[int, Side] = field(default_factory=lambda: {-1: Side.offer()})
    group_size: int = 0
    taken: set[int] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether anyone may still come."""
        return any(side.phase is Phase.OFFERED for side in self.sides.values())

    @property
    def ended(self) -> bool:
        """Whether the outcome is known for all ranks."""
        return all(side.ended for side in self.sides.values())

    @property
    def released(self) -> bool:
        """Whether nobody can touch the pages any more."""
        return all(side.released for side in self.sides.values())

    @property
    def outcome(self) -> Outcome | None:
        """COMPLETE if it is for every rank; otherwise the first rank's that isn't; None before."""
        if not self.ended:
            return None
        found = [side.outcome for side in self.sides.values()]
        return next((one for one in found if one is not Outcome.COMPLETE), Outcome.COMPLETE)

    def find(self, rank: int, group_size: int, ranks: Sequence[int]) -> Side:
        """Find the side that a rank may take, and do nothing yet.

        Args:
            rank: Of decode's group.
            group_size: Size of that group.
            ranks: Which of its ranks have a share in these pages.

        Raises:
            LeaseConsumed: That rank, or a group of another size, has taken it.
            LeaseExpired: It lapsed before that rank came.
            TransferCancelled: It was withdrawn before.
            LeaseOutOfRange: The rank has no share.
        """
        if rank not in ranks:
            raise LeaseOutOfRange(f"rank {rank} of {group_size} has no share in {self.request!r}")
        if self.group_size and self.group_size != group_size:
            raise LeaseConsumed(f"{self.request!r} was taken by a group of {self.group_size} ranks")
        side = self.sides[rank if self.group_size else -1]
        if rank in self.taken or side.phase is not Phase.OFFERED:
            raise refusal(self.request, None if rank in self.taken else side.outcome)
        return side

    def enter(self, rank: int, group_size: int, ranks: Sequence[int]) -> Side:
        """Have a side of its own for each rank, once the first has come; return that rank's."""
        if not self.group_size:
            self.group_size = group_size
            first = self.sides.pop(-1)
            self.sides = {one: Side.offer() for one in ranks}
            self.sides[rank] = first
        self.taken.add(rank)
        return self.sides[rank]

    def check_range(self, start: int, stop: int) -> None:
        """Check that positions are on offer.

        Raises:
            LeaseOutOfRange: They aren't all.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise LeaseOutOfRange(
                f"positions {start} to {stop} were asked for; {self.request!r} has "
                f"{self.num_tokens} tokens"
            )


def refusal(
    request: str, outcome: Outcome | None
) -> LeaseExpired | LeaseConsumed | TransferCancelled:
    """Return why a lease that ended so can't be taken."""
    if outcome is Outcome.EXPIRED:
        return LeaseExpired(f"the lease of {request!r} lapsed before it was taken")
    if outcome in (Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.CLOSED):
        return TransferCancelled(f"{request!r} was withdrawn before it was taken")
    return LeaseConsumed(f"{request!r} was taken before")


@dataclass(slots=True)
class _Slot:
    generation: int = 0
    lease: Lease | None = None
    request: str = ""
    outcome: Outcome | None = None


class LeaseTable:
    """The leases of one server. Not locked."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._free: deque[int] = deque()
        self._deadlines: list[tuple[float, LeaseId]] = []
        self._num_live = 0

    def __len__(self) -> int:
        """How many are on offer, or have pages that are still held."""
        return self._num_live

    def live(self) -> list[Lease]:
        """Those, in no order."""
        return [slot.lease for slot in self._slots if slot.lease is not None]

    def grant(self, request: str, num_tokens: int, expires_at: float) -> Lease:
        """Put pages on offer under a new name.

        Raises:
            ValueError: There are too many.
        """
        if self._num_live >= MAX_LEASES:
            raise ValueError(f"{self._num_live} leases are open: too many")
        if len(self._free) > KEPT_LEASES:
            index = self._free.popleft()
        else:
            index = len(self._slots)
            self._slots.append(_Slot())
        slot = self._slots[index]
        slot.generation += 1
        lease = Lease(LeaseId(index, slot.generation), request, num_tokens, expires_at)
        slot.lease, slot.request, slot.outcome = lease, request, None
        self._num_live += 1
        self._watch(lease)
        return lease

    def find(self, name: LeaseId) -> Lease:
        """Return a live lease.

        Raises:
            LeaseUnknown: There was never one of that name.
            LeaseReused: Its slot is another's by now.
            LeaseExpired: It lapsed before it was taken.
            LeaseConsumed: It was taken, and is over.
            TransferCancelled: It was withdrawn before it was taken.
        """
        known = 0 <= name.slot < len(self._slots)
        if not known or not 1 <= name.generation <= self._slots[name.slot].generation:
            raise LeaseUnknown(f"lease {name.slot}.{name.generation} was never given")
        slot = self._slots[name.slot]
        if name.generation < slot.generation:
            raise LeaseReused(
                f"lease {name.slot}.{name.generation} ended, and its place was given to another"
            )
        if slot.lease is None:
            raise refusal(slot.request, slot.outcome)
        return slot.lease

    def renew(self, name: LeaseId, expires_at: float) -> bool:
        """Let a lease last longer, never shorter; return whether anyone may still come.

        Raises:
            LeaseError: As for `find`.
            TransferCancelled: As for `find`.
        """
        lease = self.find(name)
        if not lease.open:
            return False
        lease.expires_at = max(lease.expires_at, expires_at)
        return True

    def expire(self, now: float) -> list[Lease]:
        """Let lapse what is due; return the leases in which a side ended by it.

        To be called before `find` answers a peer: a lease that is due may not be taken any more.
        """
        lapsed = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            slot = self._slots[name.slot]
            lease = slot.lease
            if lease is None or slot.generation != name.generation or not lease.open:
                continue
            if lease.expires_at > now:  # It was renewed since.
                self._watch(lease)
                continue
            for side in lease.sides.values():
                side.step(Event.EXPIRE)
            lapsed.append(lease)
        return lapsed

    def _watch(self, lease: Lease) -> None:
        if lease.expires_at == math.inf:
            return
        heapq.heappush(self._deadlines, (lease.expires_at, lease.name))
        if len(self._deadlines) > 2 * self._num_live + 64:
            self._deadlines = [
                (one.expires_at, one.name) for one in self.live() if one.expires_at != math.inf
            ]
            heapq.heapify(self._deadlines)

    def remove(self, lease: Lease) -> None:
        """Forget a released lease, but for how it ended. Idempotent."""
        assert lease.released
        slot = self._slots[lease.name.slot]
        if slot.lease is not lease:
            return
        slot.lease = None
        # Partly taken and then lapsed is consumed to whoever comes late.
        slot.outcome = lease.outcome if not lease.group_size else Outcome.CONSUMED
        self._num_live -= 1
        if slot.generation < MAX_GENERATION:
            self._free.append(lease.name.slot)


class PageLedger:
    """Which pages of one cache are held by requests. Not locked.

    Any number of requests may be read from a page (prompts share their beginnings), but one that
    is being filled is that request's alone.
    """

    def __init__(self, num_pages: int) -> None:
        self._holds = np.zeros(num_pages, np.int32)

    @property
    def num_held(self) -> int:
        return int(np.count_nonzero(self._holds))

    def hold(self, pages: Pages, *, exclusive: bool) -> None:
        """Hold pages until `release`, each once.

        Raises:
            ValueError: A page does not exist, is named twice, or is held in another way. Nothing
                is held then.
        """
        if not len(pages):
            return
        if pages.min() < 0 or pages.max() >= len(self._holds):
            raise ValueError(f"a page does not exist; there are {len(self._holds)}")
        ordered = np.sort(pages)
        if (ordered[1:] == ordered[:-1]).any():
            raise ValueError("a page is named twice")
        found = self._holds[pages]
        wrong = found != 0 if exclusive else found < 0
        if wrong.any():
            page = int(pages[wrong][0])
            use = "being filled" if self._holds[page] < 0 else "still offered"
            raise ValueError(f"page {page} is {use} by another request: it was freed too early")
        self._holds[pages] = -1 if exclusive else found + 1

    def release(self, pages: Pages) -> None:
        """Give up one hold of each page."""
        found = self._holds[pages]
        assert (found != 0).all(), "released more often than held"
        self._holds[pages] = np.where(found < 0, 0, found - 1)
