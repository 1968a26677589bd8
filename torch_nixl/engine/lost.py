"""Remotes that were lost: the library is still to forget them, and some live after all."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from torch_nixl.engine import host
from torch_nixl.engine.remotes import MAX_SEEK_SECONDS, Remote
from torch_nixl.errors import MetadataError, PeerLostError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.wire import Identity

log = logging.getLogger("torch_nixl.contacts")

MAX_ESTRANGED = 1024
"""Lost remotes whose metadata is kept, to answer them if they live after all."""

LINGER_SECONDS = 0.1
"""How long making contact waits for what is left of a lost remote of the same name."""

RECONTACT_SECONDS = 1.0
"""Least time between the loss of a remote on another host and its being contacted again because it
was heard: what comes sooner was sent before."""


class Lost:
    """The lost remotes of one connection.

    Attributes:
        lingering: Those that the library is still to forget.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._estranged: OrderedDict[str, Remote] = OrderedDict()
        self.lingering: list[Remote] = []

    def add(self, remote: Remote) -> None:
        """Note a loss. The caller holds `Connection.lock`."""
        self.lingering.append(remote)
        if not remote.closed:
            self._estranged[remote.name] = remote
            while len(self._estranged) > MAX_ESTRANGED:
                self._estranged.popitem(last=False)

    def sweep(self) -> None:
        """Have the library forget those to whom nothing is under way. Called by the driver."""
        # A thread that is making contact sweeps by itself.
        if self.lingering:
            contacting = self._connection.contacts.contacting
            try:  # [Note: interrupts] in progress.py
                if contacting.acquire(blocking=False):
                    self._forget()
            finally:
                try:
                    contacting.release()
                except RuntimeError:
                    pass

    def must_wait_for(self, name: str) -> bool:
        """Whether transfers to one of that name are still to end, after a short wait.

        The caller holds `Contacts.contacting`.
        """
        deadline = time.monotonic() + LINGER_SECONDS
        # Who was just told of the loss may be here before its operation is counted out.
        while True:
            self._forget()
            if not any(remote.name == name for remote in self.lingering):
                return False
            if time.monotonic() > deadline:
                return True
            time.sleep(0.001)

    def _forget(self) -> None:
        with self._connection.lock:
            ready = [remote for remote in self.lingering if remote.flight == 0]
            self.lingering = [remote for remote in self.lingering if remote.flight != 0]
        for remote in ready:
            self._connection.adapter.remove_remote(remote.name)
            self._connection.codec.forget(remote.name)

    def hear_again(self, name: str, now: float) -> Remote | None:
        """Contact a lost remote anew because a frame of it came: it lives, and may wait for us.

        Returns:
            None if it isn't one, or is dead after all.
        """
        lost = self._estranged.get(name)
        if lost is None or lost.identity is None:
            return None
        contacts = self._connection.contacts
        if lost.identity.host == contacts.identity.host:
            if not host.is_alive(lost.identity):
                return None
        elif now - lost.lost_at < RECONTACT_SECONDS:
            return None
        try:
            remote = contacts.contact(name, lost.connection_blob)
        except (PeerLostError, MetadataError) as error:
            log.info("can't contact %s again: %s", name, error)
            return None
        with self._connection.lock:
            self._estranged.pop(name, None)
        return remote

    def seek(self, lost: Remote, now: float) -> None:
        """Contact one anew, now and then, because it lives and may hold memory of ours.

        If it has lost this process, too, neither would ever hear of the other.
        """
        if now < lost.seek_at or lost.flight:
            return
        lost.seek_at = now + lost.seek_after
        lost.seek_after = min(2 * lost.seek_after, MAX_SEEK_SECONDS)
        self.hear_again(lost.name, now)

    def identity_of(self, name: str) -> Identity | None:
        """Which process a lost one was; None if that isn't known."""
        lost = self._estranged.get(name)
        return None if lost is None else lost.identity

    def on_late_bye(self, name: str) -> None:
        """Note that a lost remote has left by itself: there is nobody to be contacted again."""
        with self._connection.lock:
            lost = self._estranged.pop(name, None)
        if lost is not None:
            lost.closed = True
