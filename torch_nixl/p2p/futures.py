"""How the end of an operation reaches those who wait by a future: torch's, or asyncio's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import torch

from torch_nixl.engine.operation import Operation
from torch_nixl.engine.streams import StreamDevice, StreamOrder

log = logging.getLogger("torch_nixl.streams")


async def until_ended(operation: Operation) -> None:
    """Return once an operation has ended, well or not. Leaves nothing with it if cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    def call() -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(wake)

    operation.add_done_callback(call)
    try:
        await future
    finally:
        operation.remove_done_callback(call)


def torch_devices(order: StreamOrder | None) -> list[int | str | torch.device]:
    """The devices that a future of an operation has to know."""
    if order is None:
        return []
    return [one.torch_device for one in order.devices if one.torch_device is not None]


def end_future(device: StreamDevice | None, end: Callable[[], None]) -> None:
    """End a future by the right thread.

    One with devices records events on them and calls what follows, which may do anything: nothing
    for the driver, nor for the thread whose work gates wait for.
    """
    if device is None:
        end()
    else:
        device.allocate(end, _report)


def _report(error: BaseException | None) -> None:
    if error is not None:
        log.error("a future could not be ended: %r", error)
