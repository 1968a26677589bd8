"""Transfers between two prepared lists, whose rows are chosen by index. See `prepared.py`.

    local = connection.prepared.local(kind, rows, held)
    theirs = connection.prepared.remote(remote, kind, their_rows, blobs)
    rows = IndexedRows(local, [3, 4, 9], theirs, [0, 1, 7])  # int32 arrays
    transfer = IndexedTransfer(connection, Direction.READ, [rows], frame=(kind, body))
    transfer.start()
    transfer.wait()

*Indices*: int32, contiguous, equally many on both sides; row by row as large as each other. They
may repeat and be in any order. Neighbours are merged: where both sides' next rows adjoin the last
ones in memory and in the list, they are one descriptor. A transfer is cut into pieces between
rows, so that a polling thread is not held up: no row should exceed `transfer.PIECE_BYTES`.
`IndexedRows` can be moved any number of times, also by several transfers at a time.

*Leave*: as for `TransferOperation`, the protocol above has been granted access to what it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torch_nixl.engine.adapter import Direction, Indices, Spans
from torch_nixl.engine.prepared import PreparedList, split_regions
from torch_nixl.engine.transfer import (
    LONG_PIECE_BYTES,
    PIECE_BYTES,
    PIECE_SPANS,
    TransferOperation,
)
from torch_nixl.errors import TorchNixlError, TransferError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.progress import Progress


class IndexedRows:
    """Rows of a local list, each paired with one of a remote's. See the module.

    Attributes:
        local: This process's rows.
        remote: The remote's.
        nbytes: Bytes of the chosen rows together.

    Raises:
        ValueError: An index is out of range, or the two sides differ in number or size.
    """

    __slots__ = ("_ends", "_local_indices", "_remote_indices", "local", "nbytes", "remote")

    def __init__(
        self,
        local: PreparedList,
        local_indices: Indices,
        remote: PreparedList,
        remote_indices: Indices,
    ) -> None:
        if local.remote is not None or remote.remote is None:
            raise ValueError("expected a local list and a remote's, in this order")
        sizes = _sizes(local, local_indices, "local_indices")
        if not np.array_equal(sizes, _sizes(remote, remote_indices, "remote_indices")):
            raise ValueError(
                f"{len(local_indices)} local rows and {len(remote_indices)} of the remote's "
                "differ in number or size"
            )
        self.local = local
        self.remote = remote
        self._local_indices = local_indices
        self._remote_indices = remote_indices
        self._ends = np.cumsum(sizes, dtype=np.uint64)
        self.nbytes = int(self._ends[-1])

    def pieces(self, progress: Progress) -> Iterator[tuple[int, int, int]]:
        """Cut them: yield first index, last but one, and bytes of one piece after the other."""
        count = len(self._local_indices)
        if self.nbytes <= PIECE_BYTES and count <= PIECE_SPANS:
            yield 0, count, self.nbytes
            return
        start = moved = 0
        while start < count:
            limit = PIECE_BYTES if progress.contended else LONG_PIECE_BYTES
            fits = int(np.searchsorted(self._ends, np.uint64(moved + limit), side="right"))
            stop = max(start + 1, min(fits, start + PIECE_SPANS))
            end = int(self._ends[stop - 1])
            yield start, stop, end - moved
            start, moved = stop, end

    def indices(self, start: int, stop: int) -> tuple[Indices, Indices]:
        """The local and the remote's indices of one piece."""
        return self._local_indices[start:stop], self._remote_indices[start:stop]


class IndexedTransfer(TransferOperation):
    """Moves chosen rows between two prepared lists. See the module.

    Args:
        rows: What to move; all of one remote.
        frame: Kind and body of a frame to send once all bytes are visible to the remote.

    Raises:
        TransferError: Nothing to move, or rows of several remotes.
        ClosedError: A list was closed.
        PeerLostError: The remote is lost.
    """

    __slots__ = ("_entered", "_joined", "_rows", "_runs")

    starts_counted = False

    def __init__(
        self,
        connection: Connection,
        direction: Direction,
        rows: Sequence[IndexedRows],
        *,
        frame: tuple[int, bytes] | None = None,
        name: str = "",
        deadline: float | None = None,
    ) -> None:
        remotes = {one.remote.remote for one in rows}
        if len(remotes) != 1:
            raise TransferError(f"expected rows of one remote, got {len(remotes)}")
        [remote] = remotes
        assert remote is not None
        super().__init__(
            connection, remote, direction, (), (), frame=frame, name=name, deadline=deadline
        )
        self._rows = tuple(rows)
        self._runs = (
            (one, *piece) for one in self._rows for piece in one.pieces(connection.progress)
        )
        self._joined = False
        self._entered: list[PreparedList] = []
        try:
            for one in self._rows:
                for used in (one.local, one.remote):
                    used.enter()
                    self._entered.append(used)
        except TorchNixlError:
            self._leave()
            raise

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._rows)

    def start(self) -> None:
        """Let it move, by whoever waits for it or in the background.

        Raises:
            ClosedError: The connection was closed meanwhile.
        """
        try:
            self._connection.operations.add(self)
        except BaseException:
            self._release()
            self._leave()
            raise
        self._connection.progress.kick()

    def _advance(self) -> bool:
        if not self._joined and not self._done:
            try:
                if not self._join():
                    return False
            except TorchNixlError as error:
                self._break(error)
                return True
            self._joined = True
        return super()._advance()

    def _join(self) -> bool:
        """Count this transfer in `flight`, with all lists of the remote's present epoch."""
        assert self.remote is not None
        lists = [one.remote for one in self._rows]
        if self._connection.contacts.rejoin(self.remote, [one.epoch for one in lists]):
            self.counted = True
            return True
        regions = [region for one in lists for region in one.regions]
        if not self._connection.contacts.learn(self.remote, *split_regions(regions)):
            return False
        self.counted = True
        for one in lists:
            one.look_up()
        return True

    def _prepare_next(self) -> bool:
        if self._ready is not None:
            return True
        piece = next(self._runs, None)
        if piece is None:
            return False
        rows, start, stop, nbytes = piece
        ours, theirs = rows.indices(start, stop)
        transfer = self._connection.adapter.prepare_indexed(
            self._direction, rows.local.handle, ours, rows.remote.handle, theirs
        )
        self._ready = transfer, nbytes
        return True

    def _release_spent(self) -> None:
        super()._release_spent()
        # Lists go after the transfers that were made from them.
        self._leave()

    def abort(self, error: BaseException) -> None:
        super().abort(error)
        self._leave()

    def _leave(self) -> None:
        entered, self._entered = self._entered, []
        for one in entered:
            one.leave()


def _sizes(rows: PreparedList, indices: Indices, name: str) -> Spans:
    if indices.dtype != np.int32 or indices.ndim != 1 or not indices.flags.c_contiguous:
        raise ValueError(f"{name}: expected contiguous int32, got {indices.dtype}")
    if not len(indices) or indices.min() < 0 or indices.max() >= len(rows):
        raise ValueError(f"{name}: expected at least one, all within the {len(rows)} rows")
    sizes: Spans = rows.rows[indices, 1]
    return sizes
