"""What one side knows of another side's cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_nixl.kv.pools import Pool
from torch_nixl.kv.protocol import Outcome

if TYPE_CHECKING:
    from torch_nixl.engine.blob import BlobInfo
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.kv.handoff import Handoff


@dataclass(slots=True, eq=False)
class Meeting:
    """One of our caches and one of a peer's.

    Attributes:
        remote: The peer's agent.
        service: The peer's number for its cache.
        known: Its cache and what its metadata says; None until it has told.
        refused: Why nothing can be exchanged with it; None while all is well.
        waiting: Handoffs that are to be asked for once it has told.
        asked_at: `time.monotonic()` of our MEET.
        ranks: Ranks of the peer's group that have a share in our pages.
        heads: Which heads this peer has from, or for, this rank, for each group of layers.
    """

    remote: Remote
    service: int
    known: tuple[Pool, tuple[BlobInfo, ...]] | None = None
    refused: tuple[Outcome, str] | None = None
    waiting: list[Handoff] = field(default_factory=list)
    asked_at: float = 0.0
    ranks: tuple[int, ...] = ()
    heads: tuple[range, ...] = ()
    _path: str = ""

    def path_by(self, connection: Connection) -> str:
        """Which way bytes take to it: looked at once, since that costs system calls."""
        if self._path in ("", "unknown"):
            self._path = connection.path(self.remote)
        return self._path

    @property
    def pool(self) -> Pool:
        """Its cache. It has told."""
        assert self.known is not None
        return self.known[0]

    @property
    def infos(self) -> tuple[BlobInfo, ...]:
        """What its metadata says. It has told."""
        assert self.known is not None
        return self.known[1]
