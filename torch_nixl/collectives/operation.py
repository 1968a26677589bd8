"""One collective under way: an algorithm that goes on whenever what it waits for has ended.

[Note: who advances a collective]
An algorithm is a generator that yields what it waits for. A thread that waits for the collective
advances it, and attends to its messages, between polls. While none does, the end of what it waits
for calls `attend` in whichever thread polls. One thread at a time runs the generator (`_running`);
one that can't is not needed: the waiter looks again, the callback is registered only after the
generator was left, and whoever was at it looks whether what it waits for has ended meanwhile.

On device memory those above only have it go on: see `device_operation.py`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from torch_nixl.collectives.inquiry import Inquiry
from torch_nixl.collectives.port import Port
from torch_nixl.collectives.protocol import Signature
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.operation import Operation, deadline_after
from torch_nixl.engine.starting import register_all, release_all
from torch_nixl.errors import TransferCancelled
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.sending import SendOperation
from torch_nixl.p2p.tensors import MismatchError

if TYPE_CHECKING:
    from torch_nixl.collectives.group import CollectiveGroup
    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.p2p.communicator import Communicator

Message: TypeAlias = SendOperation | ReceiveOperation | Inquiry
Steps: TypeAlias = Generator[Message | None, None, None]
Algorithm: TypeAlias = Callable[[Port], Steps]

ASK_SECONDS = 0.25
"""How long a collective waits until it asks the other ranks where they are."""

MAX_ASK_SECONDS = 4.0
"""Longest time between two such rounds."""

_AS_IT_IS = contextlib.nullcontext()


class CollectiveOperation(Operation):
    """One rank's part in a collective.

    Attributes:
        number: Its number among the group's collectives.
        signature: What it is.
        outputs: What it changes.
        limit: `time.monotonic()` at which it times out; None for never.
        present: Ranks that have answered since they were last asked.
        order: None: a `DeviceCollective` has one.
    """

    __slots__ = (
        "_asked_at",
        "_attended",
        "_blocking",
        "_communicator",
        "_earlier",
        "_group",
        "_inference",
        "_parts",
        "_pause",
        "_running",
        "_stepping",
        "_steps",
        "_watched",
        "limit",
        "number",
        "outputs",
        "present",
        "signature",
    )

    order: StreamOrder | None = None

    def __init__(
        self,
        group: CollectiveGroup,
        communicator: Communicator,
        signature: Signature,
        number: int,
        algorithm: Algorithm,
        outputs: Sequence[torch.Tensor],
        limit: float | None,
    ) -> None:
        self._parts: list[Message] = []
        self._attended = 0
        super().__init__(communicator.connection, signature.name, (), None)
        self._group = group
        self._communicator = communicator
        self._running = threading.RLock()
        self._stepping = False
        self._blocking: Message | None = None
        self._watched: Message | None = None
        self._asked_at = 0.0
        self._pause = ASK_SECONDS
        self._earlier: set[int] | None = None
        # Only in that mode, which is a thread's own, may its tensors be written to.
        self._inference = torch.is_inference_mode_enabled() or any(
            one.is_inference() for one in outputs
        )
        self.number = number
        self.signature = signature
        self.outputs = list(outputs)
        self.limit = limit
        self.present: set[int] = set()
        self._steps: Steps | None = algorithm(Port(communicator, number, signature.mark, self))

    # Whoever waits for this attends to its messages, too.
    @property
    def attended(self) -> int:
        return self._attended

    @attended.setter
    def attended(self, value: int) -> None:
        self._attended = value
        for part in list(self._parts):
            part.attended = value
        if value == 0 and self._parts and not self._done:
            # The waiter was interrupted: from now on it goes on without one.
            self._connection.progress.call_later([self._wake])

    @property
    def nbytes(self) -> int:
        return 0  # Its messages are counted.

    @property
    def in_flight(self) -> int:
        # Waiters look at it every millisecond even where another thread polls.
        return max(1, sum(part.in_flight for part in list(self._parts)))

    @property
    def awaited(self) -> set[int]:
        """Ranks that it waits for a message from, or for to receive one."""
        return {_other(part) for part in list(self._parts) if not part.done}

    def __str__(self) -> str:
        return f"collective {self.number}, {self.signature}"

    def prepare(self, moved: Sequence[torch.Tensor]) -> None:
        """Make its memory. In the caller's thread.

        Args:
            moved: The tensors that the algorithm was given.
        """
        steps = self._steps
        if steps is None:
            return  # It has ended meanwhile.
        with self._mode():
            next(steps)

    def hold_memory(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register tensors until its end, so that their parts are found registered."""
        held = register_all(self._connection, list(map(tensor_memory, tensors)))
        with self._connection.lock:
            ended = self._released
            if not ended:
                self._memories += tuple(held)
        if ended:
            # Another thread has ended it while the caller's prepared it.
            release_all(self._connection, held)

    def _mode(self) -> contextlib.AbstractContextManager[object]:
        return torch.inference_mode() if self._inference else _AS_IT_IS

    def start(self) -> None:
        """Let it run as far as it gets, from then on by whoever waits or polls."""
        self._look_again(time.monotonic())
        self._connection.operations.add(self)
        if self._released:
            # It had ended before.
            self._connection.operations.remove(self)
        self.attend()

    def take(self, part: Message) -> None:
        """Attend to a message from now on."""
        part.attended = self._attended
        self._parts.append(part)

    def attend(self) -> bool:
        moved = False
        while not self._done and not self._stepping:
            running = self._running
            try:  # [Note: interrupts] in engine/progress.py
                if not running.acquire(blocking=False):
                    break  # Whoever holds it looks again.
                try:
                    self._stepping = True
                    moved |= self._advance()
                finally:
                    self._stepping = False
            finally:
                try:
                    running.release()
                except RuntimeError:
                    pass
            blocking = self._blocking
            if self.done:
                self._give_up_parts()
                break
            if self._attended or blocking is None:
                break  # Who waits looks again by itself.
            if blocking is not self._watched:
                self._watched = blocking
                blocking.add_done_callback(self._wake)
            if not blocking._done:
                break
            # It ended meanwhile, and who noticed may have found it busy.
        return moved

    def _wake(self) -> None:
        self.attend()

    def _advance(self) -> bool:
        """Run the algorithm until it has to wait. Holds `_running`."""
        moved = False
        try:
            while not self._done:
                blocking = self._blocking
                if blocking is not None and not blocking._done:
                    if not self._attend_parts():
                        return moved
                    moved = True
                    continue
                raise_for(blocking)
                moved = True
                if self._steps is not None:
                    try:
                        with self._mode():
                            self._blocking = next(self._steps)
                        continue
                    except StopIteration:
                        self._steps = None
                self._blocking = self._unfinished()
                if self._blocking is None:
                    self._end_well()
        except Exception as error:  # noqa: BLE001 - it ends the collective, on every rank
            self._group.fail(self, error)
        except BaseException as error:
            steps = self._steps
            if steps is not None and inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                # By Ctrl-C in the middle of the algorithm: nobody can go on with it.
                self._group.fail(self, TransferCancelled(f"interrupted by {error!r}"))
            raise
        return moved

    def _attend_parts(self) -> bool:
        """Attend to all messages; return whether the one that is waited for has ended."""
        ended = False
        for part in self._parts:
            if not part._done:
                part.attend()
            if part._done:
                ended = True
                if part._error is not None:
                    raise _named(part, part._error)
        if ended:
            self._parts = [part for part in self._parts if not part._done]
        return self._blocking is None or self._blocking._done

    def _unfinished(self) -> Message | None:
        """A message whose end the algorithm didn't wait for."""
        return next((part for part in self._parts if not part._done), None)

    def _end_well(self) -> None:
        """End it, unless something is wrong after all. Holds `_running`."""
        self._attend_parts()
        self._blocking = inquiry = self._group.inquire(self)
        if inquiry is not None:
            self.take(inquiry)
            return
        self._group.forget(self)
        self._finish(None)
        self._release()

    def end(self, error: BaseException) -> None:
        """End with an error, and give up all messages; what still moves stays owned."""
        if not self._finish(error):
            return
        self._give_up_parts()
        self._release()

    def _give_up_parts(self) -> None:
        """Also what was begun while another thread ended the collective."""
        error = self._error
        if error is not None:
            self._drop_steps()
            for part in list(self._parts):
                if not part.done:
                    part.fail(TransferCancelled(f"{part}: {error}"))

    def _drop_steps(self) -> None:
        self._steps = None

    # Waiting and time.

    def wait(self, timeout: float | None = None) -> None:
        if not self._done:
            deadline = self.limit
            until = deadline_after(timeout)
            if until is not None:
                deadline = until if deadline is None else min(until, deadline)
            progress = self._connection.progress
            while not self._done:
                look = self.deadline
                assert look is not None
                progress.wait(self, look if deadline is None else min(look, deadline))
                if not self._done:
                    self._look(deadline)
        if self._error is not None:
            raise copy.copy(self._error) from self._error.__cause__

    def wait_released(self, timeout: float | None = None) -> bool:
        deadline = deadline_after(timeout)
        return self._connection.progress.wait_until(
            lambda: self._released and all(part.released for part in self._parts), deadline
        )

    def expire(self) -> None:
        self._look(self.limit)
        if not self._done:
            self._connection.operations.add(self)

    def _look(self, limit: float | None) -> None:
        """Time out, or ask the other ranks where they are."""
        now = time.monotonic()
        if limit is not None and now >= limit:
            self._group.time_out(self)
            return
        assert self.deadline is not None
        if now >= self.deadline:
            self._earlier, self.present = self.present if self._asked_at else None, set()
            self._asked_at = now
            self._look_again(now)
            self._group.ask(self)

    def _look_again(self, now: float) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, MAX_ASK_SECONDS)
        self.deadline = now + pause
        if self.limit is not None:
            # Asked at least twice before it times out, so that it can be said who is missing.
            self.deadline = min(self.deadline, now + max(0.02, (self.limit - now) / 3))

    @property
    def has_asked(self) -> bool:
        """Whether it has waited for so long that it asked the other ranks."""
        return self._asked_at > 0

    def missing(self) -> list[int]:
        """Ranks that have not answered, though they had time to."""
        fresh = time.monotonic() - self._asked_at < ASK_SECONDS
        present = self.present | self._earlier if fresh and self._earlier else self.present
        everyone = range(self._communicator.world_size)
        return [r for r in everyone if r != self._communicator.rank and r not in present]

    def cancel(self) -> None:
        self._group.fail(self, TransferCancelled("cancelled"))

    def abort(self, error: BaseException) -> None:
        self._group.forget(self)
        super().abort(error)

    def on_lost(self, error: BaseException) -> None:
        """Its messages are told of it themselves."""


def _other(part: Message) -> int:
    """The rank at the other end."""
    if isinstance(part, SendOperation):
        return part.peer.rank
    assert part.source is not None
    return part.source


def raise_for(part: Message | None) -> None:
    """Raise what a message has failed with."""
    if part is not None and part._error is not None:
        raise _named(part, part._error)


def _named(part: Message, error: BaseException) -> BaseException:
    """The error of a message, with the rank at its other end."""
    if isinstance(error, MismatchError):
        return MismatchError(f"with rank {_other(part)}: {error}")
    return error
