"""Channels over device memory: steps in the order of streams, on a fake device, over loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_streams import SECONDS, queued, wait_on

from p2p.conftest import World
from torch_nixl.errors import (
    PeerLostError,
    PoisonedError,
    TorchNixlError,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p import protocol
from torch_nixl.p2p.channel import Channel
from torch_nixl.testing import FakeDevice

SMALL = 10
LARGE = 4 * protocol.EAGER_NBYTES
SIZES = pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
STRIDES = pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])


def zeros(device: FakeDevice, count: int, *, strided: bool = False) -> torch.Tensor:
    return device.zeros(count, 2)[:, 0] if strided else device.zeros(count)


def ends(world: World, like: Callable[[int], Any]) -> tuple[Channel[Any], Channel[Any]]:
    """Both ends of a channel, which have agreed on it."""
    a, b = world()
    made = a.channel(1, like=like(0)), b.channel(0, like=like(1))
    for one in made:
        progress = one._communicator.connection.progress
        assert progress.wait_until(lambda: one._session._agreed, None)  # noqa: B023 - called in this turn
    return made


@SIZES
@STRIDES
def test_step_goes_after_its_producer_and_before_its_consumer(
    world: World, slow: threading.Event, path: str, count: int, strided: bool
) -> None:
    devices = [FakeDevice("fake:0"), FakeDevice("fake:1")]
    source, out = (zeros(device, count, strided=strided) for device in devices)
    a, b = ends(world, lambda rank: (source, out)[rank])
    first, second = (device.new_stream() for device in devices)
    for value in (7, 8, 9):
        slow.clear()
        first.launch(lambda: wait_on(slow))
        first.launch(lambda value=value: source.fill_(value))  # type: ignore[misc]
        second.launch(lambda: wait_on(slow))
        before = queued(second, out)
        with devices[0].stream(first):
            send = a.isend()
            send.wait()
            first.launch(lambda: source.fill_(-1))
        with devices[1].stream(second):
            receive = b.irecv()
            receive.wait()
            seen = queued(second, out)
        for _ in range(20):
            a._communicator.connection.progress.step()
            b._communicator.connection.progress.step()
        assert not send.is_completed()
        assert not receive.is_completed()
        assert not bool((out == value).any())
        slow.set()
        second.synchronize(SECONDS)
        first.synchronize(SECONDS)
        assert bool((before[0] == (0 if value == 7 else value - 1)).all())
        assert bool((seen[0] == value).all())
        send.synchronize()
        receive.synchronize()
    for device in devices:
        allowed = {threading.current_thread().name, f"fake-{device.name}-run"}
        assert {thread for _, thread in device.calls} <= allowed


@SIZES
def test_steps_follow_each_other_on_streams(world: World, count: int) -> None:
    """Each rank adds one to what it got and sends it back."""
    devices = [FakeDevice("fake:0"), FakeDevice("fake:1")]
    tensors = [zeros(device, count) for device in devices]
    channels = ends(world, lambda rank: tensors[rank])
    works = []
    for turn in range(6):
        sender = turn % 2
        for rank in (sender, 1 - sender):
            stream = devices[rank].default_stream
            if rank == sender:
                stream.launch(
                    lambda rank=rank: tensors[rank].add_(1),  # type: ignore[misc]
                    seconds=0.002,
                )
                works.append(channels[rank].isend())
            else:
                works.append(channels[rank].irecv())
            works[-1].wait()
    for work in works[-2:]:
        work.synchronize()
    for tensor in tensors:
        assert bool((tensor == 6).all())


def test_tree_on_the_host_and_two_devices(world: World, slow: threading.Event) -> None:
    one, two = FakeDevice("fake:0"), FakeDevice("fake:1")

    def like(_: int) -> dict[str, torch.Tensor]:
        return {
            "host": torch.zeros(30),
            "empty": one.zeros(0),
            "one": zeros(one, LARGE, strided=True),
            "two": zeros(two, SMALL, strided=True),
        }

    a, b = ends(world, like)
    for name, device in (("one", one), ("two", two)):
        device.default_stream.launch(lambda: wait_on(slow))
        device.default_stream.launch(lambda name=name: a.like[name].fill_(3))  # type: ignore[misc]
    a.like["host"].fill_(3)
    other = one.new_stream()
    with one.stream(other), two.stream(two.new_stream()):
        receive = b.irecv()
    send = a.isend()
    assert not receive.is_completed()
    slow.set()
    receive.synchronize()
    send.synchronize()
    assert all(bool((tensor == 3).all()) for tensor in b.like.values())


@SIZES
def test_a_host_and_a_device_share_a_channel(world: World, device: FakeDevice, count: int) -> None:
    a, b = ends(world, lambda rank: torch.ones(count) if rank else device.zeros(count))
    work = a.irecv()
    work.wait()
    seen = queued(device.default_stream, a.like)
    b.send()
    device.default_stream.synchronize(SECONDS)
    assert bool((seen[0] == 1).all())
    device.default_stream.launch(lambda: a.like.fill_(5))
    again = a.isend()
    assert bool((b.recv() == 5).all())
    again.synchronize()


@SIZES
def test_blocking_steps_block_the_host(
    world: World, device: FakeDevice, slow: threading.Event, count: int
) -> None:
    a, b = ends(world, lambda _: device.zeros(count))
    device.default_stream.launch(lambda: a.like.fill_(4), seconds=0.02)
    with device.stream(device.new_stream()):
        receive = b.irecv()
    a.send()
    receive.synchronize()
    assert bool((b.like == 4).all())


def test_device_whose_streams_can_not_wait_blocks_the_host(world: World) -> None:
    device = FakeDevice(holds=False)
    a, b = ends(world, lambda _: device.zeros(LARGE))
    a.like.fill_(2)
    send = a.isend()
    b.irecv().wait()
    send.wait()
    assert bool((b.like == 2).all())


@SIZES
def test_failed_step_fills_its_tensors_and_poisons(
    world: World, device: FakeDevice, count: int
) -> None:
    _, b = ends(world, lambda _: device.zeros(count))
    work = b.irecv(timeout=0.1)
    work.wait()
    seen = queued(device.default_stream, b.like)
    device.default_stream.synchronize(SECONDS)
    assert bool(seen[0].isnan().all())
    with pytest.raises(TransferTimeout):
        work.wait()
    with pytest.raises(TransferTimeout):
        b.irecv()
    with pytest.raises(PoisonedError):
        b._communicator.irecv(0)


def test_step_whose_stream_never_gets_there_times_out(
    world: World, device: FakeDevice, slow: threading.Event
) -> None:
    a, b = ends(world, lambda _: device.zeros(LARGE))
    device.default_stream.launch(lambda: wait_on(slow))
    send = a.isend(timeout=0.1)
    with pytest.raises(TransferTimeout, match="stream had queued"):
        send.synchronize()
    with pytest.raises(TransferError):
        b.recv(timeout=SECONDS)
    slow.set()
    device.default_stream.synchronize(SECONDS)
    assert send.wait_released(SECONDS)


@pytest.mark.parametrize("how", ["close", "abort", "other closes", "other leaves"])
@SIZES
def test_streams_go_on_at_the_end(world: World, device: FakeDevice, how: str, count: int) -> None:
    a, b = ends(world, lambda _: device.zeros(count))
    work = b.irecv()
    work.wait()
    seen = queued(device.default_stream, b.like)
    {
        "close": b.close,
        "abort": b._communicator.abort,
        "other closes": a.close,
        "other leaves": a._communicator.close,
    }[how]()
    device.default_stream.synchronize(SECONDS)
    assert bool(seen[0].isnan().all())
    with pytest.raises((TorchNixlError, PeerLostError)):
        work.wait()


@SIZES
def test_failure_while_the_target_is_in_use_fills_it_later(
    world: World, device: FakeDevice, slow: threading.Event, count: int
) -> None:
    _, b = ends(world, lambda _: device.zeros(count))
    device.default_stream.launch(lambda: wait_on(slow))
    before = queued(device.default_stream, b.like)
    work = b.irecv()
    work.wait()
    seen = queued(device.default_stream, b.like)
    b.close()
    slow.set()
    device.default_stream.synchronize(SECONDS)
    assert bool((before[0] == 0).all())
    assert bool(seen[0].isnan().all())


def test_capture_is_refused_and_leaves_the_channel_alone(world: World, device: FakeDevice) -> None:
    a, b = ends(world, lambda _: device.zeros(SMALL))
    device.captured.add(device.default_stream)
    for begin in (a.isend, b.irecv):
        with pytest.raises(TransferError, match="captured into a graph"):
            begin()
    device.captured.clear()
    a.like.fill_(1)
    receive = b.irecv()
    a.send()
    receive.synchronize()
    assert bool((b.like == 1).all())


def test_dropped_work_and_channel(world: World, device: FakeDevice) -> None:
    a, b = ends(world, lambda _: device.zeros(LARGE))
    a.like.fill_(6)
    b.irecv().wait()
    seen = queued(device.default_stream, b.like)
    with device.stream(device.new_stream()):
        a.isend().wait()
    device.default_stream.synchronize(SECONDS)
    assert bool((seen[0] == 6).all())
