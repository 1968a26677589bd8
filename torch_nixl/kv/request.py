"""What programs hold of a request: an end to wait for, and pages that are free at some time."""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_nixl.engine.operation import deadline_after
from torch_nixl.errors import TransferTimeout

if TYPE_CHECKING:
    from torch_nixl.kv.handoff import Handoff
    from torch_nixl.kv.plan import Run
    from torch_nixl.kv.service import Service

PageLists = tuple[tuple[int, ...], ...]
"""Page ids for each group of layers."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over, and whose pages are the program's alone again.

    Attributes:
        request: What the program calls it.
        pages: Its pages, for each group of layers.
        error: What it ended with; None if all went well.
        failed_pages: Pages whose contents are undefined, for each group; empty if all went well,
            and of what was offered.
    """

    request: str
    pages: PageLists
    error: BaseException | None
    failed_pages: PageLists = ()


class Request(ABC):
    """One request on one side.

    Attributes:
        request: What the program calls it.
        runs: Its pages, for each group of layers.
    """

    def __init__(self, service: Service, request: str, runs: tuple[Run, ...]) -> None:
        self._service = service
        self._connection = service.connection
        self.request = request
        self.runs = runs
        self.handoffs: list[Handoff] = []
        self._done = False
        self._released = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done

    @property
    def released(self) -> bool:
        """Whether its pages are the program's alone again."""
        return self._released

    @property
    def error(self) -> BaseException | None:
        """What it ended with; None while it goes on and when it ended well."""
        return self._error

    @property
    def pages(self) -> PageLists:
        """Its pages, for each group of layers."""
        return tuple(tuple(run.pages.tolist()) for run in self.runs)

    @property
    def failed_pages(self) -> PageLists:
        """Pages whose contents are undefined, for each group; empty after success."""
        return ()

    @abstractmethod
    def cancel(self) -> None:
        """Give up. Pages are free when `released`, which may be later. Idempotent."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has ended. As `synchronize`."""
        self.synchronize(timeout)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until it has ended, whatever memory the pages lie in.

        Args:
            timeout: Seconds; the request itself ends with `TransferTimeout` when they have
                passed. None waits until its own deadline.

        Raises:
            TransferTimeout: Time is up. The pages stay owned: see `wait_released`.
            TransferCancelled: This side or the other cancelled.
            LeaseError: The lease had expired, been consumed, or never been; see its subclasses.
            IncompatibleError: The two caches can't be converted into each other.
            PeerLostError: The other side died or left.
            TransferError: The transfer failed, here or on the other side.
            ClosedError: The connection was closed meanwhile.
        """
        deadline = deadline_after(timeout)
        if not self._wait(lambda: self._done, deadline):
            self._expire()
        if self._error is not None:
            raise copy.copy(self._error) from self._error.__cause__

    def wait_released(self, timeout: float | None = None) -> bool:
        """Block until the pages are free; return False if they aren't by then.

        Args:
            timeout: Seconds; None waits as long as it takes, which a stopped peer can make long.
        """
        closed = self._connection
        self._wait(lambda: self._released or closed.closed, deadline_after(timeout))
        return self._released

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it has ended, outside of all locks; at once if it has.

        It is called by a thread that does nothing else, one callback of a connection after the
        other: a slow one holds up no bytes and no request, only callbacks.
        """
        with self._service.hub.lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    # Below: the hub's lock is held, but for waiting.

    @abstractmethod
    def give_up(self) -> None:
        """End what can't end before prefill's program says that more layers are computed."""

    def _wait(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        progress = self._connection.progress
        while not condition():
            going = next((one for one in self.handoffs if not one.done), None)
            if going is None:
                changed = self._or_taken(condition)
                if not progress.wait_until(changed, deadline):
                    return False
                continue
            # Whoever waits for a handoff moves its bytes, too.
            ends = [one for one in (deadline, going.deadline) if one is not None]
            if not progress.wait(going, min(ends, default=None)):
                if deadline is not None and time.monotonic() >= deadline:
                    return condition()
                going.expire()
        return True

    def _or_taken(self, condition: Callable[[], bool]) -> Callable[[], bool]:
        known = len(self.handoffs)
        return lambda: condition() or len(self.handoffs) > known

    def _expire(self) -> None:
        for one in self.handoffs:
            one.expire()
        if not self._done:
            with self._service.hub.lock:
                self._end(TransferTimeout(f"{self}: timed out"))

    def _end(self, error: BaseException | None) -> bool:
        if self._done:
            return False
        self._error = error
        self._done = True
        callbacks, self._callbacks = self._callbacks, []
        if not self._service.hub.callbacks.add(callbacks):
            self._connection.progress.call_later(callbacks)
        return True

    def _free(self) -> None:
        """The pages are the program's alone again."""
        if self._released:
            return
        self._released = True
        self._service.on_free(Ended(self.request, self.pages, self._error, self.failed_pages))

    def __repr__(self) -> str:
        state = "released" if self._released else "done" if self._done else "open"
        return f"<{type(self).__name__} {self.request!r} {state} error={self._error!r}>"


def lease_milliseconds(seconds: float) -> int:
    """Seconds of a lease as a ticket has them; 0 for never.

    Raises:
        ValueError: They are not positive.
    """
    if not seconds > 0:
        raise ValueError(f"lease={seconds}: expected seconds, more than 0")
    if seconds == math.inf:
        return 0
    return max(1, min(int(seconds * 1000), (1 << 32) - 1))
