"""The part of a claim that its owner is asked to move: the owner's side. See `assist.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_nixl.engine import path, wire
from torch_nixl.engine.active import ActiveOperation, Phase, outcome_of
from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.engine.assist import OPPOSITE
from torch_nixl.engine.grants import Claimant, GrantState
from torch_nixl.engine.offer import Offer
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.registry import borrow
from torch_nixl.engine.starting import start
from torch_nixl.errors import MetadataError, TorchNixlError, TransferCancelled

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote


class Assistance(ActiveOperation):
    """Moves the part, and answers for it.

    The memory here is that of the exposing operation, which is not released before this.
    """

    __slots__ = ("_declined", "_exposed")

    def __init__(
        self,
        connection: Connection,
        exposed: PassiveOperation,
        remote: Remote,
        offer: Offer,
        frame: wire.Assist,
    ) -> None:
        self._exposed: PassiveOperation | None = exposed
        local = borrow(exposed.memories)
        super().__init__(
            connection, remote, offer, local, claim=frame.claim, start=frame.start, deadline=None
        )
        self._declined = False

    # Whoever waits for the exposing operation moves this, too.
    @property
    def attended(self) -> int:
        return 0 if self._exposed is None else self._exposed.attended

    @attended.setter
    def attended(self, value: int) -> None:
        pass

    def _learn_and_claim(self) -> bool:
        assert self.remote is not None and self._infos is not None
        try:
            # Operations on either side may wait for this one: it must not wait for any.
            if self.remote.has_room_for(self._infos) and self._learn():
                self._phase = Phase.MOVING
                return True
        except TorchNixlError as error:
            self._break(error)
            return True
        self._declined = True
        self._stop(TransferCancelled(f"{self}: declined"))
        return True

    def _tell_owner(self) -> None:
        assert self.remote is not None
        declined = wire.Outcome.DECLINED, ""
        outcome, text = declined if self._declined else outcome_of(self._error)
        done = wire.Done(self.key, self.claim, outcome, text)
        self._connection.contacts.send(self.remote, done)

    def _count_end(self, error: BaseException | None) -> None:
        """It is counted with the whole, by both sides."""

    def _release(self) -> None:
        super()._release()
        exposed, self._exposed = self._exposed, None
        if exposed is not None and exposed.done:
            exposed.check_quarantine()


def on_assist(connection: Connection, remote: Remote, frame: wire.Assist) -> None:
    """Move the part that a claimant asks for, or decline. Runs in the driver.

    Raises:
        MetadataError: What it offers makes no sense, or is not its own. Nobody is answered.
    """
    offer = Offer.unpack(
        frame.offer, key=connection.metadata_key, parse_metadata=connection.adapter.inspect
    )
    if offer.owner != remote.name:
        raise MetadataError(f"ASSIST from {remote.name} with an offer of {offer.owner}")
    exposed = connection.operations.offer(frame.key)
    part: Assistance | None = None
    try:
        if exposed is None or not _may_begin(connection, exposed, remote, frame, offer):
            _decline(connection, remote, frame, offer)
            return
        part = Assistance(connection, exposed, remote, offer, frame)
        exposed.assistance = part
        start(connection, part)
    except BaseException as error:
        if connection.operations.claim(offer.key, frame.claim, remote) is None:
            # It has not begun, and nobody else will answer.
            if exposed is not None and exposed.assistance is part:
                exposed.assistance = None
            _decline(connection, remote, frame, offer)
        if isinstance(error, TorchNixlError):  # The two memories differ, say.
            return
        raise
    exposed.ring()
    connection.progress.kick()


def _may_begin(
    connection: Connection,
    exposed: PassiveOperation,
    remote: Remote,
    frame: wire.Assist,
    offer: Offer,
) -> bool:
    """Whether this is the claimant's word, fits and pays, and somebody here waits for the end."""
    return (
        not connection.closing
        and not exposed.done
        and exposed.waited_for
        and exposed.assistance is None
        and exposed.grant.state is GrantState.GRANTED
        and exposed.grant.claimant == Claimant(remote.name, frame.claim)
        and offer.direction is OPPOSITE[exposed.direction]
        and frame.start < exposed.nbytes
        and all(held.memory.kind is MemoryKind.DRAM for held in exposed.memories)
        and all(memory.kind is MemoryKind.DRAM for memory in offer.memories)
        and connection.path(remote) == path.CMA
    )


def _decline(connection: Connection, remote: Remote, frame: wire.Assist, offer: Offer) -> None:
    declined = wire.Done(offer.key, frame.claim, wire.Outcome.DECLINED, "")
    connection.contacts.send(remote, declined)
