"""What all operations have in common: an end, those who wait for it, and memory that is held.

An operation ends once, with or without an error: from then on it is `done`. It is `released` when,
besides, neither side can touch its memory any more. Between the two (after a timeout, a cancel or
a failure) the operation keeps its memory alive and registered, since NIXL can't abort a transfer.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch_nixl.engine import observers
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.errors import ClosedError, TransferTimeout

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote


class Alarm:
    """Wakes one thread, early or in time; ringing twice is ringing once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def sleep(self, seconds: float | None) -> bool:
        """Sleep until rung, at most so long if not None; return whether it rang."""
        return self._lock.acquire(timeout=-1 if seconds is None else seconds)

    def ring(self) -> None:
        """Wake it. Any finalizer may: no lock is taken."""
        with contextlib.suppress(RuntimeError):  # Rung already and not slept on since.
            self._lock.release()


def deadline_after(seconds: float | None) -> float | None:
    """Return the `time.monotonic()` that lies so far ahead; None for never.

    Args:
        seconds: None and `math.inf` mean never.

    Raises:
        ValueError: They are negative, or not a number.
    """
    if seconds is None or seconds == math.inf:
        return None
    if not seconds >= 0:
        raise ValueError(f"timeout={seconds}: expected seconds, 0 or more")
    return time.monotonic() + seconds


