"""Hand the cache of a Hugging Face model from the process that prefills to the one that decodes.

    pool = PagePool(model.config, num_pages=256, model="HuggingFaceTB/SmolLM2-135M-Instruct")

    # prefill                                       # decode
    server = DynamicCacheServer(connection, pool)   client = DynamicCacheClient(connection, pool)
    model(tokens, cache=cache)            cache = client.pull(ticket)
    ticket = server.offer("request 7", cache).ticket

A `DynamicCache` makes new tensors at every token, so it can't be registered. Its keys and values
are copied into pages of a pool that is, and there from the other side's pages into a new one:
bit for bit what the model computed.

Needs transformers, which is not among this package's own requirements.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from torch_nixl.engine.operation import deadline_after
from torch_nixl.errors import ClosedError, TransferTimeout
from torch_nixl.integrations.page_pool import DynamicCache, PagePool
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.offer import Offer
from torch_nixl.kv.server import DEFAULT_LEASE, KVCacheServer
from torch_nixl.kv.service import CLOSE_SECONDS, DEFAULT_TIMEOUT, Service
from torch_nixl.kv.ticket import Ticket

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.kv.request import Request
    from torch_nixl.p2p.communicator import Communicator

__all__ = ["DynamicCacheClient", "DynamicCacheServer", "PagePool"]

_S = TypeVar("_S", bound="_Lender")


class _Lender:
    """A side, and its pages that requests have."""

    def __init__(self, service: Service, pool: PagePool) -> None:
        self.pool = pool
        self._service = service
        self._lock = threading.Lock()
        self._lent: list[tuple[Request, list[int]]] = []

    def reclaim(self) -> int:
        """Give the pages of requests that are over back to the pool; return how many are free.

        Happens by itself when pages are needed.
        """
        self._service.poll()  # Nobody else does, and what it would say is known from requests.
        with self._lock:
            lent, self._lent = self._lent, []
            for request, pages in lent:
                if request.released:
                    self.pool.free(pages)
                else:
                    self._lent.append((request, pages))
        return self.pool.num_free

    def _allocate(
        self, num_tokens: int, deadline: float | None, hopeless: Callable[[], bool] = lambda: False
    ) -> list[int]:
        """Take pages, waiting for them if need be; no longer once there is no hope."""
        connection = self._service.connection
        taken: list[int] | None = None

        def enough() -> bool:
            nonlocal taken
            if taken is not None:
                return True  # It may be asked again.
            if self._service.closed or connection.closed:
                raise ClosedError(f"{self._service!r} is closed")
            self.reclaim()
            taken = self.pool.allocate(num_tokens)
            return taken is not None or hopeless()

        connection.progress.wait_until(enough, deadline)
        if taken is None:
            raise TransferTimeout(
                f"no room for {num_tokens} tokens: {self.pool.num_free} of {self.pool.num_pages} "
                "pages are free"
            )
        return taken

    def _lend(self, request: Request, pages: list[int]) -> None:
        with self._lock:
            self._lent.append((request, pages))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Take nothing new, let what moves end, withdraw the rest. Idempotent.

        Pages that a peer still has by then are not given back to the pool.

        Args:
            timeout: Seconds.
        """
        self._service.close(timeout)
        self.reclaim()

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class DynamicCacheServer(_Lender):
    """Offers caches to whoever has a ticket for them. Safe to use from many threads.

    Args:
        connection: A Connection, or a Communicator. Not closed with the server.
        pool: Where the pages come from.
        lease: Seconds for which a cache is on offer.
        timeout: Seconds after which a request that was taken times out; None for never.

    Attributes:
        pool: Where the pages come from.
        server: What it is built on, for `statistics` and the like.

    Raises:
        RegistrationError: NIXL refused the memory.
        ClosedError: The connection is closed.
    """

    def __init__(
        self,
        connection: Connection | Communicator,
        pool: PagePool,
        *,
        lease: float = DEFAULT_LEASE,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> None:
        self.server = KVCacheServer(connection, pool.cache, lease=lease, timeout=timeout)
        super().__init__(self.server, pool)

    def offer(self, request: str, cache: DynamicCache, *, timeout: float | None = None) -> Offer:
        """Copy a cache into pages and put them on offer.

        The cache is the program's own again at once. The pages go back to the pool when decode
        has them, has given up, or the lease has lapsed.

        Args:
            request: What to call it.
            cache: Of one sequence, all layers computed.
            timeout: Seconds to wait for pages; None waits as long as it takes.

        Raises:
            ValueError: The cache does not fit the pool.
            TransferTimeout: No pages have become free in time. Nothing is on offer.
            ClosedError: The server is closed.
        """
        num_tokens = int(cache.get_seq_length())
        pages = self._allocate(num_tokens, deadline_after(timeout))
        try:
            self.pool.write(cache, pages)
            offer = self.server.offer(request, pages, num_tokens)
        except BaseException:
            self.pool.free(pages)
            raise
        self._lend(offer, pages)
        return offer


class DynamicCacheClient(_Lender):
    """Takes caches over, by ticket. Safe to use from many threads.

    Args:
        connection: A Connection, or a Communicator. Not closed with the client.
        pool: Where the pages come from that caches pass through.
        timeout: Seconds after which a request times out unless told otherwise; None for never.

    Attributes:
        pool: Where the pages come from.
        client: What it is built on, for `statistics`, `keep` and the like.

    Raises:
        RegistrationError: NIXL refused the memory.
        ClosedError: The connection is closed.
    """

    def __init__(
        self,
        connection: Connection | Communicator,
        pool: PagePool,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> None:
        self.client = KVCacheClient(connection, pool.cache, timeout=timeout)
        super().__init__(self.client, pool)

    def pull(self, ticket: str | bytes, *, timeout: float | None = None) -> DynamicCache:
        """Block until a cache is here. While there are no pages for it, its lease is kept.

        Args:
            ticket: Of an `Offer`.
            timeout: Seconds, the wait for pages included; the client's by default.

        Returns:
            A cache of one sequence, as the model left it on the other side.

        Raises:
            MetadataError: The ticket is malformed, or was altered.
            ValueError: The pool is too small for it.
            TransferTimeout: Time is up. Pages that prefill may touch go back to the pool later.
            TransferCancelled: Prefill has given up, or is closing.
            LeaseError: The lease had expired, been consumed, or never been; see its subclasses.
            IncompatibleError: The two pools can't be converted into each other.
            PeerLostError: The other side can't be reached, died or left.
            TransferError: The transfer failed.
            ClosedError: The client, or the connection, is closed.
        """
        key = self.client.connection.metadata_key
        num_tokens = Ticket.unpack(ticket, key=key).num_tokens
        deadline = deadline_after(self.client.timeout if timeout is None else timeout)
        self.reclaim()
        pages = self.pool.allocate(num_tokens) or self._wait_for_room(ticket, num_tokens, deadline)
        left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            fetch = self.client.pull(ticket, pages, timeout=left)
        except BaseException:
            self.pool.free(pages)
            raise
        try:
            fetch.synchronize()  # What a stream waited for could still fail.
            return self.pool.read(pages, num_tokens)
        finally:
            fetch.cancel()
            self._lend(fetch, pages)
            self.reclaim()

    def _wait_for_room(
        self, ticket: str | bytes, num_tokens: int, deadline: float | None
    ) -> list[int]:
        heartbeat = self.client.keep(ticket)
        try:
            return self._allocate(num_tokens, deadline, lambda: heartbeat.error is not None)
        except TransferTimeout:
            if heartbeat.error is not None:
                raise heartbeat.error from None
            raise
        finally:
            heartbeat.stop()
