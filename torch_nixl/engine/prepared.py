"""Rows of memory that are looked up once and moved many times: `indexed.py` moves them.

For what moves again and again between the same places: a channel's tensors, the pages of a KV
cache. `TransferOperation` has every span looked up anew for each transfer; here the library does
that once for each list, and a transfer names rows by their numbers.

*Rows*: ``[n, 3]`` uint64, address, nbytes, device id, none empty. A local row lies in memory that
is registered here (`RegisteredMemory.device_id` is its device id), a remote's in a region that
one of `blobs` tells. `local` takes over the holds in `held` and gives them up when it is closed.

*Owner*: the Connection. `PreparedList.close()` frees a list once no transfer uses it; so does the
loss of its remote, and closing the Connection. Where the library has to forget a remote (see
[Note: device ids] in `registry.py`), the next transfer has it learned and the list looked up
again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torch_nixl.engine.adapter import MemoryKind, SpanList, Spans
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.errors import ClosedError, PeerLostError

if TYPE_CHECKING:
    from torch_nixl.engine.blob import BlobInfo
    from torch_nixl.engine.connection import Connection
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
        if connection.contacts.learn(remote, *split_regions(regions)):
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


def split_regions(regions: Sequence[tuple[bytes, BlobInfo]]) -> tuple[list[bytes], list[BlobInfo]]:
    """Part regions into their metadata and what it says."""
    return [blob for blob, _ in regions], [info for _, info in regions]


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
