"""A request on prefill's side: pages of one prompt that are on offer."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from torch_nixl.kv.leases import Lease
from torch_nixl.kv.moving import order_of
from torch_nixl.kv.plan import Run
from torch_nixl.kv.protocol import Event, Outcome, Phase, error_of
from torch_nixl.kv.request import Request

if TYPE_CHECKING:
    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.kv.handoff import Handoff
    from torch_nixl.kv.server import KVCacheServer


class Offer(Request):
    """Pages of one prompt that are on offer.

    Attributes:
        ticket: What decode needs to have them: JSON, less than 2 KiB, that may travel with the
            request over any channel.
        lease: What the ticket names.
        num_ready: Layers that may be moved: computed, their kernels included.
        num_told: Layers that the program has said to be computed.
        offered_at: `time.monotonic()` of the offer.
    """

    order = None  # Its points are the layers' own.

    def __init__(
        self,
        server: KVCacheServer,
        lease: Lease,
        request: str,
        runs: tuple[Run, ...],
        *,
        ticket: str,
    ) -> None:
        super().__init__(server, request, runs)
        self._server = server
        self.lease = lease
        self.ticket = ticket
        self._layers = order_of(server.cache.compatibility)
        self.num_ready = self.num_told = 0
        # How many layers are computed once what was queued at a call has run.
        self._points: deque[tuple[int, StreamOrder | None]] = deque()
        self.offered_at = time.monotonic()

    def layer_ready(self, layer: int, *, stream: object = None) -> None:
        """Say that the model has computed a layer: it may be moved from now on. Never blocks.

        On a device it may be moved once what is queued by now has run.

        Args:
            layer: The model's number of it. Layers become ready in the order of their numbers,
                each once.
            stream: What is queued on this stream counts; by default, on its device's current one.

        Raises:
            ValueError: It is not the next layer; or `stream` is none of the pool's devices.
            TransferError: The stream is being captured into a graph.
        """
        order = self._server.registered.order(stream)
        with self._server.hub.lock:
            if self.num_told == len(self._layers):
                raise ValueError(f"layer {layer}: all layers are ready")
            if layer != self._layers[self.num_told]:
                raise ValueError(
                    f"layer {layer}: layer {self._layers[self.num_told]} is to be ready next"
                )
            self.tell_ready(self.num_told + 1, order)

    def cancel(self) -> None:
        self.withdraw(Outcome.CANCELLED, "withdrawn by prefill")

    def withdraw(self, outcome: Outcome, text: str) -> None:
        """Give it up for a reason."""
        with self._server.hub.lock:
            for handoff in list(self.handoffs):
                handoff.cancel(outcome, text)
            self.shut(outcome, text)

    # The hub's lock is held.

    def tell_ready(self, count: int, order: StreamOrder | None) -> None:
        """So many layers are computed once a point has passed."""
        self.num_told = count
        self._points.append((count, order))
        if len(self._points) == 1:
            self._look_at_points()

    def _look_at_points(self) -> None:
        """Let layers move whose points have passed; have the driver look at the others' again."""
        points, before = self._points, self.num_ready
        while points and ((order := points[0][1]) is None or order.passed()):
            self.num_ready = points.popleft()[0]
        if self.num_ready > before:
            for handoff in list(self.handoffs):
                handoff.on_layer()
        if points and order is not None:
            self._connection.defer(order.passed, self._service.hub.locked(self._look_at_points))

    def give_up(self) -> None:
        if self.num_told < len(self._layers):
            self.withdraw(Outcome.CLOSED, "prefill is closing")
        else:
            self.shut(Outcome.CLOSED, "prefill is closing")

    def shut(self, outcome: Outcome, text: str) -> None:
        """Give up the shares that no rank has come for."""
        for side in self.lease.sides.values():
            if side.phase is Phase.OFFERED:
                side.step(Event.CANCEL, outcome)
        self.look(text)

    def look(self, text: str = "") -> None:
        """See whether it has ended, or its pages are free."""
        lease = self.lease
        outcome = lease.outcome
        if outcome is not None and not self._done:
            failed = [one.error for one in self.handoffs if one.error is not None]
            text = f"offer of {self.request!r}: {text or outcome.name.lower()}"
            error = failed[0] if failed else error_of(outcome, text)
            self._server.figures.count_end(outcome)
            self._server.figures.took("total", time.monotonic() - self.offered_at)
            if outcome is Outcome.COMPLETE:
                self._server.figures.pages += sum(len(run.pages) for run in self.runs)
            self._end(error)
        if lease.released and not self._released:
            self._server.leave(self)
            self._server.forget(self)
            self._free()

    def on_end(self, handoff: Handoff) -> None:
        self.look()

    def on_release(self, handoff: Handoff) -> None:
        self.look()

    def on_closed(self, error: BaseException) -> None:
        """The connection is gone. Handoffs have been told, or are being told."""
        if self._end(error):
            self._server.figures.count_end(Outcome.CLOSED)
        self.shut(Outcome.CLOSED, "")

    def _expire(self) -> None:
        self.withdraw(Outcome.TIMED_OUT, "timed out before decode had the pages")