# No ABC, though methods are abstract: type checkers see that all the same, and to ask of what kind
# an operation is, as the tables do for each, would take several times as long.
class Operation:
    """One movement of bytes, or the exposure of memory to one.

    Attributes:
        name: What it is, for messages.
        remote: The other side; None while nobody has taken up what is offered.
        deadline: `time.monotonic()` at which the operation times out; None for never.
        attended: Number of threads that wait, and move bytes meanwhile.
        num_awaiting: Number of tasks that wait.
        started_at: `time.monotonic()` at which it entered the connection's tables.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_connection",
        "_done",
        "_error",
        "_memories",
        "_released",
        "_waiters",
        "attended",
        "deadline",
        "name",
        "num_awaiting",
        "remote",
        "started_at",
    )

    def __init__(
        self,
        connection: Connection,
        name: str,
        memories: Sequence[RegisteredMemory],
        deadline: float | None,
    ) -> None:
        self._connection = connection
        self._memories = tuple(memories)
        self._done = False
        self._error: BaseException | None = None
        self._released = False
        self._waiters: list[Alarm] = []
        self._callbacks: list[Callable[[], None]] = []
        self.attended = 0
        self.num_awaiting = 0
        self.deadline = deadline
        self.name = name
        self.remote: Remote | None = None
        self.started_at = 0.0

    @property
    def done(self) -> bool:
        """Whether the operation has ended, well or not. Never does I/O."""
        return self._done

    @property
    def released(self) -> bool:
        """Whether no one but the caller can touch the operation's memory any more."""
        return self._released

    @property
    def error(self) -> BaseException | None:
        """What the operation ended with; None while it runs and when it ended well."""
        return self._error

    @property
    def waited_for(self) -> bool:
        """Whether a thread or a task waits for the end."""
        return bool(self.attended or self.num_awaiting or self._waiters)

    @property
    def in_flight(self) -> int:
        """Number of transfers of this operation that are under way."""
        return 0

    @property
    def memories(self) -> tuple[RegisteredMemory, ...]:
        """This side's memory; empty once released."""
        return self._memories

    @property
    def quarantined(self) -> bool:
        """Whether only time can tell when the memory is safe: no peer will say so."""
        return False

    @property
    def nbytes(self) -> int:
        """Size of this side's memory."""
        return sum(held.memory.nbytes for held in self._memories)

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation has ended.

        Args:
            timeout: Seconds; the operation itself ends with `TransferTimeout` when they have
                passed. None waits until the operation's own deadline.

        Raises:
            TransferTimeout: Time is up. The memory stays owned: see `wait_released`.
            TransferCancelled: This side or the other cancelled.
            LeaseExpired: The offer had lapsed before it was taken up.
            PeerLostError: The other side died or left.
            TransferError: The transfer failed, here or on the other side.
            ClosedError: The connection was closed meanwhile.
        """
        if not self._done:
            deadline = self.deadline
            until = deadline_after(timeout)
            if until is not None:
                deadline = until if deadline is None else min(until, deadline)
            if not self._connection.progress.wait(self, deadline):
                self.expire()
        if self._error is not None:
            # A copy: an exception that is raised gathers frames, and with them what those hold.
            raise copy.copy(self._error) from self._error.__cause__

    def wait_released(self, timeout: float | None = None) -> bool:
        """Block until the memory is the caller's alone; return False if it isn't by then.

        Args:
            timeout: Seconds; None waits as long as it takes, which a stopped peer can make long.
        """
        deadline = deadline_after(timeout)
        return self._connection.progress.wait_until(lambda: self._released, deadline)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the operation has ended, in the thread that noticed.

        It is called at once if the operation has ended already, and always outside of all locks.
        """
        with self._connection.lock:
            pending = not self._done
            if pending:
                self._callbacks.append(callback)
                self._connection.operations.watched[self] = None
        if pending:
            self._connection.progress.kick()
        else:
            callback()

    def remove_done_callback(self, callback: Callable[[], None]) -> None:
        """Have `callback` called no more, unless that has begun."""
        with self._connection.lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    @abstractmethod
    def cancel(self) -> None:
        """Ask the operation to end. Bytes may still move until it is `released`."""

    @abstractmethod
    def expire(self) -> None:
        """End the operation because its time is up."""

    def shut(self, error: ClosedError) -> None:
        """End because the connection is about to: start nothing more, and ask the remote not to."""

    def mend(self) -> None:
        """Complete an end that an exception out of a signal handler cut short, if it did."""
        if self._released:
            self._connection.operations.remove(self)

    def check_quarantine(self) -> None:
        """Release memory that is still held though the operation has ended, once that is safe."""

    def attend(self) -> bool:
        """Do what this operation needs done now; return whether anything was."""
        return False

    def hold(self, timeout: float) -> bool:
        """Keep all threads from moving bytes for this operation from now on.

        Returns:
            False if one is still at it after `timeout` seconds.
        """
        return True

    def abort(self, error: BaseException) -> None:
        """End at once: the agent is gone, and so is every transfer that it had posted."""
        self._finish(error)
        self._release()

    def on_fork(self, error: BaseException) -> None:
        """End in a forked child, where nothing of the library may be touched, memory included."""
        self._finish(error)

    def on_forgotten(self) -> None:
        """Take note that the remote had lost this process, and has made contact anew."""

    @abstractmethod
    def on_lost(self, error: BaseException) -> None:
        """Take note that the remote is gone."""

    def _timeout_error(self, why: str) -> TransferTimeout:
        advice = "" if self.remote is None else self.remote.advice()
        return TransferTimeout(f"{self}: timed out {why}{advice}")

    def _finish(self, error: BaseException | None) -> bool:
        """End with or without an error; only the first call counts."""
        with self._connection.lock:
            if self._done:
                return False
            self._error = error
            self._done = True
            if not self._released:
                self._connection.operations.ended[self] = None
            waiters, self._waiters = self._waiters, []
            callbacks, self._callbacks = self._callbacks, []
            if callbacks:
                self._connection.operations.watched.pop(self, None)
        for waiter in waiters:
            waiter.ring()
        self._connection.progress.call_later(callbacks)
        self._count_end(error)
        return True

    def _count_end(self, error: BaseException | None) -> None:
        """Count it in the connection's figures; parts of others leave that to the whole."""
        nbytes = self.nbytes
        self._connection.counters.count_end(nbytes, error)
        if observers.ends:
            observers.tell_end(self._connection, self, nbytes, error)

    def _release(self) -> None:
        """Give the memory back; only the first call counts."""
        with self._connection.lock:
            if self._released:
                return
            self._released = True
            memories, self._memories = self._memories, ()
        for held in memories:
            self._connection.registry.release(held)
        self._connection.operations.remove(self)

    def ring(self) -> None:
        """Wake those who wait: there is something to attend to."""
        with self._connection.lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.ring()

    def add_waiter(self, waiter: Alarm) -> bool:
        """Have `waiter` released at the end; False if the operation has ended already."""
        with self._connection.lock:
            if self._done:
                return False
            self._waiters.append(waiter)
            return True

    def remove_waiter(self, waiter: Alarm) -> None:
        with self._connection.lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def __str__(self) -> str:
        peer = f" with {self.remote.name}" if self.remote is not None else ""
        return f"{self.name}{peer}"

    def __repr__(self) -> str:
        state = "released" if self._released else "done" if self._done else "running"
        return f"<{type(self).__name__} {self} {state} error={self._error!r}>"
