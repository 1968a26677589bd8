"""One agent for all Communicators of a process, and the way from a frame to the one it is for."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_nixl.engine.connection import Connection
from torch_nixl.errors import MetadataError
from torch_nixl.p2p import protocol, terms
from torch_nixl.p2p.exchange import Exchange

if TYPE_CHECKING:
    from torch_nixl.engine.remotes import Remote

log = logging.getLogger("torch_nixl.p2p")

# Senders of these wait for an answer, or for the message to be received.
_ANSWERED = frozenset(
    {
        protocol.INTRO,
        protocol.EAGER,
        protocol.OFFER,
        protocol.PUSH,
        protocol.WANT,
        protocol.CANCEL,
        protocol.HELP,
        terms.CHANNEL,
        terms.READY,
        terms.BYTES,
    }
)

# What receivers say of memory that is exposed to them.
_LAST_WORDS = frozenset({protocol.DONE, protocol.LEAVE, terms.BREAK})


class Hub:
    """Hands the frames of one connection to the Communicators on it.

    Attributes:
        lock: What they guard their states with: see [Note: p2p locks].
    """

    def __init__(self, connection: Connection) -> None:
        # Weak: the connection holds this hub by its handlers.
        self._connection = weakref.ref(connection)
        self._exchanges: dict[int, Exchange] = {}
        self._ending: dict[int, Exchange] = {}
        self.lock = threading.RLock()
        _hubs.add(self)
        connection.route(protocol.INTRO, self._on_intro)
        for kind in (*protocol.KINDS, *terms.KINDS):
            if kind != protocol.INTRO:
                connection.route(kind, self._route(kind))

    def after_fork(self) -> None:
        """Replace the lock, which another thread may have held at the fork."""
        self.lock = threading.RLock()
        for exchange in (*self._exchanges.values(), *self._ending.values()):
            exchange.renew_lock(self.lock)

    def add(self, exchange: Exchange) -> None:
        """Take frames in for a Communicator.

        Raises:
            ValueError: Its context is in use.
        """
        self._forget_ended()
        if self._exchanges.setdefault(exchange.context, exchange) is not exchange:
            raise ValueError(f"context {exchange.context:#x} is in use")

    @property
    def exchanges(self) -> list[Exchange]:
        """Those that frames are taken in for."""
        return list(self._exchanges.values())

    def remove(self, exchange: Exchange) -> None:
        """Take in no more but what receivers say of memory that they may still read."""
        self._forget_ended()
        if self._exchanges.get(exchange.context) is exchange:
            if exchange.is_exposed():
                self._ending[exchange.context] = exchange
            del self._exchanges[exchange.context]

    def _forget_ended(self) -> None:
        for context, exchange in list(self._ending.items()):
            if not exchange.is_exposed():
                self._ending.pop(context, None)

    def _take_last_word(self, remote: Remote, kind: int, body: bytes) -> bool:
        """Hand a frame to a closed Communicator that still exposes memory, if it is for one."""
        (context,) = protocol.CONTEXT.unpack_from(body)
        exchange = self._ending.get(context)
        peer = None if exchange is None else exchange.by_remote.get(remote)
        if exchange is None or peer is None or kind not in _LAST_WORDS:
            return False
        exchange.handlers[kind](peer, body)
        self._forget_ended()
        return True

    def _exchange(self, remote: Remote, kind: int, body: bytes) -> Exchange | None:
        if len(body) < protocol.CONTEXT.size:
            raise MetadataError("frame is cut")
        (context,) = protocol.CONTEXT.unpack_from(body)
        exchange = self._exchanges.get(context)
        if exchange is None and self._ending and self._take_last_word(remote, kind, body):
            return None
        if exchange is None and kind in _ANSWERED:
            self._answer_leave(remote, context)
        return exchange

    def _answer_leave(self, remote: Remote, context: int) -> None:
        """Nobody here will answer it: say so, or its waiters would wait for their deadlines."""
        connection = self._connection()
        if connection is not None:
            body = protocol.CONTEXT.pack(context)
            connection.contacts.send_body(remote, protocol.LEAVE, body)

    def _on_intro(self, remote: Remote, body: bytes) -> None:
        exchange = self._exchange(remote, protocol.INTRO, body)
        if exchange is not None:
            exchange.on_intro(remote, body)

    def _route(self, kind: int) -> Callable[[Remote, bytes], None]:
        exchanges = self._exchanges
        unpack = protocol.CONTEXT.unpack_from
        size = protocol.CONTEXT.size

        def handle(remote: Remote, body: bytes) -> None:
            exchange = exchanges.get(unpack(body)[0]) if len(body) >= size else None
            peer = None if exchange is None else exchange.by_remote.get(remote)
            if exchange is not None and peer is not None:
                exchange.handlers[kind](peer, body)
            elif self._exchange(remote, kind, body) is not None:
                assert exchange is not None
                # One that was lost here, and lives after all, learns so.
                if kind in _ANSWERED and not exchange.moves_with(remote.name):
                    self._answer_leave(remote, unpack(body)[0])
                raise MetadataError(f"{remote.name} has not said which rank it is")

        return handle


_hubs: weakref.WeakSet[Hub] = weakref.WeakSet()
_lock = threading.Lock()
_shared: Connection | None = None
_num_users = 0


def hub_of(connection: Connection) -> Hub:
    """The one hub of a connection."""
    return connection.protocols.get(Hub)


def exchanges_of(connection: Connection) -> list[Exchange]:
    """What the Communicators on a connection send and receive by; none where there are none."""
    return hub_of(connection).exchanges if Hub in connection.protocols else []


def share_connection(rank: int) -> Connection:
    """Use the process's own connection, and make it if nobody does yet.

    Raises:
        BackendError: NIXL is missing or can't be set up.
    """
    global _shared, _num_users
    with _lock:
        if _shared is None or _shared.closed:
            _shared = Connection.open(f"rank{rank}")
            _num_users = 0
        _num_users += 1
        return _shared


def leave_connection(connection: Connection, *, abort: bool, timeout: float) -> None:
    """Use it no more; the last to do so closes it."""
    global _shared, _num_users
    with _lock:
        if connection is not _shared:
            return
        _num_users -= 1
        if _num_users:
            return
        _shared = None
    if abort:
        connection.abort("the last Communicator was aborted")
    else:
        connection.close(timeout)


def _after_fork_in_child() -> None:
    # The engine has disowned the connections by then: its hook was registered first.
    global _lock
    _lock = threading.Lock()
    for hub in list(_hubs):
        hub.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
