"""The receiver's side of one message."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from torch_nixl.engine.operation import Operation
from torch_nixl.engine.starting import register_all
from torch_nixl.errors import TorchNixlError, TransferCancelled, TransferError
from torch_nixl.p2p.description import Content
from torch_nixl.p2p.layout import Layout
from torch_nixl.p2p.message import Message
from torch_nixl.p2p.offered import OfferedMessage
from torch_nixl.p2p.peer import Peer, is_out_of_sight, with_rank
from torch_nixl.p2p.protocol import Route
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
        message: What is being moved for it; None before and after, and if it came in its frame.
        nbytes: Size of what was received.
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
        "_landing",
        "_overdue",
        "listed",
        "matched",
        "message",
        "nbytes",
        "packed",
        "result",
        "route",
        "source",
        "tag",
        "wanted_source",
        "watched",
    )

    nbytes: int
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
        self._overdue: BaseException | None = None
        self.listed = self.matched = False
        self.message: OfferedMessage | None = None
        self.nbytes = 0
        self.source = source
        self.wanted_source = source
        self.tag = tag
        self.result: Any = None
        self.route = Route.EAGER
        self.packed = False
        self.watched: Peer | None = None

    @property
    def reading(self) -> bool:
        """Whether its bytes are here or on their way, and the sender has no part in it."""
        message = self.message
        return message is not None and message.pushed_from is None

    @property
    def moving(self) -> bool:
        """Whether we are reading the sender's memory."""
        message = self.message
        return message is not None and bool(message.moves)

    @property
    def quarantined(self) -> bool:
        return self._done and not self.moving and is_out_of_sight(self._connection, self.remote)

    @property
    def in_flight(self) -> int:
        message = self.message
        return 0 if message is None else sum(move.in_flight for move in message.moves)

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
        return self._done or self.message is not None

    def attend(self) -> bool:
        message = self.message
        if message is None:
            return False
        moved = False
        for move in tuple(message.moves):
            moved |= move.attend()
        return moved

    # What comes. Never with the exchange's lock held.

    def give_up(self) -> None:
        """Its caller could not post it, or was interrupted while it did."""
        if self._exchange.inbox.unpost(self):
            self.conclude(TransferCancelled(f"{self}: cancelled"))
        elif self.matched or self.listed or self._done:
            self.cancel()
        else:
            self._release()

    def deliver(
        self, peer: Peer, number: int, description: Content, body: bytes, at: int
    ) -> BaseException | None:
        """Take a message that came in its frame; return what is wrong with it."""
        self.source = peer.rank
        self.nbytes = description.nbytes
        try:
            assert self._landing is not None
            self.result = self._landing.take(description, body, at)
        except Exception as error:  # noqa: BLE001 - whatever it is, both sides are told
            self.conclude(error)
            return error
        self.conclude(None)
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
        self.conclude(error)

    def _note_local(self, message: Message) -> None:
        self.source, self.nbytes = message.source, message.description.nbytes
        self.route = Route.LOCAL

    def accept(self, message: OfferedMessage) -> None:
        """Take on an offered message: from now on it can fail. Holds the exchange's lock."""
        self.matched = True
        self.source, self.remote = message.source, message.peer.remote
        message.receive, self.message = self, message

    def begin(self) -> None:
        """Have the message that it took on moved."""
        message = self.message
        assert message is not None
        if self._overdue is not None:
            message.refuse(self._overdue)
            return
        self._exchange.watch(self, message.peer)
        self._start(message)

    def break_off(self, message: Message | None, error: BaseException) -> None:
        """End because the thread that gave it a message failed at it, or was interrupted.

        Args:
            message: What it was given, where its sender may be waiting for a word.
            error: What the thread was interrupted by: Ctrl-C, say.
        """
        if not isinstance(error, TorchNixlError):
            error = TransferError(f"{self}: interrupted by {error!r}")
        taken = self.message
        if taken is not None:
            taken.break_off(error)
            return
        if isinstance(message, OfferedMessage) and not self._done:
            message.tell_done(error)
        self.conclude(error)

    def _start(self, message: OfferedMessage) -> None:
        message.start()

    def choose_target(self, message: OfferedMessage) -> None:
        """Find where the message lands, and have it moved there."""
        self._take_target(message)
        message.move()

    def _take_target(self, message: OfferedMessage) -> None:
        assert self._landing is not None
        message.target = target = self._landing.target(message.description)
        message.layout = self._hold(target)

    def _hold(self, target: Target) -> Layout:
        """Register what a message lands in, until nothing moves there any more."""
        held = register_all(self._connection, target.memories)
        with self._connection.lock:
            self._memories += tuple(held)
        return Layout.of(held)

    def unpack(self, message: OfferedMessage) -> None:
        """Do what is left to do once all bytes have landed."""
        error: BaseException | None = None
        try:
            self.result = message.target.finish()
        except Exception as caught:  # noqa: BLE001 - whatever it is, the caller is told
            error = caught
        self.conclude(error)

    # How it ends.

    def _finish(self, error: BaseException | None) -> bool:
        return super()._finish(with_rank(error, self.source))

    def conclude(self, error: BaseException | None) -> None:
        """End with or without an error, and give the memory back: nothing moves there any more."""
        self._landing = None
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
            waits = not self.has_begun()
            if waits and self.matched:
                # It is for the thread that gives it its message to say how it goes on, or the
                # message were lost. Not waited for here: locks may be held, and it may be this one.
                self._overdue = error
                return
            if waits:
                self._exchange.inbox.unpost(self)
        if waits:
            self.conclude(error)
        elif self._finish(error):
            message = self.message
            if message is not None:
                message.stop()

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
        if self.message is None:
            # Whoever finds it matched after all lets it end as it does.
            self.fail(self._timeout_error("before a message came"))
        else:
            self.fail(self._timeout_error("with its bytes under way; the memory stays owned"))

    @property
    def _pushed(self) -> OfferedMessage | None:
        """Its message, if the sender may be writing it."""
        message = self.message
        return None if message is None or message.pushed_from is None else message

    def on_lost(self, error: BaseException) -> None:
        """The agent is lost; what it may still write to stays owned."""
        self.fail(error)
        self.check_quarantine()
        if self._pushed is not None:
            self._connection.operations.busy[self] = None

    def on_left(self, error: BaseException) -> None:
        """The sender closed its Communicator, and promised to write no more."""
        self.fail(error)
        message = self._pushed
        if message is not None:
            message.let_go(error)

    def mend(self) -> None:
        message = self.message
        if message is None or message.mend():
            self.conclude(self._error)
            super().mend()

    def check_quarantine(self) -> None:
        message = self._pushed
        if message is not None and self._connection.liveness.has_let_go(message.peer.remote):
            self._connection.operations.busy.pop(self, None)
            message.let_go(self._error)

    def hold(self, timeout: float) -> bool:
        # False keeps the memory for ever: the agent dies, but the sender may go on writing.
        message = self._pushed
        return message is None or self._connection.liveness.is_gone(message.peer.remote)
