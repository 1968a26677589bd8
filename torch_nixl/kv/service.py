"""What servers and clients of KV caches have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from torch_nixl.engine.operation import Operation, deadline_after
from torch_nixl.errors import ClosedError, TransferError
from torch_nixl.kv.frames import role_of
from torch_nixl.kv.hub import AnyConnection, connection_of, hub_of
from torch_nixl.kv.meeting import Meeting
from torch_nixl.kv.pools import parse_pool
from torch_nixl.kv.protocol import Outcome
from torch_nixl.kv.registered import check_regions
from torch_nixl.kv.request import Ended, Request
from torch_nixl.kv.statistics import Figures, KVStatistics

if TYPE_CHECKING:
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.kv.cache import KVCache
    from torch_nixl.kv.compatibility import Compatibility
    from torch_nixl.kv.handoff import Handoff

DEFAULT_TIMEOUT: Final = 120.0
"""Seconds after which a request times out on either side unless told otherwise."""

CLOSE_SECONDS: Final = 5.0

MAX_ENDED: Final = 1 << 16
"""Requests that are over and that `poll` has still to return; the oldest are dropped beyond it."""

MAX_MEETINGS: Final = 1 << 14
"""Caches of peers that one service knows at a time."""

MAX_MEETINGS_EACH: Final = 256
"""Caches of one peer: if it names more, those that it named first are forgotten."""

_S = TypeVar("_S", bound="Service")


class Service(ABC):
    """A server or a client.

    Attributes:
        connection: What it sends and moves by.
        hub: All services on it.
        registered: Its cache.
        number: What peers call it.
        figures: What it has done.
    """

    number: int

    def __init__(
        self,
        connection: AnyConnection,
        cache: KVCache,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> None:
        deadline_after(timeout)
        self.connection = connection_of(connection)
        self.hub = hub_of(self.connection)
        self.registered = self.hub.register(cache)
        self.timeout = timeout
        self.figures = Figures()
        self.closed = False
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._handoffs: dict[Handoff, None] = {}
        self._requests: dict[Request, None] = {}
        self._meetings: dict[tuple[str, int], Meeting] = {}
        self._link = Link(self)
        try:
            self.connection.operations.add(self._link)
        except ClosedError:
            self.hub.leave(self.registered)
            raise

    @property
    def cache(self) -> KVCache:
        """The cache that it hands over, or fills."""
        return self.registered.cache

    def poll(self) -> list[Ended]:
        """Return the requests that are over since the last call, their pages free again.

        Never waits, and never enters the transfer library: a serving loop can call it at every
        step while bytes move. A request that failed is returned as soon as the peer can't touch
        its pages any more, which may be later than its `done`.
        """
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def statistics(self) -> KVStatistics:
        """What it has done so far, as frozen values."""
        with self.hub.lock:
            return self.figures.freeze(
                held_pages=self.registered.num_held, open_requests=len(self._requests)
            )

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Take nothing new, let what moves end, withdraw the rest. Idempotent.

        The connection stays open. Pages of requests that a peer still has by then stay owned.

        Args:
            timeout: Seconds.
        """
        if self.closed:
            return
        deadline = deadline_after(timeout)
        self.closed = True
        self._withdraw()
        progress = self.connection.progress
        progress.wait_until(lambda: not self._handoffs or self.connection.closed, deadline)
        self.abort()

    def abort(self) -> None:
        """Give up all requests at once, without waiting for peers. Idempotent."""
        self.closed = True
        self._withdraw()
        for handoff in list(self._handoffs):
            handoff.cancel(Outcome.CLOSED, f"{role_of(self.number).value} closed")
        with self.hub.lock:
            self.hub.remove(self)
            self._link.close()

    def _withdraw(self) -> None:  # noqa: B027 - a client has nothing on offer
        """End what no peer has come for. Takes the lock."""

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Below: the hub's lock is held.

    def _check_open(self) -> None:
        if self.closed or self.connection.closed:
            raise ClosedError(f"{self!r} is closed")

    def on_tick(self, now: float) -> None:  # noqa: B027 - a client's requests end by themselves
        """Look at what has a deadline."""

    def give_up(self) -> None:
        """The connection is closing: end what waits for a program, so that peers hear of it now."""
        for request in list(self._requests):
            request.give_up()

    def add(self, handoff: Handoff) -> None:
        """A handoff begins."""
        self._handoffs[handoff] = None

    def remove(self, handoff: Handoff) -> None:
        """A handoff is released."""
        self._handoffs.pop(handoff, None)

    def enter(self, request: Request) -> None:
        """A request's pages are held."""
        self._requests[request] = None
        self.registered.enter()

    def on_free(self, ended: Ended) -> None:
        """A request's pages are free."""
        self._ended.append(ended)

    def leave(self, request: Request) -> None:
        """A request holds pages no more."""
        if self._requests.pop(request, self) is None:
            self.registered.release(request.runs)
            self.hub.leave(self.registered)

    def on_abort(self, error: BaseException) -> None:
        """The connection is gone; handoffs have been told, or are being told."""
        self.closed = True

    # Peers' caches.

    def _meet(self, remote: Remote, service: int) -> Meeting:
        """What is known of a peer's cache; a new record if nothing is, or it has been lost.

        Raises:
            TransferError: Too many are known.
        """
        key = remote.name, service
        meeting = self._meetings.get(key)
        if meeting is None or meeting.remote is not remote:
            self._make_room(remote.name)
            meeting = self._meetings[key] = Meeting(remote, service)
        return meeting

    def _make_room(self, name: str) -> None:
        """Forget caches: of one peer those that it named first, and of lost peers all."""
        known = self._meetings
        mine = [key for key, one in known.items() if key[0] == name and not one.waiting]
        for key in mine[: max(0, len(mine) + 1 - MAX_MEETINGS_EACH)]:
            del known[key]
        if len(known) >= MAX_MEETINGS:
            lost = [key for key, one in known.items() if one.remote.lost_error is not None]
            for key in lost:
                del known[key]
        if len(known) >= MAX_MEETINGS:
            raise TransferError(f"{len(known)} caches of peers are known: too many")

    def _know(self, meeting: Meeting, body: bytes, at: int) -> None:
        """Take in what a peer says of its cache.

        Raises:
            MetadataError: It is not acceptable, or not the peer's to tell.
        """
        pool = parse_pool(body, at)
        adapter = self.connection.adapter
        infos = tuple(adapter.inspect(blob) for blob in pool.blobs)
        check_regions(pool, infos, meeting.remote.name)
        why = self.cache.compatibility.difference(pool.compatibility)
        if not why:
            try:
                self._share(meeting, pool.compatibility)
            except ValueError as error:
                why = str(error)
        meeting.known = pool, infos
        meeting.refused = (Outcome.INCOMPATIBLE, why) if why else None

    @abstractmethod
    def _share(self, meeting: Meeting, theirs: Compatibility) -> None:
        """Find out which heads go between two ranks.

        Raises:
            ValueError: The sizes of the two groups don't fit their heads.
        """


