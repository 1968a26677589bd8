"""Keeping a lease that nobody has come for yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_nixl.errors import PeerLostError, TransferError
from torch_nixl.kv import frames
from torch_nixl.kv.frames import Head
from torch_nixl.kv.protocol import Outcome, error_of
from torch_nixl.kv.ticket import Ticket

if TYPE_CHECKING:
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.kv.client import KVCacheClient


class Heartbeat:
    """Keeps a lease while decode has no room yet for what it offers.

    Attributes:
        error: Why the lease is lost; None while it is kept.
    """

    def __init__(self, client: KVCacheClient, remote: Remote, number: int, ticket: Ticket) -> None:
        self._client = client
        self._remote = remote
        self.number = number
        self.ticket = ticket
        self.error: TransferError | None = None
        self._due = 0.0

    @property
    def active(self) -> bool:
        """Whether it goes on."""
        return self.number in self._client.hub.heartbeats

    def stop(self) -> None:
        """Keep the lease no more. Idempotent."""
        with self._client.hub.lock:
            self._client.hub.heartbeats.pop(self.number, None)

    # The hub's lock is held.

    def on_tick(self, now: float) -> None:
        """Send the next one if it is due."""
        if self._client.closed:
            self.stop()
        elif self._remote.lost_error is not None:
            name = self._remote.name
            self.error = PeerLostError(f"{name} is lost: {self._remote.lost_error}", remote=name)
            self.stop()
        elif now >= self._due:
            lasts = self.ticket.lease_ms or int(1000 * frames.MAX_BEAT_SECONDS)
            self._due = now + lasts / 3000
            head = Head(self.ticket.service, self.number, self.ticket.lease)
            body = frames.pack_count(head, lasts)
            self._client.figures.heartbeats += 1
            self._client.connection.contacts.send_body(self._remote, frames.BEAT, body)

    def on_refused(self, remote: Remote, outcome: Outcome, text: str) -> None:
        """There is no such lease any more."""
        if remote.name == self._remote.name:
            self.error = error_of(outcome, f"the lease of {self.ticket.request!r}: {text}")
            self.stop()
