"""What connections and Communicators do, for Prometheus and OpenTelemetry.

    pip install 'torch-nixl[metrics]'

    from prometheus_client import start_http_server
    import torch_nixl.metrics

    torch_nixl.metrics.expose()
    start_http_server(9400)

Figures are read when they are asked for, so they cost nothing in between; only how long operations
took is noted as they end. A connection's figures go when it is closed.
"""

from __future__ import annotations

import atexit
import bisect
import logging
import math
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from torch_nixl.engine import host, observers
from torch_nixl.p2p.hub import exchanges_of

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.operation import Operation

log = logging.getLogger("torch_nixl.metrics")

BUCKETS: Final = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds of the histogram, in seconds."""

MAX_WAITING: Final = 1024
"""Durations of one kind that wait to be counted until somebody asks: many at once cost less."""

MAX_SPANS: Final = 10_000
"""Operations that wait to be made spans."""

SPANS_SHARE: Final = 0.005
"""Of a core, for making spans: while it makes one, no other thread of this process can run."""

PAUSE: Final = 0.05
"""Seconds after which the thread that makes spans looks for more."""

CLOSE_SECONDS: Final = 2.0
"""How long the end waits for spans that are still to be made."""


class Collector:
    """Gives Prometheus the figures of all connections of this process, until it is closed.

    Attributes:
        durations: How long operations took, by their kind, as of the last `collect`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._registry = registry
        self._waiting: defaultdict[str, deque[float]] = defaultdict(deque)
        self.durations: dict[str, Histogram] = {}

    def note(
        self, connection: Connection, operation: Operation, nbytes: int, error: BaseException | None
    ) -> None:
        """Note how long an operation took that has ended well. See [Note: notes]."""
        started = operation.started_at
        if error is not None or not started:
            return
        waiting = self._waiting[operation.name]
        waiting.append(time.monotonic() - started)
        # Whoever holds the lock counts already; it may be this very thread, interrupted.
        if len(waiting) >= MAX_WAITING and self._lock.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._lock.release()

    def _count(self) -> None:
        """Take what waits into the histograms. Holds the lock."""
        for name, waiting in list(self._waiting.items()):
            # Others may append meanwhile: not clear().
            seconds = [waiting.popleft() for _ in range(len(waiting))]
            self.durations.setdefault(name, Histogram()).add(seconds)

    def close(self) -> None:
        """Give no more."""
        observers.unwatch(end=self.note)
        self._registry.unregister(self)

    def describe(self) -> Iterator[Metric]:
        """Which metrics there are, so that a registry refuses a second collector of them."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """All metrics as they stand. Called by prometheus_client."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        for name, about, kind, read in _FIGURES:
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
                f"torch_nixl_{name}", about, labels=["agent"]
            )
            for connection in _connections():
                family.add_metric([connection.name], read(connection))
            yield family
        failures = CounterMetricFamily(
            "torch_nixl_failures", "Operations that failed.", labels=["agent", "error"]
        )
        paths = GaugeMetricFamily(
            "torch_nixl_remotes_by_path", "Remotes known now, by path.", labels=["agent", "path"]
        )
        for connection in _connections():
            for error, count in connection.statistics().failures.items():
                failures.add_metric([connection.name, error], count)
            counted = Counter(connection.path(remote) for remote in connection.contacts.all())
            for path, count in counted.items():
                paths.add_metric([connection.name, path], count)
        yield failures
        yield paths
        yield from self._messages()
        durations = HistogramMetricFamily(
            "torch_nixl_operation_seconds",
            "How long operations took that ended well.",
            labels=["operation"],
        )
        with self._lock:
            self._count()
            for name, histogram in self.durations.items():
                durations.add_metric([name], histogram.buckets(), histogram.total)
        yield durations

    def _messages(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        messages = CounterMetricFamily(
            "torch_nixl_messages", "Messages between ranks.", labels=["agent", "rank", "what"]
        )
        waiting = GaugeMetricFamily(
            "torch_nixl_unexpected_messages",
            "Messages that wait here to be received.",
            labels=["agent", "rank"],
        )
        for connection in _connections():
            totals: dict[int, Counter[str]] = {}
            for exchange in exchanges_of(connection):
                one = exchange.statistics()
                total = totals.setdefault(exchange.rank, Counter())
                total.update(
                    sent=one.sent,
                    received=one.received,
                    queued=one.queued,
                    refused=one.refused,
                    unexpected=one.unexpected,
                )
            for rank, total in totals.items():
                waiting.add_metric([connection.name, str(rank)], total.pop("unexpected"))
                for what, count in total.items():
                    messages.add_metric([connection.name, str(rank), what], count)
        yield messages
        yield waiting


class Histogram:
    """Counts durations by size. Not locked.

    Attributes:
        counts: How many were at most each of `BUCKETS` and more than the one before; then the rest.
        total: Their sum, in seconds.
    """

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: list[float]) -> None:
        """Count durations, and sort them."""
        seconds.sort()
        self.total += sum(seconds)
        below = 0
        for index, bound in enumerate((*BUCKETS, math.inf)):
            upto = bisect.bisect_right(seconds, bound, below)
            self.counts[index] += upto - below
            below = upto

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants it: how many were at most each bound."""
        so_far = 0
        result: list[tuple[str, float]] = []
        for bound, count in zip((*BUCKETS, float("inf")), self.counts, strict=True):
            so_far += count
            result.append(("+Inf" if bound == float("inf") else str(bound), float(so_far)))
        return result


_FIGURES: Final[tuple[tuple[str, str, str, Callable[[Connection], float]], ...]] = (
    ("operations", "Operations that ended well.", "counter", lambda c: c.statistics().operations),
    ("bytes", "Bytes that these moved.", "counter", lambda c: c.statistics().nbytes),
    (
        "registrations",
        "Regions registered with NIXL.",
        "counter",
        lambda c: c.statistics().registrations,
    ),
    (
        "registration_cache_hits",
        "Registrations found in the cache.",
        "counter",
        lambda c: c.statistics().cache_hits,
    ),
    ("registered_bytes", "Bytes registered.", "gauge", lambda c: c.statistics().registered_bytes),
    (
        "live_registrations",
        "Regions registered.",
        "gauge",
        lambda c: c.statistics().live_registrations,
    ),
    ("remotes", "Remotes known.", "gauge", lambda c: c.statistics().remotes),
    ("remotes_lost", "Remotes lost.", "counter", lambda c: c.statistics().remotes_lost),
    (
        "outstanding",
        "Operations not released yet.",
        "gauge",
        lambda c: c.statistics().outstanding,
    ),
    ("waiters", "Threads that wait.", "gauge", lambda c: c.progress.num_waiting),
    ("frames_received", "Control frames.", "counter", lambda c: c.statistics().frames_received),
    (
        "frames_refused",
        "Control frames that were not acceptable.",
        "counter",
        lambda c: c.statistics().frames_refused,
    ),
)


def _connections() -> list[Connection]:
    return sorted(host.watched(), key=lambda connection: connection.name)


def expose(registry: CollectorRegistry | None = None) -> Collector:
    """Have a registry of prometheus_client offer this process's figures.

    Args:
        registry: By default prometheus_client's usual one.

    Raises:
        ModuleNotFoundError: prometheus_client is missing: ``pip install 'torch-nixl[metrics]'``.
        ValueError: The registry has them already.
    """
    try:
        from prometheus_client import REGISTRY
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "metrics need prometheus_client: pip install 'torch-nixl[metrics]'", name=error.name
        ) from error
    registry = registry or REGISTRY
    collector = Collector(registry)
    registry.register(collector)
    observers.watch(end=collector.note)
    return collector


class Spans:
    """Makes an OpenTelemetry span of each operation that ends, until it is closed.

    A thread of its own makes them, with a share of a core that the program does not feel: a hundred
    or two each second. Of more than that over a longer time, some are left out.

    Attributes:
        dropped: Operations of which no span was made: `MAX_SPANS` others waited for theirs.
    """

    def __init__(self, provider: TracerProvider | None) -> None:
        from opentelemetry import trace

        self._tracer = trace.get_tracer("torch_nixl", tracer_provider=provider)
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._notes = observers.EndQueue(MAX_SPANS)
        self._ending = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="torch_nixl-spans", daemon=True)
        self._thread.start()
        observers.watch(end=self._notes.note)
        atexit.register(self.close)

    @property
    def dropped(self) -> int:
        return self._notes.dropped

    def close(self) -> None:
        """Make spans of what has ended so far, at most for `CLOSE_SECONDS`, then no more."""
        observers.unwatch(end=self._notes.note)
        atexit.unregister(self.close)
        if self._pid != os.getpid() or self._ending.is_set():
            return
        self._ending.set()
        self._thread.join(2 * CLOSE_SECONDS)
        if self.dropped:
            log.warning("no spans were made of %d operations: too many at a time", self.dropped)

    def _run(self) -> None:
        spent = time.thread_time()
        pause = PAUSE
        while not self._ending.wait(pause):
            if (ended := self._notes.take()) is None:
                pause = PAUSE
                continue
            self._make(ended)
            before, spent = spent, time.thread_time()
            pause = (spent - before) * (1 / SPANS_SHARE - 1)
        deadline = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < deadline and (ended := self._notes.take()) is not None:
            self._make(ended)
        while self._notes.take() is not None:
            self._notes.drop(1)

    def _make(self, ended: observers.Ended) -> None:
        try:
            self._make_span(ended)
        except Exception:  # Whatever a provider or an exporter raises, those behind get theirs.
            log.exception("no span could be made")

    def _make_span(self, ended: observers.Ended) -> None:
        from opentelemetry.trace import Status, StatusCode

        started_at, ended_at, agent, remote, name, nbytes, _, error = ended
        stop = self._epoch + int(ended_at * 1e9)
        span = self._tracer.start_span(
            f"torch_nixl {name}",
            start_time=self._epoch + int((started_at or ended_at) * 1e9),
            attributes={
                "torch_nixl.agent": agent,
                "torch_nixl.remote": remote,
                "torch_nixl.bytes": nbytes,
            },
        )
        if error is not None:
            kind, text = error
            about = {"exception.type": kind, "exception.message": text}
            span.add_event("exception", about, timestamp=stop)
            span.set_status(Status(StatusCode.ERROR, text))
        span.end(stop)


def export_spans(provider: TracerProvider | None = None) -> Spans:
    """Have each operation make an OpenTelemetry span. A forked child has to do so anew.

    Args:
        provider: Where spans go; the process's own by default.

    Raises:
        ModuleNotFoundError: opentelemetry-api is missing: ``pip install 'torch-nixl[metrics]'``.
    """
    return Spans(provider)
