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
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from torch_nixl.engine import host, observers, wire
from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind, Registration
from torch_nixl.engine.contacts import Contacts
from torch_nixl.engine.deferred import Deferred
from torch_nixl.engine.dispatch import Dispatcher, FrameHandler
from torch_nixl.engine.envelope import derive
from torch_nixl.engine.grants import GrantState
from torch_nixl.engine.memory import Memory, require_writable
from torch_nixl.engine.offer import Offer
from torch_nixl.engine.operation import Operation, deadline_after
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.prepared import PreparedLists
from torch_nixl.engine.progress import (
    EXPOSED_SECONDS,
    IDLE_SECONDS,
    WAIT_SECONDS,
    Progress,
)
from torch_nixl.engine.registry import RegisteredMemory, Registry
from torch_nixl.engine.remotes import Remote
from torch_nixl.engine.statistics import ConnectionStatistics, Counters
from torch_nixl.engine.streams import StreamOrder, order_of_memories
from torch_nixl.engine.table import OperationTable
from torch_nixl.engine.transfer import TransferOperation
from torch_nixl.errors import (
    ClosedError,
)

log = logging.getLogger("torch_nixl.connection")

DEFAULT_TIMEOUT = 300.0
"""Seconds after which an operation times out unless told otherwise."""

MENDING_SECONDS = 1.0
"""How often ends that were cut short are looked for."""

ABORT_SECONDS = 5.0
"""How long `abort` waits for threads that are moving bytes: a post takes milliseconds."""

