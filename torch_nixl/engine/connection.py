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

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from torch_nixl.engine import ending, host, starting, wire
from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.adapter import Adapter, Direction
from torch_nixl.engine.contacts import Contacts
from torch_nixl.engine.deferred import Deferred
from torch_nixl.engine.dispatch import Dispatcher, FrameHandler
from torch_nixl.engine.envelope import derive
from torch_nixl.engine.liveness import Liveness
from torch_nixl.engine.lost import Lost
from torch_nixl.engine.memory import Memory
from torch_nixl.engine.offer import Offer
from torch_nixl.engine.operation import deadline_after
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.prepared import PreparedLists
from torch_nixl.engine.progress import Progress
from torch_nixl.engine.protocols import Protocols
from torch_nixl.engine.registry import (
    RegisteredMemory,
    Registry,
    public_regions,
    regions_by_kind,
)
from torch_nixl.engine.remotes import Remote
from torch_nixl.engine.rounds import Rounds
from torch_nixl.engine.statistics import ConnectionStatistics, Counters
from torch_nixl.engine.table import OperationTable
from torch_nixl.engine.transfer import TransferOperation
from torch_nixl.errors import ClosedError

DEFAULT_TIMEOUT = 300.0
"""Seconds after which an operation times out unless told otherwise."""

