"""This process's end: one agent, and everything that hangs on it.

A Connection owns its registrations, remotes and operations, and the agent below them. `close()`
ends them leaves first; `abort()` destroys the agent at once, which is the only thing that stops
transfers under way, and fails everything. Both are idempotent, and both run at interpreter exit for
connections that were forgotten.

[Note: locking]
`lock` guards tables and the state of operations, never a call into the library: posts, polls and
messages run outside of it under the library's own lock. The library must not be entered from a
finalizer, a forked child, or a thread that outlives the interpreter.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from torch_nixl.engine import host, path, wire
from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind, Registration
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.envelope import derive, seal, unseal
from torch_nixl.engine.grants import GrantState
from torch_nixl.engine.memory import Memory, require_writable
from torch_nixl.engine.offer import Offer
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.progress import (
    EXPOSED_SECONDS,
    IDLE_SECONDS,
    WAIT_SECONDS,
    Progress,
)
from torch_nixl.engine.registry import RegisteredMemory, Registry
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.engine.statistics import ConnectionStatistics, Counters
from torch_nixl.engine.transfer import TransferOperation
from torch_nixl.errors import (
    ClosedError,
    MetadataError,
    PeerLostError,
)

log = logging.getLogger("torch_nixl.connection")

DEFAULT_TIMEOUT = 300.0
"""Seconds after which an operation times out unless told otherwise."""

PING_SECONDS = 0.25
"""Silence after which a remote that someone waits for is pinged; doubled while it stays silent."""

MAX_PING_SECONDS = 30.0

MAX_ENDED = 4096
"""Ended grants whose end is remembered, to tell late claimants why."""

_numbers = itertools.count(1)

FrameHandler = Callable[[Remote, bytes], None]


class Connection:
    """One agent and its remotes, memory and operations.

    Args:
        adapter: The agent. Owned from now on: closed with the Connection.
        secret: Shared by all processes that may talk to this one; frames and metadata without
            it are refused. Defaults to the environment's ``TORCH_NIXL_SECRET``.
        timeout: Seconds after which operations time out; None for never.
        peer_timeout: Seconds of silence after which a remote that someone waits for counts as
            lost. None, the default, leaves that to the transport and the operation's deadline: a
            process that computes without releasing the GIL is silent, too.
        max_registered_bytes: Budget of the registration cache; None for no limit.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        secret: bytes | str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        peer_timeout: float | None = None,
        max_registered_bytes: int | None = None,
    ) -> None:
        if secret is None:
            secret = os.environ.get("TORCH_NIXL_SECRET") or None
        if isinstance(secret, str):
            secret = secret.encode()
        self.adapter = adapter
        self.timeout = timeout
        self.peer_timeout = peer_timeout
        self.lock = threading.Lock()
        self.registry = Registry(adapter, max_bytes=max_registered_bytes)
        self.metadata_key = None if secret is None else derive(secret, "metadata")
        self.codec = wire.Codec(time.time_ns(), secret)
        self.identity = host.identity()
        self.counters = Counters()
        self._remotes: dict[str, Remote] = {}
        self._lingering: list[Remote] = []
        self._offers: dict[bytes, PassiveOperation] = {}
        self._keys: dict[bytes, PassiveOperation] = {}
        self._ended: OrderedDict[bytes, wire.Reason] = OrderedDict()
        self._claims: dict[int, ActiveOperation] = {}
        self._operations: dict[Operation, None] = {}
        self._num_claims = 0
        self._handlers: dict[int, FrameHandler] = {}
        self._reachable = False
        self._warned: set[str] = set()
        self._closed: str = ""
        self._connection_blob = adapter.metadata([], connection=True)
        self.progress = Progress(self, adapter.name)
        host.watch(self)

    @classmethod
    def open(
        cls,
        worker_id: str = "worker",
        *,
        backends: Sequence[str] = ("UCX",),
        progress_thread: float | None = None,
        secret: bytes | str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        peer_timeout: float | None = None,
        max_registered_bytes: int | None = None,
    ) -> Connection:
        """Make a Connection over NIXL.

        Args:
            worker_id: Start of the agent's name; the rest makes it unique to this incarnation.
            backends: NIXL's plugins to use.
            progress_thread: Have NIXL's own thread make progress, too, sleeping at most so many
                seconds (0.01 is a good value). For programs that hold the GIL for long; it costs
                bandwidth when all cores are busy.
            secret: See the class, as for all that follow.

        Raises:
            BackendError: NIXL is missing or can't be set up; the message says what to do.
        """
        from torch_nixl.engine.nixl import NixlAdapter

        name = f"{worker_id}-{next(_numbers)}-{secrets.token_hex(6)}"
        adapter = NixlAdapter(name, backends=backends, progress_thread=progress_thread)
        return cls(
            adapter,
            secret=secret,
            timeout=timeout,
            peer_timeout=peer_timeout,
            max_registered_bytes=max_registered_bytes,
        )

    @property
    def name(self) -> str:
        """The agent's name, unique to this incarnation."""
        return self.adapter.name

    @property
    def closed(self) -> bool:
        return bool(self._closed)

    # Memory and metadata.

    def register(self, memory: Memory, *, public: bool = False) -> RegisteredMemory:
        """Hold a registration of `memory` until `registry.release`. See `Registry.acquire`."""
        self._check_open()
        return self.registry.acquire(memory, public=public)

    def metadata(
        self, memories: Sequence[RegisteredMemory] = (), *, connection: bool = True
    ) -> tuple[bytes, ...]:
        """Blobs that tell how to reach this agent, and of the regions these memories lie in.

        One blob with the connection, if asked for, then one for each kind of memory.
        """
        self._reachable = True
        blobs = [self._connection_blob] if connection else []
        by_kind: dict[MemoryKind, dict[int, Registration]] = {}
        for held in memories:
            if held.entry is not None:
                registration = held.entry.registration
                by_kind.setdefault(held.memory.kind, {})[id(registration)] = registration
        for group in by_kind.values():
            blobs.append(self.adapter.metadata(list(group.values()), connection=False))
        return tuple(blobs)

    def public_metadata(self, memories: Sequence[RegisteredMemory]) -> bytes:
        """One blob with the connection and these memories' regions, under all their device ids.

        For peers that take one blob only and look memory up under `PUBLIC_DEVICE_ID`.

        Raises:
            ValueError: The memories are of several kinds, which one blob can't hold.
        """
        self._reachable = True
        registrations: dict[int, Registration] = {}
        for held in memories:
            if held.entry is not None:
                for one in (held.entry.registration, held.entry.public):
                    if one is not None:
                        registrations[id(one)] = one
        return self.adapter.metadata(list(registrations.values()), connection=True)

    # Operations.

    def expose(
        self,
        direction: Direction,
        memories: Sequence[Memory],
        *,
        timeout: float | None = None,
        public: bool = False,
    ) -> PassiveOperation:
        """Offer memory to one peer that holds the operation's offer.

        Args:
            direction: What the peer may do: read or write.
            memories: What it may touch.
            timeout: Seconds until the offer lapses; the Connection's by default.
            public: Also register for peers that know only device id 0.

        Raises:
            ValueError: A target can't be written to.
            RegistrationError: NIXL refused the memory.
            ClosedError: The connection is closed.
        """
        held = self._hold(memories, target=direction is Direction.WRITE, public=public)
        operation = PassiveOperation(self, direction, held, deadline=self._deadline(timeout))
        with self.lock:
            self._offers[operation.key] = operation
            self._operations[operation] = None
        self.progress.kick()
        return operation

    def claim(
        self, offer: Offer, memories: Sequence[Memory], *, timeout: float | None = None
    ) -> ActiveOperation:
        """Take up a peer's offer: read its memory into ours, or write ours into it.

        Returns at once; the bytes move while someone waits or in the background.

        Args:
            offer: From the peer, over whatever channel.
            memories: Pairwise as large as the offer's.
            timeout: Seconds; the Connection's by default.

        Raises:
            TransferError: Number or sizes differ from what is offered.
            ValueError: A target can't be written to.
            RegistrationError: NIXL refused the memory.
            MetadataError: The offer's metadata is not acceptable.
            PeerLostError: The owner can't be reached.
            ClosedError: The connection is closed.
        """
        held = self._hold(memories, target=offer.direction is Direction.READ)
        try:
            remote = self.contact(offer.owner, offer.metadata[0])
            with self.lock:
                self._num_claims += 1
                number = self._num_claims
            operation = ActiveOperation(
                self, remote, offer, held, claim=number, deadline=self._deadline(timeout)
            )
        except BaseException:
            self._drop(held)
            raise
        with self.lock:
            self._claims[number] = operation
            self._operations[operation] = None
        operation.attend()
        self.progress.kick()
        return operation

    def transfer(self, operation: TransferOperation) -> None:
        """Start an operation that a protocol above has been granted by its own rules."""
        self._check_open()
        assert operation.remote is not None
        with self.lock:
            operation.remote.flight += 1
            operation.counted = True
            self._operations[operation] = None
        operation.attend()
        if not operation.done:
            self.progress.kick()

    def _hold(
        self, memories: Sequence[Memory], *, target: bool, public: bool = False
    ) -> list[RegisteredMemory]:
        if target:
            for index, memory in enumerate(memories):
                require_writable(memory, f"memories[{index}]")
        held: list[RegisteredMemory] = []
        try:
            for memory in memories:
                held.append(self.register(memory, public=public))
        except BaseException:
            self._drop(held)
            raise
        return held

    def _drop(self, held: Iterable[RegisteredMemory]) -> None:
        for registered in held:
            self.registry.release(registered)

    def _deadline(self, timeout: float | None) -> float | None:
        seconds = self.timeout if timeout is None else timeout
        return None if seconds is None else time.monotonic() + seconds

    def forget(self, operation: Operation) -> None:
        """Take a released operation out of the tables."""
        with self.lock:
            if self._operations.pop(operation, self) is self:
                return
            match operation:
                case PassiveOperation():
                    self._offers.pop(operation.key, None)
                    if operation.foreign_key:
                        self._keys.pop(operation.foreign_key, None)
                    self._ended[operation.key] = operation.grant.reason or wire.Reason.UNKNOWN
                    while len(self._ended) > MAX_ENDED:
                        self._ended.popitem(last=False)
                case ActiveOperation():
                    self._claims.pop(operation.claim, None)
            if isinstance(operation, TransferOperation) and operation.counted:
                assert operation.remote is not None
                operation.remote.flight -= 1

    def accept_key(self, operation: PassiveOperation, key: bytes) -> None:
        """Let a message that is `key` end an operation: all that a foreign peer ever says.

        Refused where a secret is set: such a message proves nothing.

        Raises:
            ValueError: A secret is set.
        """
        if self.metadata_key is not None:
            raise ValueError("a secret is set: peers that can't authenticate are refused")
        with self.lock:
            operation.foreign_key = key
            self._keys[key] = operation

    # Remotes.

    def contact(self, name: str, connection_blob: bytes, *, foreign: bool = False) -> Remote:
        """Find or make the remote of that name, and greet it.

        Raises:
            MetadataError: The blob is of another agent, or NIXL refused it.
            PeerLostError: It can't be reached.
            ClosedError: The connection is closed.
        """
        self._check_open()
        with self.lock:
            remote = self._remotes.get(name)
        if remote is not None:
            return remote
        contact = Contact.FOREIGN if foreign else Contact.GREETING
        remote = Remote(name, contact, connection_blob)
        self._sweep_lingering(name)
        if name == self.name:
            remote.contact = Contact.READY
            remote.identity = self.identity
        else:
            self._add(remote)
        with self.lock:
            known = self._remotes.setdefault(name, remote)
        if known is remote and contact is Contact.GREETING and name != self.name:
            self._greet(remote)
        return known

    def _add(self, remote: Remote) -> None:
        info = self.adapter.inspect(remote.connection_blob)
        if info.agent != remote.name:
            raise MetadataError(
                f"metadata of agent {info.agent!r} was handed over for agent {remote.name!r}"
            )
        self.adapter.add_remote(remote.connection_blob)
        remote.learn(info)

    def _greet(self, remote: Remote) -> None:
        remote.nonce = secrets.token_bytes(16)
        metadata = seal(self._connection_blob, key=self.metadata_key)
        self.send(remote, wire.Hello(remote.nonce, self.identity, 1, 1, metadata))

    def learn(self, remote: Remote, blobs: Sequence[bytes], infos: Sequence[BlobInfo]) -> bool:
        """Tell the library of a remote's regions; False if that must wait for transfers to end.

        Raises:
            MetadataError: NIXL refused a blob.
            PeerLostError: The remote is lost.
        """
        if remote.lost_error is not None:
            raise PeerLostError(str(remote.lost_error), remote=remote.name)
        if remote.name == self.name:
            with self.lock:
                remote.flight += 1
            return True
        with self.lock:
            missing = [
                (blob, info)
                for blob, info in zip(blobs, infos, strict=True)
                if info.sections and not remote.knows(info)
            ]
            crowded = any(not remote.has_room(info) for _, info in missing)
            if crowded and remote.flight:
                return False
            remote.flight += 1
        try:
            if crowded:
                # [Note: device ids]: what it was told can only be forgotten as a whole.
                self.counters.relearned += 1
                self.adapter.remove_remote(remote.name)
                remote.forget_regions()
                if infos[0].connections:
                    remote.connection_blob = blobs[0]
                self._add(remote)
                missing = list(zip(blobs, infos, strict=True))
            missing = [pair for pair in missing if not remote.knows(pair[1])]
            for blob, info in missing:
                self.adapter.add_remote(blob)
                remote.learn(info)
        except BaseException:
            with self.lock:
                remote.flight -= 1
            raise
        return True

    def lose(self, remote: Remote, error: BaseException) -> None:
        """Note that a remote is gone: everything that waits for it ends with PeerLostError."""
        with self.lock:
            if remote.lost_error is not None:
                return
            remote.lost_error = error
            remote.contact = Contact.LOST
            if self._remotes.get(remote.name) is remote:
                del self._remotes[remote.name]
            if remote.name != self.name:
                self._lingering.append(remote)
            concerned = [op for op in self._operations if op.remote is remote]
        self.counters.lost += 1
        log.info("lost %s: %s", remote.name, error)
        for operation in concerned:
            operation.on_lost(
                PeerLostError(f"{operation}: the peer is lost: {error}", remote=remote.name)
            )
        self.progress.kick()

    def _sweep_lingering(self, name: str = "") -> None:
        """Have the library forget lost remotes once nothing is under way to them."""
        with self.lock:
            ready = [remote for remote in self._lingering if remote.flight == 0]
            self._lingering = [remote for remote in self._lingering if remote.flight != 0]
            if any(remote.name == name for remote in self._lingering):
                raise PeerLostError(
                    f"{name} was lost, and transfers to it are still to end", remote=name
                )
        for remote in ready:
            self.adapter.remove_remote(remote.name)

    def is_gone(self, remote: Remote) -> bool:
        """Whether a lost remote is certain not to touch our memory any more.

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
        """Which way bytes take to a remote: ``"cma"``, ``"tcp"`` or, to other hosts, ``"network"``.

        Known once the remote has answered; ``"unknown"`` before.
        """
        identity = remote.identity
        if identity is None:
            return "unknown"
        if identity.host != self.identity.host:
            return path.NETWORK
        return path.same_host_path(identity.pid, remote.some_address())

    # Frames.

    def route(self, kind: int, handler: FrameHandler) -> None:
        """Have frames of a protocol above handled: called in the driver, in order of arrival."""
        assert kind not in self._handlers, f"frame kind {kind} has a handler"
        self._handlers[kind] = handler

    def send(self, remote: Remote, frame: wire.Frame) -> None:
        """Send a frame; a lost peer is noted, not raised: whoever waits for it is told."""
        self.send_raw(remote, self.codec.pack(frame))

    def send_raw(self, remote: Remote, data: bytes) -> None:
        """Send packed bytes as `send` does."""
        if remote.lost_error is not None or self._closed:
            return
        try:
            self.adapter.notify(remote.name, data)
        except PeerLostError as error:
            self.lose(remote, error)

    def poll(self) -> bool:
        """Take in what has arrived. Called by the driver, one thread at a time."""
        arrived = self.adapter.drain()
        if not arrived:
            return False
        now = time.monotonic()
        for sender, data in arrived:
            self.counters.frames_received += 1
            try:
                self._dispatch(sender, data, now)
            except MetadataError as error:
                self.counters.frames_refused += 1
                # A peer that sends garbage may send much of it: one warning is enough.
                level = logging.DEBUG if sender in self._warned else logging.WARNING
                self._warned.add(sender)
                log.log(level, "refused %d bytes from %s: %s", len(data), sender, error)
        return True

    def _dispatch(self, sender: str, data: bytes, now: float) -> None:
        keyed = self._keys.get(data)
        if keyed is not None:
            keyed.on_key(sender)
            return
        frame = self.codec.unpack(sender, data)
        if isinstance(frame, wire.Hello):
            self._on_hello(sender, frame, now)
            return
        remote = self._remotes.get(sender)
        if remote is None:
            raise MetadataError(f"{type(frame).__name__} from an agent that has not said HELLO")
        remote.hear(now)
        match frame:
            case wire.RawFrame():
                handler = self._handlers.get(frame.kind)
                if handler is None:
                    raise MetadataError(f"frames of kind {frame.kind} are not spoken here")
                handler(remote, frame.body)
            case wire.Claim():
                self._on_claim(remote, frame)
            case wire.Done():
                passive = self._offers.get(frame.key)
                if passive is not None:
                    passive.on_done(remote, frame)
            case wire.Granted():
                claimed = self._claims.get(frame.claim)
                if claimed is None or claimed.remote is not remote:
                    # Abandoned before it was granted: give it back.
                    self.send(
                        remote,
                        wire.Done(frame.key, frame.claim, wire.Outcome.CANCELLED, "abandoned"),
                    )
                else:
                    claimed.on_granted(frame)
            case wire.Refuse():
                claimed = self._claims.get(frame.claim)
                if claimed is not None and claimed.remote is remote:
                    claimed.on_refused(frame)
            case wire.Revoke():
                claimed = self._claims.get(frame.claim)
                if claimed is not None and claimed.remote is remote:
                    claimed.on_revoked(frame)
            case wire.Ping():
                self.send(remote, wire.Pong(frame.token))
            case wire.Pong():
                pass  # That it was heard is all that counts.
            case wire.HelloAck():
                if frame.nonce == remote.nonce and remote.contact is Contact.GREETING:
                    remote.contact = Contact.READY
                    remote.identity = frame.identity
            case wire.Bye():
                # It sends this last of all, when its own operations have ended.
                remote.closed = True
                self.lose(remote, PeerLostError(f"{sender} closed its connection", remote=sender))

    def _on_hello(self, sender: str, frame: wire.Hello, now: float) -> None:
        blob = unseal(frame.metadata, key=self.metadata_key)
        info = self.adapter.inspect(blob)
        if info.agent != sender:
            raise MetadataError(f"HELLO from {sender} with metadata of {info.agent}")
        remote = self._remotes.get(sender)
        if remote is None:
            try:
                remote = self.contact(sender, blob)
            except PeerLostError as error:
                log.info("can't answer HELLO of %s: %s", sender, error)
                return
        remote.identity = frame.identity
        remote.contact = Contact.READY
        remote.hear(now)
        answer = wire.HelloAck(frame.nonce, secrets.token_bytes(16), self.identity)
        self.send(remote, answer)
        if remote.lost_error is not None and self._remotes.get(sender) is None:
            # The peer made its connection anew, and only now we see that the old one broke.
            with contextlib.suppress(PeerLostError):
                remote = self.contact(sender, blob)
                remote.identity = frame.identity
                remote.contact = Contact.READY
                self.send(remote, answer)

    def _on_claim(self, remote: Remote, frame: wire.Claim) -> None:
        operation = self._offers.get(frame.key)
        if operation is not None:
            operation.on_claim(remote, frame)
            return
        reason = self._ended.get(frame.key, wire.Reason.UNKNOWN)
        self.send(remote, wire.Refuse(frame.key, frame.claim, reason, ""))

    # Driven by progress.

    def advance(self) -> bool:
        moved = False
        for operation in list(self._operations):
            if not operation.attended:
                moved |= operation.attend()
        return moved

    def tick(self, now: float) -> None:
        with self.lock:
            operations = list(self._operations)
            lingering = bool(self._lingering)
        waited_for: set[Remote] = set()
        for operation in operations:
            if not operation.done and operation.deadline is not None:
                if now >= operation.deadline and not operation.attended:
                    operation.expire()
            remote = operation.remote
            if remote is None:
                continue
            if operation.done and isinstance(operation, PassiveOperation):
                operation.check_quarantine()
            if not operation.released:
                waited_for.add(remote)
        for remote in waited_for:
            self._watch(remote, now)
        if lingering:
            self._sweep_lingering()
        self.registry.collect()

    def _watch(self, remote: Remote, now: float) -> None:
        """Ping a silent remote: the library tells of a death only to those who send."""
        if remote.contact not in (Contact.GREETING, Contact.READY) or remote.name == self.name:
            return
        silence = now - remote.heard_at
        if self.peer_timeout is not None and silence > self.peer_timeout and remote.pinged_at:
            self.lose(
                remote,
                PeerLostError(
                    f"{remote.name} has been silent for {silence:.1f} s "
                    f"(peer_timeout={self.peer_timeout})",
                    remote=remote.name,
                ),
            )
        elif silence > PING_SECONDS and now - remote.pinged_at > remote.ping_after:
            remote.pinged_at = now
            remote.ping_after = min(max(PING_SECONDS, remote.ping_after * 2), MAX_PING_SECONDS)
            self.send(remote, wire.Ping(secrets.randbits(64)))

    def poll_interval(self) -> float | None:
        # Once metadata has left, a stranger may knock at any time, and is owed an answer.
        interval: float | None = IDLE_SECONDS if self._remotes or self._reachable else None
        for operation in list(self._operations):
            if isinstance(operation, PassiveOperation) and (
                operation.done or operation.grant.state is GrantState.OFFERED
            ):
                if operation.watched:
                    return WAIT_SECONDS
                interval = EXPOSED_SECONDS
            elif not operation.done:
                return WAIT_SECONDS
            else:
                interval = EXPOSED_SECONDS
        return interval

    def crash(self, error: BaseException) -> None:
        self.abort(f"its progress thread failed: {error!r}")

    # The end.

    def close(self, timeout: float = 5.0) -> None:
        """End gracefully: withdraw what is offered, let what is granted end, tell the remotes.

        Idempotent. What has not ended after `timeout` seconds is aborted.
        """
        if self._closed:
            return
        deadline = time.monotonic() + timeout
        with self.lock:
            operations = list(self._operations)
        for operation in operations:
            if isinstance(operation, PassiveOperation):
                if operation.grant.state is GrantState.OFFERED:
                    operation.cancel()
        self.progress.wait_until(lambda: not self._operations, deadline)
        for remote in list(self._remotes.values()):
            if remote.contact in (Contact.GREETING, Contact.READY) and remote.name != self.name:
                self.send(remote, wire.Bye("closed"))
        self.abort("it was closed")

    def abort(self, why: str = "it was aborted") -> None:
        """End at once: destroy the agent and fail everything that has not ended. Idempotent.

        Memory that a live peer was granted is never given back to the allocator: the peer may
        still touch it, and nothing can stop it.
        """
        with self.lock:
            if self._closed:
                return
            self._closed = why
        host.unwatch(self)
        self.progress.stop()
        with self.lock:
            operations = list(self._operations)
        for operation in operations:
            if isinstance(operation, PassiveOperation) and operation.touchable:
                host.keep_for_ever(operation.memories)
        self.adapter.close()
        self.registry.close()
        for operation in operations:
            operation.abort(ClosedError(f"{operation}: the connection is closed: {why}"))
        self.progress.stop()

    def disown(self) -> None:
        """Never touch the library again: this is a forked child, and the agent the parent's."""
        self._closed = "this process was forked; make a connection of its own"
        host.keep_for_ever(self.adapter)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the connection {self.name} can't be used: {self._closed}")

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Figures.

    def count_end(self, operation: Operation, error: BaseException | None) -> None:
        """Count an operation that has ended."""
        self.counters.count_end(operation.nbytes, error)

    def statistics(self) -> ConnectionStatistics:
        """What this Connection has done so far, as frozen values."""
        return self.counters.freeze(
            self.registry.statistics, len(self._remotes), len(self._operations)
        )

    def __repr__(self) -> str:
        state = self._closed or "open"
        return f"<Connection {self.name} {state} remotes={len(self._remotes)}>"
