"""The owner's side of a grant: memory exposed to one peer that may read or write it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_nixl.engine import wire
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.grants import Claimant, Grant, GrantState
from torch_nixl.engine.offer import Offer, OfferedMemory
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.remotes import Settling
from torch_nixl.engine.streams import StreamOrder
from torch_nixl.errors import (
    ClosedError,
    LeaseExpired,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

FOREIGN_SECONDS = 30.0
"""How long memory is kept that was withdrawn while a foreign peer may have had its metadata.

Such a peer neither asks nor can be told; over TCP, an access to memory that is no longer mapped
would kill this process.
"""

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote


class PassiveOperation(Operation):
    """Exposes memory until one peer has read or written it.

    Attributes:
        direction: What the peer may do.
        key: 16 random bytes; whoever has them, and the offer, can claim it once.
        foreign_key: The message by which a foreign peer says that it is done; empty for none.
        grant: Where the operation stands: see `grants`.
        order: For device memory, what has to run before the memory is granted.
        assistance: What moves a part of the claim from this side: see `assist.py`.
    """

    __slots__ = (
        "_quarantined_until",
        "_renewed",
        "_revoked",
        "assistance",
        "direction",
        "foreign_key",
        "grant",
        "key",
        "order",
    )

    def __init__(
        self,
        connection: Connection,
        direction: Direction,
        memories: Sequence[RegisteredMemory],
        *,
        deadline: float | None,
    ) -> None:
        super().__init__(connection, f"exposed for {direction.value}", memories, deadline)
        self.direction = direction
        self.key = os.urandom(16)
        self.foreign_key = b""
        self._quarantined_until: float | None = None
        self._renewed: Settling | None = None
        self._revoked = False
        self.grant = Grant()
        self.order: StreamOrder | None = None
        self.assistance: Operation | None = None

    def offer(self) -> Offer:
        """What a peer needs to claim this operation.

        Raises:
            TransferError: The operation has ended.
        """
        memories = self._memories
        if self._released or self._done:
            raise TransferError(f"{self}: has ended and offers nothing any more")
        return Offer(
            owner=self._connection.name,
            key=self.key,
            direction=self.direction,
            memories=tuple(
                OfferedMemory(held.memory.kind, held.spans, held.memory.nbytes) for held in memories
            ),
            metadata=self._connection.metadata(memories),
        )

    @property
    def in_flight(self) -> int:
        return 0 if self.assistance is None else self.assistance.in_flight

    @property
    def quarantined(self) -> bool:
        return self._quarantined_until is not None

    @property
    def touchable(self) -> bool:
        """Whether a peer may still touch the memory."""
        if self.foreign_key and not self._released:
            return True
        return (
            self.grant.state in (GrantState.GRANTED, GrantState.REVOKING)
            and self.remote is not None
            and not self._connection.liveness.is_gone(self.remote)
        )

    def attend(self) -> bool:
        return self.assistance is not None and self.assistance.attend()

    def cancel(self) -> None:
        self._withdraw(wire.Reason.REVOKED, TransferCancelled(f"{self}: cancelled by its owner"))

    def shut(self, error: ClosedError) -> None:
        self._withdraw(wire.Reason.CLOSED, error)

    def expire(self) -> None:
        offered = self.grant.state is GrantState.OFFERED
        error: TransferTimeout | LeaseExpired
        if offered:
            error = self._timeout_error("before any peer took it up")
        else:
            error = self._timeout_error("before the peer was done; the memory stays owned")
        self._withdraw(wire.Reason.EXPIRED, error)

    def on_claim(self, remote: Remote, frame: wire.Claim) -> None:
        """Grant or refuse. Runs in the driver."""
        reason: wire.Reason | None
        claimant = Claimant(remote.name, frame.claim)
        with self._connection.lock:
            if remote.lost_error is not None:
                return  # Just now, by another thread. It is claimed again after a new contact.
            if self.grant.is_held_by(claimant):
                return  # Said twice, around a HELLO: it has its answer, or will.
            nbytes = self.nbytes
            if self._connection.closing:
                reason = wire.Reason.CLOSED
            elif frame.direction is not self.direction:
                reason = wire.Reason.WRONG_DIRECTION
            elif self.grant.state is GrantState.OFFERED and (
                frame.nbytes != nbytes or frame.num_memories != len(self._memories)
            ):
                reason = wire.Reason.WRONG_SIZE
            else:
                reason = self.grant.claim(claimant)
            if reason is None:
                self.remote = remote
                self._connection.operations.busy[self] = None
        if reason is None:
            order = self.order
            if order is None or order.passed():
                self._tell_granted(remote, frame.claim)
            else:
                self._connection.defer(
                    order.passed, lambda: self._tell_granted(remote, frame.claim)
                )
        else:
            self._connection.contacts.send(
                remote, wire.Refuse(self.key, frame.claim, reason, str(self))
            )

    def _tell_granted(self, remote: Remote, claim: int) -> None:
        # One that was withdrawn meanwhile was told so, and answers that.
        if not self._done:
            self._connection.contacts.send(remote, wire.Granted(self.key, claim))

    def on_done(self, remote: Remote, frame: wire.Done) -> None:
        """The claimant won't touch the memory any more. Runs in the driver."""
        with self._connection.lock:
            if not self.grant.done(Claimant(remote.name, frame.claim)):
                return
        match frame.outcome:
            case wire.Outcome.COMPLETE:
                self._finish(None)
            case wire.Outcome.CANCELLED:
                self._finish(TransferCancelled(f"{self}: cancelled by the peer: {frame.text}"))
            case wire.Outcome.TIMED_OUT:
                self._finish(TransferTimeout(f"{self}: the peer's time was up: {frame.text}"))
            case _:
                self._finish(TransferError(f"{self}: failed on the peer: {frame.text}"))
        self._let_go()

    def on_key(self, sender: str) -> None:
        """A foreign peer, which asked nobody, says that it is done. Runs in the driver."""
        claimant = Claimant(sender, 0)
        with self._connection.lock:
            if self.grant.claim(claimant) is None:
                self.grant.done(claimant)
            elif self._quarantined_until is None:
                return  # A peer that asks was granted it; this message means nothing.
        self._finish(None)
        self._release()

    def on_lost(self, error: BaseException) -> None:
        """Fail; give the memory back only if the peer can't touch it any more."""
        if self._finish(error):
            with self._connection.lock:
                self.grant.revoke(wire.Reason.FAILED)
        self.check_quarantine()

    def check_quarantine(self) -> None:
        """Release memory that is still held though the operation has ended, once that is safe.

        A lost peer must be certain not to touch it any more; a foreign peer, which asks nobody,
        has to be given time.
        """
        if self._quarantined_until is not None:
            if time.monotonic() >= self._quarantined_until:
                self._release()
            return
        if not self.grant.released:
            remote = self.remote
            if remote is None:
                return
            if not self._connection.liveness.has_let_go(remote):
                self._ask_again(remote)
                return
            with self._connection.lock:
                if not self.grant.released:
                    self.grant.lost()
        self._let_go()

    def _ask_again(self, holder: Remote) -> None:
        """Ask a peer that was lost, and lives, to stop: its answer may have come in between."""
        if holder.lost_error is None or not self._connection.contacts.on_this_host(holder):
            return
        remote = self._connection.contacts.get(holder.name)
        if remote is None:
            self._connection.lost.seek(holder, time.monotonic())
        else:
            self._revoke_again(remote)

    def _revoke_again(self, remote: Remote) -> None:
        self.remote = remote
        self._renewed = Settling()
        self._send_revoke(remote)

    def _send_revoke(self, remote: Remote) -> None:
        claimant = self.grant.claimant
        assert claimant is not None
        reason = self.grant.reason or wire.Reason.FAILED
        text = str(self._error)
        self._connection.contacts.send(remote, wire.Revoke(self.key, claimant.claim, reason, text))
        self._revoked = True

    def on_forgotten(self) -> None:
        """The peer has made contact anew, after it had given this process up. Runs in the driver.

        It does so only once nothing of its own to this process is under way. On another host the
        memory stays owned all the same: see `liveness.OFF_HOST_SECONDS`.
        """
        remote = self.remote
        with self._connection.lock:
            if remote is None or self.grant.released or self.grant.claimant is None:
                return
            if self._connection.contacts.on_this_host(remote):
                self.grant.lost()
                self._renewed = Settling()
            else:
                self.grant.revoke(wire.Reason.FAILED)
        why = "the peer had lost contact with this process, and gave up"
        self._finish(PeerLostError(f"{self}: {why}", remote=remote.name))
        self._let_go()

    def _let_go(self) -> None:
        """Give the memory back, unless this process still moves some of it for the peer."""
        if not self.grant.released:
            return
        if self.assistance is not None and not self.assistance.released:
            return
        # What came by a peer's old connection may still be dealt with after it has a new one.
        if self._renewed is None or self._renewed.has_passed(time.monotonic()):
            self._release()

    def _withdraw(self, reason: wire.Reason, error: BaseException) -> None:
        with self._connection.lock:
            if self._done:
                return
            claimant = self.grant.revoke(reason)
            released = self.grant.state is GrantState.RELEASED
        self._finish(error)
        if released and self.foreign_key:
            self._connection.operations.busy[self] = None
            self._quarantined_until = time.monotonic() + FOREIGN_SECONDS
        elif released:
            self._let_go()
        elif claimant is not None and self.remote is not None:
            self._send_revoke(self.remote)
            if self.assistance is not None:
                self.assistance.cancel()
