"""One-sided access to device memory: it begins once what was queued on the stream has run."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.errors import TransferCancelled, TransferError, TransferTimeout
from torch_nixl.testing import FakeDevice, LoopbackFabric

SECONDS = 20.0
SIZE = 1000


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    fabric = LoopbackFabric()
    made = Connection(fabric.adapter("owner")), Connection(fabric.adapter("claimant"))
    yield made
    for one in made:
        one.abort()


@pytest.fixture
def slow(device: FakeDevice) -> Iterator[threading.Event]:
    """The default stream is busy until this is set."""
    event = threading.Event()
    device.default_stream.launch(lambda: event.wait(SECONDS))
    yield event
    event.set()


def turn(ends: tuple[Connection, Connection]) -> None:
    for _ in range(50):
        for one in ends:
            one.progress.step()


def test_exposed_memory_is_granted_after_its_producer(
    ends: tuple[Connection, Connection], device: FakeDevice, slow: threading.Event
) -> None:
    owner, claimant = ends
    source, target = device.zeros(SIZE), torch.zeros(SIZE)
    device.default_stream.launch(lambda: source.fill_(7))
    exposed = owner.expose(Direction.READ, [tensor_memory(source)])
    read = claimant.claim(exposed.offer(), [tensor_memory(target)])
    turn(ends)
    assert not read.done
    slow.set()
    read.wait(SECONDS)
    exposed.wait(SECONDS)
    assert bool((target == 7).all())


def test_target_is_not_read_into_while_its_stream_is_busy(
    ends: tuple[Connection, Connection], device: FakeDevice, slow: threading.Event
) -> None:
    owner, claimant = ends
    target = device.tensor(torch.ones(SIZE))
    exposed = owner.expose(Direction.READ, [tensor_memory(torch.full((SIZE,), 5.0))])
    read = claimant.claim(exposed.offer(), [tensor_memory(target)])
    turn(ends)
    assert bool((target == 1).all())
    slow.set()
    read.wait(SECONDS)
    assert bool((target == 5).all())


def test_memory_exposed_for_writing_is_not_written_to_while_its_stream_is_busy(
    ends: tuple[Connection, Connection], device: FakeDevice, slow: threading.Event
) -> None:
    owner, claimant = ends
    target, host = device.tensor(torch.ones(SIZE)), torch.zeros(SIZE)
    # One list may mix device and host memory.
    exposed = owner.expose(Direction.WRITE, [tensor_memory(host), tensor_memory(target)])
    sources = [tensor_memory(torch.full((SIZE,), 5.0)) for _ in range(2)]
    write = claimant.claim(exposed.offer(), sources)
    turn(ends)
    assert bool((target == 1).all())
    assert not host.any()
    slow.set()
    write.wait(SECONDS)
    exposed.wait(SECONDS)
    assert bool((target == 5).all())
    assert bool((host == 5).all())


def test_stream_argument_counts(
    ends: tuple[Connection, Connection], device: FakeDevice, slow: threading.Event
) -> None:
    owner, claimant = ends
    source, target = device.tensor(torch.ones(SIZE)), device.zeros(SIZE)
    idle = device.new_stream()
    exposed = owner.expose(Direction.READ, [tensor_memory(source)], stream=idle)
    read = claimant.claim(exposed.offer(), [tensor_memory(target)], stream=idle)
    read.wait(SECONDS)
    assert not slow.is_set()
    assert bool((target == 1).all())
    with pytest.raises(ValueError, match="stream"):
        owner.expose(Direction.READ, [tensor_memory(source)], stream=object())


def test_withdrawn_before_its_stream_got_there(
    ends: tuple[Connection, Connection], device: FakeDevice, slow: threading.Event
) -> None:
    owner, claimant = ends
    exposed = owner.expose(Direction.READ, [tensor_memory(device.zeros(SIZE))])
    read = claimant.claim(exposed.offer(), [tensor_memory(torch.zeros(SIZE))])
    turn(ends)
    exposed.cancel()
    with pytest.raises(TransferCancelled):
        read.wait(SECONDS)
    assert exposed.wait_released(SECONDS)
    slow.set()
    turn(ends)


def test_claim_times_out_while_its_stream_is_busy(
    ends: tuple[Connection, Connection], device: FakeDevice, slow: threading.Event
) -> None:
    owner, claimant = ends
    exposed = owner.expose(Direction.READ, [tensor_memory(torch.zeros(SIZE))])
    target = device.tensor(torch.ones(SIZE))
    read = claimant.claim(exposed.offer(), [tensor_memory(target)], timeout=0.05)
    with pytest.raises(TransferTimeout):
        read.wait()
    slow.set()
    turn(ends)
    assert read.released
    assert bool((target == 1).all())


def test_capture_is_refused_and_nothing_is_held(
    ends: tuple[Connection, Connection], device: FakeDevice
) -> None:
    owner, _ = ends
    device.captured.add(device.default_stream)
    with pytest.raises(TransferError, match="captured into a graph"):
        owner.expose(Direction.READ, [tensor_memory(device.zeros(SIZE))])
    assert len(owner.operations) == 0
