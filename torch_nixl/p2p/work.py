"""What `isend` and `irecv` return."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_nixl.errors import TransferError
from torch_nixl.p2p.futures import end_future, torch_devices, until_ended
from torch_nixl.p2p.protocol import Route
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.sending import SendOperation
from torch_nixl.p2p.step import StepOperation

if TYPE_CHECKING:
    from torch_nixl.p2p.exchange import Exchange


@dataclass(frozen=True, slots=True)
class WorkStatistics:
    """How a message went.

    Attributes:
        route: ``"eager"`` in its frame, ``"read"`` by the receiver, ``"write"`` by the sender,
            ``"split"`` a half by each, ``"local"`` within the rank.
        nbytes: Its size.
        path: ``"cma"``, ``"tcp"``, ``"network"``; empty where it is not known or has no part.
        packed: Whether scattered memory was packed on this side.
        queued: Whether it had to wait for credit.
    """

    route: str
    nbytes: int
    path: str = ""
    packed: bool = False
    queued: bool = False


class Work:
    """A send or receive under way. It goes on, and ends, also if nobody holds this.

    A small message counts as sent once it has left: what the receiver thinks of it comes later, and
    shows here if it refuses it.
    """

    __slots__ = ("_exchange", "_name", "_nbytes", "_operation")

    def __init__(
        self,
        exchange: Exchange,
        operation: SendOperation | ReceiveOperation | StepOperation | None,
        *,
        name: tuple[int, int] | None = None,
        nbytes: int = 0,
    ) -> None:
        self._exchange = exchange
        self._operation = operation
        self._name = name
        self._nbytes = nbytes

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended: block, or have a device's stream do so.

        For device memory, and without a timeout, the calling thread's current stream waits, and
        this returns at once: what is queued from now on runs when the bytes are in place (or, of
        a send, may be changed). If the operation then fails, the next look from the host raises
        it, received tensors are filled with NaN (0xFF in integers) before the stream goes on, and
        the Communicator takes no more calls. Where the device's streams can't wait, and where a
        receive was given no tensor, the host blocks.

        Args:
            timeout: Seconds; blocks, and the operation ends with `TransferTimeout` when they have
                passed. None waits until its own deadline.

        Raises:
            TransferTimeout: Time is up. The memory stays owned: see `wait_released`.
            TransferCancelled: This side or the other cancelled.
            MismatchError: The message doesn't fit what it was received into.
            PeerLostError: The other rank died or closed.
            TransferError: It failed, here or on the other side; or the current stream is being
                captured into a graph.
            ClosedError: The Communicator was closed meanwhile.
        """
        operation = self._operation
        if operation is not None:
            order = operation.order
            if order is None or timeout is not None or operation.done or not order.hold():
                operation.wait(timeout)
        self._check_refused()

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until it has ended, whatever memory it is about.

        A received device tensor then is complete on all streams. Raises as `wait` does.

        Args:
            timeout: Seconds; it ends with `TransferTimeout` when they have passed.
        """
        operation = self._operation
        if operation is not None:
            operation.wait(timeout)
        self._check_refused()

    def result(self, timeout: float | None = None) -> torch.Tensor | None:
        """What was received, once it is; None for a send. Waits and raises as `wait` does.

        None for a step of a channel, too, whose tensors the program has.
        """
        operation = self._operation
        if not isinstance(operation, ReceiveOperation):
            self.wait(timeout)
            return None
        out = operation.target
        if out is None:
            self.synchronize(timeout)
        else:
            self.wait(timeout)
        result: torch.Tensor | None = operation.received()
        if result is not None:
            operation.keep()
        return out if result is None else result

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. It does so without anyone waiting."""
        return self._operation is None or self._operation.done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What it ended with; None if it ended well or hasn't ended."""
        operation = self._operation
        if operation is not None and operation.error is not None:
            return operation.error
        return self._refusal()

    def source_rank(self) -> int:
        """The rank that a received message came from.

        Raises:
            TransferError: Nothing was received yet, or this is a send.
        """
        operation = self._operation
        if not isinstance(operation, ReceiveOperation) or not self.is_success():
            raise TransferError("only a receive that has ended well has a source")
        assert operation.source is not None
        return operation.source

    def cancel(self) -> None:
        """Give it up. The memory may be in use for a while: see `wait_released`."""
        if self._operation is not None and not self._operation.done:
            self._operation.cancel()

    def wait_released(self, timeout: float | None = None) -> bool:
        """Block until no one but the caller can touch its memory; return False if not by then.

        Args:
            timeout: Seconds; None waits as long as it takes, which a stopped peer can make long.
        """
        return self._operation is None or self._operation.wait_released(timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it has ended, in the thread that noticed; at once if it has."""
        if self._operation is None:
            callback()
        else:
            self._operation.add_done_callback(callback)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that ends when this does, with what was received in a list, as c10d's.

        An object is not in the list, which is empty then: `result()` unpickles it, in the thread
        that asks for it.

        One that fails raises `RuntimeError` with the error's name and text, whoever waits for it:
        an exception set from Python would pass for a value where C++ waits.

        Of device memory it ends with the bytes in place, and knows the device, as
        `torch.futures.Future` wants it.
        """
        operation = self._operation
        order = None if operation is None else operation.order
        devices = torch_devices(order)
        if (
            order is None
            and isinstance(operation, ReceiveOperation)
            and operation.lands is not None
        ):
            devices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        ended: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        future = ended.then(self._check_ended)

        def call() -> None:
            device = None
            if isinstance(operation, ReceiveOperation):
                device = operation.landed_on
            if device is None and order is not None:
                device = order.devices[0]
            end_future(device, lambda: ended.set_result(None))

        self.add_done_callback(call)
        return future

    def _check_ended(self, ended: torch.futures.Future[None]) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        operation = self._operation
        return operation.results() if isinstance(operation, ReceiveOperation) else []

    def __await__(self) -> Generator[object, None, torch.Tensor | None]:
        return self._await().__await__()

    async def _await(self) -> torch.Tensor | None:
        if self._operation is not None and not self.is_completed():
            await until_ended(self._operation)
        self.synchronize()
        return self.result()

    def statistics(self) -> WorkStatistics:
        """How it went, or goes."""
        operation = self._operation
        if operation is None:
            return WorkStatistics(Route.EAGER.value, self._nbytes)
        moved = operation.route in (Route.READ, Route.WRITE, Route.SPLIT)
        remote = operation.remote if moved else None
        return WorkStatistics(
            operation.route.value,
            operation.nbytes,
            path="" if remote is None else self._exchange.connection.path(remote),
            packed=operation.packed,
            queued=isinstance(operation, SendOperation) and operation.cost > 0,
        )

    def _refusal(self) -> BaseException | None:
        operation, name = self._operation, self._name
        if isinstance(operation, SendOperation):
            return operation.peer.refused.get(operation.number)
        peer = None if name is None else self._exchange.peers.get(name[0])
        return None if peer is None or name is None else peer.refused.get(name[1])

    def _check_refused(self) -> None:
        error = self._refusal()
        if error is not None:
            raise copy.copy(error)

    def __repr__(self) -> str:
        state = "pending"
        if self.is_completed():
            error = self.exception()
            state = "done" if error is None else f"failed: {error}"
        what = "send that has left" if self._operation is None else str(self._operation)
        return f"<Work {what} {state}>"


class TreeWork(Work):
    """What `irecv_tree` and `irecv_object` return: the same, but for what was received."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> Any:
        """The tree or object that was received. Waits and raises as `wait` does."""
        return super().result(timeout)
