"""Receives that may have to do with device memory: they begin late, and devices' threads help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from torch_nixl.engine.streams import Landing as LandsOn
from torch_nixl.engine.streams import StreamDevice, StreamOrder
from torch_nixl.errors import ClosedError, TransferError
from torch_nixl.p2p.description import Content, Description
from torch_nixl.p2p.message import Message
from torch_nixl.p2p.offered import OfferedMessage
from torch_nixl.p2p.ordered import Ordered, always
from torch_nixl.p2p.peer import Peer
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.tensors import Landing

if TYPE_CHECKING:
    from torch_nixl.p2p.exchange import Exchange


class DeviceReceive(Ordered, ReceiveOperation):
    """A receive into device memory, or of what may lie on a device or land there.

    Attributes:
        order: Its place among the work of its targets' devices; None for host memory, and where
            the target isn't known yet.
        lands: Where a message lands that nobody gave a tensor for; None for the host.
        landed_on: The device of a tensor that was made for the message.
        target: The one tensor that the caller receives into, if it is device memory.
    """

    __slots__ = ("_last", "_outs", "_working", "landed_on", "lands", "order", "target")

    def __init__(
        self,
        exchange: Exchange,
        source: int | None,
        tag: int,
        landing: Landing,
        deadline: float | None,
        lands: LandsOn | None = None,
    ) -> None:
        super().__init__(exchange, source, tag, landing, deadline)
        self.order: StreamOrder | None = None
        self.lands = lands
        self.landed_on: StreamDevice | None = None
        self.target: torch.Tensor | None = None
        self._outs: tuple[torch.Tensor, ...] = ()
        self._last = self._working = False

    @property
    def reading(self) -> bool:
        return self._working or super().reading

    def has_begun(self) -> bool:
        return self._working or super().has_begun()

    def keep(self) -> None:
        device = self.landed_on
        if device is not None and isinstance(self.result, torch.Tensor):
            device.keep(self.result, device.current())

    # What comes.

    def deliver(
        self, peer: Peer, number: int, description: Content, body: bytes, at: int
    ) -> BaseException | None:
        # What doesn't fit a device's tensor shows later: then its sender is told from here.
        device, landing = self._landing_device(description), self._landing
        if device is None or landing is None:
            return super().deliver(peer, number, description, body, at)
        self.source, self.nbytes = peer.rank, description.nbytes
        self._land(
            device,
            (self.order,),
            lambda: landing.take(description, body, at),
            lambda error: self._exchange.inbox.tell_done(peer, number, error),
        )
        return None

    def deliver_local(self, message: Message) -> None:
        landing, data = self._landing, message.data
        device = self._landing_device(message.description)
        if device is None and message.order is not None:
            device = message.order.devices[0]
        if device is None:
            super().deliver_local(message)
            return
        self._note_local(message)
        assert landing is not None and isinstance(data, tuple)
        orders = (self.order, message.order)
        self._land(device, orders, lambda: landing.adopt(message.description, data))

    def break_off(self, message: Message | None, error: BaseException) -> None:
        if not self._working:  # Else another thread goes on with it.
            super().break_off(message, error)

    def _start(self, message: OfferedMessage) -> None:
        self._when_passed((self.order,), lambda: self._start_now(message))

    def _start_now(self, message: OfferedMessage) -> None:
        if self._done or self._landing is None:  # It waited for its device's stream, and failed.
            message.refuse(self._error or TransferError(f"{self}: failed"))
        else:
            super()._start(message)

    def choose_target(self, message: OfferedMessage) -> None:
        device = self._landing_device(message.description)
        if device is None or self.target is not None:
            super().choose_target(message)
            return
        # Memory has to be allocated, or kernels loaded: not by the driver.
        if self.order is None:
            self.landed_on = device

        def go_on(error: BaseException | None) -> None:
            error = self._error or error
            if error is not None:
                message.refuse(error)
            else:
                message.move()

        device.allocate(
            lambda: self._take_target(message),
            lambda error: self._connection.defer(always, lambda: go_on(error)),
        )

    def unpack(self, message: OfferedMessage) -> None:
        device = self._landing_device(message.description)
        if device is None:
            super().unpack(message)
            return
        self._working = True
        placed: list[object] = []

        def then(error: BaseException | None) -> None:
            self._working = False
            error = self._error or error
            self._landed(placed[0] if error is None else None, error)

        device.run(lambda: placed.append(message.target.finish()), then)

    def _landing_device(self, content: Content) -> StreamDevice | None:
        """The device whose threads put a message in place; None for the host."""
        if self.order is not None:
            return self.order.devices[0]
        if self.lands is None or not isinstance(content, Description):
            return None
        return self.lands(content.device)

    def _land(
        self,
        device: StreamDevice,
        orders: Sequence[StreamOrder | None],
        put: Callable[[], object],
        refused: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Have bytes that are here put in place by a device's thread; the receive ends with it.

        It enters the connection's tables, if it isn't there yet: it goes on in other threads.

        Args:
            device: Whose thread.
            orders: When it may be done.
            put: Does it, and returns what is received.
            refused: Told why the message doesn't fit.
        """
        self._working = True
        try:
            with self._exchange.lock:
                self._exchange.inbox.enter(self)
        except ClosedError as error:
            self._working = False
            self._landed(None, error)
            return
        placed: list[object] = []

        def then(error: BaseException | None) -> None:
            self._working = False
            if error is not None and refused is not None:
                refused(error)
            error = self._error or error
            self._landed(placed[0] if placed and error is None else None, error)

        def start() -> None:
            if self._done:
                then(None)
            elif self.order is None:
                self.landed_on = device
                device.allocate(lambda: placed.append(put()), then)
            else:
                device.run(lambda: placed.append(put()), then)

        self._when_passed(orders, start)

    def _landed(self, result: object, error: BaseException | None) -> None:
        """All that was to be put in place is, or won't be."""
        if error is None:
            self.result = result
        self.conclude(error)

    # How it ends.

    def conclude(self, error: BaseException | None) -> None:
        if self.order is None or self.listed:
            super().conclude(error)
            return
        self._landing = None
        self._finish(error)
        self._release()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        if self._error is not None:
            self._limit_hold()

    def expire(self) -> None:
        if self._working:
            self.fail(self._timeout_error("with its bytes under way; the memory stays owned"))
        else:
            super().expire()

    def on_lost(self, error: BaseException) -> None:
        if not self._working:  # Else all of it is here.
            super().on_lost(error)
