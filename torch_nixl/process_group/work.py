"""What c10d gets for a running operation: its own kind of Work around one of ours."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from torch_nixl.engine.streams import device_of
from torch_nixl.errors import TransferError
from torch_nixl.p2p.futures import end_future
from torch_nixl.p2p.work import Work

_NO_TIMEOUT = datetime.timedelta(0)
"""What c10d passes where the caller named no timeout."""


class Pending(Protocol):
    """What is asked of the Works of p2p and of the collectives."""

    def wait(self, timeout: float | None = None) -> None: ...

    def synchronize(self, timeout: float | None = None) -> None: ...

    def is_completed(self) -> bool: ...

    def exception(self) -> BaseException | None: ...

    def add_done_callback(self, callback: Callable[[], None]) -> None: ...


class GroupWork(dist.Work):
    """One operation on a process group.

    Attributes:
        pending: The operation below; None if it has ended well already.

    Args:
        pending: The same.
        outputs: The tensors that it writes to, or sends.
    """

    def __init__(self, pending: Pending | None, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.pending = pending
        self._outputs = outputs

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the operation has ended: block, or have the current stream of a device do so.

        Of device tensors the stream waits, and this returns at once, as c10d's own backends do;
        with a timeout it blocks.

        Args:
            timeout: After so long the operation ends with `TransferTimeout`. Zero, c10d's word for
                none given, means the timeout that it was started with.

        Raises:
            TransferTimeout: Time is up. The tensors stay owned until nothing can touch them.
            PeerLostError: A rank that it needs died or left the group.
            MismatchError: The ranks' tensors don't fit each other.
            TransferError: It failed here or on another rank.
            ClosedError: The group was destroyed meanwhile.
        """
        if self.pending is not None:
            self.pending.wait(timeout.total_seconds() or None)
        return True

    def synchronize(self) -> None:
        """Block the host until the operation has ended, on devices, too. Raises as `wait` does."""
        if self.pending is not None:
            self.pending.synchronize()

    def is_completed(self) -> bool:
        return self.pending is None or self.pending.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None if self.pending is None else self.pending.exception()

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)

    def source_rank(self) -> int:
        """The group rank that a received message came from.

        Raises:
            TransferError: Nothing was received yet, or this is no receive.
        """
        if not isinstance(self.pending, Work):
            raise TransferError("only a receive has a source")
        return self.pending.source_rank()

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of `result`.

        One that fails raises `RuntimeError` with the error's name and text, whoever waits for it:
        an exception set from Python would pass for a value where C++ waits, as in DDP.
        """
        used = {each.device for each in self._outputs}
        devices: list[int | str | torch.device] = [one for one in used if one.type != "cpu"]
        ended: torch.futures.Future[None] = torch.futures.Future(devices=devices)
        future = ended.then(self._check)
        if self.pending is None:
            ended.set_result(None)
        else:
            device = device_of(self._outputs[0]) if self._outputs else None
            self.pending.add_done_callback(
                lambda: end_future(device, lambda: ended.set_result(None))
            )
        return future

    def _check(self, ended: torch.futures.Future[None]) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self.result()

    def __repr__(self) -> str:
        return f"<GroupWork {'done' if self.pending is None else self.pending!r}>"


class Together:
    """Several operations as one: ended when all have, with the first error in their order."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        self._works = [work.pending for work in works if work.pending is not None]

    def wait(self, timeout: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout)

    def synchronize(self, timeout: float | None = None) -> None:
        for work in self._works:
            work.synchronize(timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        rest = list(self._works)

        def next_one() -> None:
            if rest:
                rest.pop().add_done_callback(next_one)
            else:
                callback()

        next_one()
