"""The part of a claim that its owner is asked to move: the claimant's side.

[Note: assistance]
Between two processes of one host a transfer is a copy, by Cross Memory Attach, and one process
copies no faster than one core does. Where both have time for it, each moves a half: nearly twice
as fast. So a claimant of much memory sends, right after its CLAIM, an ASSIST: the offer of its own
memory, which needs no claim, and from which byte on the owner is asked to move::

    claimant                              owner
    CLAIM, ASSIST ─────────────────────▶
                  ◀───────────── GRANT
    moves the first half                  moves the second half, into the claimant's memory
                                          or out of it; or declines, unless a thread or a task
                                          waits for the operation, as it may be long until then
                  ◀───────────── DONE     (key of the part) complete, declined, or what failed
    moves what was declined
    DONE ──────────────────────────────▶  (key of the offer) as without assistance

The part is a grant like any other (`grants.py`), with the sides changed, and claimed from its
birth on. The claimant ends it with its operation, whose memory stays owned for as long as the
part's. The owner keeps its memory, likewise, until it has moved the last byte itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_nixl.engine import path, wire
from torch_nixl.engine.adapter import Direction, MemoryKind
from torch_nixl.engine.grants import Claimant, GrantState
from torch_nixl.engine.offer import MAX_BLOBS, Offer, OfferedMemory
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.registry import RegisteredMemory, borrow

if TYPE_CHECKING:
    from torch_nixl.engine.active import ActiveOperation
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.errors import ClosedError

ASSIST_BYTES = 16 << 20
"""Smallest claim whose owner is asked. On two cores 8 MiB take as long by one as by both, 16 MiB
take 0.85 of the time by both, 64 MiB 0.65."""

MAX_SPANS = 1024
"""Most memories of a claim whose owner is asked, and spans of them: all travel in the ASSIST."""

LEAD_BYTES = 2 << 20
"""How much more than a half the claimant moves, which begins earlier by what the ASSIST takes."""

PAGE_BYTES = 4096

OPPOSITE = {Direction.READ: Direction.WRITE, Direction.WRITE: Direction.READ}


class AssistedPart(PassiveOperation):
    """A claimant's memory, granted to the owner of what it has claimed.

    Attributes:
        start: The first byte that the owner moves.
        asked: Whether it was asked to, or is about to be.
        declined: The owner has moved nothing.
        withdrawn: It was asked to leave it, and may have moved some.
    """

    __slots__ = ("_whole", "asked", "declined", "start", "withdrawn")

    def __init__(
        self,
        connection: Connection,
        whole: ActiveOperation,
        remote: Remote,
        direction: Direction,
        start: int,
    ) -> None:
        super().__init__(connection, direction, borrow(whole.memories), deadline=None)
        self.name = f"{whole.name}, the part that its owner moves"
        self.remote = remote
        self.grant.claim(Claimant(remote.name, whole.claim))
        self.start = start
        self.asked = False
        self.declined = False
        self.withdrawn = False
        self._whole = whole

    def packed(self) -> bytes:
        """The offer, as it travels."""
        memories = self.memories
        blobs = tuple(dict.fromkeys(held.blob for held in self._whole.memories if held.blob))
        if len(blobs) > MAX_BLOBS:
            blobs = self._connection.metadata(self._whole.memories, connection=False)
        offer = Offer(
            owner=self._connection.name,
            key=self.key,
            direction=self.direction,
            memories=tuple(
                OfferedMemory(held.memory.kind, held.spans, held.memory.nbytes) for held in memories
            ),
            metadata=blobs,
        )
        return offer.pack(key=self._connection.metadata_key)

    def on_done(self, remote: Remote, frame: wire.Done) -> None:
        if frame.outcome is wire.Outcome.DECLINED:
            self.declined = True
            frame = replace(frame, outcome=wire.Outcome.COMPLETE)
        super().on_done(remote, frame)

    def withdraw(self) -> None:
        """Have the owner leave it: it may have dropped the ASSIST, and would never answer that."""
        if not self.done:
            self.withdrawn = True
            self.cancel()

    def mend(self) -> None:
        """Send its REVOKE, too, if that was cut short: its owner might not answer otherwise."""
        super().mend()
        if not self._revoked and self.grant.state is GrantState.REVOKING:
            assert self.remote is not None
            self._send_revoke(self.remote)

    def shut(self, error: ClosedError) -> None:
        """Leave that to the whole: a REVOKE from another thread might precede the ASSIST."""

    def on_forgotten(self) -> None:
        """Keep it: nobody has to claim a part, so the owner may take it up after its new HELLO.

        If it had taken it up before, its own operation has failed, and it says so to the whole.
        """
        if self.done and not self.grant.released and self.remote is not None:
            remote = self._connection.contacts.get(self.remote.name)
            if remote is not None:
                self._revoke_again(remote)

    def _count_end(self, error: BaseException | None) -> None:
        """It is counted with the whole."""

    def _release(self) -> None:
        super()._release()
        self._whole.ring()


def may_assist(
    connection: Connection,
    remote: Remote,
    local: Sequence[RegisteredMemory],
    theirs: Sequence[OfferedMemory],
) -> bool:
    """Whether it can pay to ask a claim's owner to move a part."""
    if len(local) > MAX_SPANS or remote.name == connection.name:
        return False
    if sum(memory.nbytes for memory in theirs) < ASSIST_BYTES:
        return False
    kinds = [held.memory.kind for held in local] + [memory.kind for memory in theirs]
    if any(kind is not MemoryKind.DRAM for kind in kinds):
        return False
    if sum(len(held.spans) for held in local) > MAX_SPANS:
        return False
    return connection.path(remote) == path.CMA


def middle(nbytes: int) -> int:
    """Where the owner's part of so many bytes begins."""
    return (nbytes // 2 + min(LEAD_BYTES, nbytes // 8)) & -PAGE_BYTES
