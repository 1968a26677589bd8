"""What a receive does for device memory: it begins late, and its streams are let go at the end.

See `engine/streams.py`. Whatever ends a receive, these are its last steps, in this order:

    all bytes in place                       failed, and nothing moves there any more
    unpack, in the device's thread           fill the targets, in their devices' threads
    let streams go on                        refuse all further calls, if a stream waited
    release the memory                       let streams go on, release the memory
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from torch_nixl.engine.deferred import when
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.streams import Landing as LandsOn
from torch_nixl.engine.streams import StreamDevice, StreamOrder, device_of, fill_byte
from torch_nixl.errors import ClosedError
from torch_nixl.p2p.description import Content, Description
from torch_nixl.p2p.tensors import Landing, Target

if TYPE_CHECKING:
    from torch_nixl.p2p.exchange import Exchange

log = logging.getLogger("torch_nixl.streams")

LINGER_SECONDS: Final = 5.0
"""How long after a failed receive its streams wait for the last byte that may still land. A stopped
peer would block them for as long as it is stopped; then they go on, and the target is filled once
more when nothing moves there any more."""


class OrderedReceive(Operation):
    """The part of a receive that has to do with device memory.

    Attributes:
        order: Its place among the work of its targets' devices; None for host memory, and where
            the target isn't known yet.
        lands: Where a message lands that nobody gave a tensor for; None for the host.
        landed_on: The device of a tensor that was made for the message.
    """

    __slots__ = (
        "_exchange",
        "_landing",
        "_last",
        "_outs",
        "_working",
        "landed_on",
        "lands",
        "order",
    )

    # Set by the subclass, whose making counts in every small receive.
    _exchange: Exchange
    _landing: Landing | None
    lands: LandsOn | None
    _last: bool
    _outs: tuple[torch.Tensor, ...]
    _working: bool
    landed_on: StreamDevice | None
    order: StreamOrder | None

    def put_in_order(self, order: StreamOrder | None, outs: tuple[torch.Tensor, ...]) -> None:
        """Have it begin when it may, and its targets filled if it fails. Before it is posted."""
        self.order = order
        if order is not None:
            self._outs = outs

    @property
    def target(self) -> torch.Tensor | None:
        """The one tensor that the caller receives into, if it is device memory."""
        return self._outs[0] if len(self._outs) == 1 else None

    def _landing_device(self, content: Content) -> StreamDevice | None:
        """The device whose threads put a message in place; None for the host."""
        if self.order is not None:
            return self.order.devices[0]
        if self.lands is None or not isinstance(content, Description):
            return None
        return self.lands(content.device)

    def _when_passed(
        self, orders: Sequence[StreamOrder | None], action: Callable[[], None]
    ) -> None:
        """Go on once what was queued before has run: now, or in the driver."""
        waiting = [one for one in orders if one is not None and not one.passed()]
        if waiting:
            self._connection.defer(lambda: all(one.passed() for one in waiting), action)
        else:
            action()

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
                self._exchange.inbox.enter(self)  # type: ignore[arg-type]  # of the one subclass
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

    def _unpack(self, device: StreamDevice, target: Target) -> None:
        """Have a device's thread do what is left to do once all bytes have landed."""
        self._working = True
        placed: list[object] = []

        def then(error: BaseException | None) -> None:
            self._working = False
            error = self._error or error
            self._landed(placed[0] if error is None else None, error)

        device.run(lambda: placed.append(target.finish()), then)

    def _landed(self, result: Any, error: BaseException | None) -> None:
        """All that was to be put in place is, or won't be."""
        raise NotImplementedError

    def _limit_hold(self) -> None:
        """See that streams go on in time though bytes may still land. The receive has failed."""
        order = self.order
        if order is None or not order.held or self._released or self._last:
            return
        until = time.monotonic() + LINGER_SECONDS

        def end() -> None:
            if not self._last:
                self._fill(lambda: order.settle(self._poison))

        self._connection.defer(lambda: self._last or time.monotonic() >= until, end)

    def _poison(self) -> None:
        error = self._error
        assert error is not None
        self._exchange.poison(error)

    def _fill(self, then: Callable[[], None]) -> None:
        """Let nobody take what lies in the targets for data."""
        order = self.order
        assert order is not None
        if not order.passed():
            # What was queued before the receive may still use the targets, and the connection,
            # whose driver looks at points otherwise, may be closed by now.
            when(order.passed, lambda: self._fill(then))
            return
        steps = [(device, out) for out in self._outs if (device := device_of(out)) is not None]

        def step() -> None:
            if not steps:
                then()
                return
            device, out = steps.pop()
            device.run(lambda: device.fill(tensor_memory(out), fill_byte(out.dtype)), filled)

        def filled(error: BaseException | None) -> None:
            if error is not None:
                log.error("%s: its target could not be filled: %s", self, error)
            step()

        step()

    def _release(self) -> None:
        order = self.order
        if order is None:
            super()._release()
            return
        with self._connection.lock:
            if self._last:
                return
            self._last = True
        if self._error is None:
            order.settle()
            self._let_go(order)
        else:
            self._fill(lambda: self._end_failed(order))

    def _end_failed(self, order: StreamOrder) -> None:
        order.settle(self._poison)
        self._let_go(order)

    def _let_go(self, order: StreamOrder) -> None:
        box: list[object] = [*self._outs, *self._memories]
        self._outs = ()
        super()._release()
        order.devices[0].discard(box)


def always() -> bool:
    """What is ready at once, but not in the calling thread."""
    return True
