"""The side that goes on with a prompt, and takes its keys and values over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_nixl.engine.operation import deadline_after
from torch_nixl.errors import (
    ClosedError,
    IncompatibleError,
    MetadataError,
    PeerLostError,
    TransferError,
    TransferTimeout,
)
from torch_nixl.kv import frames
from torch_nixl.kv.cache import KVCache, PageIds
from torch_nixl.kv.frames import Head, Take
from torch_nixl.kv.handoff import Handoff
from torch_nixl.kv.moving import order_of
from torch_nixl.kv.plan import Run
from torch_nixl.kv.protocol import Event, Mode, Outcome, Phase, Side, error_of
from torch_nixl.kv.request import PageLists, Request
from torch_nixl.kv.service import DEFAULT_TIMEOUT, Service, as_sequence
from torch_nixl.kv.ticket import Ticket

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.kv.compatibility import Compatibility
    from torch_nixl.kv.meeting import Meeting
    from torch_nixl.p2p.communicator import Communicator

Tickets = str | bytes | Sequence[str | bytes]
"""One ticket, or one of each rank of prefill's tensor-parallel group."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    ticket: Ticket
    heads: tuple[range, ...]
    remote: Remote


class Fetch(Request):
    """Pages of one prompt that are being filled.

    Attributes:
        mode: Who moves the bytes.
        runs: Those that are written to.
    """

    num_ready = 0

    def __init__(
        self, client: KVCacheClient, request: str, runs: tuple[Run, ...], mode: Mode
    ) -> None:
        super().__init__(client, request, runs)
        self._client = client
        self.mode = mode
        self.asked_at = time.monotonic()

    @property
    def num_layers_ready(self) -> int:
        """Layers that are filled, in the order of the model."""
        if self._done and self._error is None:
            return self._client.cache.num_layers
        return min((one.num_moved for one in self.handoffs), default=0)

    @property
    def failed_pages(self) -> PageLists:
        # Layer by layer bytes move, so no page is whole before the end.
        return self.pages if self._error is not None else ()

    def wait_layer(self, layer: int, timeout: float | None = None) -> None:
        """Block until a layer is filled.

        Args:
            layer: The model's number of it.
            timeout: Seconds; None waits until the request's own deadline. The request goes on
                after a timeout.

        Raises:
            ValueError: There is no such layer.
            TransferTimeout: Time is up.
            TransferError, ClosedError: As for `wait`.
        """
        order = order_of(self._client.cache.compatibility)
        if layer not in order:
            raise ValueError(f"layer {layer} is not in the cache")
        index = order.index(layer)
        deadline = deadline_after(timeout)
        arrived = self._connection.progress.wait_until(
            lambda: self._done or self.num_layers_ready > index, deadline
        )
        if not arrived:
            raise TransferTimeout(f"layer {layer} of {self.request!r} has not arrived yet")
        if self.num_layers_ready <= index:
            self.wait()

    def cancel(self) -> None:
        for handoff in list(self.handoffs):
            handoff.cancel(text="given up by decode")

    # The hub's lock is held.

    def on_progress(self, handoff: Handoff) -> None:
        pass

    def on_end(self, handoff: Handoff) -> None:
        error = handoff.error
        if error is None and not all(one.done for one in self.handoffs):
            return
        figures = self._client.figures
        if self._end(error):
            outcome = handoff.side.outcome
            assert outcome is not None
            figures.count_end(outcome)
            figures.took("total", time.monotonic() - self.asked_at)
            if error is None:
                figures.pages += sum(len(run.pages) for run in self.runs)
            for other in list(self.handoffs):
                if not other.done:
                    other.cancel(text=f"another part failed: {error}")

    def on_release(self, handoff: Handoff) -> None:
        if all(one.side.released for one in self.handoffs):
            self._client.leave(self)
            self._free()


