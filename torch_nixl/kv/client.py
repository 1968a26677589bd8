"""The side that goes on with a prompt, and takes its keys and values over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_nixl.engine.operation import deadline_after
from torch_nixl.errors import (
    ClosedError,
    IncompatibleError,
    MetadataError,
    TorchNixlError,
)
from torch_nixl.kv import frames
from torch_nixl.kv.cache import KVCache, PageIds
from torch_nixl.kv.fetch import Fetch
from torch_nixl.kv.frames import Head, Take
from torch_nixl.kv.handoff import Handoff
from torch_nixl.kv.heartbeat import Heartbeat
from torch_nixl.kv.protocol import Event, Mode, Outcome, Phase, Side
from torch_nixl.kv.service import DEFAULT_TIMEOUT, Service, as_sequence
from torch_nixl.kv.ticket import Ticket

if TYPE_CHECKING:
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.kv.compatibility import Compatibility
    from torch_nixl.kv.hub import AnyConnection
    from torch_nixl.kv.meeting import Meeting

Tickets = str | bytes | Sequence[str | bytes]
"""One ticket, or one of each rank of prefill's tensor-parallel group."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    ticket: Ticket
    heads: tuple[range, ...]
    remote: Remote


class KVCacheClient(Service):
    """Has pages of a cache filled from servers', by ticket.

    Args:
        connection: A Connection, or a Communicator, whose connection is used. Neither is closed
            with the client.
        cache: The cache. Registered as a whole, once.
        timeout: Seconds after which a request times out unless told otherwise; None for never.

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
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(connection, cache, timeout=timeout)
        self.number = self.hub.add_client(self)

    def pull(
        self,
        tickets: Tickets,
        pages: PageIds | Sequence[PageIds],
        *,
        start: int = 0,
        stop: int | None = None,
        first: int | Sequence[int] = 0,
        timeout: float | None = None,
        stream: object = None,
    ) -> Fetch:
        """Read a prompt's keys and values from prefill's pages into ours.

        Returns at once, but for the first contact with a server; the bytes move while someone
        waits or in the background. On a device pages are not touched before what is queued by now
        has run.

        Args:
            tickets: From prefill; of a group of several ranks, one of each that has heads for
                this rank. Give those of all ranks: what no rank of ours needs, since others hold
                the same heads, is declined, so that prefill has its pages back.
            pages: Page ids in the order of positions; of several groups of layers, each's. Those
                that are written to belong to this request alone until it is `released`.
            start: Position of the first token that is missing here; those before it are a prefix
                that this side has already.
            stop: Position after the last; by default, all that is on offer.
            first: Position of the first page's first token; of several groups, each's.
            timeout: Seconds; `math.inf` for never; the client's by default.
            stream: What is queued on this stream counts; by default, on its device's current one.

        Raises:
            ValueError: A page does not exist, is in use, or the pages don't hold these positions;
                a ticket is missing; or `stream` is none of the pool's devices.
            MetadataError: A ticket is malformed, or was altered.
            IncompatibleError: The caches can't be converted into each other, as the tickets say.
            PeerLostError: A server can't be reached.
            TransferError: Too many servers are known; or the stream is being captured into a graph.
            ClosedError: The client is closed.
        """
        return self._fetch(Mode.PULL, tickets, pages, start, stop, first, timeout, stream)

    def push(
        self,
        tickets: Tickets,
        pages: PageIds | Sequence[PageIds],
        *,
        start: int = 0,
        stop: int | None = None,
        first: int | Sequence[int] = 0,
        timeout: float | None = None,
        stream: object = None,
    ) -> Fetch:
        """Have prefill write a prompt's keys and values to our pages, each layer once computed.

        Arguments and errors are those of `pull`. On a device prefill is asked once what is queued
        by now has run, and the lease has to last as long.
        """
        return self._fetch(Mode.PUSH, tickets, pages, start, stop, first, timeout, stream)

    def keep(self, ticket: str | bytes) -> Heartbeat:
        """Keep a lease until its pages are asked for, while decode has no room for them.

        Raises:
            MetadataError: The ticket is malformed, or was altered.
            PeerLostError: The server can't be reached.
            ClosedError: The client is closed.
        """
        parsed = Ticket.unpack(ticket, key=self.connection.metadata_key)
        remote = self.connection.contact(parsed.server, parsed.connection_blob)
        with self.hub.lock:
            self._check_open()
            heartbeat = Heartbeat(self, remote, next(self.hub.numbers), parsed)
            self.hub.heartbeats[heartbeat.number] = heartbeat
            heartbeat.on_tick(time.monotonic())
            return heartbeat

    def decline(self, tickets: Tickets) -> None:
        """Say that nobody is going to come: prefill has its pages back at once.

        Raises:
            MetadataError, PeerLostError, ClosedError: As for `keep`.
        """
        for text in as_sequence(tickets):
            self._decline(Ticket.unpack(text, key=self.connection.metadata_key))

    def _decline(self, ticket: Ticket) -> None:
        remote = self.connection.contact(ticket.server, ticket.connection_blob)
        with self.hub.lock:
            self._check_open()
            self._stop_keeping(ticket)
            head = Head(ticket.service, next(self.hub.numbers), ticket.lease)
            body = frames.pack_count(head, 0)
            self.connection.contacts.send_body(remote, frames.BEAT, body)

    def _stop_keeping(self, ticket: Ticket) -> None:
        for heartbeat in list(self.hub.heartbeats.values()):
            if heartbeat.ticket.is_same(ticket):
                heartbeat.stop()

    def _fetch(
        self,
        mode: Mode,
        tickets: Tickets,
        pages: PageIds | Sequence[PageIds],
        start: int,
        stop: int | None,
        first: int | Sequence[int],
        timeout: float | None,
        stream: object,
    ) -> Fetch:
        self._check_open()
        chosen, spare = self._choose(tickets)
        sizes = {ticket.num_tokens for ticket, _ in chosen}
        if stop is None:
            if len(sizes) != 1:
                raise ValueError(f"the tickets offer different numbers of tokens: {sorted(sizes)}")
            stop = sizes.pop()
        if not 0 <= start <= stop < frames.MAX_POSITION:
            raise ValueError(f"positions {start} to {stop}: expected 0 or more, in this order")
        runs = self.cache.cover(self.cache.runs(pages, first), start, stop)
        if start < stop and min(run.first for run in runs) > start:
            raise ValueError(f"pages begin after position {start}")
        frames.pack_runs(runs)
        timeout = self.timeout if timeout is None else timeout
        deadline = deadline_after(timeout)
        wanted = [
            _Wanted(ticket, heads, self.connection.contact(ticket.server, ticket.connection_blob))
            for ticket, heads in chosen
        ]
        order = self.registered.order(stream)
        with self.hub.lock:
            self._check_open()
            meetings = [self._meet(one.remote, one.ticket.service) for one in wanted]
            self.registered.hold(runs, exclusive=True)
            fetch = Fetch(self, wanted[0].ticket.request, runs, mode, order)
            self.enter(fetch)
            self.figures.asked += 1
            for one, meeting in zip(wanted, meetings, strict=True):
                fetch.handoffs.append(self._handoff(fetch, one, meeting, start, stop, deadline))
            try:
                for handoff in fetch.handoffs:
                    self.hub.add(handoff)
            except ClosedError:
                self.leave(fetch)
                raise
            for handoff in fetch.handoffs:
                self._ask(handoff)
        self.connection.progress.kick()
        for ticket in spare:
            with contextlib.suppress(TorchNixlError):  # Its lease lapses by itself, later.
                self._decline(ticket)
        return fetch

    def _choose(
        self, tickets: Tickets
    ) -> tuple[list[tuple[Ticket, tuple[range, ...]]], list[Ticket]]:
        """Read tickets, and pick those of the ranks that have heads for this one.

        Returns:
            Those, with the heads; and those that no rank of ours needs, for one of us to decline.
        """
        key = self.connection.metadata_key
        parsed = [Ticket.unpack(text, key=key) for text in as_sequence(tickets)]
        sizes = {one.tp_size for one in parsed}
        if len(sizes) != 1:
            raise ValueError(f"tickets of groups of {sorted(sizes)} ranks: expected one group")
        by_rank: dict[int, Ticket] = {}
        for one in parsed:
            other = by_rank.setdefault(one.tp_rank, one)
            if not one.is_same(other):
                raise ValueError(f"two different tickets of rank {one.tp_rank}")
        for one in by_rank.values():
            why = one.difference(self.cache.compatibility)
            if why:
                raise IncompatibleError(f"{one.server}: {why}")
        size = sizes.pop()
        try:
            wanted = self.cache.compatibility.shares(size)
        except ValueError as error:
            raise IncompatibleError(f"{parsed[0].server}: {error}") from None
        missing = sorted(wanted.keys() - by_rank.keys())
        if missing:
            raise ValueError(f"tickets of ranks {missing} of {size} are missing")
        spare: list[Ticket] = []
        if self.cache.compatibility.tp_rank == 0 and len(by_rank) > len(wanted):
            unused = self.cache.compatibility.spare(size)
            spare = [ticket for rank, ticket in by_rank.items() if rank in unused]
        return [(by_rank[rank], heads) for rank, heads in wanted.items()], spare

    # The hub's lock is held.

    def _handoff(
        self,
        fetch: Fetch,
        one: _Wanted,
        meeting: Meeting,
        start: int,
        stop: int,
        deadline: float | None,
    ) -> Handoff:
        self._stop_keeping(one.ticket)
        return Handoff(
            self,
            fetch,
            meeting,
            Side.take(fetch.mode),
            one.remote,
            next(self.hub.numbers),
            one.ticket.lease,
            name=f"kv {fetch.mode.name.lower()}",
            label=fetch.request,
            start=start,
            stop=stop,
            heads=one.heads,
            deadline=deadline,
        )

    def _ask(self, handoff: Handoff) -> None:
        """Send TAKE, once the caches have met."""
        meeting = handoff.meeting
        if meeting.remote.lost_error is not None:
            handoff.on_lost(meeting.remote.lost_error)
        elif meeting.refused is not None:
            handoff.on(Event.REJECT, *meeting.refused)
        elif meeting.known is not None:
            if handoff.side.phase is Phase.EXPOSED:
                # Prefill writes once it is told where.
                self.hub.when_passed(handoff.request.order, lambda: self._take(handoff))
            else:
                self._take(handoff)
        else:
            meeting.waiting.append(handoff)
            if not meeting.asked_at:
                meeting.asked_at = time.monotonic()
                body = frames.pack_meet(meeting.service, self.number, self.registered.packed)
                self.connection.contacts.send_body(meeting.remote, frames.MEET, body)

    def _take(self, handoff: Handoff) -> None:
        if handoff.side.phase not in (Phase.ASKED, Phase.EXPOSED):
            return  # It was given up before.
        request = handoff.request
        assert isinstance(request, Fetch)
        handoff.sent = True
        head = Head(handoff.meeting.service, handoff.number, handoff.lease)
        runs = request.runs if request.mode is Mode.PUSH else ()
        body = frames.pack_take(
            Take(head, self.number, request.mode, handoff.start, handoff.stop, runs)
        )
        self.connection.contacts.send_body(handoff.meeting.remote, frames.TAKE, body)

    # What peers say.

    def on_welcome(self, remote: Remote, service: int, body: bytes, at: int) -> None:
        """A server tells of its cache."""
        meeting = self._meetings.get((remote.name, service))
        if meeting is None or meeting.known is not None or not meeting.asked_at:
            return
        try:
            self._know(meeting, body, at)
        except MetadataError as error:
            meeting.refused = Outcome.INCOMPATIBLE, str(error)
        self.figures.took("meet", time.monotonic() - meeting.asked_at)
        self._met(meeting)

    def on_refused(self, remote: Remote, service: int, outcome: Outcome, text: str) -> None:
        """A server says why nothing can move between the two caches."""
        meeting: Meeting | None = self._meetings.get((remote.name, service))
        if meeting is not None and outcome is not Outcome.COMPLETE:
            meeting.refused = outcome, text
            self._met(meeting)
            if outcome is Outcome.FAILED:  # It may know us later.
                self._meetings.pop((remote.name, service), None)

    def _share(self, meeting: Meeting, theirs: Compatibility) -> None:
        self.cache.compatibility.shares(theirs.tp_size)

    def _met(self, meeting: Meeting) -> None:
        waiting, meeting.waiting = meeting.waiting, []
        for handoff in waiting:
            self._ask(handoff)

    def on_abort(self, error: BaseException) -> None:
        super().on_abort(error)
        with self.hub.lock:
            for heartbeat in list(self.hub.heartbeats.values()):
                heartbeat.on_tick(0.0)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<KVCacheClient {self.connection.name} {state} fetches={len(self._requests)}>"
