"""Figures for Prometheus and spans for OpenTelemetry."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from p2p.conftest import World
from torch_nixl import TransferTimeout, metrics
from torch_nixl.engine import observers

LARGE = torch.arange(1 << 18, dtype=torch.float32)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    collector = metrics.expose(registry)
    yield registry
    collector.close()
    assert not observers.ends
    assert generate_latest(registry) == b""


def test_figures_are_those_of_the_connections(world: World, registry: CollectorRegistry) -> None:
    a, b = world()
    receive = b.irecv(0)
    a.isend(LARGE, 1)
    receive.wait()
    a.send(torch.zeros(1), 1)
    b.recv(0)
    with pytest.raises(TransferTimeout):
        b.irecv(0, timeout=0.01).wait()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"torch_nixl_{name}", labels)

    receiver = b.connection.name
    assert value("bytes_total", agent=receiver) == b.connection.statistics().nbytes
    assert value("bytes_total", agent=receiver) == LARGE.nbytes
    assert value("failures_total", agent=receiver, error="TransferTimeout") == 1
    assert value("remotes_by_path", agent=receiver, path="cma") == 1
    assert value("messages_total", agent=receiver, rank="1", what="received") == 2
    assert value("messages_total", agent=a.connection.name, rank="0", what="sent") == 2
    assert value("unexpected_messages", agent=receiver, rank="1") == 0
    assert value("waiters", agent=receiver) == 0
    assert value("operation_seconds_bucket", operation="receive", le="+Inf") == 1
    seconds = value("operation_seconds_sum", operation="receive")
    assert seconds is not None
    assert 0 < seconds < 20


def test_a_closed_connection_has_no_figures(world: World, registry: CollectorRegistry) -> None:
    a, _ = world()
    assert a.connection.name.encode() in generate_latest(registry)
    a.abort()
    a.connection.abort()
    assert a.connection.name.encode() not in generate_latest(registry)


def test_a_registry_takes_them_once(registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.expose(registry)
    assert len(observers.ends) == 1


def test_histogram_counts_by_upper_bound() -> None:
    histogram = metrics.Histogram()
    for seconds in ([0.5, 0.00001], [], [100.0, 0.3]):
        histogram.add(seconds)
    buckets = dict(histogram.buckets())
    assert (buckets["1e-05"], buckets["0.25"], buckets["0.5"]) == (1, 1, 3)
    assert (buckets["10.0"], buckets["+Inf"]) == (3, 4)
    assert histogram.total == pytest.approx(100.80001)


def test_durations_wait_to_be_counted_in_bounded_memory(
    world: World, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_WAITING", 3)
    [collector] = [end.__self__ for end in observers.ends]  # type: ignore[attr-defined]
    a, b = world()
    for _ in range(10):
        a.isend(LARGE, 1)
        b.recv(0)
        assert all(len(waiting) < 3 for waiting in collector._waiting.values())
    name = "torch_nixl_operation_seconds_bucket"
    assert registry.get_sample_value(name, {"operation": "receive", "le": "+Inf"}) == 10


def test_each_operation_is_a_span(
    world: World, exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    spans = metrics.export_spans(provider)
    a, b = world()
    receive = b.irecv(0)
    send = a.isend(LARGE, 1)
    receive.wait()
    send.wait()
    with pytest.raises(TransferTimeout):
        b.irecv(0, timeout=0.01).wait()
    spans.close()
    assert spans.dropped == 0
    assert not observers.ends
    a.isend(LARGE, 1)
    b.recv(0)
    made = {(span.name, span.status.is_ok): span for span in exporter.get_finished_spans()}
    assert sorted(made) == [
        ("torch_nixl receive", False),
        ("torch_nixl receive", True),
        ("torch_nixl send", True),
    ]
    span = made["torch_nixl send", True]
    assert span.attributes is not None
    assert span.attributes["torch_nixl.bytes"] == LARGE.nbytes
    assert span.attributes["torch_nixl.remote"] == b.connection.name
    assert span.start_time is not None
    assert span.end_time is not None
    assert 0 < span.end_time - span.start_time < 20e9
    failed = made["torch_nixl receive", False]
    [event] = failed.events
    assert event.attributes is not None
    assert event.attributes["exception.type"] == "TransferTimeout"


def test_spans_are_made_while_the_program_goes_on(
    world: World, exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    a, b = world()
    with contextlib.closing(metrics.export_spans(provider)):
        a.isend(LARGE, 1)
        b.recv(0)
        deadline = time.monotonic() + 20
        while len(exporter.get_finished_spans()) < 2:
            assert time.monotonic() < deadline
            b.iprobe(0)


def test_operations_of_which_no_span_was_made_are_counted(
    world: World,
    exporter: InMemorySpanExporter,
    provider: TracerProvider,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(metrics, "MAX_SPANS", 3)
    monkeypatch.setattr(metrics, "PAUSE", 60.0)  # None is made before the end.
    spans = metrics.export_spans(provider)
    a, b = world()
    for _ in range(5):
        send = a.isend(LARGE, 1)
        b.recv(0)
        send.wait()
    spans.close()
    spans.close()
    assert len(exporter.get_finished_spans()) == 3
    assert spans.dropped == 7
    assert "no spans were made of 7 operations" in caplog.text


def test_a_span_that_can_not_be_made_costs_no_other(
    world: World,
    exporter: InMemorySpanExporter,
    provider: TracerProvider,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spans = metrics.export_spans(provider)
    tracer, calls = spans._tracer, itertools.count()

    class Tracer:
        def start_span(self, *args: Any, **kwargs: Any) -> Any:
            if next(calls) == 0:
                raise RuntimeError("full")
            return tracer.start_span(*args, **kwargs)

    monkeypatch.setattr(spans, "_tracer", Tracer())
    a, b = world()
    send = a.isend(LARGE, 1)
    b.recv(0)
    send.wait()
    spans.close()
    assert len(exporter.get_finished_spans()) == 1
    assert "no span could be made" in caplog.text