class Heartbeat:
    """Keeps a lease while decode has no room yet for what it offers.

    Attributes:
        error: Why the lease is lost; None while it is kept.
    """

    def __init__(self, client: KVCacheClient, remote: Remote, number: int, ticket: Ticket) -> None:
        self._client = client
        self._remote = remote
        self.number = number
        self.ticket = ticket
        self.error: TransferError | None = None
        self._due = 0.0

    @property
    def active(self) -> bool:
        """Whether it goes on."""
        return self.number in self._client.hub.heartbeats

    def stop(self) -> None:
        """Keep the lease no more. Idempotent."""
        with self._client.hub.lock:
            self._client.hub.heartbeats.pop(self.number, None)

    # The hub's lock is held.

    def on_tick(self, now: float) -> None:
        """Send the next one if it is due."""
        if self._client.closed:
            self.stop()
        elif self._remote.lost_error is not None:
            name = self._remote.name
            self.error = PeerLostError(f"{name} is lost: {self._remote.lost_error}", remote=name)
            self.stop()
        elif now >= self._due:
            lasts = self.ticket.lease_ms or int(1000 * frames.MAX_BEAT_SECONDS)
            self._due = now + lasts / 3000
            head = Head(self.ticket.service, self.number, self.ticket.lease)
            body = frames.pack_count(head, lasts)
            self._client.figures.heartbeats += 1
            self._client.connection.contacts.send_body(self._remote, frames.BEAT, body)

    def on_refused(self, remote: Remote, outcome: Outcome, text: str) -> None:
        """There is no such lease any more."""
        if remote.name == self._remote.name:
            self.error = error_of(outcome, f"the lease of {self.ticket.request!r}: {text}")
            self.stop()


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
        connection: Connection | Communicator,
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
    ) -> Fetch:
        """Read a prompt's keys and values from prefill's pages into ours.

        Returns at once, but for the first contact with a server; the bytes move while someone
        waits or in the background.

        Args:
            tickets: From prefill; of a group of several ranks, one of each that has heads for
                this rank. More do no harm.
            pages: Page ids in the order of positions; of several groups of layers, each's. Those
                that are written to belong to this request alone until it is `released`.
            start: Position of the first token that is missing here; those before it are a prefix
                that this side has already.
            stop: Position after the last; by default, all that is on offer.
            first: Position of the first page's first token; of several groups, each's.
            timeout: Seconds; `math.inf` for never; the client's by default.

        Raises:
            ValueError: A page does not exist, is in use, or the pages don't hold these positions;
                or a ticket is missing.
            MetadataError: A ticket is malformed, or was altered.
            PeerLostError: A server can't be reached.
            ClosedError: The client is closed.
        """
        return self._fetch(Mode.PULL, tickets, pages, start, stop, first, timeout)

    def push(
        self,
        tickets: Tickets,
        pages: PageIds | Sequence[PageIds],
        *,
        start: int = 0,
        stop: int | None = None,
        first: int | Sequence[int] = 0,
        timeout: float | None = None,
    ) -> Fetch:
        """Have prefill write a prompt's keys and values to our pages, each layer once computed.

        Arguments and errors are those of `pull`.
        """
        return self._fetch(Mode.PUSH, tickets, pages, start, stop, first, timeout)

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
            ticket = Ticket.unpack(text, key=self.connection.metadata_key)
            remote = self.connection.contact(ticket.server, ticket.connection_blob)
            with self.hub.lock:
                self._check_open()
                self._stop_keeping(ticket)
                head = Head(ticket.service, next(self.hub.numbers), ticket.lease)
                body = frames.pack_count(head, 0)
                self.connection.contacts.send_body(remote, frames.BEAT, body)

    def _stop_keeping(self, ticket: Ticket) -> None:
        for heartbeat in list(self.hub.heartbeats.values()):
            kept = heartbeat.ticket
            if (kept.server, kept.service, kept.lease) == (
                ticket.server,
                ticket.service,
                ticket.lease,
            ):
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
    ) -> Fetch:
        self._check_open()
        chosen = self._choose(tickets)
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
        with self.hub.lock:
            self._check_open()
            self.registered.hold(runs, exclusive=True)
            fetch = Fetch(self, wanted[0].ticket.request, runs, mode)
            self.enter(fetch)
            self.figures.asked += 1
            for one in wanted:
                fetch.handoffs.append(self._handoff(fetch, one, start, stop, deadline))
            try:
                for handoff in fetch.handoffs:
                    self.hub.add(handoff)
            except ClosedError:
                self.leave(fetch)
                raise
            for handoff in fetch.handoffs:
                self._ask(handoff)
        self.connection.progress.kick()
        return fetch

    def _choose(self, tickets: Tickets) -> list[tuple[Ticket, tuple[range, ...]]]:
        """Read tickets, and pick those of the ranks that have heads for this one."""
        key = self.connection.metadata_key
        parsed = [Ticket.unpack(text, key=key) for text in as_sequence(tickets)]
        sizes = {one.tp_size for one in parsed}
        if len(sizes) != 1:
            raise ValueError(f"tickets of groups of {sorted(sizes)} ranks: expected one group")
        by_rank = {one.tp_rank: one for one in parsed}
        size = sizes.pop()
        try:
            wanted = self.cache.compatibility.shares(size)
        except ValueError as error:
            raise IncompatibleError(f"{parsed[0].server}: {error}") from None
        missing = sorted(wanted.keys() - by_rank.keys())
        if missing:
            raise ValueError(f"tickets of ranks {missing} of {size} are missing")
        return [(by_rank[rank], heads) for rank, heads in wanted.items()]

    # The hub's lock is held.

    def _handoff(
        self, fetch: Fetch, one: _Wanted, start: int, stop: int, deadline: float | None
    ) -> Handoff:
        self._stop_keeping(one.ticket)
        return Handoff(
            self,
            fetch,
            self._meet(one.remote, one.ticket.service),
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
