"""Large claims under losses, cancels and time-outs in any order: nothing is given back too early.

Each schedule is drawn from a seed and played over the loopback fabric, step by step, in one thread.
What has to hold after each step: memory that its holder was given back is moved by nobody. In the
end: everything is given back on both sides, as both live.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import pytest
from engine.assisted import NBYTES, Two

from torch_nixl.engine import assist, liveness, lost, remotes, transfer
from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.errors import PeerLostError

NUM_SCHEDULES = 120
NUM_SOAKED = 3000
TIMEOUT = 0.2
END_SECONDS = 10.0

Pair = tuple[PassiveOperation, ActiveOperation]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assist, "ASSIST_BYTES", 4096)
    monkeypatch.setattr(transfer, "LONG_PIECE_BYTES", NBYTES // 8)
    monkeypatch.setattr(lost, "LINGER_SECONDS", 0.001)
    monkeypatch.setattr(liveness, "PING_SECONDS", 0.002)
    monkeypatch.setattr(liveness, "MAX_PING_SECONDS", 0.01)
    monkeypatch.setattr(remotes, "SETTLING_SECONDS", 0.001)
    monkeypatch.setattr(remotes, "SEEK_SECONDS", 0.005)
    monkeypatch.setattr(lost, "MAX_SEEK_SECONDS", 0.02)


class Schedule:
    """One of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.two = Two()
        # For what nobody comes to any more, and claims that were lost with a contact.
        self.two.owner.timeout = self.two.claimant.timeout = TIMEOUT
        self.pairs: list[Pair] = []
        self.log: list[str] = []

    def play(self) -> None:
        rng, two = self.rng, self.two
        for name in ("owner", "claimant"):
            if rng.random() < 0.7:
                two.fabric.delay(1 << rng.randrange(12, 17), initiator=name)
        for _ in range(rng.randrange(4, 16)):
            self.act()
        for name in ("owner", "claimant"):
            two.fabric.delay(None, initiator=name)
        until = time.monotonic() + END_SECONDS
        while len(two.owner.operations) or len(two.claimant.operations):
            for connection in (two.owner, two.claimant):
                for _ in self.turn(connection):
                    self.check()
            assert time.monotonic() < until, (self.log, self.pairs)
        assert all(one.released for pair in self.pairs for one in pair)

    def act(self) -> None:
        rng, two = self.rng, self.two
        connection = rng.choice((two.owner, two.claimant))
        action = rng.choice(("begin", "lose", "cancel", "expire", "step", "step", "turn"))
        self.log.append(f"{connection.name} {action}")
        if action == "begin" and len(self.pairs) < 3:
            direction = rng.choice((Direction.READ, Direction.WRITE))
            with contextlib.suppress(PeerLostError):
                self.pairs.append(two.begin(direction, waits=rng.random() < 0.85))
        elif action == "lose":
            other = two.claimant if connection is two.owner else two.owner
            remote = connection.contacts.get(other.name)
            if remote is not None:
                connection.contacts.lose(remote, PeerLostError("scripted"))
        elif action in ("cancel", "expire") and self.pairs:
            exposed, active = rng.choice(self.pairs)
            operation = exposed if connection is two.owner else active
            getattr(operation, action)()
        elif action == "step":
            for _ in range(rng.randrange(1, 4)):
                connection.progress.step()
                self.check()
        elif action == "turn":
            for _ in self.turn(connection):
                self.check()
        self.check()

    def turn(self, connection: Connection) -> Iterator[None]:
        connection.progress.step()
        yield
        connection.rounds.advance()
        yield
        connection.rounds.tick(time.monotonic())
        yield

    def check(self) -> None:
        for exposed, active in self.pairs:
            part = exposed.assistance
            moves = part is not None and not part.released
            assert not (active.released and moves), ("the claimant's memory", self.log)
            assert not (exposed.released and (moves or active.in_flight)), ("owner's", self.log)


def play(seeds: range) -> None:
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            schedule.play()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            schedule.two.owner.abort()
            schedule.two.claimant.abort()


def test_memory_is_given_back_in_the_end_and_never_while_it_is_moved() -> None:
    play(range(NUM_SCHEDULES))


@pytest.mark.soak
def test_memory_is_given_back_by_thousands_of_schedules() -> None:
    play(range(NUM_SCHEDULES, NUM_SCHEDULES + NUM_SOAKED))
