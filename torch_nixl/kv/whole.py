"""What a handoff asks of the request that it is a part of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.kv.handoff import Handoff
    from torch_nixl.kv.plan import Run


class Whole(Protocol):
    """What a handoff is a part of: an Offer or a Fetch."""

    @property
    def num_ready(self) -> int:
        """Layers that the model has computed; prefill's."""
        ...

    @property
    def order(self) -> StreamOrder | None:
        """What has to run before pages are touched that it fills; None for host memory."""
        ...

    @property
    def runs(self) -> tuple[Run, ...]:
        """This side's pages."""
        ...

    def on_end(self, handoff: Handoff) -> None:
        """Its outcome is known. Called with the hub's lock held, as the other."""
        ...

    def on_release(self, handoff: Handoff) -> None:
        """The peer can't touch the pages any more."""
        ...
