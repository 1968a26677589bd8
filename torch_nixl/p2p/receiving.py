"""The receiver's side of one message."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.starting import register_all
from torch_nixl.errors import (
    ClosedError,
    PeerLostError,
    TorchNixlError,
    TransferCancelled,
    TransferError,
)
from torch_nixl.p2p import protocol
from torch_nixl.p2p.description import Content
from torch_nixl.p2p.layout import Layout
from torch_nixl.p2p.message import Message
from torch_nixl.p2p.move import MoveOperation, Regions
from torch_nixl.p2p.peer import Peer, is_out_of_sight, with_rank
from torch_nixl.p2p.protocol import Outcome, Route
from torch_nixl.p2p.sending import error_of, outcome_of
from torch_nixl.p2p.tensors import Landing, Target

if TYPE_CHECKING:
    import torch

    from torch_nixl.engine.streams import Landing as LandsOn
    from torch_nixl.engine.streams import StreamDevice, StreamOrder
    from torch_nixl.p2p.exchange import Exchange

MATCHED_SECONDS: Final = 5.0
"""How long a receive whose time is up waits for the thread that was just giving it its message."""


class ReceiveOperation(Operation):
    """A receive that waits for its message, or for the message's bytes.

    Attributes:
        source: The rank it receives from; once it is known, also where any would do.
        wanted_source: The rank it asked for; None for any.
        tag: The tag it receives.
        listed: Whether it is in the connection's tables.
        matched: Whether it has waited, and was given its message.
        result: What was received.
        route: Which way it came.
        packed: Whether it landed in a temporary first.
        order: None: a `DeviceReceive` has one.
        lands: None: a `DeviceReceive` may land on a device unasked.
        landed_on: The device of a tensor that was made for the message.
        target: The one tensor that the caller receives into, if it is device memory.
    """

    __slots__ = (
        "_exchange",
        "_failure",
        "_landing",
        "_layout",
        "_message",
        "_moves",
        "_overdue",
        "_pushed",
        "_reading",
        "_regions",
        "_size",
        "_starting",
        "_target",
        "listed",
        "matched",
        "number",
        "packed",
        "result",
        "route",
        "source",
        "tag",
        "wanted_source",
        "watched",
    )

    incoming = True
    # The class's, since the making of one counts in every small receive.
    order: StreamOrder | None = None
    lands: LandsOn | None = None
    landed_on: StreamDevice | None = None
    target: torch.Tensor | None = None

    def __init__(
        self,
        exchange: Exchange,
        source: int | None,
        tag: int,
        landing: Landing,
        deadline: float | None,
    ) -> None:
        super().__init__(exchange.connection, "receive", (), deadline)
        self._exchange = exchange
        self._landing: Landing | None = landing
        self._message: Message | None = None
        self._target: Target | None = None
        self._layout: Layout | None = None
        self._regions: Regions = ()
        self._moves: list[MoveOperation] = []
        self._pushed = 0
        self._size = 0
        self._reading = self._starting = False
        self._failure: BaseException | None = None
        self._overdue: BaseException | None = None
        self.listed = self.matched = False
        self.number = 0
        self.source = source
        self.wanted_source = source
        self.tag = tag
        self.result: Any = None
        self.route = Route.EAGER
        self.packed = False
        self.watched: Peer | None = None

    @property
    def nbytes(self) -> int:
        return self._size

    @property
    def reading(self) -> bool:
        """Whether its bytes are here or on their way, and the sender has no part in it."""
        return self._message is not None and not self._pushed

    @property
    def moving(self) -> bool:
        """Whether we are reading the sender's memory."""
        return bool(self._moves)

    @property
    def quarantined(self) -> bool:
        return self._done and not self.moving and is_out_of_sight(self._connection, self.remote)

    @property
    def in_flight(self) -> int:
        return sum(move.in_flight for move in self._moves)

    def __str__(self) -> str:
        source = "any rank" if self.source is None else f"rank {self.source}"
        peer = f" ({self.remote.name})" if self.remote is not None else ""
        return f"receive from {source}, tag {self.tag}{peer}"

    def keep(self) -> None:
        """Have what was made for the message kept for the calling thread's current streams."""

    def received(self) -> Any:
        """What was received, as the receiver wants it."""
        return self.result

    def results(self) -> list[Any]:
        """What a future ends with: made already, so that any thread may ask."""
        return [self.result]

    def has_begun(self) -> bool:
        """Whether it has its message, or has ended."""
        return self._done or self._message is not None

    def attend(self) -> bool:
        moves = self._moves
        if not moves:
            return False
        moved = False
        for move in tuple(moves):
            moved |= move.attend()
        return moved

    # What comes. Never with the exchange's lock held.

    def give_up(self) -> None:
        """Its caller could not post it, or was interrupted while it did."""
        if self._exchange.inbox.unpost(self):
            self._conclude(TransferCancelled(f"{self}: cancelled"))
        elif self.matched or self.listed or self._done:
            self.cancel()
        else:
            self._release()

    def deliver(
        self,
        source: int,
        description: Content,
        body: bytes,
        at: int,
        peer: Peer | None,
        number: int,
    ) -> BaseException | None:
        """Take a message that came in its frame; return what is wrong with it."""
        self.source = source
        self._size = description.nbytes
        try:
            assert self._landing is not None
            self.result = self._landing.take(description, body, at)
        except Exception as error:  # noqa: BLE001 - whatever it is, both sides are told
            self._conclude(error)
            return error
        self._conclude(None)
        return None

    def deliver_local(self, message: Message) -> None:
        """Take a message of this rank's own."""
        self._note_local(message)
        landing, data = self._landing, message.data
        assert landing is not None and isinstance(data, tuple)
        error: BaseException | None = None
        try:
            self.result = landing.adopt(message.description, data)
        except Exception as caught:  # noqa: BLE001 - whatever it is, the caller is told
            error = caught
        self._conclude(error)

    def _note_local(self, message: Message) -> None:
        self.source, self._size = message.source, message.description.nbytes
        self.route = Route.LOCAL

    def accept(self, message: Message) -> None:
        """Take on an offered message: from now on it can fail. Holds the exchange's lock."""
        peer = message.peer
        assert peer is not None
        self.matched = True
        self.source, self.remote, self._message = message.source, peer.remote, message

    def begin(self) -> None:
        """Have the message that it took on moved."""
        message = self._message
        assert message is not None and message.peer is not None
        if self._overdue is not None:
            self._refuse(self._overdue)
            return
        self._exchange.watch(self, message.peer)
        self._start(message)

    def break_off(self, message: Message | None, error: BaseException) -> None:
        """End because the thread that gave it a message failed at it, or was interrupted.

        Args:
            message: What was offered; None if it came in its frame.
            error: What the thread was interrupted by: Ctrl-C, say.
        """
        if not isinstance(error, TorchNixlError):
            error = TransferError(f"{self}: interrupted by {error!r}")
        if self._message is not None:
            # Who was not asked to write waits for a word of ours.
            self._reading |= not self._pushed
            self._starting = False
            self._finish(error)
            self._part_ended(error)
            return
        if message is not None and not self._done:
            self._exchange.inbox.tell_done(message, *outcome_of(error))
        self._conclude(error)

    def _start(self, message: Message) -> None:
        try:
            self._start_moving(message)
        except BaseException as error:
            self.break_off(message, error)
            raise

    def _start_moving(self, message: Message) -> None:
        peer, place = message.peer, message.place
        assert peer is not None and place is not None
        if peer.error is not None or peer.remote.lost_error is not None:
            lost = peer.error or peer.remote.lost_error
            self._refuse(PeerLostError(f"{self}: {lost}", remote=peer.remote.name))
            return
        if place.nbytes != message.description.nbytes:
            why = f"{self}: offered {place.nbytes} bytes for {message.description}"
            self._refuse(TransferError(why))
            return
        try:
            self._regions = message.regions
            self._choose_target(message)
        except Exception as error:  # noqa: BLE001 - whatever it is, both sides are told
            self._refuse(error)

    def _choose_target(self, message: Message) -> None:
        """Find where the message lands, and have it moved there."""
        self._take_target(message)
        self._move(message)

    def _take_target(self, message: Message) -> None:
        assert self._landing is not None
        target = self._landing.target(message.description)
        layout = self._hold(target)
        self._target, self._layout = target, layout

    def _move(self, message: Message) -> None:
        """Have its bytes moved to the target."""
        peer, place, target, layout = message.peer, message.place, self._target, self._layout
        assert peer is not None and place is not None
        assert target is not None and layout is not None
        self.packed = target.packed
        if not peer.path or peer.path == "unknown":
            peer.path = self._connection.path(peer.remote)
        nbytes = place.nbytes
        num_spans = max(len(place.spans), len(layout.spans))
        dense = not protocol.should_pack(num_spans, nbytes)
        self.route = protocol.choose_route(
            peer.path, nbytes, dense=dense, sender_waits=message.sender_waits
        )
        self._starting = True
        failure: BaseException | None = None
        try:
            if self.route is Route.WRITE:
                self._push(0)
            else:
                self._reading = True
                middle = nbytes
                if self.route is Route.SPLIT:
                    middle = nbytes // 2 & ~4095
                    self._push(middle)
                self._read(0, middle)
        except Exception as error:  # noqa: BLE001 - whatever it is, both sides are told
            failure = error
            # Who was not asked to write waits for a word of ours.
            self._reading |= not self._pushed
        self._starting = False
        self._part_ended(failure)

    def _hold(self, target: Target) -> Layout:
        """Register what a message lands in, until nothing moves there any more."""
        held = register_all(self._connection, target.memories)
        with self._connection.lock:
            self._memories += tuple(held)
        return Layout.of(held)

    def _read(self, start: int, stop: int) -> None:
        assert self._message is not None and self._message.place is not None
        assert self._layout is not None and self.remote is not None
        ours = self._layout.stretches(start, stop)
        theirs = self._message.place.stretches(start, stop)
        move = MoveOperation(
            self._connection, self.remote, Direction.READ, ours, theirs, self._regions, self
        )
        self._moves.append(move)
        try:
            move.start()
        except ClosedError:
            return  # Whoever closes ends this operation, too.
        if self._done:  # It failed just now, perhaps before it had a move to cancel.
            move.cancel()
        self.ring()

    def _push(self, start: int) -> None:
        """Ask the sender to write from `start` on."""
        message, layout, exchange = self._message, self._layout, self._exchange
        assert message is not None and layout is not None and message.peer is not None
        self.number = exchange.inbox.expect_filled(self)
        self._pushed = start + 1
        # A frame that names a region must not overtake the one that tells it.
        with exchange.lock:
            place = message.peer.place(layout.after(start))
            body = protocol.pack_push(exchange.context, message.number, self.number, start, place)
            exchange.send(message.peer, protocol.PUSH, body)

    def on_filled(self, outcome: Outcome, text: str) -> None:
        """The sender has written its part, or won't. Runs in the driver."""
        start = self._pushed - 1
        if start < 0:
            return
        if outcome is Outcome.COMPLETE:
            self._pushed = 0
            self._part_ended(None)
        elif outcome is Outcome.DECLINED and not self._done and start > 0:
            self.route = Route.READ
            assert self._message is not None
            failure: BaseException | None = None
            self._reading = True
            try:
                self._read(start, self._message.description.nbytes)
            except Exception as error:  # noqa: BLE001 - whatever it is, both sides are told
                failure = error
            self._pushed = 0
            self._part_ended(failure)
        else:
            # Who declined keeps its memory until we say that it isn't read.
            self._reading |= outcome is Outcome.DECLINED
            self._pushed = 0
            self._part_ended(error_of(self, outcome, text))

    def on_moved(self, move: MoveOperation, error: BaseException | None) -> None:
        """A part is read, or will never be."""
        if move in self._moves:  # Not if this was interrupted, and is called again.
            self._moves.remove(move)
        self._part_ended(error)

    def _part_ended(self, error: BaseException | None) -> None:
        """Note the end of a part; the last one ends the receive."""
        if error is not None:
            if self._failure is None:
                self._failure = error
            for move in tuple(self._moves):
                move.cancel()
        if self._moves or self._pushed or self._starting:
            self._tell_part()
            return
        message = None
        try:
            with self._exchange.lock:
                message, self._message = self._message, None
            if message is not None:
                self._finish_message(message)
        except BaseException as interrupt:
            if message is not None:
                # The sender may have been told, or not. Twice does no harm.
                if self._reading:
                    error = self._error or self._failure
                    self._exchange.inbox.tell_done(message, *outcome_of(error))
                self.break_off(None, interrupt)
            raise

    def _finish_message(self, message: Message) -> None:
        """Nothing moves any more: tell the sender, and put in place what came."""
        error = self._error or self._failure
        if self._reading:
            self._exchange.inbox.tell_done(message, *outcome_of(error))
            self._reading = False
        target, self._target = self._target, None
        if error is None and target is not None:
            self._size = message.description.nbytes
            self._exchange.inbox.num_received += 1
            self._unpack(message, target)
        else:
            self._conclude(error)

    def _unpack(self, message: Message, target: Target) -> None:
        """Do what is left to do once all bytes have landed."""
        error: BaseException | None = None
        try:
            self.result = target.finish()
        except Exception as caught:  # noqa: BLE001 - whatever it is, the caller is told
            error = caught
        self._conclude(error)

    def _tell_part(self) -> None:
        """Let the sender go as soon as it has written its part, if ours is read."""
        message = self._message
        if self._moves or self._starting or not self._reading or message is None:
            return
        if self._failure is None and self._error is None:
            self._reading = False
            self._exchange.inbox.tell_done(message, Outcome.PART, "")

    def _refuse(self, error: BaseException) -> None:
        message, self._message = self._message, None
        if message is None:
            return  # It was broken off while it waited for its device.
        self._exchange.inbox.tell_done(message, *outcome_of(error))
        self._conclude(error)

    # How it ends.

    def _finish(self, error: BaseException | None) -> bool:
        return super()._finish(with_rank(error, self.source))

    def _conclude(self, error: BaseException | None) -> None:
        self._landing = self._layout = None
        if not self.listed:
            # Nobody else knows of it: no waiter, no callback.
            if self._done:
                return
            self._error = error
            if self._memories:
                self._release()
            self._released = True
            self._done = True
            return
        self._finish(error)
        self._exchange.inbox.forget_receive(self)
        self._release()

    def fail(self, error: BaseException) -> None:
        """End with an error; the memory is released once nothing moves there any more."""
        with self._exchange.lock:
            begun = self.has_begun()
            if not begun and self.matched:
                # It is for the thread that gives it its message to say how it goes on, or the
                # message were lost. Not waited for here: locks may be held, and it may be this one.
                self._overdue = error
                return
            if not begun:
                self._exchange.inbox.unpost(self)
        if not begun:
            self._conclude(error)
            return
        if not self._finish(error):
            return
        for move in tuple(self._moves):
            move.cancel()

    def wait(self, timeout: float | None = None) -> None:
        super().wait(timeout)
        if not self._done:
            # Its time was up in the moment it was matched.
            until = time.monotonic() + MATCHED_SECONDS
            if not self._connection.progress.wait(self, until):
                self._finish(self._overdue)
            super().wait()

    def cancel(self) -> None:
        self.fail(TransferCancelled(f"{self}: cancelled"))

    def expire(self) -> None:
        if self._message is None:
            # Whoever finds it matched after all lets it end as it does.
            self.fail(self._timeout_error("before a message came"))
        else:
            self.fail(self._timeout_error("with its bytes under way; the memory stays owned"))

    def on_lost(self, error: BaseException) -> None:
        """The agent is lost; what it may still write to stays owned."""
        self.fail(error)
        self.check_quarantine()
        if self._pushed:
            self._connection.operations.busy[self] = None

    def on_left(self, error: BaseException) -> None:
        """The sender closed its Communicator, and promised to write no more."""
        self.fail(error)
        if self._pushed:
            self._pushed = 0
            self._part_ended(error)

    def mend(self) -> None:
        self._moves = [move for move in self._moves if not move.released]
        if self._moves or self._pushed or self._starting:
            return
        message, self._message = self._message, None
        if message is not None and self._reading:
            self._exchange.inbox.tell_done(message, *outcome_of(self._error))
        self._conclude(self._error)
        super().mend()

    def check_quarantine(self) -> None:
        remote = self.remote
        if self._pushed and remote is not None and self._connection.contacts.has_let_go(remote):
            self._pushed = 0
            self._connection.operations.busy.pop(self, None)
            self._part_ended(self._error)

    def hold(self, timeout: float) -> bool:
        # False keeps the memory for ever: the agent dies, but the sender may go on writing.
        remote = self.remote
        return not self._pushed or remote is None or self._connection.contacts.is_gone(remote)
