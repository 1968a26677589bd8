"""One group's collectives: their numbers, and what its ranks say of them to each other."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from torch_nixl.collectives import protocol
from torch_nixl.collectives.device_operation import DeviceCollective
from torch_nixl.collectives.inquiry import INQUIRY_SECONDS, Inquiry
from torch_nixl.collectives.operation import Algorithm, CollectiveOperation
from torch_nixl.collectives.protocol import Signature
from torch_nixl.engine.streams import device_of
from torch_nixl.errors import (
    ClosedError,
    MetadataError,
    PeerLostError,
    TorchNixlError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.tensors import MismatchError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.p2p.peer import Peer

MAX_HISTORY: Final = 4096
"""Collectives of the past that other ranks are told of when they ask."""

MAX_ASKED: Final = 64
"""Ranks up to which all are asked; beyond, only those that are waited for."""


class CollectiveGroup:
    """The collectives of one Communicator.

    Attributes:
        failed: What a collective failed with; from then on all do.

    [Note: earlier collectives]
    A rank that leaves while a collective is under way may have done its part in all before that.
    So they are not ended with it: each ends by itself, well or because a message of its own fails.
    """

    def __init__(self, communicator: Communicator) -> None:
        # Weak: this belongs to the Communicator.
        self._communicator = weakref.ref(communicator)
        self._exchange = communicator._exchange
        self._lock = threading.Lock()
        self._next = 0
        self._active: dict[int, CollectiveOperation] = {}
        self._history: OrderedDict[int, Signature] = OrderedDict()
        self._asked: dict[int, tuple[int, str]] = {}
        self.failed: TorchNixlError | None = None
        # The first that is of no use any more, once one has failed.
        self._failed_from = 0
        self._exchange.finishers.append(self.finish)
        communicator.connection.protocols.get(_listen)[self._exchange.context] = self

    def begin(
        self,
        signature: Signature,
        algorithm: Algorithm,
        moved: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        timeout: float | None,
        *,
        attended: bool,
    ) -> CollectiveOperation:
        """Number a collective and start it. Its errors come with it.

        Args:
            signature: What it is.
            algorithm: What it does.
            moved: The tensors that the algorithm was given.
            outputs: The caller's that it changes.
            timeout: Seconds; the Communicator's by default.
            attended: Whether the caller waits for it, and then takes one from `attended`.

        Raises:
            ClosedError: The Communicator is closed.
            TorchNixlError: An earlier collective failed, and the group with it.
            PoisonedError: An operation failed while a device's stream waited for it.
        """
        communicator = self._communicator()
        assert communicator is not None
        limit = communicator._deadline(timeout)
        self._exchange.check_poison()
        on_device = any(device_of(one) is not None for one in moved)
        kind = DeviceCollective if on_device else CollectiveOperation
        with self._lock:
            if self._exchange.closed is not None:
                raise ClosedError(f"{signature}: {self._exchange.closed}")
            if self.failed is not None and self._next >= self._failed_from:
                raise _like(self.failed, f"{signature}: this group failed before: {self.failed}")
            number = self._next
            self._next += 1
            self._history[number] = signature
            if len(self._history) > MAX_HISTORY:
                self._history.popitem(last=False)
            operation = kind(self, communicator, signature, number, algorithm, outputs, limit)
            operation.attended = int(attended)
            self._active[number] = operation
            asked = list(self._asked.items()) if self._asked else ()
        for rank, (wanted, text) in asked:
            if wanted <= number:
                self._asked.pop(rank, None)
                self._compare(rank, wanted, text, answer=True)
        try:
            self._meet_all(communicator, operation)
            operation.prepare(moved)
            operation.start()
        except ClosedError as error:
            operation.abort(ClosedError(f"{operation}: {error}"))
        except Exception as error:  # noqa: BLE001 - it ends the collective, on every rank
            self.fail(operation, error)
        except BaseException as error:
            self.fail(operation, TransferCancelled(f"interrupted by {error!r}"))
            raise
        return operation

    def _meet_all(self, communicator: Communicator, operation: CollectiveOperation) -> None:
        """Meet the ranks that were never met, which waits for each to make its Communicator.

        Returns early if the collective ends meanwhile: a rank that was met may say that it failed.
        """
        peers = self._exchange.peers
        if len(peers) == communicator.world_size - 1:
            return
        limit, started = operation.limit, time.monotonic()
        for rank in range(communicator.world_size):
            if rank == communicator.rank or rank in peers:
                continue
            come = functools.partial(self._needs_no_key, communicator, rank, operation)
            left = None if limit is None else limit - time.monotonic()
            try:
                address = communicator._bootstrap.fetch(rank, left, come)
            except TransferTimeout as error:
                assert limit is not None
                raise TransferTimeout(
                    f"rank {rank} has not made its Communicator within {limit - started:.3g} s, or "
                    "has closed it already"
                ) from error
            if address:
                self._exchange.contact(rank, address)

    def _needs_no_key(
        self, communicator: Communicator, rank: int, operation: CollectiveOperation
    ) -> bool:
        """Whether a rank has come by itself, or is not needed any more."""
        return operation.done or communicator._has_come(rank)

    def inquire(self, operation: CollectiveOperation) -> Inquiry | None:
        """Ask a rank that has sent something by now that no collective of ours receives.

        Two that both take themselves for the root of a small broadcast wait for nobody. What they
        have sent each other is found once they have next heard from each other.

        Args:
            operation: One that is about to end.

        Returns:
            What it then has to wait for; None if no rank has.

        Raises:
            MismatchError: One has that can't be asked.
        """
        exchange = self._exchange
        matcher = exchange.inbox.matcher
        if not matcher.num_messages:
            return None
        with exchange.lock:
            tags = matcher.tags()
        for tag, source in tags:
            if tag >= 0:
                continue
            number = protocol.number_of(tag, operation.number)
            with self._lock:
                mine = number == operation.number
                stray = mine or (number < operation.number and number not in self._active)
            if not stray:
                continue
            known, peer = self._history.get(number), exchange.peers.get(source)
            text = (
                f"rank {source} called something else than this rank's collective {number}, "
                f"{known or 'unknown by now'}: it sent what was never received"
            )
            if known is None or peer is None or peer.error is not None:
                raise MismatchError(text)
            soon = time.monotonic() + INQUIRY_SECONDS
            deadline = soon if operation.limit is None else min(soon, operation.limit)
            inquiry = Inquiry(exchange.connection, source, text, deadline)
            exchange.connection.operations.add(inquiry)
            exchange.send(
                peer, protocol.ASK, protocol.pack_call(exchange.context, number, known.text)
            )
            return inquiry
        return None

    def forget(self, operation: CollectiveOperation) -> None:
        """A collective has ended."""
        with self._lock:
            self._active.pop(operation.number, None)

    def finish(self, deadline: float) -> None:
        """Let collectives that are under way end, for so long: others may depend on this rank.

        Args:
            deadline: `time.monotonic()`.
        """
        if self._active:
            self._exchange.connection.progress.wait_until(lambda: not self._active, deadline)

    # Failure.

    def fail(self, operation: CollectiveOperation, error: BaseException) -> None:
        """End a collective with an error, and the group with it, on every rank."""
        if self._exchange.closed is not None:
            self.forget(operation)
            operation.end(ClosedError(f"{operation}: {self._exchange.closed}"))
            return
        if not isinstance(error, TorchNixlError):
            wrapped: TorchNixlError = TransferError(f"{operation}: {error!r}")
            wrapped.__cause__ = error
        else:
            wrapped = _like(error, f"{operation}: {error}")
        self._fail_all(wrapped, operation.number)
        # Another thread may be about to end it with the group. Until then its algorithm, which has
        # raised, must not be taken for one that has come to its end.
        operation.end(wrapped)

    def time_out(self, operation: CollectiveOperation) -> None:
        """Its time is up: say which ranks have not taken part."""
        missing = operation.missing() if operation.has_asked else []
        names = ", ".join(f"rank {rank}" for rank in missing)
        awaited = ", ".join(f"rank {rank}" for rank in sorted(operation.awaited))
        if missing:
            why = f"no sign of {names}"
        elif operation.has_asked:
            why = f"all ranks have begun it; waits for {awaited}"
        else:
            why = f"waits for {awaited}"
        self.fail(operation, TransferTimeout(f"timed out: {why}"))

    def _fail_all(self, error: TorchNixlError, number: int, *, tell: bool = True) -> None:
        # See [Note: earlier collectives].
        start = number if isinstance(error, (PeerLostError, ClosedError)) else 0
        with self._lock:
            first = self.failed is None or start < self._failed_from
            if first:
                self.failed = self.failed or error
                self._failed_from = start
            active = [one for one in self._active.values() if one.number >= start]
            for operation in active:
                del self._active[operation.number]
        for operation in active:
            same = operation.number == number
            operation.end(
                error if same else _like(error, f"{operation}: its group failed: {error}")
            )
        if first and tell:
            for peer in list(self._exchange.peers.values()):
                self._tell_failed(peer, number, error)

    def _tell_failed(self, peer: Peer, number: int, error: BaseException) -> None:
        if peer.error is None:
            body = protocol.pack_fail(self._exchange.context, number, error)
            self._exchange.send(peer, protocol.FAIL, body)

    # What other ranks say. Runs in the driver.

    def ask(self, operation: CollectiveOperation) -> None:
        """Ask the other ranks where they are."""
        exchange = self._exchange
        body = protocol.pack_call(exchange.context, operation.number, operation.signature.text)
        awaited = operation.awaited
        for rank, peer in list(exchange.peers.items()):
            if peer.error is None and (exchange.world_size <= MAX_ASKED or rank in awaited):
                exchange.send(peer, protocol.ASK, body)

    def on_ask(self, peer: Peer, body: bytes) -> None:
        """A rank waits in a collective."""
        number, text = protocol.parse_call(body)
        if self.failed is not None and number >= self._failed_from:
            self._tell_failed(peer, max(number, self._failed_from), self.failed)
            return
        with self._lock:
            begun = number < self._next
            if not begun:
                self._asked[peer.rank] = (number, text)
        if begun:
            self._compare(peer.rank, number, text, answer=True)

    def on_tell(self, peer: Peer, body: bytes) -> None:
        """A rank says what its collective of a number is."""
        number, text = protocol.parse_call(body)
        operation = self._active.get(number)
        if operation is not None:
            operation.present.add(peer.rank)
        self._compare(peer.rank, number, text, answer=False)

    def _compare(self, rank: int, number: int, text: str, *, answer: bool) -> None:
        """Fail if another rank's collective of a number is not ours."""
        exchange = self._exchange
        mine = self._history.get(number)
        peer = exchange.peers.get(rank)
        if mine is None or peer is None:
            return
        if text != mine.text:
            error = MismatchError(
                f"collective {number}: rank {rank} called {text}, "
                f"rank {exchange.rank} called {mine.text}"
            )
            self._fail_all(error, number)
        elif answer:
            body = protocol.pack_call(exchange.context, number, mine.text)
            exchange.send(peer, protocol.TELL, body)

    def on_fail(self, peer: Peer, body: bytes) -> None:
        """A collective failed on another rank."""
        number, kind, text = protocol.parse_fail(body)
        if self.failed is None or number < self._failed_from:
            if kind is ClosedError:
                kind = PeerLostError
            self._fail_all(kind(f"rank {peer.rank} reports: {text}"), number, tell=False)


