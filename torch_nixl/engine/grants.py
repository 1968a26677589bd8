"""Who may touch exposed memory, and until when. Pure: no I/O, no clock, no threads.

A grant belongs to memory that this process exposes. It is offered to whoever holds its key, and
at most one peer can claim it::

    state     event     next      effect
    -------   -------   -------   -------------------------------------------------
    OFFERED   claim     GRANTED   the claimant is told so; from now on it may touch
    OFFERED   revoke    RELEASED  outcome CANCELLED
    OFFERED   expire    RELEASED  outcome EXPIRED
    GRANTED   claim     GRANTED   nothing, if it is the claimant's own, said again
    GRANTED   done      RELEASED  the claimant's outcome
    GRANTED   revoke    REVOKING  the claimant is asked to stop; it may still touch
    GRANTED   lost      RELEASED  outcome LOST, once the claimant can't touch any more
    REVOKING  done      RELEASED  the claimant's outcome
    REVOKING  lost      RELEASED  outcome LOST

What is not in the table can't happen or changes nothing: any other claim is refused, a lease that
lapses after the grant no longer matters, `done` from anyone but the claimant is ignored. Only in
RELEASED is the memory the owner's alone. A grant never goes back.

There is no way to take memory back from a writer or reader that does not answer: the transfer
library can't revoke what a remote was told. So REVOKING may last, and the memory stays owned.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch_nixl.engine.wire import Reason


class GrantState(enum.Enum):
    """The states of the table above, in the only order in which they follow each other."""

    OFFERED = enum.auto()
    GRANTED = enum.auto()
    REVOKING = enum.auto()
    RELEASED = enum.auto()


@dataclass(frozen=True, slots=True)
class Claimant:
    """The one operation that took a grant up: its process's name and its number there."""

    remote: str
    claim: int


@dataclass(slots=True)
class Grant:
    """One row of the table above."""

    state: GrantState = GrantState.OFFERED
    claimant: Claimant | None = None
    reason: Reason | None = None

    @property
    def released(self) -> bool:
        """Whether the memory is the owner's alone."""
        return self.state is GrantState.RELEASED

    def claim(self, claimant: Claimant) -> Reason | None:
        """Take the grant up; return None if granted, else why not."""
        if self.state is GrantState.OFFERED:
            self.state = GrantState.GRANTED
            self.claimant = claimant
            return None
        return self.reason or Reason.TAKEN

    def is_held_by(self, claimant: Claimant) -> bool:
        """Whether a claim is that which was granted, and nobody has withdrawn it."""
        return self.state is GrantState.GRANTED and self.claimant == claimant

    def done(self, claimant: Claimant) -> bool:
        """Note that the claimant won't touch the memory any more; False if that's not it."""
        if self.claimant != claimant or self.state is GrantState.RELEASED:
            return False
        self.state = GrantState.RELEASED
        self.reason = Reason.TAKEN
        return True

    def revoke(self, reason: Reason) -> Claimant | None:
        """Withdraw the grant; return the claimant who must be asked to stop, if any."""
        if self.state is GrantState.OFFERED:
            self.state = GrantState.RELEASED
            self.reason = reason
        elif self.state is GrantState.GRANTED:
            self.state = GrantState.REVOKING
            self.reason = reason
            return self.claimant
        return None

    def lost(self) -> None:
        """Note that the claimant is gone and can't touch the memory any more."""
        assert self.state in (GrantState.GRANTED, GrantState.REVOKING)
        self.state = GrantState.RELEASED
        self.reason = Reason.TAKEN
