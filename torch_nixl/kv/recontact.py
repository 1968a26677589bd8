"""Contacting a lost peer again that lives, and may still touch pages of ours."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from torch_nixl.errors import TorchNixlError
from torch_nixl.kv.protocol import Event

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.kv.handoff import Handoff

RECONTACT_SECONDS: Final = 1.0
"""Time from a loss to the first try; doubled after each, up to `MAX_RECONTACT_SECONDS`."""

MAX_RECONTACT_SECONDS: Final = 30.0


class Recontact:
    """When to try again. Neither side may send to the other any more: somebody has to begin."""

    __slots__ = ("_after", "_at")

    def __init__(self) -> None:
        self._after = RECONTACT_SECONDS
        self._at = 0.0

    def begin(self) -> None:
        """The peer was lost just now."""
        self._at = time.monotonic() + self._after

    def look(self, handoff: Handoff) -> bool:
        """See whether a peer that may touch pages is gone, or back; return whether it is lost."""
        connection = handoff.service.connection
        with handoff.service.hub.lock:
            remote = handoff.remote
            if handoff.released or remote is None:
                return False
            lost = remote.lost_error is not None
            if remote.closed or (lost and connection.liveness.has_let_go(remote)):
                handoff.on(Event.DEAD, text="the peer is gone")
                return False
            again = connection.contacts.get(remote.name) if lost else None
            if again is not None:  # It lives after all.
                handoff.ask_again(again)
                return False
            return lost

    def try_if_due(self, connection: Connection, remote: Remote) -> None:
        """Contact it again, if that is due. Runs in the driver."""
        now = time.monotonic()
        if now < self._at or connection.closing:
            return
        self._at = now + self._after
        self._after = min(2 * self._after, MAX_RECONTACT_SECONDS)
        with contextlib.suppress(TorchNixlError):  # It is tried again.
            connection.contact(remote.name, remote.connection_blob)
