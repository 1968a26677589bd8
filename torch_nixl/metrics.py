"""What connections and Communicators do, for Prometheus and OpenTelemetry.

    pip install 'torch-nixl[metrics]'

    from prometheus_client import start_http_server
    import torch_nixl.metrics

    torch_nixl.metrics.expose()
    start_http_server(9400)

Figures are read when they are asked for, so they cost nothing in between; only the histogram of
how long operations took is filled as they end. A connection's figures go when it is closed.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
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


class Collector:
    """Gives Prometheus the figures of all connections of this process, until it is closed.

    Attributes:
        durations: How long operations took, by their kind.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._registry = registry
        self.durations: dict[str, Histogram] = {}

    def on_end(
        self, connection: Connection, operation: Operation, error: BaseException | None
    ) -> None:
        """Note how long an operation took that has ended well."""
        if error is not None or not operation.started_at:
            return
        seconds = time.monotonic() - operation.started_at
        with self._lock:
            histogram = self.durations.get(operation.name)
            if histogram is None:
                histogram = self.durations[operation.name] = Histogram()
            histogram.add(seconds)

    def close(self) -> None:
        """Give no more."""
        observers.ends.remove(self)
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

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

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
    observers.ends.append(collector)
    return collector


class Spans:
    """Makes an OpenTelemetry span of each operation that ends, until it is closed."""

    def __init__(self, provider: TracerProvider | None) -> None:
        from opentelemetry import trace

        self._tracer = trace.get_tracer("torch_nixl", tracer_provider=provider)
        self._epoch = time.time_ns() - time.monotonic_ns()

    def close(self) -> None:
        """Make no more."""
        observers.ends.remove(self)

    def on_end(
        self, connection: Connection, operation: Operation, error: BaseException | None
    ) -> None:
        """Make a span."""
        from opentelemetry.trace import Status, StatusCode

        stop = time.monotonic_ns()
        start = int(operation.started_at * 1e9) or stop
        remote = "" if operation.remote is None else operation.remote.name
        span = self._tracer.start_span(
            f"torch_nixl {operation.name}",
            start_time=self._epoch + start,
            attributes={
                "torch_nixl.agent": connection.name,
                "torch_nixl.remote": remote,
                "torch_nixl.bytes": operation.nbytes,
            },
        )
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(self._epoch + stop)


def export_spans(provider: TracerProvider | None = None) -> Spans:
    """Have each operation make an OpenTelemetry span.

    Args:
        provider: Where spans go; the process's own by default.

    Raises:
        ModuleNotFoundError: opentelemetry-api is missing: ``pip install 'torch-nixl[metrics]'``.
    """
    spans = Spans(provider)
    observers.ends.append(spans)
    return spans
