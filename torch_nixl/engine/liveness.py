"""Whether remotes are still there, and what follows for memory that they were granted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch_nixl.engine import host, wire
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.errors import PeerLostError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection

PING_SECONDS = 0.25
"""Silence after which a remote that someone waits for is pinged; doubled while it stays silent."""

MAX_PING_SECONDS = 30.0
"""Longest interval between two pings of a silent remote."""

CENSUS_SECONDS = 5.0
"""Interval between two looks at remotes that nobody waits for, to let go of the dead."""

OFF_HOST_SECONDS = 600.0
"""How long after its loss a peer on another host may still touch memory that it was granted.
Nothing proves from here that it died, and the connection it writes through may outlive ours."""


class Liveness:
    """Looks after the remotes of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._contacts = connection.contacts
        self._next_census = 0.0

    def look_after(self, now: float, waited_for: Iterable[Remote]) -> None:
        """Ping those that someone waits for, and let go of the dead. Called by the driver."""
        for remote in waited_for:
            self._watch(remote, now)
        if now >= self._next_census:
            self._next_census = now + CENSUS_SECONDS
            for remote in self._contacts.all():
                self._take_census(remote, now)

    def _watch(self, remote: Remote, now: float) -> None:
        """Ping a silent remote: the library tells of a death only to those who send."""
        if remote.contact not in (Contact.GREETING, Contact.READY):
            return
        if remote.name == self._connection.name:
            return
        limit = self._connection.peer_timeout
        since = remote.silent_since
        if limit is not None and since is not None and now - since > limit:
            why = f"{remote.name} has not answered for {now - since:.1f} s (peer_timeout={limit})"
            error = PeerLostError(f"{why}{remote.advice()}", remote=remote.name)
            self._contacts.lose(remote, error)
        elif now - remote.heard_at > PING_SECONDS and now - remote.pinged_at > remote.ping_after:
            remote.pinged_at = now
            remote.silent_since = since or now
            remote.ping_after = min(max(PING_SECONDS, remote.ping_after * 2), MAX_PING_SECONDS)
            self._contacts.send(remote, wire.Ping(secrets.randbits(64)))

    def _take_census(self, remote: Remote, now: float) -> None:
        identity = remote.identity
        if identity is None or remote.name == self._connection.name:
            return
        if identity.host != self._contacts.identity.host:
            if now - remote.heard_at > MAX_PING_SECONDS:
                self._watch(remote, now)
        elif not host.is_alive(identity):
            # What it sent before it died.
            self._connection.rounds.poll()
            error = PeerLostError(f"the process of {remote.name} has ended", remote=remote.name)
            self._contacts.lose(remote, error)

    def is_gone(self, remote: Remote) -> bool:
        """Whether a remote is certain not to touch our memory any more.

        It said so itself; or its process is dead, on this host; or, on another host, it was lost
        so long ago that whatever it sent has arrived or never will.
        """
        if remote.closed:
            return True
        identity = remote.identity
        if identity is None or identity.host != self._contacts.identity.host:
            lost = remote.lost_error is not None
            return lost and time.monotonic() - remote.lost_at > OFF_HOST_SECONDS
        return not host.is_alive(identity)

    def has_let_go(self, remote: Remote) -> bool:
        """Whether memory that a remote was granted may be given back: it is gone, and settled.

        To be asked by the driver, again and again.
        """
        if remote.closed:
            return True
        return self.is_gone(remote) and remote.settling.has_passed(time.monotonic())
