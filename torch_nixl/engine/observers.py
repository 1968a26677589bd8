"""Who takes note of what connections do, while anyone wants to know: traces, histograms, spans.

Nobody does, as a rule, and then it costs one look at an empty tuple where something ends.

[Note: notes]
A message of 8 bytes takes 20 us, of which watching may cost 2 % on both ends together. So all that
happens on its way is that a time and a few values are appended to a list, which needs no lock.
What they mean is worked out later, by whoever takes them out. Notes never hold an operation, its
tensors or its error. Their memory is bounded, and what finds no room is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.operation import Operation

log = logging.getLogger("torch_nixl.observers")

EndWatcher: TypeAlias = "Callable[[Connection, Operation, int, BaseException | None], None]"
"""Is told of each operation that has ended, and its bytes. Any thread; must not block."""

MessageWatcher: TypeAlias = Callable[[str, int, bool], None]
"""Is told of each message that travels in its frame, and is no operation: the remote's name, its
bytes, and whether it was sent. Any thread, locks held: it must neither block nor raise."""

ends: tuple[EndWatcher, ...] = ()
messages: tuple[MessageWatcher, ...] = ()

_lock = threading.Lock()
"""Guards changes of the two. Who reads them needs none: tuples don't change."""


def watch(*, end: EndWatcher | None = None, message: MessageWatcher | None = None) -> None:
    """Tell `end` and `message` from now on."""
    global ends, messages
    with _lock:
        if end is not None:
            ends = (*ends, end)
        if message is not None:
            messages = (*messages, message)


def unwatch(*, end: EndWatcher | None = None, message: MessageWatcher | None = None) -> None:
    """Tell them no more."""
    global ends, messages
    with _lock:
        ends = tuple(one for one in ends if one != end)
        messages = tuple(one for one in messages if one != message)


def tell_end(
    connection: Connection, operation: Operation, nbytes: int, error: BaseException | None
) -> None:
    """Tell those in `ends`. What they raise is logged: it is no business of the operation's."""
    for watcher in ends:
        try:
            watcher(connection, operation, nbytes, error)
        except Exception:
            log.exception("a watcher raised")


Ended: TypeAlias = tuple[float, float, str, str, str, int, object, "tuple[str, str] | None"]
"""An operation that has ended: `time.monotonic()` of its begin (0 if it never began) and of its
end, names of agent and remote (empty if none) and its own, bytes, route (None if it has none), and
the name and text of its error."""

Passed: TypeAlias = tuple[float, str, int, bool]
"""A message: `time.monotonic()`, the remote's name, bytes, and whether it was sent."""


def ended(
    connection: Connection, operation: Operation, nbytes: int, error: BaseException | None
) -> Ended:
    """What there is to note of an operation."""
    remote = operation.remote
    return (
        operation.started_at,
        time.monotonic(),
        connection.name,
        "" if remote is None else remote.name,
        operation.name,
        nbytes,
        getattr(operation, "route", None),
        None if error is None else (type(error).__name__, str(error)),
    )


Row = TypeVar("Row", bound="tuple[Any, ...]")


class _Rows(Generic[Row]):
    """The latest notes: `limit` at most, and at least half of that. Any threads write; one reads.

    Attributes:
        dropped: How many there were before those that are kept.
    """

    _WIDTH: ClassVar[int]

    def __init__(self, limit: int) -> None:
        # The values of all rows, one behind the other: an object for each would need twice the
        # memory, and memory that is touched for the first time costs more than all else here.
        self._kept: list[Any] = []
        self._most = limit * self._WIDTH
        self._trimming = threading.Lock()
        self.dropped = 0

    def _trim(self) -> None:
        # Whoever has the lock does it; it may be this very thread, interrupted.
        if self._trimming.acquire(blocking=False):
            try:
                if len(self._kept) > self._most:
                    count = max(1, self._most // self._WIDTH // 2)
                    del self._kept[: count * self._WIDTH]
                    self.dropped += count
            finally:
                self._trimming.release()

    def rows(self) -> list[Row]:
        """All that are kept, in their order."""
        values = iter(self._kept[:])
        return list(zip(*[values] * self._WIDTH, strict=True))  # type: ignore[arg-type]


class EndRows(_Rows[Ended]):
    """The latest operations that have ended."""

    _WIDTH = 8

    def note(
        self, connection: Connection, operation: Operation, nbytes: int, error: BaseException | None
    ) -> None:
        """Note one: an `EndWatcher`."""
        self._kept.extend(ended(connection, operation, nbytes, error))
        if len(self._kept) > self._most:
            self._trim()


class MessageRows(_Rows[Passed]):
    """The latest messages that travelled in their frames.

    Attributes:
        note: Notes one: a `MessageWatcher`.
    """

    _WIDTH = 4

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        kept, extend, most, now = self._kept, self._kept.extend, self._most, time.monotonic

        # All that it needs is bound here: looking it up would be half of what it costs.
        def note(remote: str, nbytes: int, sent: bool) -> None:
            extend((now(), remote, nbytes, sent))
            if len(kept) > most:
                self._trim()

        self.note: MessageWatcher = note


class EndQueue:
    """Operations that have ended, for a thread that takes them out. Any threads write; one reads.

    Args:
        limit: How many may wait.

    Attributes:
        dropped: How many found no room.
    """

    def __init__(self, limit: int) -> None:
        self._waiting: deque[Ended] = deque()
        self._limit = limit
        self._lock = threading.RLock()
        self.dropped = 0

    def note(
        self, connection: Connection, operation: Operation, nbytes: int, error: BaseException | None
    ) -> None:
        """Note one: an `EndWatcher`."""
        if len(self._waiting) < self._limit:
            self._waiting.append(ended(connection, operation, nbytes, error))
        else:
            self.drop(1)

    def drop(self, count: int) -> None:
        """Count what gets no room, or is not taken any more."""
        with self._lock:
            self.dropped += count

    def take(self) -> Ended | None:
        """Take the oldest out; None if there is none."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None
