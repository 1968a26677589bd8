"""How the two ends of a channel come to agree on what moves, and how that ends.

`terms.py` says what they tell each other. A session ends with its first failed step, on both ends:
a new one (`Channel.reconnect`) begins from nothing, over the same tensors. [Note: p2p locks] in
`exchange.py` holds here, too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch_nixl.engine.operation import Operation
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.wire import MAX_BODY
from torch_nixl.errors import (
    ClosedError,
    PeerLostError,
    TorchNixlError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p import terms
from torch_nixl.p2p.buffers import Buffer, why_not_writable
from torch_nixl.p2p.layout import Layout
from torch_nixl.p2p.pairing import Pair, PairedRows
from torch_nixl.p2p.protocol import EAGER_NBYTES, Outcome
from torch_nixl.p2p.sending import outcome_of
from torch_nixl.p2p.step import StepOperation
from torch_nixl.p2p.tensors import MismatchError
from torch_nixl.p2p.terms import Role, Terms

if TYPE_CHECKING:
    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.peer import Peer


class Agreement(Operation):
    """What two ends have agreed to move; `Session` makes its steps.

    Holds the memory that the other end may touch.

    Attributes:
        connection: The agent.
        exchange: The traffic of its Communicator.
        peer: The other end's rank.
        number: Ours for it.
        tag: Sets channels between two ranks apart.
        nbytes: Bytes of one step.
        packed: Whether some tensors are packed before they move.
        broken: Why no step can be made any more; None while all is well.
    """

    __slots__ = (
        "_agreed",
        "_buffers",
        "_data",
        "_exposed",
        "_index",
        "_on_devices",
        "_orphaned",
        "_reads",
        "_ready",
        "_rows",
        "_said_agree",
        "_said_break",
        "_settled",
        "_step",
        "_they_read",
        "_told",
        "_total",
        "_unwritable",
        "broken",
        "connection",
        "exchange",
        "number",
        "packed",
        "peer",
        "tag",
        "theirs",
    )

    def __init__(
        self,
        exchange: Exchange,
        peer: Peer,
        tag: int,
        buffers: Sequence[Buffer],
        held: Sequence[RegisteredMemory],
    ) -> None:
        super().__init__(exchange.connection, "channel", held, None)
        self.connection = exchange.connection
        self.exchange = exchange
        self.peer = peer
        self.remote = peer.remote
        self.number = next(exchange.numbers)
        self.tag = tag
        self.theirs: Terms | None = None
        self._rows = PairedRows()
        self.packed = any(one.packed for one in buffers)
        self.broken: BaseException | None = None
        self._total = sum(one.memory.nbytes for one in buffers)
        self._buffers = tuple(buffers)
        self._on_devices = tuple(one.tensor for one in buffers if one.device is not None)
        self._unwritable = why_not_writable(self._buffers)
        self._index = 0
        self._data = b""
        self._step: StepOperation | None = None
        self._ready: tuple[int, Role, int] | None = None
        self._reads = False
        self._agreed = False
        self._said_agree = False
        self._they_read: bool | None = None
        self._said_break = False
        self._exposed = False
        self._orphaned = False
        self._settled = False
        self._told = Outcome.FAILED, ""

    @property
    def nbytes(self) -> int:
        return self._total

    @property
    def _eager(self) -> bool:
        """Whether a step's bytes travel in its frame. Both ends have as many."""
        return self._total <= EAGER_NBYTES

    @property
    def quarantined(self) -> bool:
        return True  # Closing the connection does not wait for it.

    @property
    def step(self) -> StepOperation | None:
        """The step that is under way."""
        return self._step

    def __str__(self) -> str:
        return f"the channel with rank {self.peer.rank}, tag {self.tag} ({self.peer.remote.name})"

    # Agreement.

    def pack(self) -> bytes:
        """What the other end has to be told: a body of CHANNEL. To be sent.

        Raises:
            ValueError: It does not fit in a frame.
        """
        exchange = self.exchange
        held = iter(self._memories)
        leaves = [
            (
                one.path,
                one.description,
                self.peer.place(Layout.of([next(held)])) if one.memory.nbytes else b"",
            )
            for one in self._buffers
        ]
        body = terms.pack_channel(exchange.context, self.number, self.tag, leaves)
        if len(body) > MAX_BODY:
            raise ValueError(
                f"like: {len(leaves)} tensors take {len(body)} bytes to describe, of at most "
                f"{MAX_BODY}: use several channels, or tensors that share memory"
            )
        return body

    def match(self, theirs: Terms, regions: Sequence[bytes]) -> None:
        """Compare with what the other end moves, and prepare. Never with the lock held.

        Args:
            theirs: What it says.
            regions: For each of its tensors, the metadata of the region it lies in.
        """
        rows = PairedRows()
        failure: BaseException | None = None
        reads = False
        try:
            what = terms.difference(
                [(one.path, one.description) for one in self._buffers],
                [(one.path, one.description) for one in theirs.leaves],
            )
            if what:
                raise MismatchError(f"{self}: the two ends differ: {what}")
            pairs = self._pairs(theirs, regions)
            rows.prepare(self.connection, self.peer.remote, pairs, self._total)
            reads = self.connection.path(self.peer.remote) == "cma"
        except (TorchNixlError, ValueError) as error:
            failure = error
        exchange = self.exchange
        act = None
        with exchange.lock:
            current = self.theirs is theirs and self.broken is None
            if current and failure is None:
                self._rows = rows
                self._reads = reads
                body = terms.pack_agree(exchange.context, self.number, theirs.number, reads=reads)
                exchange.send(self.peer, terms.AGREE, body)
                self._said_agree = True
                act = self._agree()
        if self._rows is not rows:
            rows.close()
        if current and failure is not None:
            self.fail(failure)
        do(act)

    def _pairs(self, theirs: Terms, regions: Sequence[bytes]) -> list[Pair]:
        """The two ends' memory of each tensor that has bytes, in this end's order: both's."""
        there = {leaf.path: leaf.place for leaf in theirs.leaves}
        blobs = {leaf.path: blob for leaf, blob in zip(theirs.leaves, regions, strict=True)}
        pairs: list[Pair] = []
        for one, held in zip(self._full_buffers(), self._memories, strict=True):
            place = there[one.path]
            assert place is not None, "places are as large as what they are of"
            pairs.append((held, place, blobs[one.path]))
        return pairs

    def _full_buffers(self) -> list[Buffer]:
        """Those that have bytes: one for each hold."""
        return [one for one in self._buffers if one.memory.nbytes]

    def part(self) -> None:
        """What this session was matched with ended before it knew of it: wait for the next.

        Holds the lock.
        """
        self.theirs = None
        self._said_agree = False
        self._they_read = None
        self._rows.close()
        self._rows = PairedRows()

    def on_agree(self, reads: bool) -> None:
        """The other end is prepared. Runs in the driver."""
        with self.exchange.lock:
            self._they_read = reads
            act = self._agree()
        do(act)

    def _agree(self) -> Callable[[], None] | None:
        """Begin the first step once both ends have agreed. Holds the lock."""
        if self._they_read is None or not self._said_agree or self._agreed or self.broken:
            return None
        self._reads &= self._they_read
        self._agreed = True
        step = self._step
        return None if step is None or not step.ready else self._begin(step)

    @abstractmethod
    def _begin(self, step: StepOperation) -> Callable[[], None] | None:
        """Say how a step's bytes go, the ends having agreed. Holds the lock.

        Returns:
            What to do about it once the lock is free.
        """

    # The end.

    def fail(self, error: BaseException, told: tuple[Outcome, str] | None = None) -> None:
        """End with an error. Memory is released once nothing moves there any more.

        Args:
            error: What this end's step ends with, and what the next ones raise.
            told: What the other end is told; by default the same.
        """
        with self.exchange.lock:
            if self.broken is not None:
                return
            self.broken = self._error = error
            self._told = told or outcome_of(error)
            self._done = True
            self.exchange.channels.retire(self)
            step = self._step
        if step is not None:
            step.finish(error)
            for move in tuple(step.moves):
                move.cancel()
        self._settle()

    def _settle(self) -> None:
        """Say BREAK once nothing of ours moves; give memory back once nothing of theirs does."""
        exchange = self.exchange
        busy = self.connection.operations.busy
        with exchange.lock:
            step = self._step
            if self.broken is None or self._settled or (step is not None and step.moves):
                return
            if not self._said_break:
                self._said_break = True
                if self.peer.error is None:
                    answered = 0 if self.theirs is None else self.theirs.number
                    body = terms.pack_break(exchange.context, self.number, answered, *self._told)
                    exchange.send(self.peer, terms.BREAK, body)
            if self._exposed and not self.connection.liveness.has_let_go(self.peer.remote):
                busy[self] = None
                return
            busy.pop(self, None)
            self._settled = True
            exchange.channels.forget(self)
        self._rows.close()
        if step is not None:
            self._forget_ended(step)
            step.release()
        self._release()

    def _forget_ended(self, step: StepOperation) -> None:
        """Have the peer no longer looked after for a step that has ended."""
        if step.done:
            with self.exchange.lock:
                self.exchange.unwatch(step)

    def on_break(self, outcome: Outcome, text: str) -> None:
        """The other end has ended the channel, and touches our memory no more."""
        self.fail(_error_of(self, outcome, text))
        with self.exchange.lock:
            self._exposed = False
        self._settle()

    def on_left(self, error: BaseException) -> None:
        """The other end closed its Communicator, and promised to touch our memory no more."""
        self.fail(error)
        with self.exchange.lock:
            self._exposed = False
        self._settle()

    def on_lost(self, error: BaseException) -> None:
        """The other end's agent is lost; what it may still touch stays owned."""
        self.fail(self._lost(error))
        self._settle()

    def _lost(self, error: BaseException) -> PeerLostError:
        name, rank = self.peer.remote.name, self.peer.rank
        return PeerLostError(f"{self}: {error}", remote=name, rank=rank)

    def check_quarantine(self) -> None:
        self._settle()

    def hold(self, timeout: float) -> bool:
        # False keeps the memory for ever: the agent dies, but the other end's may touch it.
        return not self._exposed or self.connection.liveness.is_gone(self.peer.remote)

    def abort(self, error: BaseException) -> None:
        with self.exchange.lock:
            self.broken = self._error = self.broken or error
            self._done = self._settled = True
            self.exchange.channels.retire(self)
            self.exchange.channels.forget(self)
            step = self._step
        if step is not None:
            step.abort(error)
        self._release()

    def cancel(self) -> None:
        """End it, and tell the other end that this one closed it."""
        text = f"rank {self.exchange.rank} closed it"
        self.fail(ClosedError(f"{self} was closed"), (Outcome.CANCELLED, text))

    def abandon(self) -> None:
        """Nobody here can use it any more: end it, once a step that is under way has ended."""
        with self.exchange.lock:
            self._orphaned = True
            busy = self._step is not None and self.broken is None
        if not busy:
            self.cancel()

    def expire(self) -> None:
        """It has no deadline; its steps have."""


def do(act: Callable[[], None] | None) -> None:
    """Do what had to wait for the lock to be free."""
    if act is not None:
        act()


def _error_of(session: Agreement, outcome: Outcome, text: str) -> TransferError:
    match outcome:
        case Outcome.MISMATCH:
            return MismatchError(f"{session}: refused by the other end: {text}")
        case Outcome.TIMED_OUT:
            return TransferTimeout(f"{session}: the other end's time was up: {text}")
        case Outcome.CANCELLED:
            return TransferCancelled(f"{session}: ended by the other end: {text}")
        case _:
            return TransferError(f"{session}: failed on the other end: {text}")