_numbers = itertools.count(1)


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
        self.codec = wire.Codec(time.time_ns(), secret, name=adapter.name)
        self.counters = Counters()
        self.operations = OperationTable(self.lock)
        self.contacts = Contacts(self)
        self.liveness = Liveness(self)
        self.lost = Lost(self)
        self.prepared = PreparedLists(self)
        self.deferred = Deferred()
        self._dispatcher = Dispatcher(self)
        self.rounds = Rounds(self, self._dispatcher, self.deferred)
        self._claim_numbers = itertools.count(1)
        self.protocols = Protocols(self)
        self.closing = False
        self._closed: str = ""
        self.progress = Progress(self.rounds, adapter.name)
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
            secret: See the class.
            timeout: See the class.
            peer_timeout: See the class.
            max_registered_bytes: See the class.

        Raises:
            BackendError: NIXL is missing or can't be set up; the message says what to do.
        """
        from torch_nixl.engine.nixl import NixlAdapter

        host.check_not_forked_in_use()
        name = f"{worker_id}-{next(_numbers)}-{secrets.token_hex(6)}"
        with host.opening():
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
        self._be_reachable()
        blobs = [self.contacts.own_blob] if connection else []
        blobs += [
            self.adapter.metadata(group, connection=False) for group in regions_by_kind(memories)
        ]
        return tuple(blobs)

    def public_metadata(self, memories: Sequence[RegisteredMemory]) -> bytes:
        """One blob with the connection and these memories' regions, under all their device ids.

        For peers that take one blob only and look memory up under `PUBLIC_DEVICE_ID`.

        Raises:
            ValueError: The memories are of several kinds, which one blob can't hold.
        """
        self._be_reachable()
        return self.adapter.metadata(public_regions(memories), connection=True)

    def _be_reachable(self) -> None:
        self.rounds.reachable = True
        self.progress.kick()

    # Operations.

    def expose(
        self,
        direction: Direction,
        memories: Sequence[Memory],
        *,
        timeout: float | None = None,
        public: bool = False,
        stream: object = None,
    ) -> PassiveOperation:
        """Offer memory to one peer that holds the operation's offer.

        Args:
            direction: What the peer may do: read or write.
            memories: What it may touch.
            timeout: Seconds until the offer lapses; `math.inf` for never; the Connection's by
                default.
            public: Also register for peers that know only device id 0.
            stream: Device memory is granted once what is queued on this stream by now has run; by
                default on its device's current one.

        Raises:
            ValueError: A target can't be written to, or `stream` is another device's.
            RegistrationError: NIXL refused the memory.
            ClosedError: The connection is closed.
        """
        deadline = self._deadline(timeout)
        return starting.expose(
            self, direction, memories, deadline=deadline, public=public, stream=stream
        )

    def claim(
        self,
        offer: Offer,
        memories: Sequence[Memory],
        *,
        timeout: float | None = None,
        stream: object = None,
    ) -> ActiveOperation:
        """Take up a peer's offer: read its memory into ours, or write ours into it.

        Returns at once; the bytes move while someone waits or in the background.

        Args:
            offer: From the peer, over whatever channel.
            memories: Pairwise as large as the offer's.
            timeout: Seconds; `math.inf` for no limit; the Connection's by default.
            stream: Device memory is touched once what is queued on this stream by now has run; by
                default on its device's current one.

        Raises:
            TransferError: Number or sizes differ from what is offered.
            ValueError: A target can't be written to, or `stream` is another device's.
            RegistrationError: NIXL refused the memory.
            MetadataError: The offer's metadata is not acceptable.
            PeerLostError: The owner can't be reached.
            ClosedError: The connection is closed.
        """
        deadline, number = self._deadline(timeout), next(self._claim_numbers)
        return starting.claim(
            self, offer, memories, number=number, deadline=deadline, stream=stream
        )

    def transfer(self, operation: TransferOperation) -> None:
        """Start an operation that a protocol above has been granted by its own rules."""
        starting.start(self, operation)
        operation.attend()
        if not operation.done:
            self.progress.kick()

    def _deadline(self, timeout: float | None) -> float | None:
        return deadline_after(self.timeout if timeout is None else timeout)

    # Remotes.

    def contact(
        self,
        name: str,
        connection_blob: bytes,
        *,
        foreign: bool = False,
        identity: wire.Identity | None = None,
    ) -> Remote:
        """Find or make the remote of that name, and greet it.

        Args:
            name: The agent's name.
            connection_blob: Metadata that tells how to reach it.
            foreign: It speaks no frames of ours: nothing is sent to it but what is asked for.
            identity: Its process, where that is known before it has said so. Memory that it is told
                of before it answers can then be given back once it has died.

        Raises:
            MetadataError: The blob is of another agent, or NIXL refused it.
            PeerLostError: It can't be reached.
            ClosedError: The connection is closed.
        """
        self._check_open()
        remote = self.contacts.contact(name, connection_blob, foreign=foreign, identity=identity)
        self.progress.kick()
        return remote

    def path(self, remote: Remote) -> str:
        """Which way bytes take to a remote: ``"cma"``, ``"tcp"`` or, to other hosts, ``"network"``.

        Known once the remote has answered; ``"unknown"`` before.
        """
        return self.contacts.path(remote)

    def accept_key(self, operation: PassiveOperation, key: bytes) -> None:
        """Let a message that is `key` end an operation: all that a foreign peer ever says.

        Raises:
            ValueError: A secret is set, and such a message proves nothing.
        """
        if self.metadata_key is not None:
            raise ValueError("a secret is set: peers that can't authenticate are refused")
        self.operations.add_key(operation, key)

    def defer(self, ready: Callable[[], bool], action: Callable[[], None]) -> None:
        """Have the driver call `action`, without locks, once `ready` holds."""
        self.deferred.add(ready, action)
        self.progress.kick()

    def route(self, kind: int, handler: FrameHandler) -> None:
        """Have frames of a protocol above handled: in the driver, in order of arrival."""
        self._dispatcher.route(kind, handler)

    # The end.

    def close(self, timeout: float = 5.0) -> None:
        """End gracefully: withdraw what is offered, let what is granted end, tell the remotes.

        Idempotent. Nobody may call it from a signal handler: it takes locks.

        Args:
            timeout: Seconds. What has not ended by the last quarter of them is stopped, on both
                sides, and what can't be is aborted at their end.
        """
        ending.close(self, timeout)

    def abort(self, why: str = "it was aborted") -> None:
        """End at once: destroy the agent and fail everything that has not ended. Idempotent.

        Memory that a live peer was granted is never given back to the allocator: the peer may
        still touch it, and nothing can stop it. The same goes for memory of our own that a thread
        is still moving after `ending.ABORT_SECONDS`. Nobody may call it from a signal handler.
        """
        with self.lock:
            if self._closed:
                return
            self._closed = why
        ending.abort(self, why)

    def disown(self) -> None:
        """Never touch the library again: this is a forked child, and the agent the parent's."""
        self._closed = "this process was forked; make a connection of its own"
        self.adapter.disown()
        self.lock = threading.Lock()
        self.operations.after_fork(self.lock)
        self.contacts.after_fork()
        self.progress.after_fork()
        self.protocols.after_fork()
        for operation in self.operations.close():
            operation.on_fork(ClosedError(f"{operation}: {self._closed}"))

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

    def statistics(self) -> ConnectionStatistics:
        """What this Connection has done so far, as frozen values."""
        return self.counters.freeze(
            self.registry.statistics, len(self.contacts), len(self.operations)
        )

    def __repr__(self) -> str:
        state = self._closed or "open"
        return f"<Connection {self.name} {state} remotes={len(self.contacts)}>"
