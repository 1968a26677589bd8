"""The claimant's side of a grant: reads or writes memory that a peer exposes."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch_nixl.engine import wire
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.assist import OPPOSITE, AssistedPart, may_assist, middle
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.offer import Offer
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.engine.streams import StreamOrder
from torch_nixl.engine.transfer import Piece, TransferOperation, plan
from torch_nixl.errors import (
    ClosedError,
    LeaseExpired,
    MetadataError,
    PeerLostError,
    TorchNixlError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection


class Phase(enum.Enum):
    """How far a claim has come."""

    LEARNING = enum.auto()  # the library is still to be told of the remote's regions
    CLAIMING = enum.auto()  # CLAIM is out
    MOVING = enum.auto()  # granted


class ActiveOperation(TransferOperation):
    """Claims what a peer offers and moves its bytes.

    Attributes:
        claim: Its number.
        order: For device memory, what has to run before it claims.
    """

    __slots__ = ("_again", "_infos", "_offer", "_part", "_phase", "claim", "order")

    starts_counted = False

    def __init__(
        self,
        connection: Connection,
        remote: Remote,
        offer: Offer,
        local: Sequence[RegisteredMemory],
        *,
        claim: int,
        deadline: float | None,
        start: int = 0,
    ) -> None:
        super().__init__(
            connection,
            remote,
            offer.direction,
            local,
            offer.memories,
            start=start,
            deadline=deadline,
        )
        self._offer = offer
        self._infos: list[BlobInfo] | None = [
            connection.adapter.inspect(blob) for blob in offer.metadata
        ]
        self._phase = Phase.LEARNING
        self._part: AssistedPart | None = None
        self._again = False
        self.claim = claim
        self.order: StreamOrder | None = None

    @property
    def key(self) -> bytes:
        """The offer's."""
        return self._offer.key

    @property
    def _waits_for_part(self) -> bool:
        """Whether our half is final, or will not move, and the owner's part has not ended."""
        return self._part is not None and self._pieces is None and not self._flight

    def on_granted(self) -> None:
        if self._phase is Phase.CLAIMING:
            self._phase = Phase.MOVING
            self.ring()
            self._connection.progress.kick()

    def on_refused(self, frame: wire.Refuse) -> None:
        if self._phase is Phase.CLAIMING:
            self._stop(refusal(str(self), frame))

    def on_revoked(self, frame: wire.Revoke) -> None:
        if frame.reason is wire.Reason.CLOSED:
            self._stop(PeerLostError(f"{self}: its owner is closing: {frame.text}"))
        elif frame.reason is wire.Reason.FAILED:
            self._stop(PeerLostError(f"{self}: its owner had given up: {frame.text}"))
        else:
            self._stop(TransferCancelled(f"{self}: withdrawn by its owner: {frame.text}"))

    def expire(self) -> None:
        if self._phase is not Phase.MOVING:
            self._stop(self._timeout_error("before its owner granted it"))
        elif self._waits_for_part:
            self._stop(self._timeout_error("before its owner had moved the second half"))
        else:
            super().expire()

    def _advance(self) -> bool:
        if self._waits_for_part:
            if not self._has_part_ended():
                self._leave_to_part()
                return False
            if self._pieces is None:
                self._settle()
                return True
        if self._phase is Phase.MOVING:
            return super()._advance()
        if self._done:
            self._pieces = None
            self._settle()
            return True
        if self._phase is Phase.CLAIMING:
            if self._again:
                self._again = False
                self._send_claim()
                if self._part is not None:
                    self._part.withdraw()
            # While the answer is under way there is time. Nothing moves before it is here.
            try:
                self._prepare_next()
            except TorchNixlError as error:
                self._break(error)
                return True
            return False
        return self._learn_and_claim()

    def _learn_and_claim(self) -> bool:
        assert self.remote is not None
        if self.order is not None and not self.order.passed():
            return False
        try:
            if not self._learn():
                return False
        except TorchNixlError as error:
            self._break(error)
            return True
        if self.remote.contact is Contact.FOREIGN:
            self._phase = Phase.MOVING
            return True
        self._phase = Phase.CLAIMING
        self._send_claim()
        if may_assist(self._connection, self.remote, self._memories, self._offer.memories):
            self._ask_for_assistance(self.remote)
        return True

    def claim_again(self) -> None:
        """Claim anew, as the owner has made contact anew: it may have dropped what came before.

        Whoever attends does it, so that nothing is claimed once this has ended.
        """
        if self._phase is Phase.CLAIMING:
            self._again = True
            self.ring()
            self._connection.progress.kick()

    def _send_claim(self) -> None:
        assert self.remote is not None
        nbytes = sum(memory.nbytes for memory in self._offer.memories)
        count = len(self._offer.memories)
        claim = wire.Claim(self._offer.key, self.claim, self._direction, nbytes, count)
        self._connection.contacts.send(self.remote, claim)

    def _learn(self) -> bool:
        """Tell the library of the offer's regions; False if other operations must end first."""
        assert self.remote is not None and self._infos is not None
        if not self._connection.contacts.learn(self.remote, self._offer.metadata, self._infos):
            return False
        self._infos = None
        self.counted = True
        return True

    def _ask_for_assistance(self, remote: Remote) -> None:
        """Have the owner move the second half: see [Note: assistance]."""
        operations = self._connection.operations
        start = middle(self.nbytes)
        part = AssistedPart(self._connection, self, remote, OPPOSITE[self._direction], start)
        packed = part.packed()
        if len(packed) > wire.MAX_ASSIST_OFFER:
            return
        self._part = part
        self._pieces = self._plan(stop=start)
        operations.busy[part] = None
        try:
            operations.add(part)
        except ClosedError as error:
            part.abort(error)
            return
        assist = wire.Assist(self._offer.key, self.claim, start, packed)
        part.asked = True
        self._connection.contacts.send(remote, assist)

    def _plan(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        memories = self._offer.memories
        return plan(self._connection.progress, self._memories, memories, start=start, stop=stop)

    def _has_part_ended(self) -> bool:
        """Whether the owner moves nothing any more. What it declined is then ours to move."""
        part = self._part
        assert part is not None
        if self._done and not part.done:
            if part.asked:
                part.cancel()
            else:  # Interrupted before the owner was asked.
                part.abort(TransferCancelled(f"{part}: was never begun"))
        if not part.released:
            return False
        self._part = None
        if part.error is not None and not part.withdrawn:
            self._finish(part.error)
        elif (part.declined or part.withdrawn) and not self._done:
            self._pieces = self._plan(start=part.start)
        return True

    def _leave_to_part(self) -> None:
        """Where this has failed: hold nothing but the memory until the owner has ended, too.

        That may last, if it was given up and lives, and is no transfer of this side's: its loss is
        complete, and contact can be made anew.
        """
        if self._done:
            self._release_spent()
            self._connection.operations.uncount(self)

    def _settle(self) -> None:
        if self._part is not None and not self._has_part_ended():
            self._leave_to_part()
            return
        if self._pieces is not None:
            return  # What was declined.
        if self._direction is Direction.READ and not self._done:
            # The owner may have withdrawn the memory before our last read was final. Its word
            # has then arrived before anything that it wrote afterwards could be read.
            self._connection.progress.sweep()
        self._finish(None)
        self._tell_owner()
        self._release()
        self._release_spent()

    def _tell_owner(self) -> None:
        """Say how it ended: from now on this side touches the owner's memory no more."""
        assert self.remote is not None
        if self._phase is Phase.LEARNING or self.remote.lost_error is not None:
            return  # A lost remote is no longer known to be a foreign one, either.
        outcome, text = outcome_of(self._error)
        if self.remote.contact is not Contact.FOREIGN:
            self._connection.contacts.send(
                self.remote, wire.Done(self._offer.key, self.claim, outcome, text)
            )
        elif outcome is wire.Outcome.COMPLETE:
            self.remote.answered = True
            self._connection.contacts.send_raw(self.remote, self._offer.key)


def refusal(what: str, frame: wire.Refuse) -> TorchNixlError:
    """The exception for a refused claim."""
    match frame.reason:
        case wire.Reason.EXPIRED:
            return LeaseExpired(f"{what}: the offer had lapsed: {frame.text}")
        case wire.Reason.REVOKED:
            return TransferCancelled(f"{what}: withdrawn by its owner: {frame.text}")
        case wire.Reason.CLOSED:
            return PeerLostError(f"{what}: its owner is closing: {frame.text}")
        case wire.Reason.FAILED:
            return PeerLostError(f"{what}: its owner had given up: {frame.text}")
        case wire.Reason.WRONG_SIZE | wire.Reason.WRONG_DIRECTION:
            return MetadataError(
                f"{what}: does not match what its owner exposes "
                f"({frame.reason.name.lower()}): {frame.text}"
            )
        case wire.Reason.UNKNOWN:
            return MetadataError(f"{what}: its owner knows no such offer, or not any more")
        case wire.Reason.TAKEN:
            return TransferError(f"{what}: another operation has already taken it up")
        case _:
            return TransferError(f"{what}: refused ({frame.reason.name.lower()}): {frame.text}")


def outcome_of(error: BaseException | None) -> tuple[wire.Outcome, str]:
    """How an operation's end is told to the other side."""
    match error:
        case None:
            return wire.Outcome.COMPLETE, ""
        case TransferTimeout():
            return wire.Outcome.TIMED_OUT, str(error)
        case TransferCancelled() | ClosedError():
            return wire.Outcome.CANCELLED, str(error)
        case _:
            return wire.Outcome.FAILED, str(error)
