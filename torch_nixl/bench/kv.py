"""Handoff of KV pages between the first two ranks against bare NIXL. Host memory.

The first rank offers pages that lie scattered, the second pulls them to where others lay, in one
request. Bare NIXL: a READ by descriptor lists of all pages that both looked up beforehand, and
one of as many bytes in one piece; it asks nobody and tells nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from torch_nixl.bench.raw import NAME as RAW
from torch_nixl.bench.raw import RawAgent
from torch_nixl.bench.report import OURS
from torch_nixl.bench.session import Case, Contestant, Session
from torch_nixl.engine.connection import Connection
from torch_nixl.kv.cache import KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.server import KVCacheServer

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)

PAGE = 64 << 10
TOKENS = 16
ONE_PIECE = f"{RAW}, one piece"
LEASE = 600.0


def suite(session: Session) -> list[Case]:
    """Pulls of whole pages at each size."""
    if session.device.type != "cpu":
        raise RuntimeError("this suite measures host memory: --device cpu")
    numbers = dict.fromkeys(max(1, nbytes // PAGE) for nbytes in session.options.sizes)
    handoff = _Handoff(session, 2 * max(numbers))
    return [
        Case(f"pages of {PAGE >> 10} KiB", number * PAGE, partial(handoff.make, number))
        for number in numbers
    ]


class _Handoff:
    """This rank's pages, its server or client over them, and its bare agent."""

    def __init__(self, session: Session, num_pages: int) -> None:
        self._session = session
        self._num_pages = num_pages
        buffer = torch.zeros(num_pages * PAGE, dtype=torch.uint8)
        self._raw = RawAgent(session, buffer)
        places = np.empty((num_pages, 2), np.uint64)
        places[:, 0] = np.arange(num_pages) * PAGE
        places[:, 1] = PAGE
        self._lists = self._raw.look_up(places) if session.rank < 2 else None
        pages = buffer.view(torch.bfloat16).view(num_pages, TOKENS, -1)
        cache = KVCache([pages], "PTD", model="bench")
        connection = Connection.open(f"bench{session.rank}")
        session.stack.callback(connection.close)
        self._server = self._client = None
        if session.rank == 0:
            self._server = KVCacheServer(connection, cache, lease=LEASE)
            session.stack.callback(self._server.close)
        elif session.rank == 1:
            self._client = KVCacheClient(connection, cache)
            session.stack.callback(self._client.close)
        # Nobody closes while another still pulls.
        session.stack.callback(session.barrier)

    def make(self, number: int) -> dict[str, Contestant]:
        random = np.random.default_rng(1)
        src, dst = (random.permutation(self._num_pages)[:number] for _ in range(2))
        contestants: dict[str, Contestant] = {OURS: partial(self._pull, src.tolist(), dst.tolist())}
        rows = dst.astype(np.int32), src.astype(np.int32)
        if self._session.takes_part(RAW):
            contestants[RAW] = self._read(lambda: self._raw.read_rows(self._lists, *rows))
        if self._session.takes_part(ONE_PIECE):
            nbytes = number * PAGE
            contestants[ONE_PIECE] = self._read(lambda: self._raw.move(False, nbytes, b""))
        return contestants

    def _pull(self, src: list[int], dst: list[int], count: int) -> list[float]:
        taken = []
        for _ in range(count):
            ticket = None
            if self._server is not None:
                ticket = self._server.offer("bench", src, len(src) * TOKENS).ticket
            ticket = self._session.exchange(ticket)[0]
            started = time.perf_counter()
            if self._client is not None:
                self._client.pull(ticket, dst).wait()
                taken.append(time.perf_counter() - started)
            else:
                taken.append(0.0)
        return taken

    def _read(self, read: Callable[[], object]) -> Contestant:
        timed = self._session.timed(read)

        def contestant(count: int) -> list[float]:
            if self._session.rank == 0:
                self._session.wait_while(self._raw.poll, 0.0005)
                return [0.0] * count
            taken = list(timed(count)) if self._session.rank == 1 else [0.0] * count
            self._session.barrier()
            return taken

        return contestant
