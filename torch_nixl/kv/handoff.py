"""One side of one request with one peer: the hands of the state machine in `protocol.py`.

A Handoff turns frames, clocks, programs' calls and transfers' ends into its events, and does what
it answers: send frames, move pages, tell its request. All of that under the hub's lock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.operation import Operation
from torch_nixl.errors import ClosedError, PeerLostError, TransferCancelled
from torch_nixl.kv import frames
from torch_nixl.kv.leases import LeaseId
from torch_nixl.kv.moving import Moves, PageTransfer
from torch_nixl.kv.protocol import Action, Event, Outcome, Phase, Role, Side, error_of, outcome_of
from torch_nixl.kv.recontact import Recontact

if TYPE_CHECKING:
    from torch_nixl.engine.registry import RegisteredMemory
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.kv.meeting import Meeting
    from torch_nixl.kv.plan import Run
    from torch_nixl.kv.service import Service
    from torch_nixl.kv.whole import Whole


class Handoff(Operation):
    """One side of one request with one peer.

    Attributes:
        service: The server or client that it is of.
        label: What the program calls the request.
        request: The Offer or Fetch that it is a part of.
        meeting: What is known of the peer's cache.
        side: Where it stands.
        number: Decode's for it.
        lease: Prefill's.
        start: Position of the first token that moves.
        stop: Position after the last.
        heads: Which of the model's heads, for each group of layers.
        num_ready: Layers that can be moved.
        num_moved: Layers that have been, by this side or as the peer says.
        sent: Whether the peer knows of it; prefill's always does.
    """

    __slots__ = (
        "_asked_at",
        "_granted_at",
        "_moves",
        "_recontact",
        "_text",
        "_transfer",
        "heads",
        "label",
        "lease",
        "meeting",
        "num_moved",
        "num_ready",
        "number",
        "request",
        "sent",
        "service",
        "side",
        "start",
        "stop",
    )

    def __init__(
        self,
        service: Service,
        request: Whole,
        meeting: Meeting,
        side: Side,
        remote: Remote,
        number: int,
        lease: LeaseId,
        *,
        name: str,
        label: str,
        start: int,
        stop: int,
        heads: tuple[range, ...],
        deadline: float | None,
    ) -> None:
        super().__init__(service.connection, name, (), deadline)
        self.service = service
        self.label = label
        self.request = request
        self.meeting = meeting
        self.side = side
        self.remote = remote
        self.number = number
        self.lease = lease
        self.start, self.stop, self.heads = start, stop, heads
        self.num_ready = 0
        self.num_moved = 0
        self.sent = side.role is Role.PREFILL
        self._moves: Moves | None = None
        self._transfer: PageTransfer | None = None
        self._text = ""
        self._asked_at = self._granted_at = time.monotonic()
        self._recontact = Recontact()

    @property
    def memories(self) -> tuple[RegisteredMemory, ...]:
        return () if self._released else self.service.registered.held

    @property
    def nbytes(self) -> int:
        """Bytes that this side moves; 0 while that isn't known, and where the peer does."""
        return 0 if self._moves is None else self._moves.nbytes

    @property
    def in_flight(self) -> int:
        transfer = self._transfer
        return 0 if transfer is None else transfer.in_flight

    @property
    def num_layers(self) -> int:
        return self.service.registered.cache.num_layers

    def __str__(self) -> str:
        peer = "" if self.remote is None else f" with {self.remote.name}"
        return f"{self.name} of {self.label!r}{peer}"

    def attend(self) -> bool:
        transfer = self._transfer
        return transfer.attend() if transfer is not None else False

    def hold(self, timeout: float) -> bool:
        # False keeps the pool for ever: the agent dies, but the peer may go on touching pages.
        exposed = self.sent and self.side.phase in (Phase.EXPOSED, Phase.REVOKING)
        assert self.remote is not None
        return not exposed or self._connection.liveness.is_gone(self.remote)

    # What happens to it. The hub's lock is held where nothing else is said.

    def on(self, event: Event, reason: Outcome | None = None, text: str = "") -> None:
        """Let something happen.

        Args:
            event: What.
            reason: See `Side.step`.
            text: Why, for the error that the request may end with.

        Raises:
            MetadataError: The peer says what it can't say now. Nothing has changed.
        """
        ended = self.side.ended
        actions = self.side.step(event, reason)
        if self.side.ended and not ended:
            self._text = text
        for action in actions:
            self._do(action)
        if not self.sent and self.side.phase is Phase.REVOKING:  # The peer knows of no pages.
            self.side.step(Event.DONE)
        self._go_on()
        self._note()

    def on_ready(self, count: int) -> None:
        """The peer says that so many layers can be read, or have been written."""
        self.num_ready = max(self.num_ready, min(count, self.num_layers))
        if not self.side.mover:
            self.num_moved = max(self.num_moved, min(count, self.num_layers))
            self.ring()
        self.on(Event.READY)

    def on_granted(self, num_ready: int, runs: tuple[Run, ...]) -> None:
        """Prefill lets this side read its pages, or is going to write.

        Raises:
            MetadataError: As `on`.
        """
        now = time.monotonic()
        phase, why = self.side.phase, ""
        wanted = phase in (Phase.ASKED, Phase.EXPOSED)
        if wanted:
            self.num_ready = max(self.num_ready, min(num_ready, self.num_layers))
        if phase is Phase.ASKED:
            try:
                self._moves = self._plan(runs)
            except ValueError as error:
                why = f"what prefill has granted does not fit: {error}"
        self.on(Event.GRANT)
        if wanted:
            self.service.figures.took("grant", now - self._asked_at)
            self._granted_at = now
        if why:
            self.on(Event.FAIL, Outcome.OUT_OF_RANGE, why)

    def _plan(self, runs: tuple[Run, ...]) -> Moves:
        """Plan to read the peer's pages."""
        registered = self.service.registered
        return Moves(
            self.meeting.pool,
            runs,
            registered.pool,
            registered.cache.cover(self.request.runs, self.start, self.stop),
            start=self.start,
            stop=self.stop,
            heads=self.heads,
            by_layer=self.num_ready < self.num_layers,
        )

    def on_taken(self, event: Event, moves: Moves | None) -> None:
        """Prefill: decode has come. Push: `moves` are to be made."""
        self._moves = moves
        self.num_ready = self.request.num_ready
        self.on(event)

    def on_layer(self) -> None:
        """Prefill's model has computed one more layer."""
        self.num_ready = self.request.num_ready
        self.on(Event.LAYER)

    def on_moved(self, transfer: PageTransfer, error: BaseException | None) -> None:
        """A batch of layers has arrived, or none of it moves any more. Takes the lock."""
        with self.service.hub.lock:
            if self._transfer is not transfer:
                return
            self._transfer = None
            self.service.figures.nbytes += transfer.moved_nbytes
            self.service.figures.pieces += transfer.num_posted
            if error is not None:
                self.on(Event.FAIL, outcome_of(error), str(error))
                return
            self.num_moved = transfer.layers.stop
            if self.num_moved < self.num_layers:
                if self.side.role is Role.PREFILL:
                    self._send(frames.READY, frames.pack_count(self._head(), self.num_moved))
                self.ring()
            self._go_on()
            self._note()

    # From the engine. They take the lock.

    def cancel(self, reason: Outcome = Outcome.CANCELLED, text: str = "cancelled") -> None:
        with self.service.hub.lock:
            self.on(Event.CANCEL, reason, text)

    def expire(self) -> None:
        with self.service.hub.lock:
            if not self._done:
                self.on(Event.TIMEOUT, text=f"timed out while {self._doing()}")

    def on_lost(self, error: BaseException) -> None:
        lock = self.service.hub.lock
        # Whoever tells may hold locks of another protocol, which may want to tell that one: it
        # must not wait for this one.
        if lock.acquire(blocking=False):
            try:
                self._lose(error)
            finally:
                lock.release()
        else:
            self._connection.progress.call_later([lambda: self._lose(error)])

    def _lose(self, error: BaseException) -> None:
        with self.service.hub.lock:
            self._recontact.begin()
            self.on(Event.LOST, text=str(error))

    def check_quarantine(self) -> None:
        if self._recontact.look(self):
            # Outside of the lock: making contact takes its time.
            assert self.remote is not None
            self._recontact.try_if_due(self._connection, self.remote)

    def ask_again(self, remote: Remote) -> None:
        """The peer was lost, and is in contact again."""
        self.remote = remote
        if self.side.phase is Phase.REVOKING:
            self._do(Action.CANCEL)

    def abort(self, error: BaseException) -> None:
        with self.service.hub.lock:
            if self._released:
                return
            safe = self.hold(0.0)
            if self.side.outcome is None:
                self.side.outcome = Outcome.CLOSED
            if self._finish(error):
                self.request.on_end(self)
            self._leave()
            if safe:
                self.side.phase = Phase.RELEASED
                self.request.on_release(self)

    # What it does.

    def _do(self, action: Action) -> None:
        match action:
            case Action.GRANT:
                runs = b"\0"
                if self.side.phase is Phase.EXPOSED:
                    cache = self.service.registered.cache
                    runs = frames.pack_runs(cache.cover(self.request.runs, self.start, self.stop))
                self._send(frames.GRANT, frames.pack_count(self._head(), self.num_ready, runs))
            case Action.START:
                self.service.figures.spans += 0 if self._moves is None else self._moves.num_spans
            case Action.STOP:
                if self._transfer is not None:
                    self._transfer.stop(TransferCancelled(f"{self}: {self._text}"))
            case Action.CANCEL | Action.DONE:
                kind = frames.CANCEL if action is Action.CANCEL else frames.DONE
                assert self.side.outcome is not None
                body = frames.pack_end(self._head(), self.side.outcome, self._text)
                self._send(kind, body)
            case Action.READY if not self.side.mover:
                self._send(frames.READY, frames.pack_count(self._head(), self.num_ready))

    def _go_on(self) -> None:
        """Move what can be moved now; settle if nothing is left that could."""
        if self._transfer is not None:
            return
        if self.side.phase is Phase.STOPPING:
            self.on(Event.SETTLED)
        elif self.side.phase is Phase.MOVING and self._moves is not None:
            if self.num_moved == self.num_layers or self._moves.nbytes == 0:
                self.num_moved = self.num_layers
                self.on(Event.SETTLED)
            elif self.num_ready > self.num_moved:
                self.service.hub.when_passed(self.request.order, self._start_transfer)

    def _start_transfer(self) -> None:
        moves, layers = self._moves, range(self.num_moved, self.num_ready)
        if self._transfer is not None or self.side.phase is not Phase.MOVING or not layers:
            return  # It had to wait, and this is over.
        assert self.remote is not None and moves is not None
        pull = self.side.role is Role.DECODE
        transfer = PageTransfer(
            self._connection,
            self.remote,
            self,
            Direction.READ if pull else Direction.WRITE,
            moves.pieces(layers, pull=pull),
            layers,
            memories=self.service.registered.held,
            blobs=self.meeting.pool.blobs,
            infos=self.meeting.infos,
        )
        self._transfer = transfer
        try:
            transfer.start()
        except ClosedError:
            return  # Whoever closes ends this handoff, too.
        self.ring()

    def _note(self) -> None:
        """Tell whoever waits of an end, and the request of pages that are free."""
        side = self.side
        if side.outcome is not None and not self._done:
            figures = self.service.figures
            if side.outcome is Outcome.COMPLETE:
                if side.mover:
                    figures.took("move", time.monotonic() - self._granted_at)
                self.num_moved = self.num_layers
                figures.paths[self.meeting.path_by(self._connection)] += 1
            self._finish(self._error_of(side.outcome))
            self.request.on_end(self)
        if side.released and not self._released:
            self._leave()
            self.request.on_release(self)

    def _leave(self) -> None:
        self._connection.operations.busy.pop(self, None)
        self.service.hub.forget(self)
        self._release()

    def _error_of(self, outcome: Outcome) -> BaseException | None:
        error = error_of(outcome, f"{self}: {self._text or outcome.name.lower()}")
        if isinstance(error, PeerLostError) and self.remote is not None:
            error.remote = self.remote.name
        return error

    def _head(self) -> frames.Head:
        return frames.Head(self.meeting.service, self.number, self.lease)

    def _send(self, kind: int, body: bytes) -> None:
        assert self.remote is not None
        self._connection.contacts.send_body(self.remote, kind, body)

    def _doing(self) -> str:
        if self.request.order is not None and not self.request.order.passed():
            return "the pages' stream had work queued"
        if not self.sent:
            return "the caches were to meet"
        match self.side.phase:
            case Phase.ASKED:
                return "it waited for leave"
            case Phase.MOVING:
                return f"{self.num_moved} of {self.num_layers} layers were moved"
            case _:
                return "the peer had the pages, which stay owned until it lets go of them"