STOP_SHARE = 0.25
"""Share of `close`'s time that is kept for stopping what has not ended. An agent that dies under a
transfer costs the other side its connection, and has the library complain on both."""

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
        self.prepared = PreparedLists(self)
        self.deferred = Deferred()
        self._deferred_entries = self.deferred.entries  # looked at in every poll
        self._dispatcher = Dispatcher(self)
        self._claim_numbers = itertools.count(1)
        self._next_mending = 0.0
        self._tickers: list[Callable[[float], None]] = []
        self._reachable = False
        self.closing = False
        self._closed: str = ""
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
        self._reachable = True
        self.progress.kick()
        blobs = [self.contacts.own_blob] if connection else []
        by_kind: dict[MemoryKind, dict[int, Registration]] = {}
        for held in memories:
            if held.entry is not None:
                registration = held.entry.registration
                by_kind.setdefault(held.memory.kind, {})[id(registration)] = registration
        blobs += [
            self.adapter.metadata(list(group.values()), connection=False)
            for group in by_kind.values()
        ]
        return tuple(blobs)

    def public_metadata(self, memories: Sequence[RegisteredMemory]) -> bytes:
        """One blob with the connection and these memories' regions, under all their device ids.

        For peers that take one blob only and look memory up under `PUBLIC_DEVICE_ID`.

        Raises:
            ValueError: The memories are of several kinds, which one blob can't hold.
        """
        self._reachable = True
        self.progress.kick()
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
        held = self._hold(memories, target=direction is Direction.WRITE, public=public)
        operation = PassiveOperation(self, direction, held, deadline=deadline)
        operation.order = self._order(memories, stream, held)
        self._start(operation)
        self.progress.kick()
        return operation

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
        deadline = self._deadline(timeout)
        held = self._hold(memories, target=offer.direction is Direction.READ)
        try:
            remote = self.contact(offer.owner, offer.metadata[0])
            number = next(self._claim_numbers)
            operation = ActiveOperation(self, remote, offer, held, claim=number, deadline=deadline)
            operation.order = order_of_memories(memories, stream=stream)
        except BaseException:
            self._drop(held)
            raise
        self._start(operation)
        operation.attend()
        self.progress.kick()
        return operation

    def _order(
        self, memories: Sequence[Memory], stream: object, held: Sequence[RegisteredMemory]
    ) -> StreamOrder | None:
        try:
            return order_of_memories(memories, stream=stream)
        except BaseException:
            self._drop(held)
            raise

    def _start(self, operation: Operation) -> None:
        try:
            self.operations.add(operation)
        except ClosedError as error:
            operation.abort(error)
            raise

    def transfer(self, operation: TransferOperation) -> None:
        """Start an operation that a protocol above has been granted by its own rules."""
        self._start(operation)
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
            # One by one, so that those before a refused one can be let go again.
            for memory in memories:
                held += [self.register(memory, public=public)]
        except BaseException:
            self._drop(held)
            raise
        return held

    def _drop(self, held: Iterable[RegisteredMemory]) -> None:
        for registered in held:
            self.registry.release(registered)

    def _deadline(self, timeout: float | None) -> float | None:
        return deadline_after(self.timeout if timeout is None else timeout)

    # Remotes.

    def contact(self, name: str, connection_blob: bytes, *, foreign: bool = False) -> Remote:
        """Find or make the remote of that name, and greet it.

        Args:
            name: The agent's name.
            connection_blob: Metadata that tells how to reach it.
            foreign: It speaks no frames of ours: nothing is sent to it but what is asked for.

        Raises:
            MetadataError: The blob is of another agent, or NIXL refused it.
            PeerLostError: It can't be reached.
            ClosedError: The connection is closed.
        """
        self._check_open()
        remote = self.contacts.contact(name, connection_blob, foreign=foreign)
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

    def on_tick(self, callback: Callable[[float], None]) -> None:
        """Have a protocol above look at its deadlines, too: called by the driver, with the time."""
        self._tickers.append(callback)

    # Driven by progress.

    def poll(self) -> bool:
        """Take in what has arrived; return whether anything had."""
        moved = self._dispatcher.poll()
        if self._deferred_entries:
            moved |= self.deferred.run()
        return moved

    def advance(self) -> bool:
        """Advance operations that no thread attends; return whether anything moved."""
        moved = False
        for operation in list(self.operations.transfers):
            if not operation.attended:
                moved |= operation.attend()
        return moved

    def tick(self, now: float) -> None:
        """Look at deadlines, silent remotes and what is left of lost ones."""
        for operation in self.operations.overdue(now):
            operation.expire()
        waited_for = {
            remote
            for operation in (*self.operations.transfers, *self.operations.busy)
            if (remote := operation.remote) is not None
        }
        for exposed in list(self.operations.busy):
            if exposed.done:
                exposed.check_quarantine()
        if now >= self._next_mending:
            self._next_mending = now + MENDING_SECONDS
            for operation in list(self.operations.ended):
                operation.mend()
        self.contacts.look_after(now, waited_for)
        self.registry.collect()
        for callback in self._tickers:
            callback(now)

    def is_moving(self) -> bool:
        """Whether bytes are meant to be moving, to or from this process."""
        return bool(self.operations.transfers or self.operations.busy or self.deferred.entries)

    def is_watched(self) -> bool:
        """Whether somebody waits for an end who doesn't poll."""
        return bool(self.operations.watched)

    def poll_interval(self) -> float | None:
        """Longest sleep between two polls that what is outstanding allows."""
        operations = self.operations
        if operations.watched or self.deferred.entries:
            return WAIT_SECONDS
        if any(not one.done for one in (*operations.transfers, *operations.busy)):
            return WAIT_SECONDS
        if len(operations):
            return EXPOSED_SECONDS
        # Once metadata has left, a stranger may knock at any time, and is owed an answer.
        waiting = self._reachable or len(self.contacts) or self.contacts.lingering
        return IDLE_SECONDS if waiting else None

    def crash(self, error: BaseException) -> None:
        self.abort(f"its progress thread failed: {error!r}")

    # The end.

    def close(self, timeout: float = 5.0) -> None:
        """End gracefully: withdraw what is offered, let what is granted end, tell the remotes.

        Idempotent. Nobody may call it from a signal handler: it takes locks.

        Args:
            timeout: Seconds. What has not ended by the last quarter of them is stopped, on both
                sides, and what can't be is aborted at their end.
        """
        if self._closed:
            return
        deadline = deadline_after(timeout)
        self.closing = True
        with contextlib.suppress(ClosedError):  # Another thread has aborted it meanwhile.
            for operation in self.operations.all():
                if isinstance(operation, PassiveOperation):
                    if operation.grant.state is GrantState.OFFERED:
                        operation.cancel()
            patience = deadline_after(timeout * (1 - STOP_SHARE))
            if not self.progress.wait_until(self._has_ended, patience):
                for operation in self.operations.all():
                    operation.shut(ClosedError(f"{operation}: stopped by its connection's end"))
                self.progress.wait_until(self._has_ended, deadline)
            if not self.operations.transfers:
                # Who has just said BYE is not to be sent one: NIXL logs an error for each.
                self.progress.sweep()
                # Peers take it as proof that we touch their memory no more.
                self.contacts.say_bye()
        self.abort("it was closed")

    def _has_ended(self) -> bool:
        # The thread that closes may be the one that advances operations otherwise.
        self.advance()
        return all(operation.quarantined for operation in self.operations.all())

    def abort(self, why: str = "it was aborted") -> None:
        """End at once: destroy the agent and fail everything that has not ended. Idempotent.

        Memory that a live peer was granted is never given back to the allocator: the peer may
        still touch it, and nothing can stop it. The same goes for memory of our own that a
        thread is still moving after `ABORT_SECONDS`. Nobody may call it from a signal handler.
        """
        with self.lock:
            if self._closed:
                return
            self._closed = why
        host.unwatch(self)
        self.progress.stop()
        operations = self.operations.close()
        # A thread that is inside a post moves bytes until it returns, agent or not.
        deadline = time.monotonic() + ABORT_SECONDS
        for operation in operations:
            safe = (
                not operation.touchable
                if isinstance(operation, PassiveOperation)
                else operation.hold(deadline - time.monotonic())
            )
            if not safe:
                host.keep_for_ever(operation.memories)
        self.adapter.close()
        self.registry.close()
        for operation in operations:
            operation.abort(ClosedError(f"{operation}: the connection is closed: {why}"))
        self.progress.stop()

    def disown(self) -> None:
        """Never touch the library again: this is a forked child, and the agent the parent's."""
        self._closed = "this process was forked; make a connection of its own"
        self.adapter.disown()
        self.lock = threading.Lock()
        self.operations.after_fork(self.lock)
        self.contacts.after_fork()
        self.progress.after_fork()
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

    # Figures.

    def count_end(self, operation: Operation, error: BaseException | None) -> None:
        """Count an operation that has ended."""
        self.counters.count_end(operation.nbytes, error)
        if observers.ends:
            observers.tell_end(self, operation, error)

    def statistics(self) -> ConnectionStatistics:
        """What this Connection has done so far, as frozen values."""
        return self.counters.freeze(
            self.registry.statistics, len(self.contacts), len(self.operations)
        )

    def __repr__(self) -> str:
        state = self._closed or "open"
        return f"<Connection {self.name} {state} remotes={len(self.contacts)}>"
