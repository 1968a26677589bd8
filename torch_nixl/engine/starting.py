"""How operations start: memory held, their place among device work noted, in the tables at last.

What fails on the way gives up all that came before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.memory import Memory, require_writable
from torch_nixl.engine.offer import Offer
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.streams import order_of_memories
from torch_nixl.errors import ClosedError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection


def expose(
    connection: Connection,
    direction: Direction,
    memories: Sequence[Memory],
    *,
    deadline: float | None,
    public: bool,
    stream: object,
) -> PassiveOperation:
    """Do what `Connection.expose` says."""
    held = _hold(connection, memories, target=direction is Direction.WRITE, public=public)
    try:
        operation = PassiveOperation(connection, direction, held, deadline=deadline)
        operation.order = order_of_memories(memories, stream=stream)
    except BaseException:
        release_all(connection, held)
        raise
    start(connection, operation)
    connection.progress.kick()
    return operation


def claim(
    connection: Connection,
    offer: Offer,
    memories: Sequence[Memory],
    *,
    number: int,
    deadline: float | None,
    stream: object,
) -> ActiveOperation:
    """Do what `Connection.claim` says.

    Args:
        connection: Whose operation it is.
        offer: What is claimed.
        memories: Pairwise as large as the offer's.
        number: The claim's own.
        deadline: `time.monotonic()`.
        stream: Whose queued work goes before it.
    """
    held = _hold(connection, memories, target=offer.direction is Direction.READ)
    try:
        remote = connection.contact(offer.owner, offer.metadata[0])
        operation = ActiveOperation(
            connection, remote, offer, held, claim=number, deadline=deadline
        )
        operation.order = order_of_memories(memories, stream=stream)
    except BaseException:
        release_all(connection, held)
        raise
    start(connection, operation)
    operation.attend()
    connection.progress.kick()
    return operation


def start(connection: Connection, operation: Operation) -> None:
    """Enter an operation into the connection's tables.

    Raises:
        ClosedError: The connection is closed; the operation has ended with it.
    """
    try:
        connection.operations.add(operation)
    except ClosedError as error:
        operation.abort(error)
        raise


def register_all(
    connection: Connection, memories: Iterable[Memory], *, public: bool = False
) -> list[RegisteredMemory]:
    """Register memories; hold all of them, or none if one can't be."""
    held: list[RegisteredMemory] = []
    try:
        held.extend(connection.register(memory, public=public) for memory in memories)
    except BaseException:
        release_all(connection, held)
        raise
    return held


def release_all(connection: Connection, held: Iterable[RegisteredMemory]) -> None:
    """Give up what `register_all` held."""
    for one in held:
        connection.registry.release(one)


def _hold(
    connection: Connection, memories: Sequence[Memory], *, target: bool, public: bool = False
) -> list[RegisteredMemory]:
    if target:
        for index, memory in enumerate(memories):
            require_writable(memory, f"memories[{index}]")
    return register_all(connection, memories, public=public)
