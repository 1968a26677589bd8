"""An owner and a claimant of large memory whom only the test drives, over the loopback fabric."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torch_nixl.engine import assist
from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.passive import PassiveOperation

NBYTES = 1 << 20
START = assist.middle(NBYTES)
"""Where the owner's part begins."""


def filled(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=_seeded(seed))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def meet(owner: Connection, claimant: Connection) -> None:
    """Until the two have spoken, neither knows whether they are on one host."""
    first = owner.expose(Direction.READ, [tensor_memory(torch.ones(1))])
    claimant.claim(first.offer(), [tensor_memory(torch.zeros(1))]).wait(10)
    first.wait(10)


@dataclass
class Two:
    """An owner and a claimant whom only this thread drives."""

    fabric: LoopbackFabric = field(default_factory=LoopbackFabric)

    def __post_init__(self) -> None:
        self.agent = self.fabric.adapter("owner")
        self.owner = Connection(self.agent, timeout=20)
        self.claimant = Connection(self.fabric.adapter("claimant"), timeout=20)
        meet(self.owner, self.claimant)
        self.owner.progress.stop()
        self.claimant.progress.stop()
        self.source, self.target = filled(NBYTES, 1), torch.zeros(NBYTES, dtype=torch.uint8)

    def begin(
        self, direction: Direction = Direction.READ, *, waits: bool = True
    ) -> tuple[PassiveOperation, ActiveOperation]:
        exposed = self.owner.expose(direction, [tensor_memory(self.source)])
        exposed.num_awaiting += waits
        return exposed, self.claimant.claim(exposed.offer(), [tensor_memory(self.target)])

    def step(self, condition: Callable[[], bool] = lambda: False, turns: int = 0) -> bool:
        """Drive both until a condition holds, or for so many turns; return whether it does."""
        until = time.monotonic() + 5
        for turn in itertools.count():
            if condition():
                return True
            if turn >= turns > 0 or time.monotonic() > until:
                return False
            for connection in (self.owner, self.claimant):
                connection.progress.step()
                connection.rounds.advance()
                connection.rounds.tick(time.monotonic())
        raise AssertionError("counts for ever")

    def step_owner(self, turns: int) -> None:
        for _ in range(turns):
            self.owner.progress.step()
            self.owner.rounds.advance()

    def slow_owner(self) -> None:
        """Have what the owner posts crawl."""
        self.fabric.delay(8, initiator="owner")

    def let_go(self) -> None:
        self.fabric.delay(None, initiator="owner")

    def begin_slowly(self) -> tuple[PassiveOperation, ActiveOperation]:
        """A claim whose first half has been read, and whose second one crawls."""
        self.slow_owner()
        exposed, active = self.begin()
        assert self.step(lambda: active.moved_nbytes == START and in_flight(exposed))
        assert not active.done
        return exposed, active

    def works_still(self) -> bool:
        self.let_go()
        self.target.zero_()
        exposed, active = self.begin()
        both = self.step(lambda: exposed.released and active.released)
        return both and active.error is None and torch.equal(self.source, self.target)


def in_flight(exposed: PassiveOperation) -> bool:
    return exposed.assistance is not None and exposed.assistance.in_flight > 0
