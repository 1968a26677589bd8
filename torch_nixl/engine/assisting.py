"""The part of a claim that its owner is asked to move: the owner's side. See `assist.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_nixl.engine import wire
from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.engine.assist import OPPOSITE
from torch_nixl.engine.grants import Claimant, GrantState
from torch_nixl.engine.offer import Offer
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.registry import borrow
from torch_nixl.engine.starting import start
from torch_nixl.errors import MetadataError, TorchNixlError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote


class Assistance(ActiveOperation):
    """Moves the part. The memory here is that of the exposing operation, which holds it as long."""

    __slots__ = ("_exposed",)

    def __init__(
        self,
        connection: Connection,
        exposed: PassiveOperation,
        remote: Remote,
        offer: Offer,
        frame: wire.Assist,
    ) -> None:
        self._exposed = exposed
        local = borrow(exposed.memories)
        super().__init__(
            connection, remote, offer, local, claim=frame.claim, start=frame.start, deadline=None
        )

    # Whoever waits for the exposing operation moves this, too.
    @property
    def attended(self) -> int:
        return self._exposed.attended

    @attended.setter
    def attended(self, value: int) -> None:
        pass

    def _count_end(self, error: BaseException | None) -> None:
        """It is counted with the whole, by both sides."""


def on_assist(connection: Connection, remote: Remote, frame: wire.Assist) -> None:
    """Move the part that a claimant asks for, or decline. Runs in the driver.

    Raises:
        MetadataError: What it offers makes no sense, or is not its own.
    """
    offer = Offer.unpack(
        frame.offer, key=connection.metadata_key, parse_metadata=connection.adapter.inspect
    )
    if offer.owner != remote.name:
        raise MetadataError(f"ASSIST from {remote.name} with an offer of {offer.owner}")
    started = False
    try:
        operation = connection.operations.offer(frame.key)
        if operation is not None and _may(connection, operation, remote, frame, offer):
            started = _start(connection, operation, remote, frame, offer)
    finally:  # Interrupted, too: the claimant waits for an answer.
        if not started:
            outcome = wire.Outcome.DECLINED
            connection.contacts.send(remote, wire.Done(offer.key, frame.claim, outcome, ""))


def _may(
    connection: Connection,
    operation: PassiveOperation,
    remote: Remote,
    frame: wire.Assist,
    offer: Offer,
) -> bool:
    """Whether this is the claimant's word, it fits, and somebody here waits for the end."""
    return (
        not connection.closing
        and not operation.done
        and operation.waited_for
        and operation.assistance is None
        and operation.grant.state is GrantState.GRANTED
        and operation.grant.claimant == Claimant(remote.name, frame.claim)
        and offer.direction is OPPOSITE[operation.direction]
        and frame.start < operation.nbytes
        and all(held.memory.kind is MemoryKind.DRAM for held in operation.memories)
        and all(memory.kind is MemoryKind.DRAM for memory in offer.memories)
    )


def _start(
    connection: Connection,
    operation: PassiveOperation,
    remote: Remote,
    frame: wire.Assist,
    offer: Offer,
) -> bool:
    try:
        part = Assistance(connection, operation, remote, offer, frame)
        # Who waits for the other side, of which operations may wait for this one, waits for ever.
        if not part.begin():
            return False
    except TorchNixlError:  # The two memories differ, or the claimant is lost.
        return False
    operation.assistance = part
    start(connection, part)
    connection.progress.kick()
    return True
