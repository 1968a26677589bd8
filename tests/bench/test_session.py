"""How contestants take turns."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from torch_nixl.bench.report import OURS, Measurement
from torch_nixl.bench.session import (
    MAX_COUNT,
    MIN_COUNT,
    Case,
    Contestant,
    Options,
    _fitting,
    expected_seconds,
    open_session,
)
from torch_nixl.testing import Rank, RankPool


def _measure(rank: Rank) -> tuple[Measurement, int, list[str], list[object]]:
    ticks = 0
    turns: list[str] = []

    def tick() -> None:
        nonlocal ticks
        ticks += 1

    def contestant(name: str, seconds: float) -> Contestant:
        def run(count: int) -> Sequence[float]:
            turns.append(name)
            return [seconds] * count

        return run

    with open_session(Options(sizes=(8,), rounds=2)) as session:
        contestants = {
            OURS: contestant(OURS, 0.25 if session.rank else 0.125),
            "other": contestant("other", 0.0625 if session.rank else 0.5),
        }
        measured = session.measure(Case("x", 8, lambda: contestants, share=0.5), tick)
        told = session.exchange(session.rank)
        return measured, ticks, turns[-4:], told


def test_the_slowest_rank_counts_and_contestants_alternate(rank_pool: RankPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    found = rank_pool.run(
        _measure, world_size=2, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    )
    for measured, ticks, turns, told in found:
        assert measured.seconds == {OURS: [0.5, 0.5], "other": [1.0, 1.0]}
        assert measured.p99 == measured.seconds
        assert ticks == 2
        assert turns == [OURS, "other", "other", OURS]
        assert told == [0, 1]


def test_a_round_has_as_many_runs_as_fit() -> None:
    assert _fitting(10, 1000.0) == MIN_COUNT
    assert _fitting(10, 1e-9) == MAX_COUNT
    assert MIN_COUNT < _fitting(100, 0.2) < 100


def test_the_time_that_it_will_take_grows_with_rounds_contestants_and_bytes() -> None:
    small = Case("x", 8, dict, contestants=2)
    assert expected_seconds([small, small], rounds=4) == 2 * 2 * 5 * 0.1
    assert expected_seconds([Case("x", 1 << 30, dict, 2.0)], rounds=4) > 30
