"""A message that is offered: who moves which part of it, and what its sender is still to be told.

`protocol.py` draws the frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_nixl.engine.adapter import Direction
from torch_nixl.errors import ClosedError, MetadataError, PeerLostError, TransferError
from torch_nixl.p2p import protocol
from torch_nixl.p2p.description import parse
from torch_nixl.p2p.layout import Layout
from torch_nixl.p2p.message import Message
from torch_nixl.p2p.move import MoveOperation
from torch_nixl.p2p.peer import Peer
from torch_nixl.p2p.place import parse_place
from torch_nixl.p2p.protocol import HEAD, Outcome, Route
from torch_nixl.p2p.sending import error_of
from torch_nixl.p2p.tensors import Target

if TYPE_CHECKING:
    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.receiving import ReceiveOperation


class OfferedMessage(Message):
    """A message whose bytes lie at its sender, until its receive has them moved.

    We read it, or the sender writes it when asked to, or each does a part. The end of the last part
    is the end of the receive.

    Attributes:
        place: Where its bytes are to be had.
        regions: What that lies in.
        sender_waits: Whether a thread of the sender waits for it to be received.
        receive: What receives it, once something does; its `message` is this one until the end.
        target: Where it lands, once that is known.
        layout: The same, registered.
        moves: What we are reading of it.
        pushed_from: The first byte that the sender was asked to write; None once it writes no more.
    """

    __slots__ = (
        "_exchange",
        "_failure",
        "_owes_done",
        "_rid",
        "_starting",
        "layout",
        "moves",
        "place",
        "pushed_from",
        "receive",
        "regions",
        "sender_waits",
        "target",
    )

    peer: Peer
    receive: ReceiveOperation
    target: Target
    layout: Layout

    def __init__(self, exchange: Exchange, peer: Peer, body: bytes) -> None:
        """Read an OFFER.

        Raises:
            MetadataError: It makes no sense.
        """
        if len(body) < HEAD.size:
            raise MetadataError("frame is cut")
        _, flags, tag, number = HEAD.unpack_from(body)
        description = parse(body, HEAD.size)
        nbytes = len(description.packed)
        self.place = place = parse_place(body, HEAD.size + nbytes)
        # Remembered at once: later frames may name the region without its metadata. And kept with
        # the message, however many others are told before it is received.
        self.regions = peer.regions(exchange, place)
        cost = protocol.offer_cost(len(place.spans), nbytes) if flags & protocol.CREDITED else 0
        super().__init__(peer, peer.rank, tag, number, cost, description, None)
        self.sender_waits = bool(flags & protocol.WAITING)
        self.moves: list[MoveOperation] = []
        self.pushed_from: int | None = None
        self._exchange = exchange
        self._failure: BaseException | None = None
        self._owes_done = self._starting = False
        self._rid = 0

    # What its receive does with it. Never with the exchange's lock held.

    def start(self) -> None:
        """Have it moved, or refuse it."""
        peer, receive = self.peer, self.receive
        try:
            try:
                lost = peer.error or peer.remote.lost_error
                if lost is not None:
                    raise PeerLostError(f"{receive}: {lost}", remote=peer.remote.name)
                nbytes, what = self.place.nbytes, self.description
                if nbytes != what.nbytes:
                    raise TransferError(f"{receive}: offered {nbytes} bytes for {what}")
                receive.choose_target(self)
            except Exception as error:  # noqa: BLE001 - whatever it is, both sides are told
                self.refuse(error)
        except BaseException as error:
            receive.break_off(self, error)
            raise

    def move(self) -> None:
        """Have its bytes moved to the target."""
        peer, receive, place = self.peer, self.receive, self.place
        receive.packed = self.target.packed
        if not peer.path or peer.path == "unknown":
            peer.path = self._exchange.connection.path(peer.remote)
        nbytes = place.nbytes
        num_spans = max(len(place.spans), len(self.layout.spans))
        dense = not protocol.should_pack(num_spans, nbytes)
        receive.route = route = protocol.choose_route(
            peer.path, nbytes, dense=dense, sender_waits=self.sender_waits
        )
        self._starting = True
        failure: BaseException | None = None
        try:
            if route is Route.WRITE:
                self._push(0)
            else:
                self._owes_done = True
                middle = nbytes
                if route is Route.SPLIT:
                    middle = nbytes // 2 & ~4095
                    self._push(middle)
                self._read(0, middle)
        except Exception as error:  # noqa: BLE001 - whatever it is, both sides are told
            failure = error
            # Who was not asked to write waits for a word of ours.
            self._owes_done |= self.pushed_from is None
        self._starting = False
        self._end_part(failure)

    def refuse(self, error: BaseException) -> None:
        """Have nothing of it moved."""
        receive = self.receive
        mine, receive.message = receive.message is self, None
        if mine:  # Else it was broken off while it waited for its device.
            self.tell_done(error)
            receive.conclude(error)

    def stop(self) -> None:
        """Read no more than is under way."""
        for move in tuple(self.moves):
            move.cancel()

    def break_off(self, error: BaseException) -> None:
        """End because a thread failed at it, or was interrupted."""
        # Who was not asked to write waits for a word of ours.
        self._owes_done |= self.pushed_from is None
        self._starting = False
        self.receive._finish(error)
        self._end_part(error)

    def let_go(self, error: BaseException | None) -> None:
        """The sender writes no more of it."""
        self.pushed_from = None
        self._exchange.inbox.pushed.pop(self._rid, None)
        self._end_part(error)

    def mend(self) -> bool:
        """Complete an end that was cut short; return False while something moves."""
        self.moves = [move for move in self.moves if not move.released]
        if self.moves or self.pushed_from is not None or self._starting:
            return False
        receive = self.receive
        receive.message = None
        if self._owes_done:
            self.tell_done(receive._error)
        return True

    def tell_done(self, error: BaseException | None) -> None:
        """Tell the sender that its memory is not touched any more."""
        self._exchange.inbox.tell_done(self.peer, self.number, error)

    # Its parts.

    def _read(self, start: int, stop: int) -> None:
        receive = self.receive
        ours, theirs = self.layout.stretches(start, stop), self.place.stretches(start, stop)
        move = MoveOperation(
            self._exchange.connection,
            self.peer.remote,
            Direction.READ,
            ours,
            theirs,
            self.regions,
            receive,
            self._on_moved,
        )
        self.moves.append(move)
        try:
            move.start()
        except ClosedError:
            return  # Whoever closes ends the receive, too.
        if receive._done:  # It failed just now, perhaps before it had a move to cancel.
            move.cancel()
        receive.ring()

    def _push(self, start: int) -> None:
        """Ask the sender to write from `start` on."""
        exchange, peer = self._exchange, self.peer
        with exchange.lock:
            rid = next(exchange.numbers)
            try:
                # A frame that names a region must not overtake the one that tells it.
                place = peer.place(self.layout.after(start))
                body = protocol.pack_push(exchange.context, self.number, rid, start, place)
                # Before it leaves: the answer may come while it does.
                self._rid, self.pushed_from = rid, start
                exchange.inbox.pushed[rid] = self
                exchange.send(peer, protocol.PUSH, body)
            except BaseException:
                peer.forget_told()
                raise

    def on_filled(self, outcome: Outcome, text: str) -> None:
        """The sender has written its part, or won't. Runs in the driver."""
        receive, start = self.receive, self.pushed_from
        failure: BaseException | None = None
        if outcome is Outcome.DECLINED and start and not receive._done:
            receive.route = Route.READ
            self._owes_done = True
            try:
                self._read(start, self.place.nbytes)
            except Exception as error:  # noqa: BLE001 - whatever it is, both sides are told
                failure = error
        elif outcome is not Outcome.COMPLETE:
            # Who declined keeps its memory until we say that it isn't read.
            self._owes_done |= outcome is Outcome.DECLINED
            failure = error_of(receive, outcome, text)
        self.let_go(failure)

    def _on_moved(self, move: MoveOperation, error: BaseException | None) -> None:
        """A part is read, or will never be."""
        if move in self.moves:  # Not if this was interrupted, and is called again.
            self.moves.remove(move)
        self._end_part(error)

    def _end_part(self, error: BaseException | None) -> None:
        """Note the end of a part; the last one ends the receive."""
        if error is not None:
            if self._failure is None:
                self._failure = error
            self.stop()
        if self.moves or self.pushed_from is not None or self._starting:
            self._tell_part()
            return
        receive = self.receive
        mine = False
        try:
            with self._exchange.lock:
                mine, receive.message = receive.message is self, None
            if mine:
                self._end()
        except BaseException as interrupt:
            if mine:
                # The sender may have been told, or not. Twice does no harm.
                if self._owes_done:
                    self.tell_done(receive._error or self._failure)
                receive.break_off(None, interrupt)
            raise

    def _end(self) -> None:
        """Nothing moves any more: tell the sender, and have put in place what came."""
        receive = self.receive
        error = receive._error or self._failure
        if self._owes_done:
            self.tell_done(error)
            self._owes_done = False
        if error is None:
            receive.nbytes = self.place.nbytes
            self._exchange.inbox.num_received += 1
            receive.unpack(self)
        else:
            receive.conclude(error)

    def _tell_part(self) -> None:
        """Let the sender go as soon as it has written its part, if ours is read."""
        receive = self.receive
        if self.moves or self._starting or not self._owes_done or receive.message is not self:
            return
        if self._failure is None and receive._error is None:
            self._owes_done = False
            exchange = self._exchange
            body = protocol.pack_end(exchange.context, self.number, Outcome.PART, "")
            exchange.send(self.peer, protocol.DONE, body)
