"""All servers and clients of KV caches on one connection, and the way from a frame to a handoff.

[Note: kv locks]
`KVHub.lock` guards everything of this package that changes: leases, pages held, handoffs. Frame
handlers, ticks, programs' calls and transfers' ends take it, and frames are sent with it held, so
that those of one request leave in order. The connection's lock may be taken inside of it, never the
other way round; so may an operation's locks, but not `TransferOperation._attending`: a transfer is
never attended to with it held. Nor is a device's runtime called, which may wait for streams that
wait for the driver.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from torch_nixl.connect.connection import Connection as ConnectConnection
from torch_nixl.engine.connection import Connection
from torch_nixl.kv import frames
from torch_nixl.kv.callbacks import Callbacks
from torch_nixl.kv.frames import Head
from torch_nixl.kv.leases import LeaseId
from torch_nixl.kv.protocol import Event, Outcome, Role
from torch_nixl.kv.registered import RegisteredPool
from torch_nixl.p2p.communicator import Communicator

if TYPE_CHECKING:
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.kv.cache import KVCache
    from torch_nixl.kv.client import KVCacheClient
    from torch_nixl.kv.handoff import Handoff
    from torch_nixl.kv.heartbeat import Heartbeat
    from torch_nixl.kv.server import KVCacheServer
    from torch_nixl.kv.service import Service

NO_SERVER: Final = "there is no such server here, or not any more"


class KVHub:
    """Hands the frames of one connection to the servers and clients on it.

    Attributes:
        lock: See [Note: kv locks].
        registering: Held while a cache is registered, which may wait for its device.
        callbacks: Programs', of requests that have ended.
        numbers: Names of decode's requests in this process.
        asked: Decode's handoffs, by number.
        taken: Prefill's handoffs, by the peer's name and its number.
        heartbeats: By number.
    """

    def __init__(self, connection: Connection) -> None:
        # Weak: the connection holds this hub by its handlers.
        self._connection = weakref.ref(connection)
        self.lock = threading.RLock()
        self.registering = threading.Lock()
        self.callbacks = Callbacks()
        self.numbers = itertools.count(1)
        self.asked: dict[int, Handoff] = {}
        self.taken: dict[tuple[str, int], Handoff] = {}
        self.heartbeats: dict[int, Heartbeat] = {}
        # Their parity says which: see `frames.role_of`.
        self._server_numbers = itertools.count(2, 2)
        self._client_numbers = itertools.count(3, 2)
        self._servers: dict[int, KVCacheServer] = {}
        self._clients: dict[int, KVCacheClient] = {}
        self._pools: dict[int, RegisteredPool] = {}
        for kind, handler in (
            (frames.MEET, self._on_meet),
            (frames.WELCOME, self._on_welcome),
            (frames.TAKE, self._on_take),
            (frames.GRANT, self._on_grant),
            (frames.READY, self._on_ready),
            (frames.REJECT, self._on_reject),
            (frames.CANCEL, self._on_cancel),
            (frames.DONE, self._on_done),
            (frames.BEAT, self._on_beat),
        ):
            connection.route(kind, self._locked_handler(handler))
        connection.rounds.tickers.append(self._tick)

    # Services and pools.

    def register(self, cache: KVCache) -> RegisteredPool:
        """Find or make the registration of a cache, and count one more user.

        Raises:
            RegistrationError: NIXL refused the memory.
            ValueError: It can't be written to, or shares memory in a wrong way: its groups, or
                with another cache.
            ClosedError: The connection is closed.
        """
        connection = self._connection()
        assert connection is not None
        with self.registering:
            with self.lock:
                pool = self._pools.get(id(cache))
                if pool is not None:
                    pool.enter()
                    return pool
                others = list(self._pools.values())
            pool = RegisteredPool(connection, cache, others)
            with self.lock:
                pool.enter()
                self._pools[id(cache)] = pool
                return pool

    def leave(self, pool: RegisteredPool) -> None:
        """Count one user less."""
        if pool.leave():
            del self._pools[id(pool.cache)]

    def add_server(self, server: KVCacheServer) -> int:
        """Take frames in for a server; return its number."""
        with self.lock:
            number = next(self._server_numbers)
            self._servers[number] = server
            return number

    def add_client(self, client: KVCacheClient) -> int:
        """Take frames in for a client; return its number."""
        with self.lock:
            number = next(self._client_numbers)
            self._clients[number] = client
            return number

    def remove(self, service: Service) -> None:
        """Take nothing new in for a service. Its handoffs still end as they can."""
        with self.lock:
            self._servers.pop(service.number, None)
            self._clients.pop(service.number, None)

    # Handoffs.

    def add(self, handoff: Handoff) -> None:
        """Know a handoff until it is released, and have its peer looked after.

        Raises:
            ClosedError: The connection was closed meanwhile.
        """
        connection = self._connection()
        assert connection is not None and handoff.remote is not None
        connection.operations.add(handoff)
        connection.operations.busy[handoff] = None
        if handoff.side.role is Role.DECODE:
            self.asked[handoff.number] = handoff
        else:
            self.taken[handoff.remote.name, handoff.number] = handoff
        handoff.service.add(handoff)

    def forget(self, handoff: Handoff) -> None:
        """A handoff is released."""
        if handoff.side.role is Role.DECODE:
            self.asked.pop(handoff.number, None)
        else:
            assert handoff.remote is not None
            self.taken.pop((handoff.remote.name, handoff.number), None)
        handoff.service.remove(handoff)

    def find(self, remote: Remote, head: Head) -> Handoff | None:
        """The handoff that a frame is about; which side of it we are, its service says."""
        if frames.role_of(head.service) is Role.PREFILL:
            return self.taken.get((remote.name, head.number))
        found = self.asked.get(head.number)
        if found is None or found.remote is None or found.remote.name != remote.name:
            return None
        return found

    @property
    def services(self) -> list[Service]:
        """All that frames are taken in for."""
        return [*self._servers.values(), *self._clients.values()]

    def _tick(self, now: float) -> None:
        connection = self._connection()
        with self.lock:
            for service in self.services:
                service.on_tick(now)
                if connection is not None and connection.closing:
                    service.give_up()
            for heartbeat in list(self.heartbeats.values()):
                heartbeat.on_tick(now)

    def when_passed(self, order: StreamOrder | None, action: Callable[[], None]) -> None:
        """Do it once what was queued on streams has run: now, or in the driver. Lock held."""
        connection = self._connection()
        if order is None or order.passed():
            action()
        elif connection is not None:
            connection.defer(order.passed, self.locked(action))

    def locked(self, action: Callable[[], None]) -> Callable[[], None]:
        """The same, with the lock taken."""

        def act() -> None:
            with self.lock:
                action()

        return act

    # Frames. In the driver, in order of arrival, with the lock held.

    def _locked_handler(
        self, handler: Callable[[Remote, bytes], None]
    ) -> Callable[[Remote, bytes], None]:
        lock = self.lock

        def handle(remote: Remote, body: bytes) -> None:
            with lock:
                handler(remote, body)

        return handle

    def send_end(
        self, remote: Remote, kind: int, head: Head, outcome: Outcome, text: str = ""
    ) -> None:
        """Send a REJECT, CANCEL or DONE that no handoff is behind."""
        connection = self._connection()
        if connection is not None:
            connection.contacts.send_body(remote, kind, frames.pack_end(head, outcome, text))

    def _on_meet(self, remote: Remote, body: bytes) -> None:
        receiver, sender, at = frames.parse_meet(body)
        server = self._servers.get(receiver)
        if server is None:
            head = Head(sender, 0, LeaseId(receiver, 0))
            self.send_end(remote, frames.REJECT, head, Outcome.UNKNOWN, NO_SERVER)
        else:
            server.on_meet(remote, sender, body, at)

    def _on_welcome(self, remote: Remote, body: bytes) -> None:
        receiver, sender, at = frames.parse_meet(body)
        client = self._clients.get(receiver)
        if client is not None:
            client.on_welcome(remote, sender, body, at)

    def _on_take(self, remote: Remote, body: bytes) -> None:
        take = frames.parse_take(body)
        server = self._servers.get(take.head.service)
        if server is not None:
            server.on_take(remote, take)
            return
        head = Head(take.service, take.head.number, take.head.lease)
        self.send_end(remote, frames.REJECT, head, Outcome.UNKNOWN, NO_SERVER)

    def _on_grant(self, remote: Remote, body: bytes) -> None:
        ready, runs = frames.parse_grant(body)
        handoff = self.find(remote, frames.parse_head(body))
        if handoff is not None and handoff.side.role is Role.DECODE:
            handoff.on_granted(ready, runs)
        elif handoff is None and runs:
            # Given up since, or lost: nobody is going to read them.
            head = frames.parse_head(body)
            answer = Head(frames.any_peer_of(head.service), head.number, head.lease)
            self.send_end(remote, frames.DONE, answer, Outcome.UNKNOWN)

    def _on_ready(self, remote: Remote, body: bytes) -> None:
        count = frames.parse_count(body)
        handoff = self.find(remote, frames.parse_head(body))
        if handoff is not None and handoff.side.role is Role.DECODE:
            handoff.on_ready(count)

    def _on_reject(self, remote: Remote, body: bytes) -> None:
        head = frames.parse_head(body)
        outcome, text = frames.parse_end(body)
        if head.number == 0:
            client = self._clients.get(head.service)
            if client is not None:
                client.on_refused(remote, head.lease.slot, outcome, text)
            return
        heartbeat = self.heartbeats.get(head.number)
        if heartbeat is not None:
            heartbeat.on_refused(remote, outcome, text)
            return
        handoff = self.find(remote, head)
        if handoff is not None and handoff.side.role is Role.DECODE:
            handoff.on(Event.REJECT, outcome, text)

    def _on_cancel(self, remote: Remote, body: bytes) -> None:
        head = frames.parse_head(body)
        outcome, text = frames.parse_end(body)
        handoff = self.find(remote, head)
        if handoff is not None:
            handoff.on(Event.WITHDRAW, outcome, text)
            return
        # Through, or never heard of: in either case nothing of the peer's is touched any more.
        answer = Head(frames.any_peer_of(head.service), head.number, head.lease)
        self.send_end(remote, frames.DONE, answer, Outcome.UNKNOWN)

    def _on_done(self, remote: Remote, body: bytes) -> None:
        head = frames.parse_head(body)
        outcome, text = frames.parse_end(body)
        handoff = self.find(remote, head)
        if handoff is not None:
            handoff.on(Event.DONE, outcome, text)

    def _on_beat(self, remote: Remote, body: bytes) -> None:
        milliseconds = frames.parse_count(body)
        head = frames.parse_head(body)
        server = self._servers.get(head.service)
        if server is not None:
            server.on_beat(remote, head, milliseconds / 1000)
        else:
            answer = Head(frames.any_peer_of(head.service), head.number, head.lease)
            self.send_end(remote, frames.REJECT, answer, Outcome.UNKNOWN, NO_SERVER)


AnyConnection: TypeAlias = Connection | Communicator | ConnectConnection
"""What a server or client works on."""


def hub_of(connection: Connection) -> KVHub:
    """The one hub of a connection."""
    return connection.protocols.get(KVHub)


def connection_of(connection: AnyConnection) -> Connection:
    """The connection itself, or that of a Communicator or of `torch_nixl.connect`.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(connection, Connection):
        return connection
    if isinstance(connection, Communicator):
        return connection.connection
    if isinstance(connection, ConnectConnection):
        return connection.engine
    raise TypeError(
        f"expected a Communicator or a Connection of torch_nixl.connect, not {connection!r}"
    )
