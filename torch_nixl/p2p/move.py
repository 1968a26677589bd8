"""Moving the bytes of one message, or of a part of it, for the operation that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.memory import Memory
from torch_nixl.engine.offer import OfferedMemory
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.transfer import TransferOperation
from torch_nixl.errors import TorchNixlError
from torch_nixl.p2p.place import Stretch, align

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.operation import Operation
    from torch_nixl.engine.remotes import Remote

Regions: TypeAlias = Sequence[tuple[bytes, BlobInfo]]
"""Regions of a remote: metadata, and what it says."""


class MoveOperation(TransferOperation):
    """Moves one part of a message once the library knows of the remote's region.

    It belongs to a send or a receive, which is what programs wait for.
    """

    __slots__ = ("_blobs", "_infos", "_on_moved", "_owner", "_told")

    starts_counted = False

    def __init__(
        self,
        connection: Connection,
        remote: Remote,
        direction: Direction,
        local: Sequence[Stretch],
        place: Sequence[Stretch],
        regions: Regions,
        owner: Operation,
        on_moved: Callable[[MoveOperation, BaseException | None], None],
    ) -> None:
        """Prepare to move.

        Args:
            connection: Whose memory `local` is.
            remote: Whose memory `place` is.
            direction: READ from there, or WRITE to there.
            local: The owner's registered memory, which it holds for as long as it has moves.
            place: As many bytes of the remote's.
            regions: What those lie in.
            owner: A send or a receive.
            on_moved: Told that the part is final: nothing that was started for it moves any more.
        """
        self._owner = owner
        self._on_moved = on_moved
        ours, theirs = [], []
        for (kind, spans), (remote_kind, remote_spans) in align(local, place):
            nbytes = algebra.total(remote_spans[:, :2])
            memory = Memory(kind, 0, algebra.EMPTY, nbytes, 0, 0, None, None, True)
            ours.append(RegisteredMemory(memory, 0, spans, None))
            theirs.append(OfferedMemory(remote_kind, remote_spans, nbytes))
        super().__init__(connection, remote, direction, ours, theirs)
        self._blobs = [blob for blob, _ in regions]
        self._infos = [info for _, info in regions]
        self._told = False

    # Whoever waits for the owner moves this, too.
    @property
    def attended(self) -> int:
        return self._owner.attended

    @attended.setter
    def attended(self, value: int) -> None:
        pass

    def start(self) -> None:
        """Let it move, by whoever waits for the owner or in the background.

        Raises:
            ClosedError: The connection was closed meanwhile.
        """
        connection = self._connection
        try:
            connection.operations.add(self)
        except BaseException:
            self._release()
            raise
        if not self._owner.attended:
            connection.progress.kick()

    def _advance(self) -> bool:
        if not self._told and not self._done:
            assert self.remote is not None
            try:
                if not self._connection.contacts.learn(self.remote, self._blobs, self._infos):
                    return False
            except TorchNixlError as error:
                self._break(error)
                return True
            self.counted = True
            self._told = True
        return super()._advance()

    def _count_end(self, error: BaseException | None) -> None:
        """Count nothing: the send or receive does, with the bytes of all its parts."""

    def _settle(self) -> None:
        # First what the other side waits for, then this side's waiters, then housekeeping.
        self._on_moved(self, self._error)
        self._finish(None)
        self._release()
        self._release_spent()
