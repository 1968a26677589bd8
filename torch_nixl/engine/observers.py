"""Who takes note of what connections do, while anyone wants to know: traces, histograms, spans.

Nobody does, as a rule, and then it costs one look at an empty tuple where something ends.

[Note: notes]
A message of 8 bytes takes 20 us, of which watching may cost 2 % on both ends together. So all that
happens on its way is that a few values and a time are appended to a deque, which needs no lock.
What they mean is worked out later, by whoever takes them out. Notes never hold an operation, its
tensors or its error. They are numbered, so that those that found no room are counted.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

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


Ended: TypeAlias = tuple[int, float, float, str, str, str, int, object, "tuple[str, str] | None"]
"""An operation that has ended: number, `time.monotonic()` of its begin (0 if it never began) and of
its end, names of agent and remote (empty if none) and its own, bytes, route (None if it has none),
and the name and text of its error."""

Passed: TypeAlias = tuple[int, float, str, int, bool]
"""A message: number, `time.monotonic()`, the remote's name, bytes, and whether it was sent."""

Note = TypeVar("Note", bound="tuple[Any, ...]")


class _Notes(Generic[Note]):
    """The latest notes, numbered. Any threads write; one reads.

    Args:
        limit: How many are kept.

    Attributes:
        dropped: How many found no room, as far as those behind them were taken out.
    """

    def __init__(self, limit: int) -> None:
        self._kept: deque[Note] = deque(maxlen=limit)
        self._append = self._kept.append
        self._number = itertools.count().__next__
        self._num_taken = 0
        self.dropped = 0

    def take(self) -> Note | None:
        """Take the oldest out; None if there is none."""
        try:
            note = self._kept.popleft()
        except IndexError:
            return None
        # Of two threads one may draw its number first and append second: never less than zero.
        self.dropped = max(self.dropped, note[0] - self._num_taken)
        self._num_taken += 1
        return note

    def take_all(self) -> list[Note]:
        """Take out all that there are."""
        return list(iter(self.take, None))


class EndNotes(_Notes[Ended]):
    """The latest operations that have ended."""

    def note(
        self, connection: Connection, operation: Operation, nbytes: int, error: BaseException | None
    ) -> None:
        """Note one: an `EndWatcher`."""
        remote = operation.remote
        self._append(
            (
                self._number(),
                operation.started_at,
                time.monotonic(),
                connection.name,
                "" if remote is None else remote.name,
                operation.name,
                nbytes,
                getattr(operation, "route", None),
                None if error is None else (type(error).__name__, str(error)),
            )
        )


class MessageNotes(_Notes[Passed]):
    """The latest messages that travelled in their frames.

    Attributes:
        note: Notes one: a `MessageWatcher`.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        append, number, now = self._append, self._number, time.monotonic

        # All that it needs is bound here: looking it up would be half of what it costs.
        def note(remote: str, nbytes: int, sent: bool) -> None:
            append((number(), now(), remote, nbytes, sent))

        self.note: MessageWatcher = note
