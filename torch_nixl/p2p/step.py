"""One step of a channel, and the bytes that this end moves for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.indexed import IndexedRows, IndexedTransfer
from torch_nixl.engine.operation import Operation
from torch_nixl.errors import TransferCancelled
from torch_nixl.p2p.ordered import Ordered
from torch_nixl.p2p.protocol import Route
from torch_nixl.p2p.terms import Role

if TYPE_CHECKING:
    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.p2p.peer import Peer
    from torch_nixl.p2p.session import Session

SPIN_SECONDS = 0.0005
"""How long a blocking step polls before it enters the tables and says that it waits."""


class StepOperation(Operation):
    """One step of a channel on this end.

    Attributes:
        session: The channel as both ends agreed on it.
        index: The step's number.
        role: What this end does.
        waiting: Whether a thread waits for it from the start.
        listed: Whether it is in the connection's tables.
        begun: Whether it was told how bytes go, the ends having agreed.
        announced: Whether the other end was told that this one is ready.
        owes: Whether this end's part is still to be moved.
        expects: Whether the other end's part is still to be moved.
        ending: Whether a thread is about to end it, both parts having moved.
        moves: What is under way.
        route: Which way bytes go.
        packed: Whether some of them were packed on this end.
        order: None: a `DeviceStep` has one.
        ready: Whether bytes may be touched: what was queued on devices has run.
    """

    order: StreamOrder | None = None
    ready = True

    __slots__ = (
        "announced",
        "begun",
        "ending",
        "expects",
        "index",
        "listed",
        "moves",
        "owes",
        "packed",
        "role",
        "route",
        "session",
        "waiting",
        "watched",
    )

    def __init__(
        self, session: Session, index: int, role: Role, deadline: float | None, *, waiting: bool
    ) -> None:
        # A kind, not a name of its own: figures are kept for each.
        name = "channel send" if role is Role.SEND else "channel receive"
        super().__init__(session.connection, name, (), deadline)
        self.remote = session.peer.remote
        self.session = session
        self.index = index
        self.role = role
        self.waiting = waiting
        self.listed = False
        self.begun = False
        self.announced = False
        self.owes = False
        self.expects = False
        self.ending = False
        self.moves: list[StepMove] = []
        self.route = Route.READ
        self.packed = session.packed
        self.watched: Peer | None = None

    @property
    def nbytes(self) -> int:
        return self.session.nbytes

    @property
    def incoming(self) -> bool:
        return self.role is Role.RECEIVE

    @property
    def moving(self) -> bool:
        """Whether we are touching the other end's memory."""
        return bool(self.moves)

    @property
    def in_flight(self) -> int:
        return sum(move.in_flight for move in self.moves)

    def __str__(self) -> str:
        verb = "send" if self.role is Role.SEND else "receive"
        return f"{verb} of step {self.index} on {self.session}"

    def run(self) -> None:
        """Wait for a step that was just begun. Raises as `wait` does."""
        if not self._connection.progress.spin(self._look, SPIN_SECONDS):
            self.session.enlist(self)
        self.wait()

    def _look(self) -> bool:
        if self.moves:
            self.attend()
        return self._done

    def attend(self) -> bool:
        moved = False
        for move in tuple(self.moves):
            moved |= move.attend()
        return moved

    def finish(self, error: BaseException | None) -> None:
        """End it, with or without an error."""
        self._finish(error)

    def release(self) -> None:
        """Nobody touches its memory any more."""
        self._release()

    def fail(self, error: BaseException) -> None:
        """End it, and the channel with it: the two ends no longer agree on what was moved."""
        self.session.fail(error)

    def cancel(self) -> None:
        if not self._done:
            self.fail(TransferCancelled(f"{self}: cancelled"))

    def expire(self) -> None:
        if not self._done:
            where = "with its bytes under way" if self.moves else self.session.what_it_waits_for()
            self.fail(self._timeout_error(f"{where}; its memory stays owned until it is released"))

    def on_lost(self, error: BaseException) -> None:
        """The session, which is told too, ends it."""

    def on_left(self, error: BaseException) -> None:
        """The session, which is told too, ends it."""


class DeviceStep(Ordered, StepOperation):
    """A step that has device memory on this end."""

    __slots__ = ("_exchange", "_last", "_outs", "order", "ready")

    def __init__(
        self,
        session: Session,
        index: int,
        role: Role,
        deadline: float | None,
        order: StreamOrder,
        outs: tuple[torch.Tensor, ...],
        *,
        waiting: bool,
    ) -> None:
        super().__init__(session, index, role, deadline, waiting=waiting)
        self._exchange = session.exchange
        self._last = False
        self._outs: tuple[torch.Tensor, ...] = ()
        self.ready = False
        self.put_in_order(order, outs)

    def when_passed(self, action: Callable[[], None]) -> None:
        """Go on once what was queued before has run: now, or in the driver."""
        self._when_passed((self.order,), action)

    def finish(self, error: BaseException | None) -> None:
        super().finish(error)
        if error is not None and self.role is Role.RECEIVE:
            self._limit_hold()


class StepMove(IndexedTransfer):
    """Moves this end's part of one step, which is what programs wait for."""

    __slots__ = ("_step",)

    def __init__(
        self, step: StepOperation, direction: Direction, rows: Sequence[IndexedRows]
    ) -> None:
        self._step = step
        super().__init__(step.session.connection, direction, rows)

    # Whoever waits for the step moves this, too.
    @property
    def attended(self) -> int:
        return self._step.attended

    @attended.setter
    def attended(self, value: int) -> None:
        pass

    def _count_end(self, error: BaseException | None) -> None:
        """Count nothing: the step does, with the bytes of both ends' parts."""

    def _settle(self) -> None:
        # First what the other end waits for, then this end's waiters, then housekeeping.
        self._step.session.on_part_moved(self._step, self, self._error)
        self._finish(None)
        self._release()
        self._release_spent()
