"""Ranks that send tensors to each other."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch

from torch_nixl.engine.connection import DEFAULT_TIMEOUT, Connection
from torch_nixl.engine.streams import FAKES, StreamOrder, device_of, landing, may_use_devices
from torch_nixl.errors import ClosedError
from torch_nixl.p2p import protocol
from torch_nixl.p2p.bootstrap import Bootstrap
from torch_nixl.p2p.description import DEVICES, describe
from torch_nixl.p2p.device_receiving import DeviceReceive
from torch_nixl.p2p.exchange import Exchange
from torch_nixl.p2p.hub import hub_of, leave_connection, share_connection
from torch_nixl.p2p.ordering import NewLanding, make_receive, make_send, pack, place
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.sending import SendOperation
from torch_nixl.p2p.tensors import (
    TensorLanding,
    check_target,
    host_address,
    make_source,
)
from torch_nixl.p2p.trees import TreeMethods
from torch_nixl.p2p.values import (
    CommunicatorStatistics,
    Envelope,
    SendOrReceive,
    operation_name,
)
from torch_nixl.p2p.work import Work

if TYPE_CHECKING:
    from torch.distributed import Store

    from torch_nixl.p2p.channel import Channel
    from torch_nixl.p2p.peer import Peer

T = TypeVar("T")

CLOSE_SECONDS = 5.0
"""How long `close` waits for what was sent to be received."""


class Communicator(TreeMethods):
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
        self.timeout = _seconds(timeout)
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
            self._bootstrap.publish(self._connection.metadata()[0])
        except BaseException:
            if self._shares:
                leave_connection(self._connection, abort=False, timeout=CLOSE_SECONDS)
            raise

    @property
    def connection(self) -> Connection:
        """The agent below."""
        return self._connection

    @property
    def closed(self) -> bool:
        return self._exchange.closed is not None

    # Sending.

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        stream: object = None,
    ) -> None:
        """Send a tensor; return once it may be changed again.

        Args:
            tensor: Any strides and dtype; only its data is sent, not its graph.
            dst: The rank that receives it; may be this one.
            tag: 0 or more: the receiver asks for it by this number.
            timeout: Seconds; `math.inf` for no limit; the Communicator's by default.
            stream: A device tensor goes once what is queued on this stream by now has run; by
                default on its device's current one.

        Raises:
            TypeError, ValueError: An argument can't be sent, or there is no such rank.
            TransferTimeout: It was not received in time. The memory stays owned until it is
                released; use `isend` to know when.
            MismatchError: The receiver has a tensor for it that it doesn't fit. A small message has
                left before that shows: then the log says so, and `statistics`.
            PeerLostError: The receiver died or closed.
            ClosedError: This Communicator is closed.
        """
        operation = self._send(tensor, dst, protocol.check_tag(tag), timeout, stream, waiting=True)
        if isinstance(operation, SendOperation):
            operation.wait()

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        stream: object = None,
    ) -> Work:
        """Begin to send a tensor, which must not change before the Work has ended.

        See `send` for arguments and errors; those after the first three come with the Work.
        """
        operation = self._send(tensor, dst, protocol.check_tag(tag), timeout, stream, waiting=False)
        if isinstance(operation, SendOperation):
            return Work(self._exchange, operation)
        return Work(self._exchange, None, name=(dst, operation), nbytes=tensor.nbytes)

    def _send(
        self,
        tensor: torch.Tensor,
        dst: int,
        tag: int,
        timeout: float | None,
        stream: object = None,
        *,
        waiting: bool,
    ) -> SendOperation | int:
        address = host_address(tensor)
        device = None
        if not address or FAKES or stream is not None:
            tensor, device = place(tensor, stream)
        description = describe(tensor)
        exchange = self._exchange
        if exchange.poisoned is not None:
            exchange.check_poison()
        deadline = self._deadline(timeout)
        peer = exchange.peers.get(dst)
        if peer is None:
            if dst == self.rank and device is not None:
                data = [pack(tensor, device, stream)]
                exchange.inbox.post_local(tag, description, data, StreamOrder((device,), stream))
                return 0
            if dst == self.rank:
                exchange.inbox.post_local(tag, description, [tensor.detach().clone()])
                return 0
            peer = self._meet(dst, "dst", deadline)
        if description.nbytes <= protocol.EAGER_NBYTES and (
            device is None or not description.nbytes
        ):
            return exchange.outbox.submit_eager(peer, tag, description, tensor, address, deadline)
        if device is not None:
            operation = make_send(
                exchange, peer, tag, description, tensor, device, stream, deadline
            )
            return self._submit(operation, packed=operation.packed, waiting=waiting)
        memory, packed = make_source(tensor)
        held = self._connection.register(memory)
        operation = SendOperation(exchange, peer, tag, description, None, (held,), deadline)
        return self._submit(operation, packed=packed, waiting=waiting)

    # Receiving.

    def recv(
        self,
        src: int | None = None,
        *,
        out: torch.Tensor | None = None,
        tag: int = 0,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        stream: object = None,
    ) -> torch.Tensor:
        """Receive a tensor.

        Args:
            src: The rank it comes from; None for any.
            out: Where it goes; any strides. Shape and dtype must be those that were sent. A new
                tensor by default.
            tag: The tag it was sent with.
            device: Where a new tensor is made; by default the sender's kind of device.
            timeout: Seconds; `math.inf` for no limit; the Communicator's by default.
            stream: A device tensor is written to once what is queued on this stream by now has
                run; by default on its device's current one.

        Returns:
            `out`, or the new tensor.

        Raises:
            TypeError, ValueError: `out` can't be received into, or there is no such rank.
            TransferTimeout: Nothing came in time. A message that comes later is intact.
            MismatchError: It doesn't fit `out`, which is untouched. The message is gone.
            PeerLostError: The sender died or closed.
            TransferError: The sender gave up, or could not move it.
            ClosedError: This Communicator is closed.
        """
        operation = self._receive(
            src, out, protocol.check_tag(tag), device, timeout, stream, spin=True
        )
        operation.wait()
        result: torch.Tensor = operation.result
        if operation.landed_on is not None:
            operation.keep()
        return result

    def irecv(
        self,
        src: int | None = None,
        *,
        out: torch.Tensor | None = None,
        tag: int = 0,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        stream: object = None,
    ) -> Work:
        """Begin to receive a tensor. See `recv`; the Work's `result()` has the tensor."""
        operation = self._receive(
            src, out, protocol.check_tag(tag), device, timeout, stream, spin=False
        )
        self._connection.progress.kick()
        return Work(self._exchange, operation)

    def _receive(
        self,
        src: int | None,
        out: torch.Tensor | None,
        tag: int,
        device: torch.device | str | None,
        timeout: float | None,
        stream: object = None,
        *,
        spin: bool,
    ) -> ReceiveOperation:
        address = 0
        on = None
        if out is not None:
            if device is not None:
                raise ValueError("expected out= or device=, not both")
            address = check_target(out)
            if not address or FAKES:
                on = device_of(out)
        if stream is not None and on is None:
            raise ValueError("stream=: expected out= to be a device tensor")
        exchange = self._exchange
        if exchange.poisoned is not None:
            exchange.check_poison()
        deadline = self._deadline(timeout)
        if src is not None and src != self.rank and src not in exchange.peers:
            self._meet(src, "src", deadline)
        where = None if device is None else torch.device(device)
        if where is not None and where.type not in DEVICES:
            raise ValueError(f"device={device}: expected one of {', '.join(DEVICES)}")
        operation: ReceiveOperation
        if on is not None:
            assert out is not None
            operation = make_receive(exchange, src, tag, out, on, stream, deadline)
        else:
            lands = landing(where) if out is None else None
            made = TensorLanding(out, address, where) if lands is None else NewLanding(lands, where)
            if lands is None and not (src in (None, self.rank) and may_use_devices()):
                operation = ReceiveOperation(exchange, src, tag, made, deadline)
            else:
                operation = DeviceReceive(exchange, src, tag, made, deadline, lands)
        try:
            exchange.inbox.post(operation, spin=spin)
        except BaseException:
            operation.give_up()
            raise
        return operation

    def iprobe(self, src: int | None = None, *, tag: int = 0) -> Envelope | None:
        """Tell what the next receive from `src` with `tag` would get, if it is here already."""
        if not self.closed:
            self._connection.progress.step()
        return self._exchange.inbox.peek(src, tag)

    def probe(
        self, src: int | None = None, *, tag: int = 0, timeout: float | None = None
    ) -> Envelope:
        """Wait until a message is here, and tell what it is without receiving it.

        Raises:
            TransferTimeout: None came in time.
            PeerLostError: The sender died or closed.
            ClosedError: This Communicator is closed.
        """
        exchange = self._exchange
        exchange.check_poison()
        deadline = self._deadline(timeout)
        if src is not None and src != self.rank and src not in exchange.peers:
            self._meet(src, "src", deadline)
        return exchange.inbox.probe(src, tag, deadline)

    def batch_isend_irecv(self, operations: Iterable[SendOrReceive]) -> list[Work]:
        """Begin several sends and receives: the receives first, so that messages find them.

        Args:
            operations: `torch.distributed.P2POp`, or anything with its attributes.

        Returns:
            The Works, in the order of the operations.
        """
        operations = list(operations)
        names = [operation_name(one) for one in operations]
        works: dict[int, Work] = {}
        for wanted in ("irecv", "isend"):
            for index, (name, one) in enumerate(zip(names, operations, strict=True)):
                if name != wanted:
                    continue
                tag = one.tag or 0
                if name == "irecv":
                    works[index] = self.irecv(one.peer, out=one.tensor, tag=tag)
                else:
                    works[index] = self.isend(one.tensor, one.peer, tag=tag)
        return [works[index] for index in range(len(operations))]

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
            ValueError: No such rank or tag, or this rank's own.
            TransferTimeout, PeerLostError, ClosedError: As `channel`.
        """
        if not 0 <= tag <= protocol.MAX_TAG:
            raise ValueError(f"tag={tag}: expected 0 to 2^63 - 1")
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
        if not (isinstance(rank, int) and 0 <= rank < self.world_size):
            raise ValueError(f"{name}={rank!r}: expected a rank, 0 to {self.world_size - 1}")
        timeout = None if deadline is None else deadline - time.monotonic()
        blob = self._bootstrap.fetch(rank, timeout)
        return self._exchange.contact(rank, blob)

    def _deadline(self, timeout: float | None) -> float | None:
        seconds = self.timeout if timeout is None else timeout
        if seconds is None or seconds == math.inf:
            return None
        if not seconds >= 0:
            raise ValueError(f"timeout={seconds}: expected seconds, 0 or more")
        return time.monotonic() + seconds

    # The end.

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End gracefully: what waits to be received fails, what was sent is received. Idempotent.

        Args:
            timeout: Seconds after which sends that were not received fail, too.
        """
        self._end("the Communicator was closed", timeout)

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
        deadline = time.monotonic() + (timeout or 0.0)
        outstanding = exchange.outstanding()
        for one in outstanding:
            if timeout is None or one.incoming:
                one.fail(ClosedError(f"{one}: {why}"))
        with contextlib.suppress(ClosedError):
            if timeout is not None:
                self._connection.progress.wait_until(self._is_quiet, deadline)
            for one in exchange.outstanding():
                one.fail(ClosedError(f"{one}: {why}"))
            if timeout is not None:
                self._connection.progress.wait_until(
                    exchange.has_ended, min(deadline, time.monotonic() + 1.0)
                )
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


def _seconds(timeout: float | datetime.timedelta | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
