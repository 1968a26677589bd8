"""What a Communicator sends, what waits for credit, and what receivers say of it."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from torch_nixl.engine import observers
from torch_nixl.errors import MetadataError
from torch_nixl.p2p import protocol
from torch_nixl.p2p.description import Content
from torch_nixl.p2p.ordered import always
from torch_nixl.p2p.protocol import HEAD, Outcome, Unwanted
from torch_nixl.p2p.sending import SendOperation, error_of
from torch_nixl.p2p.tensors import join

if TYPE_CHECKING:
    import threading

    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.peer import Peer

log = logging.getLogger("torch_nixl.p2p")

MAX_REFUSED: Final = 256
"""Refusals by one rank of messages that had gone, which are remembered for their Works."""

MAX_WARNED: Final = 16
"""Refusals by one rank that the log tells of."""


class Outbox:
    """The sending half of an exchange.

    Attributes:
        sends: Messages that the receiver may still speak of, by number.
        num_sent: Messages that left.
        num_queued: Messages that had to wait for credit.
        num_refused: Messages that had left and were refused.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._connection = exchange.connection
        self._context = exchange.context
        self._lock = exchange.lock
        self._numbers = exchange.numbers
        self._send = exchange.send
        self.sends: dict[int, SendOperation] = {}
        self.num_sent = self.num_queued = self.num_refused = 0
        self.handlers = {
            protocol.CREDIT: self.on_credit,
            protocol.WANT: self.on_want,
            protocol.UNWANT: self.on_unwant,
            protocol.DONE: self.on_done,
            protocol.PUSH: self.on_push,
        }

    def renew_lock(self, lock: threading.RLock) -> None:
        """See `Exchange.renew_lock`."""
        self._lock = lock

    def submit_eager(
        self,
        peer: Peer,
        tag: int,
        description: Content,
        tensor: torch.Tensor,
        address: int,
        deadline: float | None,
    ) -> SendOperation | int:
        """Send a message in its frame, or queue it if there is no credit.

        Args:
            peer: Whom it is for.
            tag: Its tag.
            description: What it is.
            tensor: Its bytes.
            address: The tensor's `host_address`, as it was checked.
            deadline: When it times out while it is queued.

        Returns:
            The message's number if it has gone, else the operation that holds the tensor.
        """
        cost = protocol.eager_cost(HEAD.size + len(description.packed) + description.nbytes)
        with self._lock:
            self._exchange.check(peer)
            held = peer.held and tag in peer.held
            credited = None if held else self._may_send(peer, tag, cost)
            if credited is not None:
                number = next(self._numbers)
                try:
                    body = self._pack(tag, number, credited, description, tensor, address)
                except BaseException:
                    self._take_back(peer, tag, cost, credited)
                    raise
                self._send_eager(peer, description, body)
                if peer.remote.broken is not None:
                    raise self._exchange.broken(peer)  # It has not left.
                return number
            operation = SendOperation(self._exchange, peer, tag, description, tensor, (), deadline)
            if held:
                self._hold(operation)
            else:
                self._queue(operation, cost)
        self._connection.progress.kick()
        return operation

    def submit(self, operation: SendOperation) -> None:
        """Offer a large message, or queue it if there is no credit."""
        peer = operation.peer
        with self._lock:
            self._exchange.check(peer)
            if operation.tag in peer.held or not operation.ready():
                self._hold(operation)
            else:
                self._submit(operation)
        if not operation.waiting:
            self._connection.progress.kick()

    def _submit(self, operation: SendOperation) -> None:
        cost = self._cost(operation)
        credited = self._may_send(operation.peer, operation.tag, cost)
        if credited is None:
            self._queue(operation, cost)
            return
        try:
            self._connection.operations.add(operation)
            if not self._transmit(operation, credited) and not credited:
                self._note_wanted(operation.peer, operation.tag)
        except BaseException:
            if operation.number not in self.sends:
                self._take_back(operation.peer, operation.tag, cost, credited)
            raise

    def _cost(self, operation: SendOperation) -> int:
        layout, description = operation.layout, operation.description
        if layout is not None:
            return protocol.offer_cost(len(layout.spans), len(description.packed))
        return protocol.eager_cost(HEAD.size + len(description.packed) + description.nbytes)

    # A device's send goes once what was queued before it has run, and holds back what is sent to
    # the same rank with the same tag until then. Other tags and ranks don't wait for it.

    def _hold(self, operation: SendOperation) -> None:
        self._connection.operations.add(operation)
        peer, tag = operation.peer, operation.tag
        held = peer.held.setdefault(tag, deque())
        held.append(operation)
        self._exchange.watch(operation, peer)
        if len(held) == 1:
            self._connection.defer(operation.ready, lambda: self._free(peer, tag))

    def _free(self, peer: Peer, tag: int) -> None:
        """Send what was held and need not wait any more."""
        with self._lock:
            held = peer.held.get(tag)
            while held and held[0].ready():
                self._submit(held.popleft())
            if held:
                self._connection.defer(held[0].ready, lambda: self._free(peer, tag))
            else:
                peer.held.pop(tag, None)

    def _may_send(self, peer: Peer, tag: int, cost: int) -> int | None:
        """Whether a message may go now: flags for its frame, or None if it must wait."""
        if peer.wanted and tag in peer.wanted:
            self._unwant(peer, tag)
            return 0
        if not peer.queue and peer.allowance.take(cost):
            return protocol.CREDITED
        return None

    def _take_back(self, peer: Peer, tag: int, cost: int, flags: int) -> None:
        """A message that might go does not: what `_may_send` took for it is there again."""
        if flags & protocol.CREDITED:
            peer.allowance.give(1, cost)
        else:
            self._note_wanted(peer, tag)

    def _note_wanted(self, peer: Peer, tag: int) -> None:
        peer.wanted[tag] = peer.wanted.get(tag, 0) + 1
        peer.num_wanted += 1

    def _unwant(self, peer: Peer, tag: int) -> None:
        peer.num_wanted -= 1
        if peer.wanted[tag] == 1:
            del peer.wanted[tag]
        else:
            peer.wanted[tag] -= 1

    def _queue(self, operation: SendOperation, cost: int) -> None:
        self._connection.operations.add(operation)
        self.num_queued += 1
        operation.cost = cost
        peer = operation.peer
        peer.queue.append(operation)
        peer.queued_by_tag.setdefault(operation.tag, deque()).append(operation)
        self._exchange.watch(operation, peer)

    def unqueue(self, operation: SendOperation) -> None:
        """Take an operation out of the queue; it has not gone and never will."""
        peer = operation.peer
        held = peer.held.get(operation.tag)
        if held is not None and operation in held:
            first = held[0] is operation
            held.remove(operation)
            if first:
                self._connection.defer(always, lambda: self._free(peer, operation.tag))
        elif operation in peer.queue:
            peer.queue.remove(operation)
            self._untag(operation)
            if self._exchange.closed is None and peer.error is None:
                self._pump(peer)

    def _pump(self, peer: Peer) -> None:
        """Send what waits for credit, in order, as far as there is some."""
        queue = peer.queue
        while queue and peer.allowance.take(queue[0].cost):
            operation = queue.popleft()
            self._untag(operation)
            self._transmit(operation, protocol.CREDITED)

    def _untag(self, operation: SendOperation) -> None:
        by_tag = operation.peer.queued_by_tag
        queue = by_tag[operation.tag]
        queue.remove(operation)
        if not queue:
            del by_tag[operation.tag]

    def _transmit(self, operation: SendOperation, flags: int) -> bool:
        """Send an operation's frame; return False if its memory was gone, and it with it."""
        peer = operation.peer
        if operation.watched is not None and not operation.is_in_place():
            if flags & protocol.CREDITED:
                peer.allowance.give(1, self._cost(operation))
            operation.withdraw()
            return False
        if operation.tensor is not None:
            what = operation.description
            body = self._pack(operation.tag, operation.number, flags, what, operation.tensor)
            self._send_eager(peer, what, body)
            operation.sent(None if peer.remote.broken is None else self._exchange.broken(peer))
            return True
        try:
            body = operation.offer(flags)
            self.sends[operation.number] = operation
            self._exchange.watch(operation, peer)
            self.num_sent += 1
            self._send(peer, protocol.OFFER, body)
        except BaseException:
            peer.forget_told()
            raise
        return True

    def _pack(
        self,
        tag: int,
        number: int,
        flags: int,
        description: Content,
        tensor: torch.Tensor,
        address: int = 0,
    ) -> bytes:
        """A body of EAGER."""
        head = HEAD.pack(self._context, flags, tag, number)
        return join(head + description.packed, tensor, address)

    def _send_eager(self, peer: Peer, description: Content, body: bytes) -> None:
        self.num_sent += 1
        self._send(peer, protocol.EAGER, body)
        for tell in observers.messages:
            tell((time.monotonic(), peer.remote.name, description.nbytes, True))

    def on_credit(self, peer: Peer, body: bytes) -> None:
        """Credit came back: send what waited for it."""
        frames, nbytes = protocol.parse_credit(body)
        with self._lock:
            peer.allowance.give(frames, nbytes)
            self._pump(peer)

    def on_want(self, peer: Peer, body: bytes) -> None:
        """A receive waits there: let one message of its tag go without credit."""
        tag = protocol.parse_want(body)
        with self._lock:
            while (queue := peer.queued_by_tag.get(tag)) is not None:
                operation = queue[0]
                peer.queue.remove(operation)
                self._untag(operation)
                if self._transmit(operation, 0):
                    # Those behind it may take less than it would have.
                    self._pump(peer)
                    return
            if peer.num_wanted >= protocol.CREDIT_FRAMES:
                raise MetadataError(f"rank {peer.rank} wants over {peer.num_wanted} messages")
            self._note_wanted(peer, tag)

    def on_unwant(self, peer: Peer, body: bytes) -> None:
        """A receive waits there no more; or the other way round, an answer to that."""
        tag, state = protocol.parse_unwant(body)
        with self._lock:
            if state is not Unwanted.ASKED:
                self._exchange.inbox.asker.on_unwant(peer, tag, state)
                return
            state = Unwanted.SERVED
            if tag in peer.wanted:
                self._unwant(peer, tag)
                state = Unwanted.FORGOTTEN
            answer = protocol.pack_unwant(self._context, tag, state)
            self._send(peer, protocol.UNWANT, answer)

    def on_done(self, peer: Peer, body: bytes) -> None:
        """A receiver is done with a message of ours, or refuses it."""
        number, outcome, text = protocol.parse_end(body)
        operation = self.sends.get(number)
        if operation is not None and operation.peer is peer:
            operation.on_done(outcome, text)
        elif operation is None and outcome not in (Outcome.COMPLETE, Outcome.PART):
            what = f"message {number} to rank {peer.rank}"
            self.num_refused += 1
            peer.num_refused += 1
            # Who refuses what was never sent may do so for ever.
            level = logging.WARNING if peer.num_refused <= MAX_WARNED else logging.DEBUG
            log.log(level, "%s was refused: %s", what, text)
            peer.refused[number] = error_of(what, outcome, text)
            if len(peer.refused) > MAX_REFUSED:
                del peer.refused[next(iter(peer.refused))]

    def on_push(self, peer: Peer, body: bytes) -> None:
        """A receiver asks for bytes to be written."""
        send, receive, start, place = protocol.parse_push(body)
        # Remembered whatever is answered: later frames may name the region without its metadata.
        peer.regions(self._exchange, place)
        operation = self.sends.get(send)
        if operation is not None and operation.peer is peer:
            operation.on_push(receive, start, place)
        else:
            self.tell_filled(peer, receive, Outcome.CANCELLED, "the sender has given up")

    def tell_filled(self, peer: Peer, number: int, outcome: Outcome, text: str) -> None:
        """Tell a receiver that our part has landed, or never will."""
        self._send(peer, protocol.FILLED, protocol.pack_end(self._context, number, outcome, text))

    def forget_send(self, operation: SendOperation) -> None:
        """An operation has ended on both sides."""
        with self._lock:
            self.sends.pop(operation.number, None)
            self._exchange.unwatch(operation)
