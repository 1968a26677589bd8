"""The side that has computed a prompt's keys and values, and gives them away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from torch_nixl.errors import (
    LeaseError,
    LeaseOutOfRange,
    MetadataError,
    TransferCancelled,
    TransferError,
)
from torch_nixl.kv import frames
from torch_nixl.kv.cache import KVCache, PageIds
from torch_nixl.kv.handoff import Handoff
from torch_nixl.kv.leases import Lease, LeaseId, LeaseTable
from torch_nixl.kv.moving import Moves
from torch_nixl.kv.offer import Offer
from torch_nixl.kv.protocol import Event, Mode, Outcome, outcome_of
from torch_nixl.kv.request import lease_milliseconds
from torch_nixl.kv.service import DEFAULT_TIMEOUT, Service
from torch_nixl.kv.ticket import MAX_REQUEST, Ticket, describe

if TYPE_CHECKING:
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.kv.compatibility import Compatibility
    from torch_nixl.kv.hub import AnyConnection
    from torch_nixl.kv.meeting import Meeting

DEFAULT_LEASE: Final = 30.0
"""Seconds for which pages are on offer unless told otherwise."""

STALL_SECONDS: Final = 0.25
"""After so long without a tick this process stood still, or its driver did: for as long again no
lease lapses, so that heartbeats that came in time are read first."""


class KVCacheServer(Service):
    """Offers pages of a cache to whoever has a ticket for them.

    Args:
        connection: A Connection, or a Communicator, whose connection is used. Neither is closed
            with the server.
        cache: The cache. Registered as a whole, once.
        lease: Seconds for which pages are on offer unless told otherwise.
        timeout: Seconds after which a request that was taken times out; None for never.

    Raises:
        RegistrationError: NIXL refused the memory.
        ValueError: The cache can't be handed over; the message says why.
        ClosedError: The connection is closed.
    """

    def __init__(
        self,
        connection: AnyConnection,
        cache: KVCache,
        *,
        lease: float = DEFAULT_LEASE,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> None:
        lease_milliseconds(lease)
        super().__init__(connection, cache, timeout=timeout)
        self._lease = lease
        self._leases = LeaseTable()
        self._ticked_at = time.monotonic()
        self._lapse_after = 0.0
        self._offers: dict[LeaseId, Offer] = {}
        self._blob = Ticket.encode(self.connection.metadata()[0])
        self._description = describe(cache.compatibility)
        self.number = self.hub.add_server(self)

    def offer(
        self,
        request: str,
        pages: PageIds | Sequence[PageIds],
        num_tokens: int,
        *,
        first: int | Sequence[int] = 0,
        ready: bool = True,
        lease: float | None = None,
        stream: object = None,
    ) -> Offer:
        """Put the pages of a prompt on offer. Never blocks.

        On a device they may be read, or are written to the other side, once what is queued by now
        has run.

        Args:
            request: What to call it.
            pages: Page ids in the order of positions; of several groups of layers, each's. Pages
                may be offered by several requests at a time, but not while they are being filled.
            num_tokens: Positions up to this are on offer.
            first: Position of the first page's first token; of several groups, each's.
            ready: Whether all layers are computed. If not, `Offer.layer_ready` says when each is.
            lease: Seconds until the offer lapses unless decode has come or sends heartbeats.
            stream: What is queued on this stream counts; by default, on its device's current one.

        Raises:
            ValueError: A page does not exist, is being filled, or the pages don't reach as far; or
                `stream` is none of the pool's devices.
            TransferError: The stream is being captured into a graph.
            ClosedError: The server is closed.
        """
        runs = self.cache.runs(pages, first)
        if not 0 <= num_tokens < frames.MAX_POSITION:
            raise ValueError(f"num_tokens={num_tokens}: expected 0 or more")
        begin = min(run.first for run in runs)
        self.cache.cover(runs, begin, num_tokens)
        frames.pack_runs(runs)
        seconds = self._lease if lease is None else lease
        milliseconds = lease_milliseconds(seconds)
        if stream is not None and not ready:
            raise ValueError("stream=: no layer is ready yet; layer_ready() takes each one's")
        order = self.registered.order(stream) if ready else None
        with self.hub.lock:
            self._check_open()
            granted = self._leases.grant(request, num_tokens, time.monotonic() + seconds)
            try:
                ticket = self._ticket(granted, milliseconds)
                self.registered.hold(runs, exclusive=False)
            except BaseException:
                granted.sides[-1].step(Event.CANCEL)
                self._leases.remove(granted)
                raise
            offer = Offer(self, granted, request, runs, ticket=ticket)
            if ready:
                offer.tell_ready(self.cache.num_layers, order)
            self._offers[granted.name] = offer
            self.enter(offer)
            self.figures.offers += 1
        self.connection.progress.expect()
        return offer

    def _ticket(self, lease: Lease, milliseconds: int) -> str:
        compatibility = self.cache.compatibility
        ticket = Ticket(
            server=self.connection.name,
            service=self.number,
            slot=lease.name.slot,
            generation=lease.name.generation,
            request=lease.request[:MAX_REQUEST],
            num_tokens=lease.num_tokens,
            tp_rank=compatibility.tp_rank,
            tp_size=compatibility.tp_size,
            lease_ms=milliseconds,
            compatibility=self._description,
            metadata=self._blob,
        )
        return ticket.pack(key=self.connection.metadata_key)

    def _withdraw(self) -> None:
        with self.hub.lock:
            for offer in list(self._offers.values()):
                offer.shut(Outcome.CLOSED, "prefill closed")

    # The hub's lock is held.

    def forget(self, offer: Offer) -> None:
        """An offer's pages are free."""
        self._offers.pop(offer.lease.name, None)
        self._leases.remove(offer.lease)

    def on_tick(self, now: float) -> None:
        if now - self._ticked_at > STALL_SECONDS:
            self._lapse_after = now + STALL_SECONDS
        self._ticked_at = now
        if now >= self._lapse_after:
            self._expire(now)

    def _expire(self, now: float) -> None:
        for lease in self._leases.expire(now):
            offer = self._offers.get(lease.name)
            if offer is not None:
                offer.look("its lease lapsed before it was taken")

    def on_abort(self, error: BaseException) -> None:
        super().on_abort(error)
        with self.hub.lock:
            for offer in list(self._offers.values()):
                offer.on_closed(error)

    # What peers say.

    def on_meet(self, remote: Remote, service: int, body: bytes, at: int) -> None:
        """A client tells of its cache; answer with ours, or why nothing can move."""
        head = frames.Head(service, 0, LeaseId(self.number, 0))
        try:
            meeting = self._meet(remote, service)
        except TransferError as error:
            self.hub.send_end(remote, frames.REJECT, head, Outcome.FAILED, str(error))
            return
        try:
            self._know(meeting, body, at)
        except MetadataError as error:
            meeting.refused = Outcome.INCOMPATIBLE, str(error)
        if meeting.refused is None:
            answer = frames.pack_meet(service, self.number, self.registered.packed)
            self.connection.contacts.send_body(remote, frames.WELCOME, answer)
        else:
            self.hub.send_end(remote, frames.REJECT, head, *meeting.refused)

    def _share(self, meeting: Meeting, theirs: Compatibility) -> None:
        ours = self.cache.compatibility
        meeting.ranks = ours.takers(theirs)
        nothing = tuple(range(0) for _ in ours.geometries)
        meeting.heads = theirs.shares(ours.tp_size).get(ours.tp_rank, nothing)

    def on_take(self, remote: Remote, take: frames.Take) -> None:
        """Decode asks for pages.

        Raises:
            MetadataError: It has asked under this number before.
        """
        head = take.head
        if (remote.name, head.number) in self.hub.taken:
            raise MetadataError(f"{remote.name} asks twice under the number {head.number}")
        self.figures.asked += 1
        now = time.monotonic()
        self._expire(now)
        try:
            self._grant(remote, take, now)
        except (LeaseError, TransferCancelled) as error:
            answer = frames.Head(take.service, head.number, head.lease)
            outcome = Outcome.CLOSED if self.closed else outcome_of(error)
            self.hub.send_end(remote, frames.REJECT, answer, outcome, str(error))

    def _grant(self, remote: Remote, take: frames.Take, now: float) -> None:
        if self.closed or self.connection.closing:
            raise TransferCancelled("prefill is closing")
        meeting = self._meetings.get((remote.name, take.service))
        if meeting is None or meeting.known is None or meeting.refused is not None:
            raise LeaseError("the caches have not met")
        lease = self._leases.find(take.head.lease)
        lease.check_range(take.start, take.stop)
        offer = self._offers[lease.name]
        theirs = meeting.pool.compatibility
        lease.find(theirs.tp_rank, theirs.tp_size, meeting.ranks)
        moves = self._plan(offer, meeting, take)
        side = lease.enter(theirs.tp_rank, theirs.tp_size, meeting.ranks)
        handoff = Handoff(
            self,
            offer,
            meeting,
            side,
            remote,
            take.head.number,
            lease.name,
            name="kv offer",
            label=lease.request,
            start=take.start,
            stop=take.stop,
            heads=meeting.heads,
            deadline=None if self.timeout is None else now + self.timeout,
        )
        offer.handoffs.append(handoff)
        self.hub.add(handoff)
        self.figures.took("grant", now - offer.offered_at)
        handoff.on_taken(Event.TAKE_PULL if take.mode is Mode.PULL else Event.TAKE_PUSH, moves)

    def _plan(self, offer: Offer, meeting: Meeting, take: frames.Take) -> Moves | None:
        """Plan to write to decode's pages; for PULL only see that ours begin early enough."""
        try:
            if take.mode is Mode.PULL:
                begin = min(run.first for run in offer.runs)
                if take.start < take.stop and take.start < begin:
                    raise ValueError(
                        f"the pages on offer begin at position {begin}, not {take.start}"
                    )
                return None
            return Moves(
                self.registered.pool,
                offer.runs,
                meeting.pool,
                take.runs,
                start=take.start,
                stop=take.stop,
                heads=meeting.heads,
                by_layer=offer.num_ready < self.cache.num_layers,
            )
        except ValueError as error:
            raise LeaseOutOfRange(str(error)) from None

    def on_beat(self, remote: Remote, head: frames.Head, seconds: float) -> None:
        """Decode is still going to come; or, with 0 seconds, it never will."""
        self.figures.heartbeats += 1
        now = time.monotonic()
        try:
            if seconds == 0:
                lease = self._leases.find(head.lease)
                if not lease.group_size:
                    self._offers[lease.name].withdraw(Outcome.CANCELLED, "declined by decode")
                return
            self._leases.renew(head.lease, now + min(seconds, frames.MAX_BEAT_SECONDS))
        except (LeaseError, TransferCancelled) as error:
            answer = frames.Head(frames.any_peer_of(self.number), head.number, head.lease)
            self.hub.send_end(remote, frames.REJECT, answer, outcome_of(error), str(error))

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<KVCacheServer {self.connection.name} {state} offers={len(self._offers)}>"
