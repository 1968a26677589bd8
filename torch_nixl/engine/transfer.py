"""Moving bytes: cut into pieces, posted a few at a time, owned until the last one is final."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torch_nixl.engine import spans
from torch_nixl.engine.adapter import Direction, MemoryKind, Spans, Transfer
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.performance import look_at_spans
from torch_nixl.engine.registry import PUBLIC_DEVICE_ID, RegisteredMemory
from torch_nixl.errors import (
    ClosedError,
    PeerLostError,
    TorchNixlError,
    TransferCancelled,
    TransferError,
)

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.offer import OfferedMemory
    from torch_nixl.engine.progress import Progress
    from torch_nixl.engine.remotes import Remote

PIECE_BYTES = 4 << 20
"""Most bytes in one post while other threads poll. Over CMA the post copies before it returns, and
the agent can't be polled meanwhile: 4 MiB take about 0.6 ms. A piece costs about 25 us besides."""

LONG_PIECE_BYTES = 64 << 20
"""Most bytes in one post while nobody else polls: a poll that comes then is held up once, and what
follows is cut shorter."""

PIECE_SPANS = 4096
"""Most spans in one post, for the same reason: about 5 us each when they are scattered."""

WINDOW = 16
"""Most pieces under way. TCP needs several to keep its socket buffers full."""

SHORT_BYTES = 256 << 10
"""Pieces up to this size don't keep anyone from polling for long."""

POLLS = 4
"""Polls of a piece in a row. A small one is complete after two or three, each of which is progress:
to go round the waiter's whole loop between them would take longer than the transfer."""

BURST = 4
"""Most pieces posted before others get their turn at the agent."""

Piece = tuple[MemoryKind, Spans, MemoryKind, Spans]


