"""The sender's side of one message."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.memory import require_in_place, tensor_memory
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.errors import (
    ClosedError,
    PeerLostError,
    TorchNixlError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p import protocol
from torch_nixl.p2p.description import Content
from torch_nixl.p2p.layout import Layout
from torch_nixl.p2p.move import MoveOperation
from torch_nixl.p2p.peer import Peer, is_out_of_sight, with_rank
from torch_nixl.p2p.place import Place
from torch_nixl.p2p.protocol import Outcome, Route
from torch_nixl.p2p.tensors import MismatchError

if TYPE_CHECKING:
    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.p2p.exchange import Exchange


class State(enum.Enum):
    """How far a send has come."""

    QUEUED = enum.auto()  # no credit yet: the peer knows nothing of it
    SENT = enum.auto()  # its frame is out
    ENDED = enum.auto()  # neither side touches the memory any more


class SendOperation(Operation):
    """A message that has not gone yet, or whose memory the receiver reads.

    Attributes:
        peer: Whom it is for.
        tag: Its tag.
        number: Names it between the two ranks.
        description: What is sent.
        tensor: Its bytes, if it travels in its frame.
        layout: Where its bytes lie, if it doesn't.
        cost: Credit that it takes.
        state: See `State`.
        waiting: Whether the receiver was told that a thread waits for it.
        route: Which way it went.
        order: For device memory, what has to run before it goes, and what waits for its end.
    """

    __slots__ = (
        "_declined",
        "_exchange",
        "_exposed",
        "_receive",
        "_write",
        "cost",
        "description",
        "layout",
        "number",
        "order",
        "packed",
        "peer",
        "route",
        "state",
        "tag",
        "tensor",
        "waiting",
        "watched",
    )

    incoming = False

    def __init__(
        self,
        exchange: Exchange,
        peer: Peer,
        tag: int,
        description: Content,
        tensor: torch.Tensor | None,
        memories: Sequence[RegisteredMemory],
        deadline: float | None,
        order: StreamOrder | None = None,
    ) -> None:
        super().__init__(exchange.connection, "send", memories, deadline)
        self._exchange = exchange
        self._declined = False
        self._exposed = False
        self._receive = 0
        self._write: MoveOperation | None = None
        self.peer = peer
        self.remote = peer.remote
        self.tag = tag
        self.number = next(exchange.numbers)
        self.description = description
        self.tensor = tensor
        self.layout = Layout.of(memories) if memories else None
        self.cost = 0
        self.state = State.QUEUED
        self.waiting = False
        self.order = order
        self.packed = False
        self.watched: Peer | None = None
        self.route = Route.READ if memories else Route.EAGER

    @property
    def nbytes(self) -> int:
        return self.description.nbytes

    @property
    def moving(self) -> bool:
        """Whether we are writing to the receiver's memory."""
        return self._write is not None

    @property
    def quarantined(self) -> bool:
        return self._done and not self.moving and is_out_of_sight(self._connection, self.remote)

    @property
    def in_flight(self) -> int:
        write = self._write
        return 0 if write is None else write.in_flight

    def __str__(self) -> str:
        return (
            f"send of {self.description} to rank {self.peer.rank}, tag {self.tag} "
            f"({self.peer.remote.name})"
        )

    def ready(self) -> bool:
        """Whether it may go as far as streams are concerned."""
        return self.order is None or self.order.passed()

    def wait(self, timeout: float | None = None) -> None:
        if not self.waiting and not self._done and self.nbytes >= protocol.SPLIT_NBYTES:
            self.waiting = True
            if self.state is State.SENT and self.peer.path in ("", "cma"):
                body = protocol.pack_number(self._exchange.context, self.number)
                self._exchange.send(self.peer, protocol.HELP, body)
        super().wait(timeout)

    def attend(self) -> bool:
        write = self._write
        return write.attend() if write is not None else False

    # Called by the exchange, which holds its lock.

    def give_up(self) -> None:
        """It was never submitted."""
        self._release()

    def is_in_place(self) -> bool:
        """Whether its memory is still there: it may have been resized while this waited."""
        try:
            if self.tensor is not None:
                tensor_memory(self.tensor)
            for held in self._memories:
                require_in_place(held.memory)
        except (TypeError, ValueError):
            return False
        return True

    def withdraw(self) -> None:
        """Its memory is gone, and it with it. The receiver knows nothing of it."""
        self._end(TransferError(f"{self}: its tensor was resized or freed before it had gone"))

    def offer(self, flags: int) -> bytes:
        """The body of its OFFER. From now on the receiver may read the memory."""
        exchange = self._exchange
        if self.waiting:
            flags |= protocol.WAITING
        head = protocol.HEAD.pack(exchange.context, flags, self.tag, self.number)
        assert self.layout is not None
        body = head + self.description.packed + self.peer.place(self.layout)
        # Before it leaves: the answer may come while it does.
        self._exposed = True
        self.state = State.SENT
        return body

    def sent(self, error: PeerLostError | None) -> None:
        """It has left in its frame, and that was all; or it could not."""
        self._end(error)

    # What the receiver says. Runs in the driver.

    def on_done(self, outcome: Outcome, text: str) -> None:
        """The receiver touches our memory no more."""
        if outcome is Outcome.PART:
            if not self._declined:
                self._exposed = False
                self._conclude()
            return
        self._exposed = False
        if outcome is not Outcome.COMPLETE:
            self._finish(error_of(self, outcome, text))
            if self._write is not None:
                self._write.cancel()
        self._conclude()

    def on_push(self, receive: int, start: int, place: Place) -> None:
        """The receiver asks for bytes from `start` on to be written."""
        exchange = self._exchange
        stop = start + place.nbytes
        whole = start == 0 and stop == self.nbytes
        layout = self.layout
        idle = self.state is State.SENT and self._write is None
        if stop > self.nbytes or layout is None or not idle:
            why = f"{self}: bytes {start} to {stop} can't be asked for"
            exchange.outbox.tell_filled(self.peer, receive, Outcome.FAILED, why)
            return
        if self._done or (not whole and not self.attended):
            outcome = Outcome.CANCELLED if self._done else Outcome.DECLINED
            if whole:
                self._exposed = False
            self._declined = outcome is Outcome.DECLINED
            exchange.outbox.tell_filled(self.peer, receive, outcome, str(self._error or ""))
            self._conclude()
            return
        self.route = Route.WRITE if whole else Route.SPLIT
        try:
            write = MoveOperation(
                self._connection,
                self.peer.remote,
                Direction.WRITE,
                layout.stretches(start, stop),
                place.stretches(0, place.nbytes),
                self.peer.regions(exchange, place),
                self,
                self._on_moved,
            )
        except (TorchNixlError, ValueError) as error:
            if whole:
                self._exposed = False
            exchange.outbox.tell_filled(self.peer, receive, Outcome.FAILED, str(error))
            self._finish(error)
            self._conclude()
            return
        if whole:
            self._exposed = False
        self._receive = receive
        self._write = write
        try:
            write.start()
        except ClosedError:
            return  # Whoever closes ends this operation, too.
        self.ring()

    def _on_moved(self, move: MoveOperation, error: BaseException | None) -> None:
        """Our part is written, or will never be."""
        outcome, text = outcome_of(self._error or error)
        self._exchange.outbox.tell_filled(self.peer, self._receive, outcome, text)
        self._write = None
        if error is not None:
            self._finish(error)
        self._conclude()

    # How it ends.

    def _finish(self, error: BaseException | None) -> bool:
        return super()._finish(with_rank(error, self.peer.rank))

    def _conclude(self) -> None:
        """End if neither side touches the memory any more."""
        if not self._exposed and self._write is None:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._finish(error)
        if self.state is not State.ENDED:
            self.state = State.ENDED
            self._exchange.outbox.forget_send(self)
            self._connection.operations.busy.pop(self, None)
            self._release()
            self.tensor = self.layout = None

    def _release(self) -> None:
        order = self.order
        if order is None:
            super()._release()
            return
        order.settle(self._poison)
        box: list[object] = [self.tensor, *self._memories]
        self.tensor = self.layout = None
        super()._release()
        order.devices[0].discard(box)

    def _poison(self) -> None:
        if self._error is not None:
            self._exchange.poison(self._error)

    def fail(self, error: BaseException) -> None:
        """End with an error; the memory is released once the receiver reads it no more."""
        exchange = self._exchange
        with exchange.lock:
            queued = self.state is State.QUEUED
            if queued:
                exchange.outbox.unqueue(self)
        if queued:
            self._end(error)
            return
        if not self._finish(error):
            return
        if self._exposed and self.peer.error is None:
            body = protocol.pack_number(exchange.context, self.number)
            exchange.send(self.peer, protocol.CANCEL, body)
        write = self._write
        if write is not None:
            write.cancel()
        self._conclude()

    def cancel(self) -> None:
        self.fail(TransferCancelled(f"{self}: cancelled"))

    def expire(self) -> None:
        if self.state is not State.QUEUED:
            where = "before it was received; the memory stays owned until the receiver lets go"
        elif not self.ready():
            where = "before what its device's stream had queued has run"
        else:
            where = "before the receiver had room for it"
        self.fail(self._timeout_error(where))

    def on_lost(self, error: BaseException) -> None:
        """The agent is lost: it can't read any more, unless it is alive after all."""
        self.fail(error)
        self.check_quarantine()
        if self.state is not State.ENDED:
            self._connection.operations.busy[self] = None

    def on_left(self, error: BaseException) -> None:
        """The receiver closed its Communicator, and promised to read no more."""
        self.fail(error)
        self._exposed = False
        self._conclude()

    def check_quarantine(self) -> None:
        if self._done and self._connection.liveness.has_let_go(self.peer.remote):
            self._exposed = False
            self._conclude()

    def hold(self, timeout: float) -> bool:
        # False keeps the memory for ever: the agent dies, but the receiver may go on reading.
        return not self._exposed or self._connection.liveness.is_gone(self.peer.remote)


def outcome_of(error: BaseException | None) -> tuple[Outcome, str]:
    """What to tell the other side of an end."""
    match error:
        case None:
            return Outcome.COMPLETE, ""
        case TransferTimeout():
            return Outcome.TIMED_OUT, str(error)
        case TransferCancelled():
            return Outcome.CANCELLED, str(error)
        case MismatchError():
            return Outcome.MISMATCH, str(error)
        case _:
            return Outcome.FAILED, str(error)


def error_of(operation: object, outcome: Outcome, text: str) -> TransferError:
    """The exception for an end that the other side tells of."""
    match outcome:
        case Outcome.MISMATCH:
            return MismatchError(f"{operation}: refused by the receiver: {text}")
        case Outcome.TIMED_OUT:
            return TransferTimeout(f"{operation}: the other side's time was up: {text}")
        case Outcome.CANCELLED:
            return TransferCancelled(f"{operation}: cancelled by the other side: {text}")
        case _:
            return TransferError(f"{operation}: failed on the other side: {text}")
