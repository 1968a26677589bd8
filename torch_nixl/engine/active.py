"""The claimant's side of a grant: reads or writes memory that a peer exposes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_nixl.engine import wire
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.offer import Offer
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.engine.streams import StreamOrder
from torch_nixl.engine.transfer import TransferOperation
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


class _Phase(enum.Enum):
    LEARNING = enum.auto()  # the library is still to be told of the remote's regions
    CLAIMING = enum.auto()  # CLAIM is out
    MOVING = enum.auto()  # granted


class ActiveOperation(TransferOperation):
    """Claims what a peer offers and moves its bytes.

    Attributes:
        claim: Its number.
        order: For device memory, what has to run before it claims.
    """

    __slots__ = ("_infos", "_offer", "_phase", "claim", "order")

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
    ) -> None:
        super().__init__(
            connection, remote, offer.direction, local, offer.memories, deadline=deadline
        )
        self._offer = offer
        self._infos: list[BlobInfo] | None = [
            connection.adapter.inspect(blob) for blob in offer.metadata
        ]
        self._phase = _Phase.LEARNING
        self.claim = claim
        self.order: StreamOrder | None = None

    def on_granted(self, frame: wire.Granted) -> None:
        if self._phase is _Phase.CLAIMING and frame.key == self._offer.key:
            self._phase = _Phase.MOVING
            self.ring()
            self._connection.progress.kick()

    def on_refused(self, frame: wire.Refuse) -> None:
        if self._phase is _Phase.CLAIMING and frame.key == self._offer.key:
            self._stop(refusal(str(self), frame))

    def on_revoked(self, frame: wire.Revoke) -> None:
        if frame.key != self._offer.key:
            return
        if frame.reason is wire.Reason.CLOSED:
            self._stop(PeerLostError(f"{self}: its owner is closing: {frame.text}"))
        else:
            self._stop(TransferCancelled(f"{self}: withdrawn by its owner: {frame.text}"))

    def expire(self) -> None:
        if self._phase is _Phase.MOVING:
            super().expire()
        else:
            self._stop(self._timeout_error("before its owner granted it"))

    def _advance(self) -> bool:
        if self._phase is _Phase.MOVING:
            return super()._advance()
        if self._done:
            self._pieces = None
            self._settle()
            return True
        if self._phase is _Phase.CLAIMING:
            # While the answer is under way there is time. Nothing moves before it is here.
            try:
                self._prepare_next()
            except TorchNixlError as error:
                self._break(error)
                return True
            return False
        return self._learn_and_claim()

    def _learn_and_claim(self) -> bool:
        assert self.remote is not None and self._infos is not None
        if self.order is not None and not self.order.passed():
            return False
        try:
            if not self._connection.contacts.learn(self.remote, self._offer.metadata, self._infos):
                return False
        except TorchNixlError as error:
            self._break(error)
            return True
        self._infos = None
        self.counted = True
        if self.remote.contact is Contact.FOREIGN:
            self._phase = _Phase.MOVING
            return True
        self._phase = _Phase.CLAIMING
        self._connection.contacts.send(
            self.remote,
            wire.Claim(
                self._offer.key,
                self.claim,
                self._direction,
                sum(memory.nbytes for memory in self._offer.memories),
                len(self._offer.memories),
            ),
        )
        return True

    def _settle(self) -> None:
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
        if self._phase is _Phase.LEARNING or self.remote.lost_error is not None:
            return  # A lost remote is no longer known to be a foreign one, either.
        outcome, text = _outcome(self._error)
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


def _outcome(error: BaseException | None) -> tuple[wire.Outcome, str]:
    match error:
        case None:
            return wire.Outcome.COMPLETE, ""
        case TransferTimeout():
            return wire.Outcome.TIMED_OUT, str(error)
        case TransferCancelled() | ClosedError():
            return wire.Outcome.CANCELLED, str(error)
        case _:
            return wire.Outcome.FAILED, str(error)
