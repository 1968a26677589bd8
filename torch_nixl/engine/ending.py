"""How a connection ends: what it lets end first, and what it stops."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from torch_nixl.engine import host
from torch_nixl.engine.grants import GrantState
from torch_nixl.engine.operation import deadline_after
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.errors import ClosedError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection

ABORT_SECONDS = 5.0
"""How long `abort` waits for threads that are moving bytes: a post takes milliseconds."""

STOP_SHARE = 0.25
"""Share of `close`'s time that is kept for stopping what has not ended. An agent that dies under a
transfer costs the other side its connection, and has the library complain on both."""


def close(connection: Connection, timeout: float) -> None:
    """Do what `Connection.close` says."""
    if connection.closed:
        return
    operations, progress = connection.operations, connection.progress

    def has_ended() -> bool:
        # The thread that closes may be the one that advances operations otherwise.
        connection.rounds.advance()
        return all(operation.quarantined for operation in operations.all())

    deadline = deadline_after(timeout)
    connection.closing = True
    with contextlib.suppress(ClosedError):  # Another thread has aborted it meanwhile.
        for operation in operations.all():
            if isinstance(operation, PassiveOperation):
                if operation.grant.state is GrantState.OFFERED:
                    operation.cancel()
        patience = deadline_after(timeout * (1 - STOP_SHARE))
        if not progress.wait_until(has_ended, patience):
            for operation in operations.all():
                operation.shut(ClosedError(f"{operation}: stopped by its connection's end"))
            progress.wait_until(has_ended, deadline)
        # Those that are done and not counted wait for their owners' parts.
        if not any(one.counted or not one.done for one in list(operations.transfers)):
            # Peers take BYE as proof that we touch their memory no more. It is said before another
            # thread can find out that one of them has left, too: NIXL logs an error for each word
            # to who has, and forgets who was lost.
            progress.sweep(connection.contacts.say_bye)
    connection.abort("it was closed")


def abort(connection: Connection, why: str) -> None:
    """Do what `Connection.abort` says, once: the connection is marked as closed already."""
    host.unwatch(connection)
    connection.progress.stop()
    operations = connection.operations.close()
    # A thread that is inside a post moves bytes until it returns, agent or not.
    deadline = time.monotonic() + ABORT_SECONDS
    for operation in operations:
        safe = (
            not operation.touchable
            if isinstance(operation, PassiveOperation)
            else operation.hold(deadline - time.monotonic())
        )
        if not safe:
            host.keep_for_ever(operation.memories)
    connection.adapter.close()
    connection.registry.close()
    for operation in operations:
        operation.abort(ClosedError(f"{operation}: the connection is closed: {why}"))
    connection.progress.stop()
