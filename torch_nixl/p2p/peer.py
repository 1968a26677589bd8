"""What a Communicator knows of each rank that it has met."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.path import NETWORK
from torch_nixl.errors import MetadataError, PeerLostError
from torch_nixl.p2p.layout import Layout
from torch_nixl.p2p.move import Regions
from torch_nixl.p2p.place import Place, PlacedRegion, pack_place
from torch_nixl.p2p.protocol import CREDIT_FRAMES, Allowance, Debt, credit_nbytes
from torch_nixl.p2p.wants import Wants

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.sending import SendOperation

MAX_TOLD: Final = 1024
"""Regions that a peer is trusted to remember, the latest ones told."""

MAX_REGIONS: Final = 4 * MAX_TOLD
"""Regions of a peer that are remembered, the latest ones told: more than it trusts us to."""


def with_rank(error: BaseException | None, rank: int | None) -> BaseException | None:
    """The same error, with the rank if it tells of a lost agent.

    The engine knows no ranks, and one agent may be of several: each Communicator adds its own.
    """
    if not isinstance(error, PeerLostError) or error.rank is not None or rank is None:
        return error
    ranked = copy.copy(error)
    ranked.rank = rank
    ranked.__cause__ = error.__cause__
    return ranked


def is_out_of_sight(connection: Connection, remote: Remote | None) -> bool:
    """Whether a remote was lost that may live on, on another host: only time tells of its end."""
    if remote is None or remote.lost_error is None:
        return False
    return connection.path(remote) in (NETWORK, "unknown")


class Peer:
    """One rank that has been met.

    Attributes:
        rank: Its rank.
        remote: Its agent.
        error: Why nothing can be exchanged with it any more; None while all is well.
        path: Which way bytes take to it; empty until that was needed.
        allowance: Our credit there.
        debt: Its credit here.
        queue: Sends that wait for credit, in order.
        queued_by_tag: The same by tag: one that is wanted goes out of turn.
        held: Sends by tag, in order, of which the first waits for its device's stream.
        wanted: Messages that may go there without credit, by tag.
        num_wanted: How many of all tags.
        wants: Messages that may come from there without credit.
        refused: What became of messages that it refused after they had gone, by number.
        num_refused: How many it has refused.
        pending: Operations that wait for it: while there are any, it is pinged.
        link: Stands for it in the connection's tables.
    """

    __slots__ = (
        "_next_region",
        "_regions",
        "_told",
        "allowance",
        "debt",
        "error",
        "held",
        "link",
        "num_refused",
        "num_wanted",
        "path",
        "pending",
        "queue",
        "queued_by_tag",
        "rank",
        "refused",
        "remote",
        "wanted",
        "wants",
    )

    def __init__(self, exchange: Exchange, rank: int, remote: Remote) -> None:
        nbytes = credit_nbytes(exchange.world_size)
        self.rank = rank
        self.remote = remote
        self.error: BaseException | None = None
        self.path = ""
        self.allowance = Allowance(CREDIT_FRAMES, nbytes)
        self.debt = Debt(CREDIT_FRAMES, nbytes)
        self.queue: deque[SendOperation] = deque()
        self.queued_by_tag: dict[int, deque[SendOperation]] = {}
        self.held: dict[int, deque[SendOperation]] = {}
        self.wanted: dict[int, int] = {}
        self.num_wanted = 0
        self.wants = Wants()
        self.refused: dict[int, BaseException] = {}
        self.num_refused = 0
        self.pending = 0
        self.link = Link(exchange, self)
        self._told: OrderedDict[bytes, int] = OrderedDict()
        self._regions: OrderedDict[int, tuple[bytes, BlobInfo]] = OrderedDict()
        self._next_region = 1

    def place(self, layout: Layout) -> bytes:
        """Pack where memory of ours lies, with its regions' metadata if they have to be told."""
        regions = [
            PlacedRegion(held.memory.kind, *self._tell(held.blob, num_spans))
            for held, num_spans in layout.regions
        ]
        return pack_place(regions, layout.spans)

    def _tell(self, blob: bytes, num_spans: int) -> tuple[int, int, bytes]:
        region = self._told.get(blob)
        if region is not None:
            return region, num_spans, b""
        region = self._next_region
        self._next_region += 1
        self._told[blob] = region
        if len(self._told) > MAX_TOLD:
            self._told.popitem(last=False)
        return region, num_spans, blob

    def regions(self, exchange: Exchange, place: Place) -> Regions:
        """Find or remember the regions that a place of its memory lies in.

        Raises:
            MetadataError: One was never told, or its metadata is not acceptable.
        """
        found = []
        for _, number, _, blob in place.regions:
            if blob:
                info = exchange.connection.adapter.inspect(blob)
                if info.agent != self.remote.name:
                    raise MetadataError(f"metadata of {info.agent} from {self.remote.name}")
                self._regions[number] = (blob, info)
                if len(self._regions) > MAX_REGIONS:
                    self._regions.popitem(last=False)
            known = self._regions.get(number)
            if known is None:
                raise MetadataError(f"{self.remote.name} names region {number}, never told")
            found.append(known)
        return found

    def unsent(self) -> list[SendOperation]:
        """Sends that the peer knows nothing of yet."""
        return [*self.queue, *(one for held in self.held.values() for one in held)]

    def forget_told(self) -> None:
        """Tell every region anew: a frame that told one may not have been sent."""
        self._told.clear()


class Link(Operation):
    """A peer in the connection's tables: learns of its loss, and has it pinged when need be.

    It moves nothing and never times out.
    """

    __slots__ = ("_exchange", "_peer")

    def __init__(self, exchange: Exchange, peer: Peer) -> None:
        super().__init__(exchange.connection, f"rank {peer.rank}", (), None)
        self._exchange = exchange
        self._peer = peer
        self.remote = peer.remote

    @property
    def quarantined(self) -> bool:
        return True  # Closing the connection does not wait for it.

    def on_lost(self, error: BaseException) -> None:
        self._exchange.lose(self._peer, error)

    def cancel(self) -> None:
        self.close()

    def expire(self) -> None:
        pass

    def close(self) -> None:
        """Leave the tables."""
        self._connection.operations.busy.pop(self, None)
        self._done = True
        self._release()
