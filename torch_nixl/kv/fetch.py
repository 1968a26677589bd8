"""A request on decode's side: pages of one prompt that are being filled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch_nixl.engine.operation import deadline_after
from torch_nixl.errors import TransferTimeout
from torch_nixl.kv.moving import order_of
from torch_nixl.kv.plan import Run
from torch_nixl.kv.protocol import Mode
from torch_nixl.kv.request import PageLists, Request

if TYPE_CHECKING:
    from torch_nixl.kv.client import KVCacheClient
    from torch_nixl.kv.handoff import Handoff


class Fetch(Request):
    """Pages of one prompt that are being filled.

    Attributes:
        mode: Who moves the bytes.
        runs: Those that are written to.
    """

    num_ready = 0

    def __init__(
        self, client: KVCacheClient, request: str, runs: tuple[Run, ...], mode: Mode
    ) -> None:
        super().__init__(client, request, runs)
        self._client = client
        self.mode = mode
        self.asked_at = time.monotonic()

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

    def wait_layer(self, layer: int, timeout: float | None = None) -> None:
        """Block until a layer is filled.

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
            self.wait()

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
            for other in list(self.handoffs):
                if not other.done:
                    other.cancel(text=f"another part failed: {error}")

    def on_release(self, handoff: Handoff) -> None:
        if all(one.side.released for one in self.handoffs):
            self._client.leave(self)
            self._free()