class Link(Operation):
    """A service in the connection's tables: learns when that ends.

    It moves nothing and never times out.
    """

    __slots__ = ("_service",)

    def __init__(self, service: Service) -> None:
        super().__init__(service.connection, "KV cache", (), None)
        self._service = service

    @property
    def quarantined(self) -> bool:
        return True  # Closing the connection does not wait for it.

    def _count_end(self, error: BaseException | None) -> None:
        """It is no operation of the program's."""

    def on_lost(self, error: BaseException) -> None:
        pass

    def cancel(self) -> None:
        self.close()

    def expire(self) -> None:
        pass

    def abort(self, error: BaseException) -> None:
        self._service.on_abort(error)
        super().abort(error)

    def on_fork(self, error: BaseException) -> None:
        # Another thread may have held it at the fork.
        self._service.hub.lock = threading.RLock()
        self._service.hub.registering = threading.Lock()
        super().on_fork(error)

    def close(self) -> None:
        """Leave the tables, and the service's cache to those requests that still need it."""
        if not self._released:
            self._done = True
            self._release()
            self._service.hub.leave(self._service.registered)


def as_sequence(tickets: str | bytes | Sequence[str | bytes]) -> list[str | bytes]:
    """One ticket, or several."""
    return [tickets] if isinstance(tickets, (str, bytes)) else list(tickets)
