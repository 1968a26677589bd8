"""What an operation on device memory does at its end: its streams are let go.

See `engine/streams.py`. Whatever ends one that receives, these are its last steps, in this order:

    all bytes in place                       failed, and nothing moves there any more
    unpack, in the device's thread           fill the targets, in their devices' threads
    let streams go on                        refuse all further calls, if a stream waited
    release the memory                       let streams go on, release the memory
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from torch_nixl.engine.deferred import when
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.streams import StreamDevice, StreamOrder, device_of, fill_byte

if TYPE_CHECKING:
    from torch_nixl.p2p.exchange import Exchange

log = logging.getLogger("torch_nixl.streams")

LINGER_SECONDS: Final = 5.0
"""How long after a failed receive its streams wait for the last byte that may still land. A stopped
peer would block them for as long as it is stopped; then they go on, and the target is filled once
more when nothing moves there any more."""


class Ordered(Operation):
    """The part of an operation that has to do with streams. For those that write to memory.

    Attributes:
        order: Its place among the work of its memory's devices; None for host memory, and where
            that isn't known yet.
    """

    # Slots are the subclasses': several have another base besides.
    __slots__ = ()

    _exchange: Exchange
    _last: bool
    _outs: tuple[torch.Tensor, ...]
    order: StreamOrder | None

    def put_in_order(self, order: StreamOrder | None, outs: tuple[torch.Tensor, ...]) -> None:
        """Have it begin when it may, and its targets filled if it fails. Before it is posted."""
        self.order = order  # type: ignore[misc]  # a slot of the subclasses'
        if order is not None:
            self._outs = outs  # type: ignore[misc]

    def _when_passed(
        self, orders: Sequence[StreamOrder | None], action: Callable[[], None]
    ) -> None:
        """Go on once what was queued before has run: now, or in the driver."""
        waiting = [one for one in orders if one is not None and not one.passed()]
        if waiting:
            self._connection.defer(lambda: all(one.passed() for one in waiting), action)
        else:
            action()

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
        jobs: list[Job] = []
        for out in self._outs:
            device = device_of(out)
            if device is not None:
                jobs.append((device, functools.partial(_fill, device, out)))

        def filled(error: BaseException | None) -> None:
            if error is not None:
                log.error("%s: its target could not be filled: %s", self, error)
            then()

        run_in_turn(jobs, filled)

    def _release(self) -> None:
        order = self.order
        if order is None:
            super()._release()
            return
        with self._connection.lock:
            if self._last:
                return
            self._last = True  # type: ignore[misc]
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
        self._outs = ()  # type: ignore[misc]
        super()._release()
        order.devices[0].discard(box)


Job: TypeAlias = tuple[StreamDevice, Callable[[], None]]
"""What a device's thread is to do."""


def run_in_turn(jobs: Sequence[Job], then: Callable[[BaseException | None], None]) -> None:
    """Have jobs done one after the other; then call `then` with the first error, if any.

    It is called by the last device's thread, or at once if there are no jobs.
    """
    rest = list(reversed(jobs))
    first: list[BaseException] = []

    def step(error: BaseException | None) -> None:
        if error is not None:
            first.append(error)
        if rest:
            device, work = rest.pop()
            device.run(work, step)
        else:
            then(first[0] if first else None)

    step(None)


def _fill(device: StreamDevice, out: torch.Tensor) -> None:
    device.fill(tensor_memory(out), fill_byte(out.dtype))


def always() -> bool:
    """What is ready at once, but not in the calling thread."""
    return True
