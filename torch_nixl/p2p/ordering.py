"""Sends and receives of device memory: what the caller's thread prepares for them.

See [Note: no device calls in the driver] in `engine/streams.py` for why it is this thread.

A device tensor is never sent in a message's frame, however small: its bytes would have to be copied
to the host first, which is a call of the device's runtime and another wait. It is offered, and the
transfer library moves it from where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from torch_nixl.engine.memory import Memory, tensor_memory
from torch_nixl.engine.streams import Landing as LandsOn
from torch_nixl.engine.streams import StreamDevice, StreamOrder, device_of
from torch_nixl.p2p.description import Content, Description
from torch_nixl.p2p.device_receiving import DeviceReceive
from torch_nixl.p2p.protocol import EAGER_NBYTES, should_pack
from torch_nixl.p2p.sending import SendOperation
from torch_nixl.p2p.tensors import (
    TensorLanding,
    TensorTarget,
    check_fits,
    from_bytes,
    require_tensor,
    sendable,
)

if TYPE_CHECKING:
    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.peer import Peer

_HOST: Final = torch.device("cpu")


def place(tensor: torch.Tensor, stream: object) -> tuple[torch.Tensor, StreamDevice | None]:
    """What is sent of a tensor, and the device that it lies on, if any.

    Raises:
        TypeError, ValueError: It can't be sent, or `stream` has no meaning for it.
    """
    found = sendable(tensor)
    device = device_of(found)
    # A lazy view is resolved by the current stream, so nothing would order that.
    if stream is not None and (device is None or found is not tensor):
        raise ValueError("stream=: expected a device tensor that is no lazy view")
    return found, device


def make_send(
    exchange: Exchange,
    peer: Peer,
    tag: int,
    description: Description,
    tensor: torch.Tensor,
    device: StreamDevice,
    stream: object,
    deadline: float | None,
) -> SendOperation:
    """Make the send of a device tensor, which goes once what is queued by now has run.

    Raises:
        ValueError: `stream` is another device's.
        TransferError: The stream is being captured into a graph.
    """
    memory = tensor_memory(tensor)
    packed = should_pack(memory.num_spans, memory.nbytes)
    if packed:
        memory = tensor_memory(pack(tensor, device, stream))
    order = StreamOrder((device,), stream)
    held = exchange.connection.register(memory)
    operation = SendOperation(exchange, peer, tag, description, None, (held,), deadline, order)
    operation.packed = packed
    return operation


def make_receive(
    exchange: Exchange,
    source: int | None,
    tag: int,
    out: torch.Tensor,
    device: StreamDevice,
    stream: object,
    deadline: float | None,
) -> DeviceReceive:
    """Make a receive into a device tensor, which begins once what is queued by now has run.

    Raises:
        ValueError: `stream` is another device's.
        TransferError: The stream is being captured into a graph.
    """
    memory = tensor_memory(out, name="out")
    buffer = out
    num_spans, nbytes = memory.num_spans, memory.nbytes
    # What comes in a frame, or from this rank, is copied by the device's thread: its kernels have
    # to be loaded by this one.
    copied = nbytes <= EAGER_NBYTES or source in (None, exchange.rank)
    if num_spans > 1 and (copied or should_pack(num_spans, nbytes)):
        buffer = device.buffer(out, _chosen(device, stream))
        memory = tensor_memory(buffer)
    order = StreamOrder((device,), stream)
    # Registered here; what the receive holds later finds it in the cache.
    exchange.connection.registry.release(exchange.connection.register(memory))
    landing = DeviceLanding(out, buffer, memory, device)
    operation = DeviceReceive(exchange, source, tag, landing, deadline)
    operation.put_in_order(order, (out,))
    operation.target = out
    return operation


def pack(tensor: torch.Tensor, device: StreamDevice, stream: object) -> torch.Tensor:
    """Queue a contiguous copy where the order's point will be recorded, too."""
    return device.pack(tensor, _chosen(device, stream))


def _chosen(device: StreamDevice, stream: object) -> object:
    if stream is not None and not device.owns(stream):
        raise ValueError(f"stream={stream!r}: expected a stream of {device.name}")
    device.check_capture(stream)
    return device.current() if stream is None else stream


class DeviceLanding:
    """Receives into a device tensor. All that has to be allocated is there already."""

    __slots__ = ("_buffer", "_device", "_memory", "_out")

    def __init__(
        self, out: torch.Tensor, buffer: torch.Tensor, memory: Memory, device: StreamDevice
    ) -> None:
        self._out = out
        self._buffer = buffer
        self._memory = memory
        self._device = device

    def take(self, content: Content, body: bytes, at: int) -> torch.Tensor:
        check_fits(require_tensor(content), self._out)
        return self._put(from_bytes(content, body, at, None, _HOST))

    def adopt(self, content: Content, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        check_fits(require_tensor(content), self._out)
        return self._put(tensors[0])

    def target(self, content: Content) -> DeviceTarget:
        check_fits(require_tensor(content), self._out)
        return DeviceTarget(self._out, self._buffer, self._memory, self._device)

    def _put(self, source: torch.Tensor) -> torch.Tensor:
        tensor_memory(self._out, name="out")  # Refuses what was freed or has shrunk meanwhile.
        self._device.copy(self._buffer, source)
        if self._buffer is not self._out:
            self._device.copy(self._out, self._buffer)
        return self._out


class DeviceTarget:
    """Where a message for a device tensor lands: there, or in a packed buffer."""

    __slots__ = ("_buffer", "_device", "_out", "memories", "packed")

    def __init__(
        self, out: torch.Tensor, buffer: torch.Tensor, memory: Memory, device: StreamDevice
    ) -> None:
        self._out = out
        self._buffer = buffer
        self._device = device
        self.memories: Sequence[Memory] = (memory,)
        self.packed = buffer is not out

    def finish(self) -> torch.Tensor:
        if self.packed:
            tensor_memory(self._out, name="out")  # Refuses what was freed or has shrunk meanwhile.
            self._device.copy(self._out, self._buffer)
        return self._out


class NewLanding(TensorLanding):
    """Receives into a new tensor, on a device if the sender's was on one or the receiver says so.

    Args:
        lands: Tells which.
        where: What the receiver said.
    """

    __slots__ = ("_lands",)

    def __init__(self, lands: LandsOn, where: torch.device | None) -> None:
        super().__init__(None, 0, where)
        self._lands = lands

    def take(self, content: Content, body: bytes, at: int) -> torch.Tensor:
        what = require_tensor(content)
        device = self._lands(what.device)
        if device is None:
            return super().take(content, body, at)
        out = device.empty(what.shape, what.dtype)
        device.copy(out, from_bytes(what, body, at, None, _HOST))
        return out

    def target(self, content: Content) -> TensorTarget:
        what = require_tensor(content)
        device = self._lands(what.device)
        if device is None:
            return super().target(content)
        out = device.empty(what.shape, what.dtype)
        return TensorTarget(out, out, tensor_memory(out))
