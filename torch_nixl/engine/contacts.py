"""Meeting remotes, telling the library of their memory, sending to them, and losing them."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch_nixl.engine import host, path, wire
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.envelope import seal, unseal
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.errors import ClosedError, MetadataError, PeerLostError, TorchNixlError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.wire import Identity

log = logging.getLogger("torch_nixl.contacts")

MAX_REMOTES = 16384
"""Remotes that strangers may make us remember by greeting us."""


class Contacts:
    """The remotes of one connection.

    Attributes:
        contacting: Held while one is contacted, or forgotten by the library.
        identity: This process's own.
        own_blob: Metadata that tells how to reach this agent.
        leaving: Names of those whose BYE has arrived behind words that the driver is still to take
            in. Nothing is sent to them: NIXL logs an error for each word to who has left.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._adapter = connection.adapter
        self._lock = connection.lock
        self.contacting = threading.RLock()
        self._remotes: dict[str, Remote] = {}
        self.identity = host.identity()
        self.own_blob = self._adapter.metadata([], connection=True)
        self.leaving: set[str] = set()

    def __len__(self) -> int:
        return len(self._remotes)

    def after_fork(self) -> None:
        """Replace locks that other threads held at the fork."""
        self._lock = self._connection.lock
        self.contacting = threading.RLock()

    def all(self) -> list[Remote]:
        """Those known, and not lost."""
        return list(self._remotes.values())

    def get(self, name: str) -> Remote | None:
        """The remote of that name, if it is known and not lost."""
        return self._remotes.get(name)

    def contact(
        self,
        name: str,
        connection_blob: bytes,
        *,
        foreign: bool = False,
        identity: Identity | None = None,
    ) -> Remote:
        """Find or make the remote of that name, and greet it. See `Connection.contact`."""
        remote = self._remotes.get(name)
        if remote is not None and remote.greeted:
            if remote.broken is None:
                return remote
            self._part(remote, remote.broken)
        # One at a time: a frame that another thread sends before our HELLO comes from a stranger.
        with self.contacting:
            remote = self._remotes.get(name)
            if remote is not None:
                return remote
            if self._connection.lost.must_wait_for(name):
                raise PeerLostError(
                    f"{name} was lost, and transfers to it are still to end", remote=name
                )
            remote = Remote(name, Contact.FOREIGN if foreign else Contact.GREETING, connection_blob)
            # It can be told from here, then, whether it has died: before it has answered, too.
            remote.identity = identity
            if identity is None and not foreign:
                remote.identity = self._connection.lost.identity_of(name)
            if name == self._adapter.name:
                remote.contact = Contact.READY
                remote.identity = self.identity
            elif name not in self.leaving:
                self._add(remote)
            with self._lock:
                self._remotes[name] = remote
            if remote.contact is Contact.GREETING:
                self._greet(remote)
                if remote.broken is not None:
                    self.lose(remote, remote.broken)
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
        if not frame.min_version <= wire.VERSION <= frame.max_version:
            raise MetadataError(
                f"{sender} speaks versions {frame.min_version} to {frame.max_version}, "
                f"this process {wire.VERSION}"
            )
        if len(self._remotes) >= MAX_REMOTES and sender not in self._remotes:
            raise MetadataError(f"HELLO from one agent too many: {MAX_REMOTES} are known")
        for exposed in list(self._connection.operations.busy):
            if exposed.remote is not None and exposed.remote.name == sender:
                exposed.on_forgotten()
        known = self._remotes.get(sender)
        answer = wire.HelloAck(frame.nonce, secrets.token_bytes(16), self.identity)
        # Twice, if need be: the peer may have made its connection anew, and only our first answer
        # shows that the old one broke.
        for _ in range(2):
            try:
                remote = self.contact(sender, blob, identity=frame.identity)
            except PeerLostError as error:
                log.info("can't answer HELLO of %s: %s", sender, error)
                return
            remote.identity = frame.identity
            remote.contact = Contact.READY
            remote.hear(now)
            self.send(remote, answer)
            if remote.broken is None:
                if remote is known:
                    for claiming in self._connection.operations.claims(remote):
                        claiming.claim_again()
                return
            # What it sent before may have come with this HELLO, its BYE too.
            self._connection.rounds.poll()
            self.lose(remote, remote.broken)
            if remote.closed:
                return

    def on_hello_ack(self, remote: Remote, frame: wire.HelloAck) -> None:
        """Note that contact is made. Runs in the driver."""
        if frame.nonce != remote.nonce:
            return
        remote.answered = True
        if remote.contact is Contact.GREETING:
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
        with remote.learning:
            crowded = any(
                not remote.knows(info) and not remote.has_room(info) for _, info in wanted
            )
            if crowded or remote.crowded:
                # What the library was told can only be forgotten as a whole, and only while
                # nothing is under way. Newcomers wait, too, or that moment might never come.
                remote.crowded = remote.flight > 0
                if remote.crowded:
                    return False
            if crowded:
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
            with self._lock:
                remote.flight += 1
        return True

    def rejoin(self, remote: Remote, epochs: Iterable[int]) -> bool:
        """Count one more operation in `flight` if nothing was forgotten since.

        Returns:
            False if the regions must be learned (anew) first.

        Raises:
            PeerLostError: The remote is lost.
        """
        if remote.lost_error is not None:
            raise PeerLostError(str(remote.lost_error), remote=remote.name)
        with remote.learning:
            if remote.crowded or any(epoch != remote.epoch for epoch in epochs):
                return False
            with self._lock:
                remote.flight += 1
        return True

    def part(self, remote: Remote, error: BaseException) -> None:
        """Note that the way to a remote is broken: it is lost once what it sent is taken in.

        That may have arrived, and would be lost with it otherwise: a rank may send and close.
        """
        if remote.broken is not None:
            return
        remote.broken = error
        self._connection.progress.call_later([lambda: self._part(remote, error)])

    def _part(self, remote: Remote, error: BaseException) -> None:
        self._connection.progress.sweep()
        self.lose(remote, error)

    def lose(self, remote: Remote, error: BaseException) -> None:
        """Note that a remote is gone: everything that waits for it ends with PeerLostError."""
        with self._lock:
            if remote.lost_error is not None:
                return
            remote.broken = remote.lost_error = error
            remote.lost_at = time.monotonic()
            remote.contact = Contact.LOST
            if self._remotes.get(remote.name) is remote:
                del self._remotes[remote.name]
            if remote.name != self._adapter.name:
                self._connection.lost.add(remote)
        self._connection.counters.lost += 1
        log.info("lost %s: %s", remote.name, error)
        for operation in self._connection.operations.all():
            if operation.remote is remote:
                operation.on_lost(
                    PeerLostError(f"{operation}: the peer is lost: {error}", remote=remote.name)
                )
        self._connection.prepared.lose(remote)
        self._connection.progress.kick()

    def on_this_host(self, remote: Remote) -> bool:
        """Whether a remote is known to be a process of this host."""
        return remote.identity is not None and remote.identity.host == self.identity.host

    def path(self, remote: Remote) -> str:
        """Which way bytes take to a remote. See `Connection.path`."""
        identity = remote.identity
        if identity is None:
            return "unknown"
        if identity.host != self.identity.host:
            return path.NETWORK
        return path.same_host_path(identity.pid, remote.some_address())

    def send(self, remote: Remote, frame: wire.Frame) -> None:
        """Send a frame; a lost peer is noted, not raised: whoever waits for it is told."""
        codec = self._connection.codec
        self._send(remote, lambda: codec.pack(frame, to=remote.name))

    def send_body(self, remote: Remote, kind: int, body: bytes) -> None:
        """Send a frame of a protocol above, as `send` does."""
        codec = self._connection.codec
        self._send(remote, lambda: codec.pack_raw(kind, body, to=remote.name))

    def _send(self, remote: Remote, pack: Callable[[], bytes]) -> None:
        if self._connection.codec.unnumbered:
            self.send_raw(remote, pack())
        else:
            with remote.sending:
                self.send_raw(remote, pack())

    def send_raw(self, remote: Remote, data: bytes) -> None:
        """Send packed bytes as `send` does."""
        if remote.broken is not None or remote.name in self.leaving or self._connection.closed:
            return
        try:
            try:
                self._adapter.notify(remote.name, data)
            except MetadataError:
                # It may be unknown for a moment, while it is learned anew; or for good, if another
                # thread has lost it right now.
                with remote.learning:
                    if remote.broken is None:
                        self._adapter.notify(remote.name, data)
        except ClosedError:
            pass  # Another thread has aborted the connection: everything ends with that.
        except TorchNixlError as error:
            self.part(remote, remote.explain(error))

    def say_bye(self) -> None:
        """Tell all remotes that this side ends and won't touch their memory any more."""
        for remote in list(self._remotes.values()):
            if remote.contact in (Contact.GREETING, Contact.READY):
                if remote.name != self._adapter.name:
                    self.send(remote, wire.Bye("closed"))
