"""One of two processes dies, stops or leaves at a bad moment: the other goes on, and is silent.

Over UCX's own choice of transports and over TCP, where the process that exposes memory moves the
bytes itself, also for a peer that has died.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from connect.dying import SIZES, Round, Server, faults, play

SMALL, LARGE = SIZES
TCP = "tcp,self"
NUM_SOAKED = 300


def row(
    victim: str,
    action: str,
    moment: str,
    transports: str = TCP,
    *,
    reads: bool = True,
    nbytes: int = LARGE,
    delay: float = 0.003,
    frees: bool = True,
    cancels: bool = False,
    met: bool = False,
) -> Round:
    return Round(victim, action, moment, reads, nbytes, delay, frees, cancels, transports, met)


ROUNDS = [
    # What is freed too early is touched by UCX once in twenty rounds or so.
    row("active", "kill", "middle", nbytes=2 * LARGE, cancels=True),
    row("active", "kill", "middle", reads=False, cancels=True, frees=False),
    row("owner", "kill", "middle"),
    row("owner", "close", "contact", nbytes=SMALL, delay=0.01),
    row("owner", "exit", "middle", reads=False, delay=0.01),
    row("active", "exit", "middle", delay=0.01),
    row("active", "stop", "middle", reads=False),
    row("owner", "_exit", "before", nbytes=SMALL),
    row("owner", "raise", "middle", ""),
    row("active", "abort", "contact", "", nbytes=SMALL),
    row("active", "close", "after", "", nbytes=SMALL, delay=0.0),
    # Both move a half.
    row("owner", "kill", "middle", "", met=True),
    row("active", "kill", "middle", "", reads=False, met=True),
    row("owner", "stop", "middle", "", met=True),
    row("active", "abort", "middle", "", met=True, frees=False),
    row("owner", "exit", "contact", "", met=True, cancels=True),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("dying")) as server:
        yield server


def check(server: Server, one: Round) -> None:
    ended = play(server, one)
    found = list(faults(one, ended))
    said = "\n".join(f"{who} {end.status} {end.told}\n{end.output}" for who, end in ended.items())
    assert not found, f"{one}: {found}\n{said}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "one",
    ROUNDS,
    ids=[f"{one.victim} {one.action} {one.moment}{' met' * one.met}" for one in ROUNDS],
)
def test_the_other_goes_on(server: Server, one: Round) -> None:
    check(server, one)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transports", ["", TCP], ids=["default", "tcp"])
def test_the_other_goes_on_whatever_happens(server: Server, transports: str) -> None:
    rng = random.Random(7)
    for _ in range(NUM_SOAKED):
        check(server, Round.draw(rng, transports))
