"""A request on decode's side: pages of one prompt that are being filled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch_nixl.engine.deferred import when
from torch_nixl.engine.operation import deadline_after
from torch_nixl.errors import TransferTimeout
from torch_nixl.kv.filling import fill
from torch_nixl.kv.moving import order_of
from torch_nixl.kv.plan import Run
from torch_nixl.kv.protocol import Mode, Outcome, Phase
from torch_nixl.kv.request import PageLists, Request
from torch_nixl.p2p.ordered import LINGER_SECONDS

if TYPE_CHECKING:
    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.kv.client import KVCacheClient
    from torch_nixl.kv.handoff import Handoff


class Fetch(Request):
    """Pages of one prompt that are being filled.

    Attributes:
        mode: Who moves the bytes.
        runs: Those that are written to.
        order: Its place among the work of the pages' devices; None for host memory.
    """

    num_ready = 0

    def __init__(
        self,
        client: KVCacheClient,
        request: str,
        runs: tuple[Run, ...],
        mode: Mode,
        order: StreamOrder | None,
    ) -> None:
        super().__init__(client, request, runs)
        self._client = client
        self.mode = mode
        self.order = order
        self.asked_at = time.monotonic()
        self._settling = False

    @property
    def num_layers_ready(self) -> int:
        """Layers that are filled, in the order of the model."""
        if self._done and self._error is None:
            return self._client.cache.num_layers
        return min((one.num_moved for one in self.handoffs), default=0)

    @property
    def failed_pages(self) -> PageLists:
        # Layer by layer bytes move, so no page is whole before the end.
        return self.pages if self._error is not None else ()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the pages are filled: block, or have a device's stream do so.

        For pages on a device, and without a timeout, the calling thread's current stream waits, and
        this returns at once: what is queued from now on finds the pages filled. If the request then
        fails, its pages are filled with NaN (0xFF in integers) before the stream goes on, and the
        next look from the host raises it: `wait`, `synchronize`, `error`, or `poll`'s answer. Where
        the device's streams can't wait, the host blocks.

        Args:
            timeout: Seconds; blocks, and the request ends with `TransferTimeout` when they have
                passed. None waits until its own deadline.

        Raises:
            TransferError: The current stream is being captured into a graph; or as `synchronize`.
            ClosedError: As `synchronize`.
        """
        order = self.order
        if order is None or timeout is not None or self._done or not order.hold():
            self.synchronize(timeout)

    def wait_layer(self, layer: int, timeout: float | None = None) -> None:
        """Block the host until a layer is filled.

        Args:
            layer: The model's number of it.
            timeout: Seconds; None waits until the request's own deadline. The request goes on
                after a timeout.

        Raises:
            ValueError: There is no such layer.
            TransferTimeout: Time is up.
            TransferError, ClosedError: As for `wait`.
        """
        order = order_of(self._client.cache.compatibility)
        if layer not in order:
            raise ValueError(f"layer {layer} is not in the cache")
        index = order.index(layer)
        deadline = deadline_after(timeout)
        arrived = self._connection.progress.wait_until(
            lambda: self._done or self.num_layers_ready > index, deadline
        )
        if not arrived:
            raise TransferTimeout(f"layer {layer} of {self.request!r} has not arrived yet")
        if self.num_layers_ready <= index:
            self.synchronize()

    def cancel(self) -> None:
        for handoff in list(self.handoffs):
            handoff.cancel(text="given up by decode")

    # The hub's lock is held.

    def on_end(self, handoff: Handoff) -> None:
        error = handoff.error
        if error is None and not all(one.done for one in self.handoffs):
            return
        figures = self._client.figures
        if self._end(error):
            outcome = handoff.side.outcome
            assert outcome is not None
            figures.count_end(outcome)
            figures.took("total", time.monotonic() - self.asked_at)
            if error is None:
                figures.pages += sum(len(run.pages) for run in self.runs)
            if self.order is not None:
                if error is None:
                    self.order.settle()
                else:
                    self._limit_hold(self.order)
            for other in list(self.handoffs):
                if not other.done:
                    other.cancel(text=f"another part failed: {error}")

    def give_up(self) -> None:
        for one in list(self.handoffs):
            taken = one.sent and one.side.phase in (Phase.MOVING, Phase.EXPOSED)
            if taken and one.num_ready < one.num_layers:
                one.cancel(Outcome.CLOSED, "decode is closing")

    def on_release(self, handoff: Handoff) -> None:
        if self._settling or not all(one.side.released for one in self.handoffs):
            return
        self._settling = True
        order = self.order
        if order is None or self._error is None:
            self._let_go()
            return

        def filled() -> None:
            order.settle()
            with self._client.hub.lock:
                self._let_go()

        fill(self._client.registered, self.runs, order, filled)

    def _limit_hold(self, order: StreamOrder) -> None:
        """See that streams go on in time though bytes may still land. The request has failed."""
        until = time.monotonic() + LINGER_SECONDS

        def end() -> None:
            if not self._settling:
                fill(self._client.registered, self.runs, order, order.settle)

        # Not by the connection's driver, which may have ended before.
        when(lambda: self._settling or time.monotonic() >= until, end)

    def _let_go(self) -> None:
        self._client.leave(self)
        self._free()
