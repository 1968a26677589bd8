"""Sends and receives of what isn't one tensor: the methods of a Communicator for it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.starting import register_all, release_all
from torch_nixl.engine.streams import FAKES, order_of
from torch_nixl.engine.streams import landing as landing_of
from torch_nixl.p2p import protocol
from torch_nixl.p2p.bundle_receiving import ObjectReceive, TreeReceive
from torch_nixl.p2p.bundles import (
    ONE_PIECE,
    TreeSource,
    choose_num_apart,
    copy_all,
    fits_frame,
    one_piece,
    resolve,
)
from torch_nixl.p2p.description import DEVICES, Bundle, Form
from torch_nixl.p2p.fitting import NOTHING
from torch_nixl.p2p.landing import TreeLanding
from torch_nixl.p2p.manifest import Packed
from torch_nixl.p2p.sending import SendOperation
from torch_nixl.p2p.tensors import host_address, sendable
from torch_nixl.p2p.work import TreeWork, Work

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.peer import Peer


class _Gone(NamedTuple):
    """A message that has left: to whom, its number there, and its size."""

    rank: int
    number: int
    nbytes: int


class TreeMethods:
    """What a Communicator does with trees and objects."""

    rank: int
    world_size: int
    _connection: Connection
    _exchange: Exchange

    if TYPE_CHECKING:

        def _deadline(self, timeout: float | None) -> float | None: ...

        def _meet(self, rank: int, name: str, deadline: float | None) -> Peer: ...

        def _source(
            self, src: int | None, timeout: float | None
        ) -> tuple[int | None, float | None]: ...

    def send_tree(
        self, tree: object, dst: int, *, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send a tree; return once its tensors may be changed again.

        It is one message, and only `recv_tree` receives it. No pickle: what arrives is dicts,
        lists, tuples, tensors and scalars, and the receiver's own types where it gives them.

        Args:
            tree: Nested dicts, lists, tuples, namedtuples, dataclasses and TensorDicts, with
                tensors on any devices, None, bool, int, float, complex, str and bytes in them.
                Keys are str, int, bool, None, float or bytes. Of subclasses of dict, list and
                tuple only the contents are sent. All but the tensors' bytes must fit 256 KiB.
            dst: The rank that receives it; may be this one.
            tag: As for `send`: trees and tensors share the order of a tag.
            timeout: Seconds; `math.inf` for no limit; the Communicator's by default.

        Raises:
            TypeError, ValueError: Something in it can't be sent; its path is named.
            TransferError: As `send`: all that it raises.
            ClosedError: This Communicator is closed.
        """
        operation = self._send_tree(tree, dst, tag, timeout, waiting=True)
        if isinstance(operation, SendOperation):
            _wait(operation)

    def isend_tree(
        self, tree: object, dst: int, *, tag: int = 0, timeout: float | None = None
    ) -> Work:
        """Begin to send a tree, whose tensors must not change before the Work has ended.

        See `send_tree`. Scalars and small tensors are copied at once.
        """
        return self._work_of(self._send_tree(tree, dst, tag, timeout, waiting=False))

    def recv_tree(
        self,
        src: int | None = None,
        *,
        out: Any = NOTHING,
        like: Any = NOTHING,
        tag: int = 0,
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive a tree.

        Without `out` and `like` a dataclass or a TensorDict arrives as a dict, a namedtuple as a
        tuple: a peer names no types.

        Args:
            src: The rank it comes from; None for any.
            out: A tree to fill in place: containers of the same kinds with the same keys (those of
                dicts in any order), tensors of the same shapes and dtypes on any device. Only data
                is written, also where gradients are required. Scalars are replaced; in tuples and
                frozen dataclasses they have to be equal. Tensors that share memory end up with
                the bytes of the last of them.
            like: A tree of the same structure that gives the types and, unless they are meta, the
                devices of a new one. It isn't changed.
            tag: The tag it was sent with.
            device: Where new tensors are made; by default the sender's kind of device.
            timeout: Seconds; `math.inf` for no limit; the Communicator's by default.

        Returns:
            `out`, or a new tree.

        Raises:
            TypeError, ValueError: `out` can't be received into, or there is no such rank.
            MismatchError: What came isn't a tree, or differs from `out` or `like`: the first
                difference is named, on both sides. Nothing was written. The message is gone.
            TransferError: As `recv`: all that it raises. In `out` then lie undefined bytes.
            ClosedError: This Communicator is closed.
        """
        operation = self._receive_tree(src, out, like, tag, device, timeout, spin=True)
        _wait(operation)
        operation.keep()
        return operation.received()

    def irecv_tree(
        self,
        src: int | None = None,
        *,
        out: Any = NOTHING,
        like: Any = NOTHING,
        tag: int = 0,
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ) -> TreeWork:
        """Begin to receive a tree. See `recv_tree`; the Work's `result()` has it."""
        operation = self._receive_tree(src, out, like, tag, device, timeout, spin=False)
        self._connection.progress.kick()
        return TreeWork(self._exchange, operation)

    def send_object(
        self, value: object, dst: int, *, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Pickle any Python object and send it; only `recv_object` receives it.

        Raises:
            Exception: Whatever pickling it raises; else as `send`.
        """
        operation = self._send_object(value, dst, tag, timeout, waiting=True)
        if isinstance(operation, SendOperation):
            _wait(operation)

    def isend_object(
        self, value: object, dst: int, *, tag: int = 0, timeout: float | None = None
    ) -> Work:
        """Begin to send a Python object, pickled before this returns. See `send_object`."""
        return self._work_of(self._send_object(value, dst, tag, timeout, waiting=False))

    def recv_object(
        self, src: int | None = None, *, tag: int = 0, timeout: float | None = None
    ) -> Any:
        """Receive a Python object, and unpickle it.

        Unpickling runs whatever the sender wrote: whoever can send to this rank can then run any
        code in this process. Use it only among ranks that trust each other, and with a shared
        secret (docs/security.md) where others can reach them. Nothing else in this package
        unpickles, and this unpickles nothing but what `send_object` sent.

        Raises:
            MismatchError: A tensor or a tree was sent. The message is gone.
            TransferError: As `recv`: all that it raises.
            Exception: Whatever unpickling raises.
        """
        operation = self._receive_object(src, tag, timeout, spin=True)
        _wait(operation)
        return operation.received()

    def irecv_object(
        self, src: int | None = None, *, tag: int = 0, timeout: float | None = None
    ) -> TreeWork:
        """Begin to receive a Python object. `result()` unpickles it: see `recv_object`."""
        operation = self._receive_object(src, tag, timeout, spin=False)
        self._connection.progress.kick()
        return TreeWork(self._exchange, operation)

    # Sending.

    def _send_tree(
        self, tree: object, dst: int, tag: int, timeout: float | None, *, waiting: bool
    ) -> SendOperation | _Gone:
        packed = Packed(tree, "tree", resolve)
        if FAKES:
            # Small tensors are copied below by the current stream, or after it; a fake device
            # has no such copies.
            early = order_of(packed.tensors)
            if early is not None:
                self._connection.progress.wait_until(early.passed, None)
        tag, deadline, peer = self._address(dst, tag, timeout)
        try:
            if peer is None:
                return self._send_local(tag, *copy_all(packed))
            num_apart = choose_num_apart(packed.descriptions)
            if num_apart == ONE_PIECE:
                return self._send_eager(peer, tag, *one_piece(packed), deadline)
            source = TreeSource(packed, num_apart)
            held = register_all(self._connection, source.memories)
            while source.num_apart and not fits_frame(source.bundle, held):
                release_all(self._connection, held)
                source = TreeSource(packed, source.num_apart // 2)
                held = register_all(self._connection, source.memories)
        except (TypeError, ValueError):
            for index, tensor in enumerate(packed.tensors):
                sendable(tensor, name=packed.path(index, tree))
            raise
        # Copies were queued on the current streams, too.
        order = order_of(packed.tensors)
        operation = SendOperation(
            self._exchange, peer, tag, source.bundle, None, held, deadline, order=order
        )
        return self._submit(operation, packed=source.packed, waiting=waiting)

    def _send_object(
        self, value: object, dst: int, tag: int, timeout: float | None, *, waiting: bool
    ) -> SendOperation | _Gone:
        data = bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        buffer = torch.frombuffer(data, dtype=torch.uint8)
        bundle = Bundle(Form.OBJECT, b"", 0, buffer.nbytes)
        tag, deadline, peer = self._address(dst, tag, timeout)
        if peer is None:
            return self._send_local(tag, bundle, [buffer])
        if buffer.nbytes <= protocol.EAGER_NBYTES:
            return self._send_eager(peer, tag, bundle, buffer, deadline)
        held = register_all(self._connection, [tensor_memory(buffer)])
        operation = SendOperation(self._exchange, peer, tag, bundle, None, held, deadline)
        return self._submit(operation, packed=False, waiting=waiting)

    def _address(
        self, dst: int, tag: int, timeout: float | None
    ) -> tuple[int, float | None, Peer | None]:
        """Tag, deadline and receiver of a message; no receiver is this rank itself."""
        tag = protocol.check_tag(tag)
        self._exchange.check_poison()
        deadline = self._deadline(timeout)
        if type(dst) is not int:
            dst = protocol.check_rank(dst, self.world_size, "dst")
        peer = self._exchange.peers.get(dst)
        if peer is None and dst != self.rank:
            peer = self._meet(dst, "dst", deadline)
        return tag, deadline, peer

    def _send_local(self, tag: int, bundle: Bundle, data: Sequence[torch.Tensor]) -> _Gone:
        self._exchange.inbox.post_local(tag, bundle, data)
        return _Gone(self._exchange.rank, 0, bundle.nbytes)

    def _send_eager(
        self,
        peer: Peer,
        tag: int,
        bundle: Bundle,
        buffer: torch.Tensor,
        deadline: float | None,
    ) -> SendOperation | _Gone:
        sent = self._exchange.outbox.submit_eager(
            peer, tag, bundle, buffer, host_address(buffer), deadline
        )
        return sent if isinstance(sent, SendOperation) else _Gone(peer.rank, sent, bundle.nbytes)

    def _submit(self, operation: SendOperation, *, packed: bool, waiting: bool) -> SendOperation:
        operation.packed = packed
        operation.waiting = waiting
        try:
            self._exchange.outbox.submit(operation)
        except BaseException:
            operation.give_up()
            raise
        return operation

    def _work_of(self, sent: SendOperation | _Gone) -> Work:
        if isinstance(sent, SendOperation):
            return Work(self._exchange, sent)
        return Work(self._exchange, None, name=(sent.rank, sent.number), nbytes=sent.nbytes)

    # Receiving.

    def _receive_tree(
        self,
        src: int | None,
        out: Any,
        like: Any,
        tag: int,
        device: torch.device | str | None,
        timeout: float | None,
        *,
        spin: bool,
    ) -> TreeReceive:
        if (out is not NOTHING) + (like is not NOTHING) > 1:
            raise ValueError("expected out= or like=, not both")
        if out is not NOTHING and device is not None:
            raise ValueError("expected out= or device=, not both")
        where = None if device is None else torch.device(device)
        if where is not None and where.type not in DEVICES:
            raise ValueError(f"device={device}: expected one of {', '.join(DEVICES)}")
        tag = protocol.check_tag(tag)
        src, deadline = self._source(src, timeout)
        lands = landing_of(where) if out is NOTHING else None
        landing = TreeLanding(out, like, where, lands)
        landing.load_kernels()
        order = order_of(landing.own_tensors)
        operation = TreeReceive(self._exchange, src, tag, landing, deadline, order, lands)
        self._post(operation, spin=spin)
        return operation

    def _receive_object(
        self, src: int | None, tag: int, timeout: float | None, *, spin: bool
    ) -> ObjectReceive:
        tag = protocol.check_tag(tag)
        src, deadline = self._source(src, timeout)
        operation = ObjectReceive(self._exchange, src, tag, deadline)
        self._post(operation, spin=spin)
        return operation

    def _post(self, operation: TreeReceive | ObjectReceive, *, spin: bool) -> None:
        try:
            self._exchange.inbox.post(operation, spin=spin)
        except BaseException:
            operation.give_up()
            raise


def _wait(operation: SendOperation | TreeReceive | ObjectReceive) -> None:
    """Wait until it has ended. Interrupted, it must neither take nor be the next message."""
    try:
        operation.wait()
    except BaseException:
        operation.cancel()
        raise