class TransferOperation(Operation):
    """Moves bytes between registered memory and a remote's.

    Args:
        frame: Kind and body of a frame to send once all bytes are visible to the remote.
        start: The first byte to be moved.

    Attributes:
        starts_counted: Whether it counts in its remote's `flight` from the start, rather than once
            the library knows of the remote's regions.
        counted: Whether it is counted there.
        moved_nbytes: Bytes of the pieces that are final.

    It may start at once: whoever makes one has been granted access by the remote, by this
    module's rules (`active.ActiveOperation`) or by those of a protocol above.
    """

    __slots__ = (
        "_advancing",
        "_attending",
        "_direction",
        "_flight",
        "_frame",
        "_message",
        "_pieces",
        "_ready",
        "_spent",
        "counted",
        "moved_nbytes",
    )

    starts_counted = True

    def __init__(
        self,
        connection: Connection,
        remote: Remote,
        direction: Direction,
        local: Sequence[RegisteredMemory],
        remote_memories: Sequence[OfferedMemory],
        *,
        frame: tuple[int, bytes] | None = None,
        start: int = 0,
        name: str = "",
        deadline: float | None = None,
    ) -> None:
        super().__init__(connection, name or direction.value, local, deadline)
        self.remote = remote
        self._direction = direction
        self._pieces: Iterator[Piece] | None = plan(
            connection.progress, local, remote_memories, start=start
        )
        self._ready: tuple[Transfer, int] | None = None
        self._flight: deque[tuple[Transfer, int]] = deque()
        self._frame = frame
        self._message = b""
        # A set, in order: one may come twice where an interrupt fell between two steps.
        self._spent: dict[Transfer, None] = {}
        self._attending = threading.RLock()
        self._advancing = False
        self.counted = False
        self.moved_nbytes = 0

    @property
    def in_flight(self) -> int:
        """Number of pieces under way."""
        return len(self._flight)

    def attend(self) -> bool:
        if self._released or self._advancing:
            return False
        attending = self._attending
        try:  # [Note: interrupts] in progress.py
            if not attending.acquire(blocking=False):
                return False
            try:
                self._advancing = True
                return self._advance()
            except BaseException as error:
                # Interrupted between two pieces, by Ctrl-C say: one may be missing.
                self._break(TransferError(f"{self}: interrupted by {error!r}"))
                raise
            finally:
                self._advancing = False
        finally:
            try:
                attending.release()
            except RuntimeError:
                pass

    def _advance(self) -> bool:
        """Poll what is under way and post what fits. Holds `_attending`."""
        adapter = self._connection.adapter
        flight = self._flight
        moved = False
        try:
            # In order of posting: they complete in that order but for rare exceptions.
            polls = POLLS if flight else 0
            while polls and flight:
                transfer, nbytes = flight[0]
                if adapter.poll(transfer):
                    self._spent[transfer] = None
                    flight.popleft()
                    self.moved_nbytes += nbytes
                    moved = True
                else:
                    polls -= 1
            posted = 0
            while self._pieces is not None and len(flight) < WINDOW and posted < BURST:
                if self._done or not self._prepare_next():
                    self._pieces = None
                    break
                self._post_next()
                posted += 1
                moved = True
        except TorchNixlError as error:
            self._break(error)
            return True
        if self._pieces is None and not flight:
            self._settle()
            return True
        if self._frame is not None and not self._message and self._connection.codec.unnumbered:
            # While the bytes are under way. A numbered frame must be packed when it's sent.
            assert self.remote is not None
            self._message = self._connection.codec.pack_raw(*self._frame, to=self.remote.name)
        return moved

    def _prepare_next(self) -> bool:
        """Have the next piece ready to be posted; return False if there is none."""
        if self._ready is not None:
            return True
        piece = None if self._pieces is None else next(self._pieces, None)
        if piece is None:
            return False
        assert self.remote is not None
        kind, local, remote_kind, remote_spans = piece
        transfer = self._connection.adapter.prepare(
            self._direction, kind, local, remote_kind, remote_spans, self.remote.name
        )
        self._ready = transfer, spans.total(local)
        return True

    def _post_next(self) -> None:
        assert self._ready is not None
        transfer, nbytes = self._ready
        if nbytes > SHORT_BYTES:
            self._connection.progress.let_poll()
        self._flight.append(self._ready)
        self._ready = None
        if self._connection.adapter.post(transfer):
            self._spent[transfer] = None
            self._flight.pop()
            self.moved_nbytes += nbytes

    def _break(self, error: TorchNixlError) -> None:
        """A piece failed. The others are still to become final."""
        if self.remote is not None:
            error = self.remote.explain(error)
        self._finish(error)
        self._pieces = None
        broken, self._flight = self._flight, deque()
        adapter = self._connection.adapter
        for transfer, nbytes in broken:
            try:
                if not adapter.poll(transfer):
                    self._flight.append((transfer, nbytes))
                    continue
            except Exception:  # noqa: BLE001 - it has failed already, and has to be released
                pass  # Final, or never posted.
            self._spent[transfer] = None
        if isinstance(error, PeerLostError) and self.remote is not None:
            self._connection.contacts.lose(self.remote, error)
        if not self._flight:
            self._settle()

    def _settle(self) -> None:
        """All pieces are final: nothing that this side started can touch memory any more."""
        if not self._done:
            self._finish(self._send_frame())
        self._release()
        # Only now: whoever waits for the end waits for neither side's housekeeping.
        self._release_spent()

    def _release_spent(self) -> None:
        spent, self._spent = self._spent, {}
        if self._ready is not None:
            spent[self._ready[0]] = None
            self._ready = None
        with contextlib.suppress(ClosedError):  # Closing has freed them.
            for transfer in spent:
                self._connection.adapter.release(transfer)

    def _send_frame(self) -> TorchNixlError | None:
        """Send the closing frame, if there is one; return why it can't be sent."""
        if self._frame is None:
            return None
        assert self.remote is not None
        contacts = self._connection.contacts
        if self._message:
            contacts.send_raw(self.remote, self._message)
        else:
            contacts.send_body(self.remote, *self._frame)
        lost = self.remote.broken
        if self._connection.closed:
            return ClosedError(f"{self}: the connection was closed before the peer was told")
        if lost is None:
            return None
        return PeerLostError(f"{self}: the peer is lost: {lost}", remote=self.remote.name)

    def _stop(self, error: BaseException) -> None:
        """End now; what is under way stays owned until it is final."""
        if self._finish(error):
            self._connection.progress.kick()
        self.attend()

    def hold(self, timeout: float) -> bool:
        held = self._attending.acquire(timeout=max(0.0, timeout))
        if held:
            self._advancing = True  # For good: this thread, which holds the lock, does not either.
        return held

    def cancel(self) -> None:
        self._stop(TransferCancelled(f"{self}: cancelled"))

    def shut(self, error: ClosedError) -> None:
        self._stop(error)

    def expire(self) -> None:
        self._stop(self._timeout_error(f"with {len(self._flight)} pieces under way"))

    def on_lost(self, error: BaseException) -> None:
        self._stop(error)


