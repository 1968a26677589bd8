"""What a connection does in the rounds of its driver, and how often it asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_nixl.engine import observers
from torch_nixl.engine.deferred import Deferred
from torch_nixl.engine.dispatch import Dispatcher

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection

WAIT_SECONDS = 0.0005
"""Longest sleep between two polls while someone waits: 4 % of a core, 0.3 ms of latency."""

IDLE_SECONDS = 0.010
"""Sleep between two polls while nobody here waits, but a remote may send something."""

MENDING_SECONDS = 1.0
"""How often ends that were cut short are looked for."""


class Rounds:
    """What `Progress` and its background thread drive.

    Attributes:
        reachable: Whether metadata that tells how to reach this process has left it.
        tickers: What protocols above look at besides, called with the time.
    """

    def __init__(self, connection: Connection, dispatcher: Dispatcher, deferred: Deferred) -> None:
        self.reachable = False
        self.tickers: list[Callable[[float], None]] = []
        self._connection = connection
        self._operations = connection.operations
        self._dispatcher = dispatcher
        self._deferred = deferred
        self._deferred_entries = deferred.entries  # looked at in every poll
        self._next_mending = 0.0

    def poll(self) -> bool:
        """Take in what has arrived; return whether any of it was news."""
        moved = self._dispatcher.poll()
        if self._deferred_entries:
            moved |= self._deferred.run()
        return moved

    def advance(self) -> bool:
        """Advance operations that no thread attends; return whether anything moved."""
        moved = False
        if self._operations.transfers:
            for operation in list(self._operations.transfers):
                if not operation.attended:
                    moved |= operation.attend()
        return moved

    def tick(self, now: float) -> None:
        """Look at deadlines, silent remotes and what is left of lost ones."""
        connection = self._connection
        for operation in self._operations.overdue(now):
            operation.expire()
        waited_for = {
            remote
            for operation in (*self._operations.transfers, *self._operations.busy)
            if (remote := operation.remote) is not None
        }
        for exposed in list(self._operations.busy):
            if exposed.done:
                exposed.check_quarantine()
        if now >= self._next_mending:
            self._next_mending = now + MENDING_SECONDS
            for operation in list(self._operations.ended):
                operation.mend()
        connection.liveness.look_after(now, waited_for)
        connection.lost.sweep()
        connection.registry.collect()
        observers.trim()
        for callback in self.tickers:
            callback(now)

    def is_moving(self) -> bool:
        """Whether bytes are meant to be moving, to or from this process."""
        return bool(self._operations.transfers or self._operations.busy or self._deferred_entries)

    def is_watched(self) -> bool:
        """Whether somebody waits for an end who doesn't poll."""
        return bool(self._operations.watched)

    def poll_interval(self) -> float | None:
        """Longest sleep between two polls that what is outstanding allows; None for any."""
        operations, connection = self._operations, self._connection
        if operations.watched or self._deferred_entries:
            return WAIT_SECONDS
        if any(not one.done for one in (*operations.transfers, *operations.busy)):
            return WAIT_SECONDS
        # Once metadata has left, a stranger may knock at any time, and is owed an answer.
        open_to_others = self.reachable or len(connection.contacts) or len(operations)
        return IDLE_SECONDS if open_to_others or connection.lost.lingering else None

    def crash(self, error: BaseException) -> None:
        """The background thread met a bug: fail everything rather than hang."""
        self._connection.abort(f"its progress thread failed: {error!r}")
