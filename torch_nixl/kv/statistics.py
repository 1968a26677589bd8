"""What a server or client of KV caches has done so far."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from torch_nixl.kv.protocol import Outcome

NUM_LATENCIES: Final = 1024
"""Latencies of each stage that are remembered, the latest ones."""

STAGES: Final = ("meet", "grant", "move", "total")
"""Stages of a request. *meet*: first contact with a cache; *grant*: from asking to leave;
*move*: from leave to the last byte; *total*: all of it, on this side."""


@dataclass(frozen=True, slots=True)
class StageLatency:
    """How long a stage took lately, in seconds.

    Attributes:
        count: Requests that it is taken from.
        p50: Half of them took no longer.
        p99: 99 of 100 took no longer.
    """

    count: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class KVStatistics:
    """Figures of one server or client.

    Attributes:
        offers: Requests that were offered; 0 of a client.
        asked: Requests that were asked for: by peers of a server, by a client itself.
        outcomes: How requests ended, by `Outcome` name in lower case.
        nbytes: Bytes that this side moved.
        pages: Pages of this side that requests were complete on.
        spans: Descriptors that this side moved bytes by, neighbours merged.
        pieces: Posts that it took.
        heartbeats: Sent by a client, heard by a server.
        held_pages: Pages that requests hold now.
        open_requests: Requests whose pages are held now.
        latencies: By stage, of `STAGES`; those that happened.
        paths: How many requests took which way: ``cma``, ``tcp``, ``network``, ``unknown``.
    """

    offers: int
    asked: int
    outcomes: Mapping[str, int]
    nbytes: int
    pages: int
    spans: int
    pieces: int
    heartbeats: int
    held_pages: int
    open_requests: int
    latencies: Mapping[str, StageLatency]
    paths: Mapping[str, int]


@dataclass(slots=True)
class Figures:
    """Counters behind `KVStatistics`. Guarded by the hub's lock."""

    offers: int = 0
    asked: int = 0
    nbytes: int = 0
    pages: int = 0
    spans: int = 0
    pieces: int = 0
    heartbeats: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, deque[float]] = field(default_factory=dict)

    def count_end(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name.lower()] += 1

    def took(self, stage: str, seconds: float) -> None:
        """Note how long a stage took."""
        self.latencies.setdefault(stage, deque(maxlen=NUM_LATENCIES)).append(seconds)

    def freeze(self, *, held_pages: int, open_requests: int) -> KVStatistics:
        """The figures of this moment."""
        return KVStatistics(
            offers=self.offers,
            asked=self.asked,
            outcomes=dict(self.outcomes),
            nbytes=self.nbytes,
            pages=self.pages,
            spans=self.spans,
            pieces=self.pieces,
            heartbeats=self.heartbeats,
            held_pages=held_pages,
            open_requests=open_requests,
            latencies={k: _latency(v) for k, v in self.latencies.items()},
            paths=dict(self.paths),
        )


def _latency(seconds: deque[float]) -> StageLatency:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return StageLatency(len(ordered), ordered[last // 2], ordered[last * 99 // 100])
