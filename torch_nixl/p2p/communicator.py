"""Ranks that send tensors to each other."""

from __future__ import annotations

import contextlib
import datetime
import time
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from torch_nixl.engine.connection import DEFAULT_TIMEOUT, Connection
from torch_nixl.engine.operation import deadline_after
from torch_nixl.errors import ClosedError
from torch_nixl.p2p import protocol
from torch_nixl.p2p.bootstrap import Address, Bootstrap
from torch_nixl.p2p.exchange import Exchange
from torch_nixl.p2p.hub import hub_of, leave_connection, share_connection
from torch_nixl.p2p.tensor_methods import TensorMethods
from torch_nixl.p2p.trees import TreeMethods
from torch_nixl.p2p.values import (
    CommunicatorStatistics,
)

if TYPE_CHECKING:
    from torch.distributed import Store

    from torch_nixl.p2p.channel import Channel
    from torch_nixl.p2p.peer import Peer

T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""How long `close` waits for what was sent to be received."""

GIVE_UP_SECONDS = 1.0
"""How long `close` then waits for receivers to let go of what was not."""


class Communicator(TensorMethods, TreeMethods):
    """Sends and receives tensors, trees of them and objects between ranks.

    Messages between two ranks with one tag arrive in the order they were sent. A rank is met when
    something is first sent to it or received from it; until it has made its own Communicator, that
    call waits, up to the timeout. Any thread may use it.

    Args:
        store: Through which ranks find each other; used until first contact.
        rank: This rank.
        world_size: How many there are.
        prefix: Sets apart the keys of several groups in one store.
        timeout: Seconds after which sends and receives end with `TransferTimeout`; None for never.
        connection: An agent to use instead of the one that all Communicators share. Not closed
            with the Communicator.
        once: No other Communicator is ever made with this prefix in this store: once all are
            closed, nothing is left there.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        prefix: str = "torch_nixl",
        timeout: float | datetime.timedelta | None = DEFAULT_TIMEOUT,
        connection: Connection | None = None,
        once: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: expected 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.timeout = seconds_of(timeout)
        self._shares = connection is None
        self._connection = share_connection(rank) if connection is None else connection
        try:
            key = self._connection.metadata_key
            self._bootstrap = Bootstrap(store, prefix, rank, world_size, key, once=once)
            self._hub = hub_of(self._connection)
            context = self._bootstrap.context
            self._exchange = Exchange(self._connection, context, rank, world_size, self._hub.lock)
            # Before anyone can know how to reach it.
            self._hub.add(self._exchange)
            identity, metadata = self._connection.contacts.identity, self._connection.metadata()
            self._bootstrap.publish(Address(identity, metadata[0]))
        except BaseException:
            self._unmake()
            if self._shares:
                leave_connection(self._connection, abort=False, timeout=CLOSE_SECONDS)
            raise

    def _unmake(self) -> None:
        """Take back what a constructor that failed has done."""
        exchange, bootstrap = getattr(self, "_exchange", None), getattr(self, "_bootstrap", None)
        if exchange is not None:
            exchange.closed = ClosedError("the Communicator could not be made")
            self._hub.remove(exchange)
        if bootstrap is not None:
            bootstrap.leave()

    @property
    def connection(self) -> Connection:
        """The agent below."""
        return self._connection

    @property
    def closed(self) -> bool:
        return self._exchange.closed is not None

    # Channels.

    def channel(
        self, peer: int, *, like: T, tag: int = 0, timeout: float | None = None
    ) -> Channel[T]:
        """Make a channel: the same tensors, moved to or from a rank again and again.

        Both ranks make it, with the same tag and trees alike, in any order with other channels: it
        waits for the other rank to have made its Communicator, but not its channel; the first
        step does. It then costs no registration, no metadata and no use of the store.

        Args:
            peer: The other rank.
            like: A tensor, or dicts, lists and tuples of tensors; any strides and dtypes. Their
                memory on this rank is what is sent from and received into.
            tag: 0 or more: sets channels between two ranks apart. Messages have tags of their own.
            timeout: Seconds until the other rank must have made its Communicator; this one's own by
                default.

        Raises:
            TypeError, ValueError: A tensor can't be moved as it lies, there is no such rank, it is
                this rank's own, or a channel with this rank and tag is open.
            TransferTimeout: The other rank made no Communicator in time.
            RegistrationError: NIXL refused the memory.
            PeerLostError: The other rank died or closed.
            ClosedError: This Communicator is closed.
        """
        from torch_nixl.p2p.channel import Channel

        return Channel(self, peer, like, tag, timeout)

    def contact_for_channel(
        self, peer: int, tag: int, timeout: float | None
    ) -> tuple[Exchange, Peer]:
        """Meet the other end of a channel. For `Channel`.

        Raises:
            TypeError, ValueError: No such rank or tag, or this rank's own.
            TransferTimeout, PeerLostError, ClosedError: As `channel`.
        """
        protocol.check_tag(tag)
        peer = protocol.check_rank(peer, self.world_size, "peer")
        if peer == self.rank:
            raise ValueError(f"peer={peer}: a channel needs another rank than its own")
        known = self._exchange.peers.get(peer)
        if known is None:
            known = self._meet(peer, "peer", self._deadline(timeout))
        return self._exchange, known

    # Contact.

    def _meet(self, rank: int, name: str, deadline: float | None) -> Peer:
        if self._exchange.closed is not None:
            raise ClosedError(str(self._exchange.closed))
        protocol.check_rank(rank, self.world_size, name)
        timeout = None if deadline is None else deadline - time.monotonic()
        address = self._bootstrap.fetch(rank, timeout, lambda: self._has_come(rank))
        # It may have closed since, and its key be gone: it has introduced itself before.
        return self._exchange.contact(rank, address) if address else self._exchange.peers[rank]

    def _has_come(self, rank: int) -> bool:
        """Whether a rank is met: it may have met us first."""
        self._connection.progress.sweep()
        return rank in self._exchange.peers

    def _source(self, src: int | None, timeout: float | None) -> tuple[int | None, float | None]:
        """Meet the rank that something is to come from; return it, and the deadline."""
        exchange = self._exchange
        if exchange.poisoned is not None:
            exchange.check_poison()
        deadline = self._deadline(timeout)
        if src is not None:
            if type(src) is not int:
                src = protocol.check_rank(src, self.world_size, "src")
            if src not in exchange.peers and src != self.rank:
                self._meet(src, "src", deadline)
        return src, deadline

    def _deadline(self, timeout: float | None) -> float | None:
        return deadline_after(self.timeout if timeout is None else timeout)

    # The end.

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End gracefully: what waits to be received fails, what was sent is received. Idempotent.

        Collectives that were begun end before, if the other ranks begin them in time.

        Args:
            timeout: Seconds after which collectives and sends that were not received fail, too.
                Their receivers then have one more to let go of the memory.
        """
        deadline = time.monotonic() + timeout
        if not self.closed:
            with contextlib.suppress(ClosedError):  # The connection is aborted meanwhile.
                for finish in self._exchange.finishers:
                    finish(deadline)
        self._end("the Communicator was closed", max(0.0, deadline - time.monotonic()))

    def abort(self) -> None:
        """End at once: all who wait return with `ClosedError`. Idempotent.

        The last Communicator of a process takes the agent with it, which stops all transfers.
        """
        self._end("the Communicator was aborted", None)

    def _end(self, why: str, timeout: float | None) -> None:
        exchange = self._exchange
        with exchange.lock:
            if exchange.closed is not None:
                return
            exchange.closed = ClosedError(why)
            exchange.inbox.close()
        deadline = time.monotonic() + (timeout or 0.0)
        outstanding = exchange.outstanding()
        for one in outstanding:
            if timeout is None or one.incoming:
                one.fail(ClosedError(f"{one}: {why}"))
        with contextlib.suppress(ClosedError):  # The connection is aborted meanwhile.
            if timeout is not None:
                self._connection.progress.wait_until(self._is_quiet, deadline)
            for one in exchange.outstanding():
                one.fail(ClosedError(f"{one}: {why}"))
            # The collectives that they were of end with them.
            self._connection.progress.call_now()
            if timeout is not None:
                until = time.monotonic() + GIVE_UP_SECONDS
                self._connection.progress.wait_until(exchange.has_ended, until)
                # Who has just left is not to be told: NIXL logs an error for each such word.
                self._connection.progress.sweep()
            exchange.channels.close()
        exchange.say_leave()
        self._hub.remove(exchange)
        self._bootstrap.leave()
        if self._shares:
            left = max(1.0, deadline - time.monotonic())
            leave_connection(self._connection, abort=timeout is None, timeout=left)

    def _is_quiet(self) -> bool:
        """Whether all that was sent has been received, or has at least reached its rank."""
        exchange = self._exchange
        remotes = [peer.remote for peer in list(exchange.peers.values())]
        return exchange.has_ended() and all(one.answered or one.broken for one in remotes)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def statistics(self) -> CommunicatorStatistics:
        """What this Communicator has done so far."""
        return self._exchange.statistics()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Communicator rank {self.rank} of {self.world_size} {state}>"


def seconds_of(timeout: float | datetime.timedelta | None) -> float | None:
    """A timeout in seconds; None for never."""
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
