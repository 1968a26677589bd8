"""Waiting for an engine operation from asyncio: futures that the driver wakes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final

from torch_nixl.engine.operation import deadline_after
from torch_nixl.engine.transfer import LONG_PIECE_BYTES

if TYPE_CHECKING:
    from torch_nixl.connect.connection import Connection
    from torch_nixl.engine.operation import Operation

SPIN_SECONDS: Final = 0.001
"""How long the first to await something on a Connection polls, before the driver takes over.

Most small operations end within that; to be woken by another thread takes longer than they do. It
holds up the event loop, so that only one does it at a time.
"""


class Awaiter:
    """Those who await one operation, in any number of event loops."""

    __slots__ = ("_connection", "_futures", "_hooked", "_lock", "_operation")

    def __init__(self, connection: Connection, operation: Operation) -> None:
        self._connection = connection
        self._operation = operation
        self._futures: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._hooked = False
        self._lock = threading.Lock()

    async def wait(self, timeout: float | None) -> None:
        """Return once the operation has ended, well or not.

        Args:
            timeout: Seconds after which the operation ends with `TransferTimeout`; None leaves
                that to its own deadline.
        """
        deadline_after(timeout)  # Refuses what is no timeout, before anything ends by it.
        if self._operation.done:
            return
        connection = self._connection
        connection.num_awaiting += 1
        try:
            if connection.num_awaiting == 1 and self._spin(timeout):
                return
            await self._sleep(timeout)
        finally:
            connection.num_awaiting -= 1

    def _spin(self, timeout: float | None) -> bool:
        """Poll for a moment; return whether the operation has ended."""
        seconds = SPIN_SECONDS if timeout is None else min(SPIN_SECONDS, timeout)
        progress, operation = self._connection.engine.progress, self._operation
        started = time.monotonic()
        if progress.wait(operation, started + seconds):
            return True
        now = time.monotonic()
        if now - started < 2 * seconds or operation.nbytes > 2 * LONG_PIECE_BYTES:
            return False
        # The time went into a copy, and the end is near.
        return progress.wait(operation, now + seconds)

    async def _sleep(self, timeout: float | None) -> None:
        operation = self._operation
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._futures[future] = loop
            hook, self._hooked = not self._hooked, True
        if hook:
            operation.add_done_callback(self._wake)
        # Those who wait may have been woken just before this one was added.
        if operation.done:
            self._settle(future)
        timer = loop.call_later(timeout, operation.expire) if timeout is not None else None
        operation.num_awaiting += 1
        try:
            await future
        finally:
            operation.num_awaiting -= 1
            if timer is not None:
                timer.cancel()
            with self._lock:
                self._futures.pop(future, None)

    def _wake(self) -> None:
        """Wake all who wait. Runs in whichever thread noticed the end."""
        with self._lock:
            waiting, self._futures = self._futures, {}
        for future, loop in waiting.items():
            # A loop that was closed meanwhile has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._settle, future)

    @staticmethod
    def _settle(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)