def _like(error: TorchNixlError, text: str) -> TorchNixlError:
    """An error of the same type with another text."""
    made = type(error)(text)
    made.__cause__ = error.__cause__
    return made


_Groups: TypeAlias = "weakref.WeakValueDictionary[int, CollectiveGroup]"

_groups: weakref.WeakKeyDictionary[Communicator, CollectiveGroup] = weakref.WeakKeyDictionary()
_lock = threading.Lock()

_HANDLERS: Final = {
    protocol.ASK: CollectiveGroup.on_ask,
    protocol.TELL: CollectiveGroup.on_tell,
    protocol.FAIL: CollectiveGroup.on_fail,
}


def group_of(communicator: Communicator) -> CollectiveGroup:
    """The one group of a Communicator."""
    group = _groups.get(communicator)
    if group is None:
        with _lock:
            group = _groups.get(communicator)
            if group is None:
                group = _groups[communicator] = CollectiveGroup(communicator)
    return group


def _listen(connection: Connection) -> _Groups:
    """Make a connection's table of groups by context, which its frames go to."""
    groups: _Groups = weakref.WeakValueDictionary()
    for kind, handler in _HANDLERS.items():
        connection.route(kind, _route(groups, handler))
    return groups


def _route(
    groups: _Groups, handler: Callable[[CollectiveGroup, Peer, bytes], None]
) -> Callable[[Remote, bytes], None]:
    def handle(remote: Remote, body: bytes) -> None:
        if len(body) < 4:
            raise MetadataError("frame is cut")
        group = groups.get(int.from_bytes(body[:4], "little"))
        if group is not None:
            peer = group._exchange.by_remote.get(remote)
            if peer is not None:
                handler(group, peer, body)

    return handle
