"""Handoff of paged KV caches against bare NIXL on the same pages, in one run.

    python benchmarks/kv.py [--json FILE]

Two ranks on one host. Rank 0 offers pages and does nothing else; rank 1 pulls them and waits.
The rivals, polled by the thread that waits: NIXL's READ of one piece, and of rows of descriptor
lists that it looked up beforehand, chosen by index; both know beforehand what is to be read, ask
nobody and tell nobody.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from rows import Row, Rows, alternate, main

from torch_nixl.bench.raw import RawAgent
from torch_nixl.bench.report import percentile
from torch_nixl.bench.session import Session
from torch_nixl.engine.connection import Connection
from torch_nixl.kv.cache import KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.layout import describe
from torch_nixl.kv.offer import Offer
from torch_nixl.kv.plan import Run, make_plan
from torch_nixl.kv.server import KVCacheServer

BUFFER = 512 << 20
HUGE = 256 << 20
TOKENS = 16
ROUNDS = 15
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
"""SmolLM2-135M's."""

SIZES = ((4 << 10, 4096), (16 << 10, 2048), (64 << 10, 1024), (256 << 10, 512))
"""Bytes of a page, and how many are moved."""

PROMPT = 128
IDLE_SECONDS = 5


def caches(buffer: torch.Tensor, page_nbytes: int) -> KVCache:
    """A latent cache of one layer whose pages are one piece each."""
    dim = page_nbytes // TOKENS // 2
    pages = buffer.view(torch.bfloat16).view(-1, TOKENS, dim)
    return KVCache([pages], "PTD", model="bench")


def smollm(buffer: torch.Tensor) -> KVCache:
    """SmolLM2's cache: 30 layers, in one storage, keys before values."""
    layer = 2 * TOKENS * KV_HEADS * HEAD_DIM
    num_pages = BUFFER // 2 // (LAYERS * layer)
    whole = buffer.view(torch.bfloat16)[: num_pages * LAYERS * layer]
    shaped = whole.view(LAYERS, 2, num_pages, TOKENS, KV_HEADS, HEAD_DIM)
    return KVCache([shaped], "LKPTHD", model="smollm2")


class Prefill:
    """Rank 0: offers what it is asked for, until it is told to end."""

    def __init__(self, session: Session, connection: Connection, buffer: torch.Tensor) -> None:
        self.session = session
        self.connection = connection
        self.buffer = buffer
        self.what: object = None
        self.server: KVCacheServer | None = None
        self.offers: list[Offer] = []

    def serve(self) -> None:
        while (asked := self.session.exchange(None)[1]) is not None:
            what, pages, num_tokens = asked
            offer = self.serving(what).offer("bench", pages, num_tokens)
            self.offers = [one for one in self.offers if not one.released] + [offer]
            self.session.exchange(offer.ticket)

    def serving(self, what: object) -> KVCacheServer:
        """A server of pages cut so; one at a time, as all are of the same memory."""
        if self.server is None or self.what != what:
            if self.server is not None:
                self.server.close()
            cache = smollm(self.buffer) if what == "smollm" else caches(self.buffer, int(str(what)))
            self.server, self.what = KVCacheServer(self.connection, cache, lease=600.0), what
        return self.server

    def idle(self) -> float:
        """Share of a core that this process uses while pages are on offer and nobody comes."""
        time.sleep(0.5)
        shares = []
        for _ in range(IDLE_SECONDS):
            before, started = time.process_time(), time.perf_counter()
            time.sleep(1)
            shares.append((time.process_time() - before) / (time.perf_counter() - started))
        return 100 * median(shares)


