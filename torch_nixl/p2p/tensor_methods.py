"""Sends and receives of tensors: the methods of a Communicator for them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import torch

from torch_nixl.engine.streams import FAKES, StreamOrder, device_of, landing, may_use_devices
from torch_nixl.p2p import protocol
from torch_nixl.p2p.description import DEVICES, describe
from torch_nixl.p2p.device_receiving import DeviceReceive
from torch_nixl.p2p.ordering import NewLanding, make_receive, make_send, pack, place
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.sending import SendOperation
from torch_nixl.p2p.tensors import (
    TensorLanding,
    check_target,
    contiguous_copy,
    host_address,
    make_source,
)
from torch_nixl.p2p.values import Envelope, SendOrReceive, operation_name
from torch_nixl.p2p.work import Work

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.peer import Peer

CANCEL_SECONDS: Final = 1.0
"""How long a batch that was refused waits until its tensors are its caller's again."""


class TensorMethods:
    """What a Communicator does with tensors."""

    rank: int
    world_size: int
    _connection: Connection
    _exchange: Exchange

    if TYPE_CHECKING:

        @property
        def closed(self) -> bool: ...

        def _deadline(self, timeout: float | None) -> float | None: ...

        def _meet(self, rank: int, name: str, deadline: float | None) -> Peer: ...

        def _source(
            self, src: int | None, timeout: float | None
        ) -> tuple[int | None, float | None]: ...

        def _submit(
            self, operation: SendOperation, *, packed: bool, waiting: bool
        ) -> SendOperation: ...

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
            try:
                operation.wait()
            except BaseException:
                operation.cancel()  # Interrupted: nobody else can.
                raise

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
        if type(dst) is not int:
            dst = protocol.check_rank(dst, self.world_size, "dst")
        peer = exchange.peers.get(dst)
        if peer is None:
            if dst == self.rank and device is not None:
                data = [pack(tensor, device, stream)]
                exchange.inbox.post_local(tag, description, data, StreamOrder((device,), stream))
                return 0
            if dst == self.rank:
                exchange.inbox.post_local(tag, description, [contiguous_copy(tensor)])
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
        try:
            operation.wait()
        except BaseException:
            operation.cancel()  # Interrupted: it must not take the next message.
            raise
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
        src, deadline = self._source(src, timeout)
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
        tag = protocol.check_tag(tag)
        if src is not None:
            src = protocol.check_rank(src, self.world_size, "src")
        prober = self._exchange.prober
        if not self.closed:
            prober.ask(src, tag)
            self._connection.progress.step()
        return prober.peek(src, tag)

    def probe(
        self, src: int | None = None, *, tag: int = 0, timeout: float | None = None
    ) -> Envelope:
        """Wait until a message is here, and tell what it is without receiving it.

        Raises:
            TransferTimeout: None came in time.
            PeerLostError: The sender died or closed.
            ClosedError: This Communicator is closed.
        """
        tag = protocol.check_tag(tag)
        src, deadline = self._source(src, timeout)
        return self._exchange.prober.wait(src, tag, deadline)

    def batch_isend_irecv(self, operations: Iterable[SendOrReceive]) -> list[Work]:
        """Begin several sends and receives: the receives first, so that messages find them.

        If one of them is refused, those begun before it are cancelled: their tensors may be used
        again, and later messages find no receive of theirs. Small messages may have left.

        Args:
            operations: `torch.distributed.P2POp`, or anything with its attributes.

        Returns:
            The Works, in the order of the operations.
        """
        operations = list(operations)
        names = [operation_name(one) for one in operations]
        for one in operations:
            protocol.check_tag(one.tag or 0)
            protocol.check_rank(one.peer, self.world_size, "peer")
        works: dict[int, Work] = {}
        try:
            for wanted in ("irecv", "isend"):
                for index, (name, one) in enumerate(zip(names, operations, strict=True)):
                    if name != wanted:
                        continue
                    tag = one.tag or 0
                    if name == "irecv":
                        works[index] = self.irecv(one.peer, out=one.tensor, tag=tag)
                    else:
                        works[index] = self.isend(one.tensor, one.peer, tag=tag)
        except BaseException:
            for work in works.values():
                work.cancel()
            until = time.monotonic() + CANCEL_SECONDS
            for work in works.values():
                work.wait_released(max(0.0, until - time.monotonic()))
            raise
        return [works[index] for index in range(len(operations))]
