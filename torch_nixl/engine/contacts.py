"""Meeting remotes, telling the library of their memory, and noticing that they are gone."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_nixl.engine import host, path, wire
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.envelope import seal, unseal
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.errors import MetadataError, PeerLostError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection

log = logging.getLogger("torch_nixl.contacts")

PING_SECONDS = 0.25
"""Silence after which a remote that someone waits for is pinged; doubled while it stays silent."""

MAX_PING_SECONDS = 30.0
"""Longest interval between two pings of a silent remote."""


class Contacts:
    """The remotes of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._adapter = connection.adapter
        self._lock = connection.lock
        self._contacting = threading.Lock()
        self._remotes: dict[str, Remote] = {}
        self._lingering: list[Remote] = []
        self.identity = host.identity()
        self.own_blob = self._adapter.metadata([], connection=True)

    def __len__(self) -> int:
        return len(self._remotes)

    def get(self, name: str) -> Remote | None:
        """The remote of that name, if it is known and not lost."""
        return self._remotes.get(name)

    def contact(self, name: str, connection_blob: bytes, *, foreign: bool = False) -> Remote:
        """Find or make the remote of that name, and greet it. See `Connection.contact`."""
        remote = self._remotes.get(name)
        if remote is not None and remote.greeted:
            return remote
        # One at a time: a frame that another thread sends before our HELLO comes from a stranger.
        with self._contacting:
            remote = self._remotes.get(name)
            if remote is not None:
                return remote
            self.sweep(name)
            remote = Remote(name, Contact.FOREIGN if foreign else Contact.GREETING, connection_blob)
            if name == self._adapter.name:
                remote.contact = Contact.READY
                remote.identity = self.identity
            else:
                self._add(remote)
            with self._lock:
                self._remotes[name] = remote
            if remote.contact is Contact.GREETING:
                self._greet(remote)
            remote.greeted = True
            if remote.lost_error is not None:
                raise PeerLostError(f"{name} can't be reached: {remote.lost_error}", remote=name)
        return remote

    def _add(self, remote: Remote) -> None:
        info = self._adapter.inspect(remote.connection_blob)
        if info.agent != remote.name:
            raise MetadataError(
                f"metadata of agent {info.agent!r} was handed over for agent {remote.name!r}"
            )
        self._adapter.add_remote(remote.connection_blob)
        remote.learn(info)

    def _greet(self, remote: Remote) -> None:
        remote.nonce = secrets.token_bytes(16)
        metadata = seal(self.own_blob, key=self._connection.metadata_key)
        version = wire.VERSION
        self.send(remote, wire.Hello(remote.nonce, self.identity, version, version, metadata))

    def on_hello(self, sender: str, frame: wire.Hello, now: float) -> None:
        """Answer a HELLO. Runs in the driver.

        Raises:
            MetadataError: Its metadata is not acceptable, or not the sender's.
        """
        blob = unseal(frame.metadata, key=self._connection.metadata_key)
        info = self._adapter.inspect(blob)
        if info.agent != sender:
            raise MetadataError(f"HELLO from {sender} with metadata of {info.agent}")
        answer = wire.HelloAck(frame.nonce, secrets.token_bytes(16), self.identity)
        # Twice, if need be: the peer may have made its connection anew, and only our first answer
        # shows that the old one broke.
        for _ in range(2):
            try:
                remote = self.contact(sender, blob)
            except PeerLostError as error:
                log.info("can't answer HELLO of %s: %s", sender, error)
                return
            remote.identity = frame.identity
            remote.contact = Contact.READY
            remote.hear(now)
            self.send(remote, answer)
            if remote.lost_error is None:
                return

    def on_hello_ack(self, remote: Remote, frame: wire.HelloAck) -> None:
        """Note that contact is made. Runs in the driver."""
        if frame.nonce == remote.nonce and remote.contact is Contact.GREETING:
            remote.contact = Contact.READY
            remote.identity = frame.identity

    def learn(self, remote: Remote, blobs: Sequence[bytes], infos: Sequence[BlobInfo]) -> bool:
        """Tell the library of a remote's regions, and count one more operation in `flight`.

        Returns:
            False if it must wait for other operations with the remote to end: see
            [Note: device ids]. Nothing is counted then.

        Raises:
            MetadataError: The library refused a blob.
            PeerLostError: The remote is lost.
        """
        if remote.lost_error is not None:
            raise PeerLostError(str(remote.lost_error), remote=remote.name)
        wanted = [] if remote.name == self._adapter.name else list(zip(blobs, infos, strict=True))
        with self._lock:
            crowded = any(
                not remote.knows(info) and not remote.has_room(info) for _, info in wanted
            )
            if crowded and remote.flight:
                return False
            remote.flight += 1
        try:
            if crowded:
                # What it was told can only be forgotten as a whole.
                self._connection.counters.relearned += 1
                self._adapter.remove_remote(remote.name)
                remote.forget_regions()
                if infos[0].connections:
                    remote.connection_blob = blobs[0]
                self._add(remote)
            for blob, info in wanted:
                if info.sections and not remote.knows(info):
                    self._adapter.add_remote(blob)
                    remote.learn(info)
        except BaseException:
            with self._lock:
                remote.flight -= 1
            raise
        return True

    def lose(self, remote: Remote, error: BaseException) -> None:
        """Note that a remote is gone: everything that waits for it ends with PeerLostError."""
        with self._lock:
            if remote.lost_error is not None:
                return
            remote.lost_error = error
            remote.contact = Contact.LOST
            if self._remotes.get(remote.name) is remote:
                del self._remotes[remote.name]
            if remote.name != self._adapter.name:
                self._lingering.append(remote)
        self._connection.counters.lost += 1
        log.info("lost %s: %s", remote.name, error)
        for operation in self._connection.operations.all():
            if operation.remote is remote:
                operation.on_lost(
                    PeerLostError(f"{operation}: the peer is lost: {error}", remote=remote.name)
                )
        self._connection.progress.kick()

    def sweep(self, name: str = "") -> None:
        """Have the library forget lost remotes once nothing is under way to them.

        Raises:
            PeerLostError: The remote called `name` is lost, and something still is.
        """
        if not self._lingering:
            return
        with self._lock:
            ready = [remote for remote in self._lingering if remote.flight == 0]
            self._lingering = [remote for remote in self._lingering if remote.flight != 0]
            waiting = any(remote.name == name for remote in self._lingering)
        for remote in ready:
            self._adapter.remove_remote(remote.name)
            self._connection.codec.forget(remote.name)
        if waiting:
            raise PeerLostError(
                f"{name} was lost, and transfers to it are still to end", remote=name
            )

    def is_gone(self, remote: Remote) -> bool:
        """Whether a remote is certain not to touch our memory any more.

        It said so itself; or its process is dead, on this host; or, on another host, the
        connection broke over which alone it could.
        """
        if remote.closed:
            return True
        identity = remote.identity
        if identity is None or identity.host != self.identity.host:
            return remote.lost_error is not None
        return not host.is_alive(identity)

    def path(self, remote: Remote) -> str:
        """Which way bytes take to a remote. See `Connection.path`."""
        identity = remote.identity
        if identity is None:
            return "unknown"
        if identity.host != self.identity.host:
            return path.NETWORK
        return path.same_host_path(identity.pid, remote.some_address())

    def watch(self, remote: Remote, now: float) -> None:
        """Ping a silent remote: the library tells of a death only to those who send."""
        if remote.contact not in (Contact.GREETING, Contact.READY):
            return
        if remote.name == self._adapter.name:
            return
        silence = now - remote.heard_at
        limit = self._connection.peer_timeout
        if limit is not None and silence > limit and remote.pinged_at:
            why = f"{remote.name} has been silent for {silence:.1f} s (peer_timeout={limit})"
            self.lose(remote, PeerLostError(why, remote=remote.name))
        elif silence > PING_SECONDS and now - remote.pinged_at > remote.ping_after:
            remote.pinged_at = now
            remote.ping_after = min(max(PING_SECONDS, remote.ping_after * 2), MAX_PING_SECONDS)
            self.send(remote, wire.Ping(secrets.randbits(64)))

    def send(self, remote: Remote, frame: wire.Frame) -> None:
        """Send a frame; a lost peer is noted, not raised: whoever waits for it is told."""
        self.send_raw(remote, self._connection.codec.pack(frame, to=remote.name))

    def send_raw(self, remote: Remote, data: bytes) -> None:
        """Send packed bytes as `send` does."""
        if remote.lost_error is not None or self._connection.closed:
            return
        try:
            self._adapter.notify(remote.name, data)
        except PeerLostError as error:
            self.lose(remote, error)

    def say_bye(self) -> None:
        """Tell all remotes that this side ends and won't touch their memory any more."""
        for remote in list(self._remotes.values()):
            if remote.contact in (Contact.GREETING, Contact.READY):
                if remote.name != self._adapter.name:
                    with contextlib.suppress(MetadataError):
                        self.send(remote, wire.Bye("closed"))