class Decode:
    """Rank 1: pulls and measures."""

    def __init__(
        self, session: Session, connection: Connection, buffer: torch.Tensor, raw: RawAgent
    ) -> None:
        self.session, self.connection, self.buffer, self.raw = session, connection, buffer, raw
        self.rows: list[Row] = []

    def ask(self, what: object, pages: Sequence[int] = (), num_tokens: int = 0) -> Any:
        self.session.exchange((what, list(pages), num_tokens))
        return self.session.exchange(None)[0]

    def pull(
        self,
        client: KVCacheClient,
        what: object,
        src: Sequence[int],
        dst: Any,
        num_tokens: int,
        silence: float = 0.0,
    ) -> float:
        """Seconds from the ticket, or after so many seconds more, to the last page."""
        ticket = self.ask(what, src, num_tokens)
        time.sleep(silence)
        started = time.perf_counter()
        fetch = client.pull(ticket, dst)
        fetch.wait()
        return time.perf_counter() - started

    def pages(self, page_nbytes: int, count: int) -> None:
        """Pages in order and scattered, against one piece and against prepared lists."""
        rng = np.random.default_rng(1)
        client = KVCacheClient(self.connection, caches(self.buffer, page_nbytes))
        num_pages = BUFFER // page_nbytes
        places = np.empty((num_pages, 2), np.uint64)
        places[:, 0] = np.arange(num_pages) * page_nbytes
        places[:, 1] = page_nbytes
        lists = self.raw.look_up(places)
        src, dst = (rng.permutation(num_pages)[:count] for _ in range(2))
        line = np.arange(count)
        ours32, theirs32 = dst.astype(np.int32), src.astype(np.int32)
        tokens = count * TOKENS
        figures = alternate(
            {
                "ours": lambda: self.pull(client, page_nbytes, src.tolist(), dst, tokens),
                "raw": lambda: timed(lambda: self.raw.read_rows(lists, ours32, theirs32)),
                "line": lambda: self.pull(client, page_nbytes, line.tolist(), line, tokens),
                "piece": lambda: timed(lambda: self.raw.move(False, count * page_nbytes, b"")),
            },
            ROUNDS,
        )
        middle = {name: median(seconds[2:]) * 1e3 for name, seconds in figures.items()}
        name = f"{count} pages of {page_nbytes >> 10} KiB"
        self.rows += [
            Row(
                f"{name}, scattered",
                middle["ours"],
                "ms",
                1.0,
                middle["raw"],
                note="raw NIXL, prepared lists",
            ),
            Row(
                f"{name}, consecutive",
                middle["line"],
                "ms",
                1.2,
                middle["piece"],
                note="raw NIXL, one piece",
            ),
        ]
        client.close()

    def prompt(self) -> None:
        """128 tokens of SmolLM2: 2.95 MB."""
        client = KVCacheClient(self.connection, smollm(self.buffer))
        layout = client.cache.layouts[0]
        nbytes = 2 * TOKENS * KV_HEADS * HEAD_DIM
        places = np.empty((LAYERS * 2 * layout.num_pages, 2), np.uint64)
        places[:, 0] = np.arange(len(places)) * nbytes
        places[:, 1] = nbytes
        lists = self.raw.look_up(places)
        rng = np.random.default_rng(2)
        src = rng.permutation(layout.num_pages)[: PROMPT // TOKENS]
        dst = rng.permutation(layout.num_pages)[: PROMPT // TOKENS]
        tables = np.arange(LAYERS * 2)[:, None] * layout.num_pages
        ours32, theirs32 = ((tables + ids).reshape(-1).astype(np.int32) for ids in (dst, src))
        figures = alternate(
            {
                "ours": lambda: self.pull(client, "smollm", src.tolist(), dst, PROMPT),
                "raw": lambda: timed(lambda: self.raw.read_rows(lists, ours32, theirs32)),
            },
            60,
        )
        ours, bare = (median(figures[name][5:]) * 1e3 for name in ("ours", "raw"))
        self.rows += [
            Row(
                "128 tokens of SmolLM2 (2.95 MB, 480 spans)",
                ours,
                "ms",
                1.3 + 1 / bare,
                bare,
                note="raw NIXL, prepared lists; 1.3 and 1 ms",
            ),
            Row("the same, p99 of 55", percentile(figures["ours"][5:], 0.99) * 1e3, "ms", 50),
        ]
        client.close()

    def first_contact(self) -> None:
        """A client that has never met the server, on a connection that has not either."""
        seconds: dict[str, list[float]] = {"busy": [], "idle": [], "again": []}
        for turn in range(7):
            silence = 0.2 + 0.0023 * turn  # Not always at the same moment of the server's sleeps.
            for name in ("busy", "idle"):
                connection = Connection.open("new")
                client = KVCacheClient(connection, smollm(self.buffer))
                quiet = silence if name == "idle" else 0.0
                seconds[name].append(self.pull(client, "smollm", [1], [1], TOKENS, quiet))
                if name == "idle":
                    again = self.pull(client, "smollm", [1], [1], TOKENS, silence)
                    seconds["again"].append(again)
                client.close()
                connection.close()
        busy, idle, again = (median(seconds[name]) * 1e3 for name in ("busy", "idle", "again"))
        self.rows += [
            Row("first contact: ticket to the first page", busy, "ms", 50),
            Row("first contact, server idle for 0.2 s", idle, "ms", 50),
            Row("known client, server idle for 0.2 s", again, "ms", None),
        ]

    def polls(self) -> None:
        """A serving loop's polls while 256 MiB of pages move."""
        page_nbytes = 64 << 10
        client = KVCacheClient(self.connection, caches(self.buffer, page_nbytes))
        rng = np.random.default_rng(3)
        count = HUGE // page_nbytes
        src, dst = (rng.permutation(BUFFER // page_nbytes)[:count] for _ in range(2))
        seconds: list[float] = []
        while len(seconds) < 1000:
            ticket = self.ask(page_nbytes, src.tolist(), count * TOKENS)
            fetch = client.pull(ticket, dst)
            while not fetch.done:
                started = time.perf_counter()
                client.poll()
                seconds.append(time.perf_counter() - started)
                time.sleep(0.0002)
            fetch.wait()
        self.rows.append(
            Row(
                "p99 of 1,000 polls while 256 MiB of pages move",
                percentile(seconds[:1000], 0.99) * 1e3,
                "ms",
                2.0,
            )
        )
        client.close()

    def planning(self) -> None:
        """100,000 scattered pages: plan and spans."""
        values = self.buffer.view(torch.bfloat16)[: 2 * 131072 * 512]
        tensor = values.view(1, 2, 131072, 1, 1, 512)
        layout, _ = describe([tensor], "LKPTHD")
        rng = np.random.default_rng(4)
        src, dst = (Run(rng.permutation(131072)[:100_000].astype(np.int64)) for _ in range(2))
        regions = np.zeros((1, 2), np.uint64)
        best = []
        for _ in range(9):
            started = time.perf_counter()
            plan = make_plan(layout, src, layout, dst, start=0, stop=100_000)
            best.append(time.perf_counter() - started)
            assert plan.num_spans == 200_000
            for _ in plan.pieces(regions, regions, max_bytes=8 << 20, max_spans=512):
                pass
        self.rows.append(Row("100,000 pages planned", median(best) * 1e3, "ms", 50))

    def idle(self) -> None:
        """The other side's share of a core while it holds 100 offers, and polls nothing else."""
        for page in range(100):
            self.ask(4 << 10, [page], TOKENS)
        self.session.exchange(None)
        share = self.session.exchange(None)[0]
        self.rows.append(Row("server, idle, 100 requests' pages held", share, "% of a core", 2.0))


def timed(run: Any) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@contextlib.contextmanager
def polled(raw: RawAgent) -> Iterator[None]:
    """Have an agent polled now and then: once in many reads UCX wants a word of the other side."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(0.002):
            raw.poll()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def body(session: Session) -> Rows:
    buffer = torch.zeros(BUFFER, dtype=torch.uint8)
    raw = RawAgent(session, buffer)
    connection = Connection.open(f"ours{session.rank}")
    # First contact of the raw agents takes both.
    if session.rank == 0:
        session.wait_while(raw.poll)
        prefill = Prefill(session, connection, buffer)
        with polled(raw):
            prefill.serve()
        session.exchange(prefill.idle())
    else:
        raw.move(False, 4096, b"")
        session.barrier()
        decode = Decode(session, connection, buffer, raw)
        for page_nbytes, count in SIZES:
            decode.pages(page_nbytes, count)
        decode.prompt()
        decode.first_contact()
        decode.polls()
        decode.planning()
        decode.idle()
        yield from decode.rows
    connection.close()


if __name__ == "__main__":
    main("KV handoff against raw NIXL", body, __doc__ or "")
