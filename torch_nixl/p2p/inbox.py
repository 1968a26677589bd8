"""What a Communicator receives, what waits to be received, and who waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from torch_nixl.engine import observers
from torch_nixl.errors import ClosedError, MetadataError, TransferCancelled, TransferError
from torch_nixl.p2p import protocol
from torch_nixl.p2p.asking import Asker
from torch_nixl.p2p.description import Content, parse
from torch_nixl.p2p.matching import Matcher
from torch_nixl.p2p.message import Message
from torch_nixl.p2p.offered import OfferedMessage
from torch_nixl.p2p.protocol import HEAD
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.sending import outcome_of

if TYPE_CHECKING:
    import threading

    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.peer import Peer

SPIN_SECONDS: Final = 0.0005
"""How long a blocking receive polls before it enters the tables."""


class Inbox:
    """The receiving half of an exchange.

    Attributes:
        matcher: Receives and messages that wait for each other.
        asker: Has messages come whose senders may be out of credit.
        receiving: Receives in the connection's tables.
        pushed: Messages that senders were asked to write, by our number.
        num_received: Messages received.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._connection = exchange.connection
        self._context = exchange.context
        self._rank = exchange.rank
        self._lock = exchange.lock
        self._peers = exchange.peers
        self._send = exchange.send
        self.matcher: Matcher[ReceiveOperation, Message] = Matcher()
        self.asker = Asker(exchange, self.matcher)
        self.receiving: dict[ReceiveOperation, None] = {}
        self.num_received = 0
        self.pushed: dict[int, OfferedMessage] = {}
        self._offers: dict[tuple[int, int], OfferedMessage] = {}
        # Those between the two: their receive is known, but does not know of them yet.
        self._passing: set[tuple[int, int]] = set()
        self.handlers = {
            protocol.EAGER: self.on_eager,
            protocol.OFFER: self.on_offer,
            protocol.HELP: self.on_help,
            protocol.CANCEL: self.on_cancel,
            protocol.FILLED: self.on_filled,
        }

    def renew_lock(self, lock: threading.RLock) -> None:
        """See `Exchange.renew_lock`."""
        self._lock = lock

    def post(self, receive: ReceiveOperation, *, spin: bool = False) -> None:
        """Give a receive its message, or have it wait for one.

        Args:
            receive: Made by the caller, in no table yet.
            spin: Its caller waits for it at once: poll for a moment before it enters any table,
                since most messages that are waited for come within that.

        Raises:
            PeerLostError: No message waits, and none can come from there any more.
            ClosedError: The Communicator is closed.
        """
        source, tag = receive.wanted_source, receive.tag
        message = None
        try:
            with self._lock:
                # First: what waits here may be memory that its sender has taken back.
                self._exchange.check_open()
                message = self.matcher.take(source, tag)
                if message is None:
                    lost = self._exchange.why_lost(source)
                    if lost is not None:
                        raise lost
                    peer = None if source is None else self._peers.get(source)
                    self.matcher.post(receive, source, tag)
                    self.asker.ask(peer, source, tag)
                    if not spin or receive.order is not None:
                        self.enter(receive)
                        return
                else:
                    due = self._taken(message)
            if message is not None:
                if due is not None:
                    self._give_credit(message.peer, due)
                self._hand_over(receive, message)
                return
        except BaseException as error:
            if message is not None:
                receive.break_off(message, error)
            raise
        try:
            receive.attended = 1  # Its caller moves it, too: no other thread need be woken.
            self._connection.progress.spin(receive.has_begun, SPIN_SECONDS)
        finally:
            receive.attended = 0
            # Also when a signal handler or an abort interrupts.
            with self._lock:
                if not receive.matched:
                    self._list_or_end(receive)

    def enter(self, receive: ReceiveOperation) -> None:
        """Enter a receive in the tables: it has a deadline now, and its source is looked after."""
        if receive.listed:
            return
        source = receive.wanted_source
        peer = None if source is None else self._peers.get(source)
        if peer is not None:
            receive.remote = peer.remote
        receive.listed = True
        self._connection.operations.add(receive)
        self.receiving[receive] = None
        if peer is not None:
            self._exchange.watch(receive, peer)
        elif source is None:
            for peer in self._peers.values():
                self._exchange.look_after(peer)

    def _list_or_end(self, receive: ReceiveOperation) -> None:
        """List a receive that waits, unless what it waits for has ended meanwhile."""
        if receive.done:
            return
        try:
            error = self._exchange.why_none(receive.wanted_source)
            if error is None:
                self.enter(receive)
        except ClosedError as closed:
            error = closed
        if error is not None:
            receive.fail(error)

    def _hand_over(self, receive: ReceiveOperation, message: Message) -> None:
        """Give a receive that is not in the tables its message."""
        data = message.data
        if isinstance(data, bytes):
            assert message.peer is not None
            self._deliver(receive, message.peer, message.number, message.description, data)
        elif isinstance(message, OfferedMessage):
            self._begin(receive, message)
        else:
            self.num_received += 1
            receive.deliver_local(message)

    def _begin(self, receive: ReceiveOperation, message: OfferedMessage) -> None:
        try:
            with self._lock:
                self.enter(receive)
                receive.accept(message)
                self._passing.discard((message.source, message.number))
            receive.begin()
        except ClosedError as error:
            receive.break_off(message, error)

    def _deliver(
        self,
        receive: ReceiveOperation,
        peer: Peer,
        number: int,
        description: Content,
        body: bytes,
    ) -> None:
        self.num_received += 1
        if observers.messages:  # [Note: notes] in observers.py
            remote = peer.remote
            note = (remote.heard_at, remote.name, description.nbytes, False)
            for tell in observers.messages:
                tell(note)
        at = HEAD.size + len(description.packed)
        error = receive.deliver(peer, number, description, body, at)
        if error is not None:
            self.tell_done(peer, number, error)

    def tell_done(self, peer: Peer, number: int, error: BaseException | None) -> None:
        """Tell a sender how a message of its ended, and that we touch its memory no more."""
        self._passing.discard((peer.rank, number))
        end = protocol.pack_end(self._context, number, *outcome_of(error))
        self._send(peer, protocol.DONE, end)

    def _taken(self, message: Message) -> tuple[int, int] | None:
        """A message waits no more; return the credit that is due for it."""
        peer = message.peer
        if peer is None:
            return None
        if message.data is None:
            key = (peer.rank, message.number)
            self._offers.pop(key, None)
            self._passing.add(key)
        return peer.debt.settle(message.cost) if message.cost else None

    def _give_credit(self, peer: Peer | None, due: tuple[int, int]) -> None:
        assert peer is not None
        self._send(peer, protocol.CREDIT, protocol.pack_credit(self._context, *due))

    def _match(self, source: int, tag: int) -> ReceiveOperation | None:
        receive = self.matcher.match(source, tag)
        if receive is not None:
            receive.matched = True
        return receive

    def on_eager(self, peer: Peer, body: bytes) -> None:
        """A message came, its bytes with it."""
        if len(body) < HEAD.size:
            raise MetadataError("frame is cut")
        _, flags, tag, number = HEAD.unpack_from(body)
        description = parse(body, HEAD.size)
        at = HEAD.size + len(description.packed)
        nbytes = description.nbytes
        if len(body) - at != nbytes:
            raise MetadataError(f"{len(body) - at} bytes came for {description}")
        cost = protocol.eager_cost(len(body)) if flags & protocol.CREDITED else 0
        receive = due = None
        try:
            with self._lock:
                was_strained = peer.debt.strained
                if not self._admit(peer, tag, number, cost):
                    return
                receive = self._match(peer.rank, tag)
                due = self._arrived(peer, cost, was_strained, matched=receive is not None)
                if receive is None and self._exchange.closed is None:
                    self.matcher.store(
                        Message(peer, peer.rank, tag, number, cost, description, body),
                        peer.rank,
                        tag,
                    )
            if receive is not None:
                self._deliver(receive, peer, number, description, body)
        except BaseException as error:
            if receive is not None:
                receive.break_off(None, error)
            raise
        finally:
            if due is not None:
                self._give_credit(peer, due)

    def on_offer(self, peer: Peer, body: bytes) -> None:
        """A message is offered."""
        message = OfferedMessage(self._exchange, peer, body)
        tag, number, cost = message.tag, message.number, message.cost
        receive = due = None
        try:
            with self._lock:
                if (peer.rank, number) in self._offers:
                    raise MetadataError(f"message {number} is offered twice")
                was_strained = peer.debt.strained
                if not self._admit(peer, tag, number, cost):
                    return
                receive = self._match(peer.rank, tag)
                due = self._arrived(peer, cost, was_strained, matched=receive is not None)
                if receive is not None:
                    self._passing.add((peer.rank, number))
                else:
                    # Also after the end, for the answer to a CANCEL.
                    self._offers[peer.rank, number] = message
                    if self._exchange.closed is None:
                        self.matcher.store(message, peer.rank, tag)
            if receive is not None:
                self._begin(receive, message)
        except BaseException as error:
            if receive is not None:
                receive.break_off(message, error)
            raise
        finally:
            if due is not None:
                self._give_credit(peer, due)

    def _admit(self, peer: Peer, tag: int, number: int, cost: int) -> bool:
        """Note a message; refuse one that its sender had no leave to send, and return False."""
        if peer.debt.arrive(cost) if cost else self.asker.has_come(peer, tag):
            return True
        self.tell_done(peer, number, TransferError(f"rank {peer.rank} sends beyond its credit"))
        return False

    def _arrived(
        self, peer: Peer, cost: int, was_strained: bool, *, matched: bool
    ) -> tuple[int, int] | None:
        """Return the credit that is due after a message."""
        if not cost:
            return None
        due = peer.debt.settle(cost) if matched else None
        if not was_strained and peer.debt.strained:
            # From here on the sender may be out of credit, and those that wait have to say so.
            self.asker.ask_all(peer)
        return due

    def on_help(self, peer: Peer, body: bytes) -> None:
        """A thread of the sender waits by now."""
        message = self._offers.get((peer.rank, protocol.parse_number(body)))
        if message is not None:
            message.sender_waits = True

    def on_cancel(self, peer: Peer, body: bytes) -> None:
        """The sender gives a message up. One that is being received is received."""
        number = protocol.parse_number(body)
        due = None
        with self._lock:
            message = self._offers.get((peer.rank, number))
            if message is not None:
                self.matcher.remove(message, message.source, message.tag)
                due = self._taken(message)
            elif (peer.rank, number) in self._passing or self._is_moving(peer, number):
                return
        # Also of one that never came: who was interrupted while it offered can't tell.
        self.tell_done(peer, number, TransferCancelled("before it was received"))
        if due is not None:
            self._give_credit(peer, due)

    def _is_moving(self, peer: Peer, number: int) -> bool:
        found = (receive.message for receive in self.receiving)
        return any(one is not None and one.number == number and one.peer is peer for one in found)

    def on_filled(self, peer: Peer, body: bytes) -> None:
        """A sender has written its part, or won't."""
        number, outcome, text = protocol.parse_end(body)
        message = self.pushed.get(number)
        if message is not None and message.peer is peer:
            message.on_filled(outcome, text)

    def unpost(self, receive: ReceiveOperation) -> bool:
        """Forget a receive that waits for a message; return False if it doesn't."""
        with self._lock:
            found = self.matcher.cancel(receive, receive.wanted_source, receive.tag)
            if found:
                self.asker.unask(receive.wanted_source, receive.tag)
            return found

    def forget_receive(self, receive: ReceiveOperation) -> None:
        """A receive has ended, and nothing moves for it any more."""
        with self._lock:
            self.receiving.pop(receive, None)
            self._exchange.unwatch(receive)
            if receive.wanted_source is None and not self.matcher.num_any:
                for peer in self._peers.values():
                    self._exchange.look_after(peer)

    def post_local(
        self,
        tag: int,
        description: Content,
        data: Sequence[torch.Tensor],
        order: StreamOrder | None = None,
    ) -> None:
        """Send to this rank itself. The tensors belong to the message from now on."""
        rank = self._rank
        message = Message(None, rank, tag, 0, 0, description, tuple(data))
        message.order = order
        receive = None
        try:
            with self._lock:
                self._exchange.check_open()
                self._exchange.outbox.num_sent += 1
                receive = self._match(rank, tag)
                if receive is None:
                    self.matcher.store(message, rank, tag)
            if receive is not None:
                self.num_received += 1
                receive.deliver_local(message)
        except BaseException as error:
            if receive is not None:
                receive.break_off(None, error)
            raise

    def close(self) -> None:
        """Forget what waits to be received: nobody can any more. Holds the lock."""
        self.matcher.forget_messages()