def plan(
    progress: Progress,
    local: Sequence[RegisteredMemory],
    remote: Sequence[OfferedMemory],
    *,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Piece]:
    """Pair local memories with a remote's and cut them into pieces.

    Neighbouring memories of the same kinds share pieces, so that a tree of small tensors costs
    few posts, and those of one host registration that follow each other on both sides are one span.

    Args:
        progress: Tells how long pieces may be.
        local: This side's memories.
        remote: The other side's.
        start: The first byte to be moved. Other than 0 only where all memory is of one kind.
        stop: The first byte that is not, likewise; None to move all that follow.

    Raises:
        TransferError: The two sides differ in number or size. Checked before the first piece.
    """
    if len(local) == len(remote) == 1 and local[0].memory.nbytes == remote[0].nbytes:
        ours, theirs = local[0].spans, remote[0].spans
        if len(ours) == len(theirs) == 1:
            stop = remote[0].nbytes if stop is None else stop
            kinds = local[0].memory.kind, remote[0].kind
            return _dense(progress, kinds, ours, theirs, start, stop)
    if len(local) != len(remote) or any(
        mine.memory.nbytes != theirs.nbytes for mine, theirs in zip(local, remote, strict=True)
    ):
        raise TransferError(
            f"local memory of {[held.memory.nbytes for held in local]} bytes does not match "
            f"remote memory of {[theirs.nbytes for theirs in remote]} bytes"
        )
    return _pieces(progress, local, remote, start, stop)


def _dense(
    progress: Progress,
    kinds: tuple[MemoryKind, MemoryKind],
    ours: Spans,
    theirs: Spans,
    start: int,
    stop: int,
) -> Iterator[Piece]:
    """The common case, one span on each side: no numpy between the posts, whose caches it costs."""
    kind, remote_kind = kinds
    [[address, nbytes, device_id]] = ours.tolist()
    if stop - start == nbytes <= PIECE_BYTES:
        yield kind, ours, remote_kind, theirs
        return
    [[remote_address, _, remote_device_id]] = theirs.tolist()
    while start < stop:
        size = min(PIECE_BYTES if progress.contended else LONG_PIECE_BYTES, stop - start)
        yield (
            kind,
            spans.row(address + start, size, device_id),
            remote_kind,
            spans.row(remote_address + start, size, remote_device_id),
        )
        start += size


def _pieces(
    progress: Progress,
    local: Sequence[RegisteredMemory],
    remote: Sequence[OfferedMemory],
    start: int,
    stop: int | None,
) -> Iterator[Piece]:
    first = 0
    count = len(local)
    while first < count:
        kind, remote_kind = local[first].memory.kind, remote[first].kind
        last = first + 1
        while last < count and local[last].memory.kind is kind and remote[last].kind is remote_kind:
            last += 1
        ours: Spans = np.concatenate([held.spans for held in local[first:last]])
        theirs: Spans = np.concatenate([memory.spans for memory in remote[first:last]])
        if start or stop is not None:
            assert last - first == count, "a part is cut from memory of one kind"
            end = spans.total(ours) if stop is None else stop
            ours, theirs = spans.clip(ours, start, end), spans.clip(theirs, start, end)
        first = last
        ours, theirs = spans.pair(ours, theirs)
        if kind is remote_kind is MemoryKind.DRAM:
            # Host memory under an id of its own is one region: see [Note: device ids]. Under a
            # device's id, neighbours may lie in two, which no span may cross.
            ours, theirs = spans.merge_pairs(ours, theirs, except_device=PUBLIC_DEVICE_ID)
        look_at_spans(len(ours), spans.total(ours))
        for long in spans.pieces(ours, theirs, max_bytes=LONG_PIECE_BYTES, max_spans=PIECE_SPANS):
            short = [long]
            if progress.contended:
                short = spans.pieces(*long, max_bytes=PIECE_BYTES, max_spans=PIECE_SPANS)
            for our_piece, their_piece in short:
                yield kind, our_piece, remote_kind, their_piece
