"""Moving the bytes of one message, or of a part of it, for the operation that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.offer import OfferedMemory
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.transfer import TransferOperation
from torch_nixl.errors import TorchNixlError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.p2p.protocol import Place


class Owner(Protocol):
    """A send or a receive."""

    attended: int

    def on_moved(self, move: MoveOperation, error: BaseException | None) -> None:
        """Take note that a part is final: nothing that was started for it moves any more."""
        ...


class MoveOperation(TransferOperation):
    """Moves one part of a message once the library knows of the remote's region.

    It belongs to a send or a receive, which is what programs wait for.
    """

    __slots__ = ("_blob", "_info", "_owner", "_told")

    def __init__(
        self,
        connection: Connection,
        remote: Remote,
        direction: Direction,
        local: RegisteredMemory,
        place: Place,
        region: tuple[bytes, BlobInfo],
        owner: Owner,
    ) -> None:
        self._owner = owner
        theirs = [OfferedMemory(place.kind, place.spans, place.nbytes)]
        super().__init__(connection, remote, direction, [local], theirs)
        self._blob, self._info = region
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
        # Not under way yet: `learn` counts it, once there is room for the region.
        with connection.lock:
            assert self.remote is not None
            self.remote.flight -= 1
            self.counted = False
        connection.progress.kick()

    def _advance(self) -> bool:
        if not self._told and not self._done:
            assert self.remote is not None
            try:
                blobs: Sequence[bytes] = (self._blob,)
                if not self._connection.contacts.learn(self.remote, blobs, (self._info,)):
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
        self._owner.on_moved(self, self._error)
        self._finish(None)
        self._release()
        self._release_spent()
