"""Who is told what connections do, while anyone wants to know: traces and latency histograms.

Nobody is, as a rule, and then it costs one look at an empty list where something ends.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.operation import Operation
    from torch_nixl.engine.remotes import Remote

log = logging.getLogger("torch_nixl.observers")


class EndObserver(Protocol):
    """Is told of each operation that has ended."""

    def on_end(
        self, connection: Connection, operation: Operation, error: BaseException | None
    ) -> None:
        """An operation has ended, begun at its `started_at`. Any thread; must not block."""
        ...


class MessageObserver(Protocol):
    """Is told of each message that travels in its frame, and is no operation."""

    def on_message(
        self, connection: Connection, remote: Remote, nbytes: int, *, sent: bool
    ) -> None:
        """A message of so many bytes has left or come. Any thread; must not block."""
        ...


ends: list[EndObserver] = []
messages: list[MessageObserver] = []


def tell_end(connection: Connection, operation: Operation, error: BaseException | None) -> None:
    """Tell those in `ends`. What they raise is logged: it is no business of the operation's."""
    for observer in tuple(ends):
        try:
            observer.on_end(connection, operation, error)
        except Exception:
            log.exception("an observer raised")


def tell_message(connection: Connection, remote: Remote, nbytes: int, *, sent: bool) -> None:
    """Tell those in `messages`, as `tell_end` does."""
    for observer in tuple(messages):
        try:
            observer.on_message(connection, remote, nbytes, sent=sent)
        except Exception:
            log.exception("an observer raised")
