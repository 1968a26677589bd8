"""Rows of memory that are looked up once and moved many times, chosen by index.

For what moves again and again between the same places: a channel's tensors, the pages of a KV
cache. `TransferOperation` has every span looked up anew for each transfer; here the library does
that once for each list, and a transfer names rows by their numbers.

    local = connection.prepared.local(kind, rows, held)
    theirs = connection.prepared.remote(remote, kind, their_rows, blobs)
    rows = IndexedRows(local, [3, 4, 9], theirs, [0, 1, 7])  # int32 arrays
    transfer = IndexedTransfer(connection, Direction.READ, [rows], frame=(kind, body))
    transfer.start()
    transfer.wait()

*Rows*: ``[n, 3]`` uint64, address, nbytes, device id, none empty. A local row lies in memory that
is registered here (`RegisteredMemory.device_id` is its device id), a remote's in a region that
one of `blobs` tells. `local` takes over the holds in `held` and gives them up when it is closed.

*Indices*: int32, contiguous, equally many on both sides; row by row as large as each other. They
may repeat and be in any order. Neighbours are merged: where both sides' next rows adjoin the last
ones in memory and in the list, they are one descriptor. A transfer is cut into pieces between
rows, so that a polling thread is not held up: no row should exceed `transfer.PIECE_BYTES`.
`IndexedRows` can be moved any number of times, also by several transfers at a time.

*Owner*: the Connection. `PreparedList.close()` frees a list once no transfer uses it; so does the
loss of its remote, and closing the Connection. Where the library has to forget a remote (see
[Note: device ids] in `registry.py`), the next transfer has it learned and the list looked up
again.

*Leave*: as for `TransferOperation`, the protocol above has been granted access to what it names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torch_nixl.engine.adapter import Direction, Indices, MemoryKind, SpanList, Spans
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.transfer import (
    LONG_PIECE_BYTES,
    PIECE_BYTES,
    PIECE_SPANS,
    TransferOperation,
)
from torch_nixl.errors import ClosedError, PeerLostError, TorchNixlError, TransferError

if TYPE_CHECKING:
    from torch_nixl.engine.blob import BlobInfo
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.progress import Progress
    from torch_nixl.engine.remotes import Remote


class PreparedLists:
    """The prepared lists of one connection: makes, owns and frees them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._all: dict[PreparedList, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def local(
        self, kind: MemoryKind, rows: Spans, held: Sequence[RegisteredMemory] = ()
    ) -> PreparedList:
        """Look up rows of this process's memory.

        Args:
            kind: Which kind of memory.
            rows: See the module.
            held: Registrations that the list takes over, and gives up when it is closed.

        Raises:
            ValueError: `rows` has another form, or an empty row.
            RegistrationError: A row lies in no registered memory. `held` stays the caller's.
        """
        made = PreparedList(self._connection, self._lock, kind, _checked(rows), None, (), held)
        made.look_up()
        return self._add(made)

    def remote(
        self, remote: Remote, kind: MemoryKind, rows: Spans, blobs: Sequence[bytes]
    ) -> PreparedList:
        """Look up rows of a remote's memory: at once if the library can learn of them at once.

        Args:
            remote: Whose.
            kind: Which kind of memory.
            rows: See the module.
            blobs: Metadata of the regions that they lie in, from the remote.

        Raises:
            ValueError: `rows` has another form, or an empty row.
            MetadataError: A blob is not acceptable, or a row lies in none of its regions.
            PeerLostError: The remote is lost.
        """
        connection = self._connection
        regions = tuple((blob, connection.adapter.inspect(blob)) for blob in dict.fromkeys(blobs))
        made = PreparedList(connection, self._lock, kind, _checked(rows), remote, regions, ())
        if connection.contacts.learn(remote, *_split(regions)):
            try:
                made.look_up()
            finally:
                with connection.lock:
                    remote.flight -= 1
        return self._add(made)

    def _add(self, made: PreparedList) -> PreparedList:
        with self._lock:
            self._all[made] = None
        return made

    def forget(self, one: PreparedList) -> None:
        """Own a list no more, which is free."""
        with self._lock:
            self._all.pop(one, None)

    def lose(self, remote: Remote) -> None:
        """Free the lists of a remote that is lost."""
        for one in list(self._all):
            if one.remote is remote:
                one.close()


class PreparedList:
    """Rows of memory that the library has looked up. See the module.

    Attributes:
        kind: Which kind of memory.
        rows: ``[n, 3]``: address, nbytes, device id; read-only.
        remote: Whose they are; None for this process's own.
        regions: Those of the remote's that they lie in: metadata, and what it says.
        epoch: `Remote.epoch` when they were looked up; -1 before.
    """

    __slots__ = (
        "_closed",
        "_connection",
        "_handle",
        "_held",
        "_lock",
        "_looking_up",
        "_num_users",
        "epoch",
        "kind",
        "regions",
        "remote",
        "rows",
    )

    def __init__(
        self,
        connection: Connection,
        lock: threading.Lock,
        kind: MemoryKind,
        rows: Spans,
        remote: Remote | None,
        regions: Sequence[tuple[bytes, BlobInfo]],
        held: Sequence[RegisteredMemory],
    ) -> None:
        self._connection = connection
        self._lock = lock
        self._looking_up = threading.Lock()
        self._handle: SpanList | None = None
        self._held = tuple(held)
        self.regions = tuple(regions)
        self._num_users = 0
        self._closed = False
        self.epoch = -1
        self.kind = kind
        self.remote = remote
        self.rows = rows

    @property
    def handle(self) -> SpanList:
        """What the library calls it, while a transfer uses it."""
        assert self._handle is not None, "looked up before it is used"
        return self._handle

    @property
    def closed(self) -> bool:
        return self._closed

    def look_up(self) -> None:
        """Have the library look the rows up, unless it has in this epoch.

        A remote's regions must stay known meanwhile: its `flight` is counted up.
        """
        remote = self.remote
        adapter = self._connection.adapter
        with self._looking_up:
            epoch = 0 if remote is None else remote.epoch
            if self.epoch == epoch:
                return
            stale, self._handle = self._handle, None
            if stale is not None:
                # Of an earlier epoch: nothing uses it, or nothing could have been forgotten.
                adapter.release_list(stale)
            name = None if remote is None else remote.name
            self._handle = adapter.prepare_list(self.kind, self.rows, name)
            self.epoch = epoch

    def enter(self) -> None:
        """Count one more transfer that uses the list.

        Raises:
            ClosedError: It was closed.
            PeerLostError: Its remote is lost.
        """
        with self._lock:
            if not self._closed:
                self._num_users += 1
                return
        remote = self.remote
        if remote is not None and remote.lost_error is not None:
            raise PeerLostError(str(remote.lost_error), remote=remote.name)
        raise ClosedError("this list of prepared rows was closed")

    def leave(self) -> None:
        """Count one less."""
        with self._lock:
            self._num_users -= 1
        self._free()

    def close(self) -> None:
        """Take no new transfers, and free the list once those that use it are final. Idempotent."""
        self._closed = True
        self._free()

    def _free(self) -> None:
        with self._lock:
            if not self._closed or self._num_users:
                return
            handle, self._handle = self._handle, None
            held, self._held = self._held, ()
        connection = self._connection
        if handle is not None and not connection.closed:
            try:
                connection.adapter.release_list(handle)
            except ClosedError:
                pass  # Closing has freed it.
        for one in held:
            connection.registry.release(one)
        connection.prepared.forget(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        whose = "local" if self.remote is None else self.remote.name
        state = "closed" if self._closed else f"{self._num_users} users"
        return f"<PreparedList {whose} {self.kind.value} rows={len(self.rows)} {state}>"


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
        if not self._connection.contacts.learn(self.remote, *_split(regions)):
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


def _checked(rows: Spans) -> Spans:
    """Return a read-only copy of rows.

    Raises:
        ValueError: They have another form, or one is empty.
    """
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype != np.uint64 or not len(rows):
        raise ValueError(f"rows: expected [n, 3] of uint64, got {rows.shape} of {rows.dtype}")
    if not rows[:, 1].all():
        raise ValueError("rows: an empty one can't be looked up")
    copied: Spans = np.array(rows, order="C")
    copied.flags.writeable = False
    return copied


def _split(regions: Sequence[tuple[bytes, BlobInfo]]) -> tuple[list[bytes], list[BlobInfo]]:
    return [blob for blob, _ in regions], [info for _, info in regions]


def _sizes(rows: PreparedList, indices: Indices, name: str) -> Spans:
    if indices.dtype != np.int32 or indices.ndim != 1 or not indices.flags.c_contiguous:
        raise ValueError(f"{name}: expected contiguous int32, got {indices.dtype}")
    if not len(indices) or indices.min() < 0 or indices.max() >= len(rows):
        raise ValueError(f"{name}: expected at least one, all within the {len(rows)} rows")
    sizes: Spans = rows.rows[indices, 1]
    return sizes
