"""What a collective with ``async_op=True`` returns."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from torch_nixl.collectives.operation import CollectiveOperation
from torch_nixl.p2p.futures import end_future, torch_devices, until_ended


class CollectiveWork:
    """A collective under way. It goes on, and ends, also if nobody holds this."""

    __slots__ = ("_operation",)

    def __init__(self, operation: CollectiveOperation) -> None:
        self._operation = operation

    @property
    def number(self) -> int:
        """Its number among the collectives of its group."""
        return self._operation.number

    def wait(self, timeout: float | None = None) -> None:
        """Wait until this rank's part has ended: block, or have a device's stream do so.

        For device memory, and without a timeout, the calling thread's current stream waits, and
        this returns at once: what is queued from now on runs when the result is in place. If the
        collective then fails, outputs are filled with NaN (0xFF in integers) before the stream
        goes on, the next look from the host raises the error, and the Communicator takes no more
        calls. Where the device's streams can't wait the host blocks.

        Args:
            timeout: Seconds; blocks, and the collective fails, on all ranks, when they have
                passed. None waits until its own deadline.

        Raises:
            TransferTimeout: Time is up; names the ranks that have given no sign.
            MismatchError: Ranks have called different things; names both.
            PeerLostError: A rank died or closed.
            TransferError: It failed, here or on another rank; or the current stream is being
                captured into a graph.
            ClosedError: The Communicator was closed meanwhile.
        """
        operation = self._operation
        order = operation.order
        if order is None or timeout is not None or operation.done or not order.hold():
            operation.wait(timeout)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until it has ended, whatever memory it is about. Raises as `wait` does.

        Args:
            timeout: Seconds; the collective fails, on all ranks, when they have passed.
        """
        self._operation.wait(timeout)

    def result(self, timeout: float | None = None) -> list[torch.Tensor]:
        """The tensors that it changed, or will have when streams that `wait` go on.

        Waits and raises as `wait` does.
        """
        self.wait(timeout)
        return self._operation.outputs

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. It does so without anyone waiting."""
        return self._operation.done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        """What it ended with; None if it ended well or hasn't ended."""
        return self._operation.error

    def cancel(self) -> None:
        """Give it up, on all ranks. The memory may be in use for a while: see `wait_released`."""
        if not self._operation.done:
            self._operation.cancel()

    def wait_released(self, timeout: float | None = None) -> bool:
        """Block until no one but the caller can touch its memory; return False if not by then.

        Args:
            timeout: Seconds; None waits as long as it takes, which a stopped rank can make long.
        """
        return self._operation.wait_released(timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it has ended, in the thread that noticed; at once if it has."""
        self._operation.add_done_callback(callback)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that ends when this does, with the tensors that it changed.

        One that fails raises `RuntimeError` with the error's name and text, whoever waits for it:
        an exception set from Python would pass for a value where C++ waits, as in a hook of DDP.
        """
        order = self._operation.order
        device = None if order is None else order.devices[0]
        ended: torch.futures.Future[None] = torch.futures.Future(devices=torch_devices(order))
        future = ended.then(self._check)
        self.add_done_callback(lambda: end_future(device, lambda: ended.set_result(None)))
        return future

    def _check(self, ended: torch.futures.Future[None]) -> list[torch.Tensor]:
        error = self._operation.error
        if error is not None:
            raise error
        return self._operation.outputs

    def __await__(self) -> Generator[object, None, list[torch.Tensor]]:
        return self._await().__await__()

    async def _await(self) -> list[torch.Tensor]:
        if not self.is_completed():
            await until_ended(self._operation)
        self.synchronize()
        return self.result()

    def __repr__(self) -> str:
        state = "pending"
        if self.is_completed():
            error = self.exception()
            state = "done" if error is None else f"failed: {error}"
        return f"<CollectiveWork {self._operation} {state}>"
