"""Who takes note of what connections do, while anyone wants to know: traces, histograms, spans.

Nobody does, as a rule, and then it costs one look at an empty tuple where something ends.

[Note: notes]
A message of 8 bytes takes 20 us, of which watching may cost 2 %. What its sender notes, it notes
while the message is under way; what its receiver notes, the program there waits for. That is a call
of a function in C, with a time that is known already: to ask for the time and to call a function in
Python cost as much again (0.45 us instead of 0.25: code that was not run for 20 us is slow). No
lock is needed. What notes mean is worked out later, by whoever takes them out. They never hold an
operation, its tensors or its error. Their memory is bounded, and what finds no room is counted.
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

MessageWatcher: TypeAlias = "Callable[[Passed], None]"
"""Is told of each message that travels in its frame, and is no operation. Any thread, locks held:
it must neither block nor raise."""

ends: tuple[EndWatcher, ...] = ()
messages: tuple[MessageWatcher, ...] = ()

_message_rows: tuple[MessageRows, ...] = ()
"""Those whose watchers are in `messages`."""

_lock = threading.Lock()
"""Guards changes of the three. Who reads them needs none: tuples don't change."""


def watch(*, end: EndWatcher | None = None, message: MessageRows | None = None) -> None:
    """Tell `end`, and note messages in `message`, from now on."""
    global ends
    with _lock:
        if end is not None:
            ends = (*ends, end)
        if message is not None:
            _note_in(*_message_rows, message)


def unwatch(*, end: EndWatcher | None = None, message: MessageRows | None = None) -> None:
    """Tell them no more."""
    global ends
    with _lock:
        ends = tuple(one for one in ends if one != end)
        _note_in(*(one for one in _message_rows if one is not message))


def _note_in(*rows: MessageRows) -> None:
    global messages, _message_rows
    _message_rows = rows
    messages = tuple(one.note for one in rows)


def trim() -> None:
    """Keep the notes of messages within their limits. Drivers call it now and then."""
    for rows in _message_rows:
        rows.trim()


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
"""A message: `time.monotonic()` when it was sent, or when its sender was last heard; the remote's
name, bytes, and whether it was sent."""


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

    def trim(self) -> None:
        """Let the oldest go if there are too many."""
        # Whoever has the lock does it; it may be this very thread, interrupted.
        if len(self._kept) > self._most and self._trimming.acquire(blocking=False):
            try:
                limit = self._most // self._WIDTH
                count = max(0, len(self._kept) // self._WIDTH - (limit - limit // 2))
                del self._kept[: count * self._WIDTH]
                self.dropped += count
            finally:
                self._trimming.release()

    def rows(self) -> list[Row]:
        """All that are kept, in their order."""
        self.trim()
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
            self.trim()


class MessageRows(_Rows[Passed]):
    """The latest messages that travelled in their frames. Somebody is to call `trim`, too.

    Attributes:
        note: Notes one: a `MessageWatcher`.
    """

    _WIDTH = 4

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.note: MessageWatcher = self._kept.extend


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
