"""Device memory through connect's coroutines and JSON: mixed lists, empty entries, stream order.

The device is a fake whose streams are threads. Nothing here measures time: a kernel waits for a
`threading.Event` that the host sets later, so that what must wait for it can't have ended before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from connect.pairs import DEADLINE, Pair, bounded, over_json, pattern
from torch_nixl import connect
from torch_nixl.connect import Descriptor, OperationStatus
from torch_nixl.engine import streams
from torch_nixl.errors import TransferCancelled, TransferError, TransferTimeout
from torch_nixl.testing import FakeDevice, FakeStream, LoopbackConnector, LoopbackFabric

SIZE = 1000
READS = pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])


@pytest.fixture(params=["loopback", "nixl"])
def two(request: pytest.FixtureRequest, pair: Pair) -> Iterator[Pair]:
    """Two Connectors, whose connections are open."""
    if request.param == "nixl":
        for connector in (pair.owner, pair.other):
            connector.connection()
        yield pair
        return
    fabric = LoopbackFabric()
    made = Pair(LoopbackConnector(fabric, "owner"), LoopbackConnector(fabric, "other"))
    made.move(bytes(8), bytearray(8))
    yield made
    made.owner.close()
    made.other.close()


def busy(device: FakeDevice, slow: threading.Event) -> FakeStream:
    """Return a stream that does nothing before `slow` is set."""
    stream = device.new_stream()
    stream.launch(lambda: slow.wait(DEADLINE))
    return stream


def expose(two: Pair, descriptors: list[Descriptor], *, reads: bool = True) -> Any:
    role = two.owner.create_readable if reads else two.owner.create_writable
    return bounded(role(descriptors))


def begin(two: Pair, exposed: Any, descriptors: list[Descriptor], *, reads: bool = True) -> Any:
    told = over_json(exposed.metadata())
    if reads:
        return bounded(two.other.begin_read(told, descriptors))
    return bounded(two.other.begin_write(descriptors, told))


def complete(*operations: Any) -> None:
    for operation in operations:
        bounded(operation.wait_for_completion(DEADLINE))
        assert operation.status is OperationStatus.COMPLETE


def turn(two: Pair, until: Callable[[], bool] = lambda: True) -> None:
    """Let both sides do all that they can do now, and so much more until a condition holds."""
    deadline = time.monotonic() + DEADLINE
    turns = 0
    while turns < 50 or not until():
        assert time.monotonic() < deadline, "it does not happen"
        turns += 1
        for one in (two.owner, two.other):
            one.connection().engine.progress.step()


def claimed(exposed: Any) -> Callable[[], bool]:
    """Whether a peer has asked for what is exposed."""
    return lambda: exposed.status is OperationStatus.IN_PROGRESS


def mixed(device: FakeDevice, fill: float) -> list[torch.Tensor]:
    """Host and device memory, in one piece and in several, and none of either."""
    host, on_device = torch.full((3, SIZE), fill), device.tensor(torch.full((SIZE, 4), fill))
    return [
        host[0],
        on_device[:, 1:3],
        torch.empty(0),
        device.zeros(0),
        device.tensor(torch.full((7,), fill, dtype=torch.uint8)),
        host[1:],
    ]


def described(tensors: list[torch.Tensor]) -> list[Descriptor]:
    return [Descriptor(one) for one in tensors]


def all_are(tensors: list[torch.Tensor], value: float) -> bool:
    return all(bool((one == value).all()) for one in tensors)


@READS
def test_a_list_of_host_and_device_tensors_is_exchanged(
    two: Pair, device: FakeDevice, reads: bool
) -> None:
    sources, targets = mixed(device, 3), mixed(FakeDevice("fake:1"), 9)
    exposed = expose(two, described(sources if reads else targets), reads=reads)
    moving = begin(two, exposed, described(targets if reads else sources), reads=reads)
    complete(moving, exposed)
    assert all_are(targets, 3)


@READS
def test_device_memory_goes_into_host_memory_and_back(
    two: Pair, device: FakeDevice, reads: bool
) -> None:
    on_device, host = device.tensor(torch.arange(float(SIZE))), torch.zeros(SIZE)
    exposed = expose(two, described([on_device if reads else host]), reads=reads)
    complete(begin(two, exposed, described([host if reads else on_device]), reads=reads), exposed)
    assert torch.equal(on_device, host)
    assert torch.equal(host, torch.arange(float(SIZE)))


@READS
def test_nothing_but_empty_device_memory_completes(
    two: Pair, device: FakeDevice, reads: bool
) -> None:
    def nothing() -> list[Descriptor]:
        return described([device.zeros(0), device.zeros(4)[:0], torch.empty(0)])

    exposed = expose(two, nothing(), reads=reads)
    complete(begin(two, exposed, nothing(), reads=reads), exposed)


# Before.


def test_what_is_exposed_is_not_read_before_its_producer_has_run(
    two: Pair, device: FakeDevice, slow: threading.Event
) -> None:
    sources, targets = mixed(device, 0), mixed(device, 9)
    stream = busy(device, slow)
    stream.launch(lambda: [one.fill_(7) for one in sources])
    with device.stream(stream):
        exposed = expose(two, described(sources))
    reading = begin(two, exposed, described(targets))
    turn(two, claimed(exposed))
    turn(two)
    assert reading.status is OperationStatus.IN_PROGRESS
    assert all_are(targets, 9), "it was read although its producer has not run"
    slow.set()
    complete(reading, exposed)
    assert all_are(targets, 7)


def test_a_target_is_not_read_into_before_its_last_user_has_run(
    two: Pair, device: FakeDevice, slow: threading.Event
) -> None:
    sources, targets = mixed(device, 5), mixed(device, 3)
    seen: list[bool] = []
    stream = busy(device, slow)
    stream.launch(lambda: seen.append(all_are(targets, 3)))
    exposed = expose(two, described(sources))
    with device.stream(stream):
        reading = begin(two, exposed, described(targets))
    turn(two)
    assert all_are(targets, 3), "it was read into while its stream was busy"
    assert exposed.status is OperationStatus.INITIALIZED, "it was claimed before it is of use"
    slow.set()
    complete(reading, exposed)
    assert seen == [True]
    assert all_are(targets, 5)


@pytest.mark.parametrize("side", ["owner", "writer"])
def test_neither_side_of_a_write_goes_before_its_stream(
    two: Pair, device: FakeDevice, slow: threading.Event, side: str
) -> None:
    sources, targets = mixed(device, 0), mixed(device, 3)
    stream, idle = busy(device, slow), device.new_stream()
    used = targets if side == "owner" else sources
    seen: list[bool] = []
    stream.launch(lambda: seen.append(all_are(targets, 3)))
    stream.launch(lambda: [one.fill_(5) for one in sources])
    with device.stream(stream if used is targets else idle):
        exposed = expose(two, described(targets), reads=False)
    with device.stream(stream if used is sources else idle):
        writing = begin(two, exposed, described(sources), reads=False)
    turn(two)
    assert all_are(targets, 3)
    slow.set()
    complete(writing, exposed)
    assert seen == [True]
    assert all_are(targets, 5)


def test_only_the_current_stream_counts(
    two: Pair, device: FakeDevice, slow: threading.Event
) -> None:
    """Work of another stream is the program's to order, with an event; nobody waits for it."""
    source, target = device.tensor(torch.ones(SIZE)), device.zeros(SIZE)
    busy(device, slow)
    with device.stream(device.new_stream()):
        exposed = expose(two, described([source]))
        reading = begin(two, exposed, described([target]))
    complete(reading, exposed)
    assert not slow.is_set()
    assert all_are([target], 1)


def test_an_event_of_another_stream_is_waited_for(
    two: Pair, device: FakeDevice, slow: threading.Event
) -> None:
    source, target = device.zeros(SIZE), torch.zeros(SIZE)
    producer, chosen = busy(device, slow), device.new_stream()
    producer.launch(lambda: source.fill_(4))
    chosen.wait_event(producer.record())
    with device.stream(chosen):
        exposed = expose(two, described([source]))
    reading = begin(two, exposed, described([target]))
    turn(two)
    assert not target.any()
    slow.set()
    complete(reading, exposed)
    assert all_are([target], 4)


def test_all_devices_of_a_list_are_waited_for(two: Pair, slow: threading.Event) -> None:
    first, second = FakeDevice("fake:0"), FakeDevice("fake:1")
    sources = [first.tensor(torch.ones(SIZE)), second.zeros(SIZE)]
    stream = busy(second, slow)
    stream.launch(lambda: sources[1].fill_(1))
    targets = [torch.zeros(SIZE), torch.zeros(SIZE)]
    with first.stream(first.new_stream()), second.stream(stream):
        exposed = expose(two, described(sources))
    reading = begin(two, exposed, described(targets))
    turn(two)
    assert all_are(targets, 0)
    slow.set()
    complete(reading, exposed)
    assert all_are(targets, 1)


def test_memory_named_by_its_address_goes_in_order_of_the_devices_stream(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, slow: threading.Event
) -> None:
    """Told of as the device's own kind: all but NIXL's copy is as on a machine that has one."""
    monkeypatch.setitem(streams._devices, ("cuda", 1), device)
    fabric = LoopbackFabric()
    two = Pair(LoopbackConnector(fabric, "owner"), LoopbackConnector(fabric, "other"))
    array, host = np.zeros(SIZE, np.uint8), pattern(10)
    stream = busy(device, slow)
    stream.launch(lambda: array.fill(6))
    with device.stream(stream):
        memory = Descriptor((array.ctypes.data, SIZE, "cuda:1", array))
        exposed = expose(two, [Descriptor(host), memory, Descriptor(bytearray())])
    assert [one.device for one in exposed.metadata().descriptors] == ["cpu", "cuda:1", "cpu"]
    targets = [np.zeros(10, np.uint8), np.zeros(SIZE, np.uint8), np.zeros(0, np.uint8)]
    reading = begin(two, exposed, [Descriptor(one) for one in targets])
    turn(two)
    assert not targets[0].any() and not targets[1].any()
    slow.set()
    complete(reading, exposed)
    assert bool((targets[0] == host).all()) and bool((targets[1] == 6).all())
    two.owner.close()
    two.other.close()


@pytest.mark.parametrize("begins", [False, True], ids=["create", "begin"])
def test_with_a_connection_nothing_suspends_before_the_stream_was_asked(
    two: Pair, device: FakeDevice, begins: bool
) -> None:
    """So no other task can have changed the thread's current stream in between."""
    here: Callable[[], Any] = lambda: [Descriptor(device.zeros(8))]  # noqa: E731
    coroutine: Any = two.owner.create_readable(here())
    if begins:
        exposed = expose(two, here())
        coroutine.close()
        coroutine = two.other.begin_read(over_json(exposed.metadata()), here())
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    operation = ended.value.value
    assert isinstance(operation, connect.ReadOperation if begins else connect.ReadableOperation)


# After, and what is given up.


def test_what_is_queued_after_the_end_sees_the_bytes(
    two: Pair, device: FakeDevice, slow: threading.Event
) -> None:
    stream = busy(device, slow)
    source, target = torch.full((SIZE,), 2.0), device.zeros(SIZE)
    seen: list[float] = []
    stream.launch(lambda: seen.append(float(target.sum())))
    exposed = expose(two, described([source]))
    with device.stream(stream):
        reading = begin(two, exposed, described([target]))
        slow.set()
        complete(reading, exposed)
        stream.launch(lambda: seen.append(float(target.sum())))
    stream.synchronize()
    assert seen == [0.0, 2.0 * SIZE]


@READS
def test_given_up_before_its_stream_got_there_it_touches_nothing(
    two: Pair, device: FakeDevice, slow: threading.Event, reads: bool
) -> None:
    sources, targets = mixed(device, 5), mixed(device, 3)
    exposed = expose(two, described(sources if reads else targets), reads=reads)
    with device.stream(busy(device, slow)):
        moving = begin(two, exposed, described(targets if reads else sources), reads=reads)
    with pytest.raises(TransferTimeout):
        moving.wait(0.05)
    assert moving.wait_released(DEADLINE)
    exposed.cancel()
    slow.set()
    turn(two)
    assert all_are(targets, 3)
    with pytest.raises(TransferCancelled):
        exposed.wait(DEADLINE)


def test_withdrawn_before_its_stream_got_there_the_peer_is_told(
    two: Pair, device: FakeDevice, slow: threading.Event
) -> None:
    targets = [torch.zeros(SIZE)]
    with device.stream(busy(device, slow)):
        exposed = expose(two, described([device.tensor(torch.ones(SIZE))]))
    reading = begin(two, exposed, described(targets))
    turn(two)
    exposed.cancel()
    with pytest.raises(TransferCancelled):
        reading.wait(DEADLINE)
    slow.set()
    turn(two)
    assert all_are(targets, 0)


def test_a_stream_that_is_being_captured_is_refused_and_nothing_is_held(
    two: Pair, device: FakeDevice
) -> None:
    before = two.owner.statistics().outstanding
    device.captured.add(device.default_stream)
    with pytest.raises(TransferError, match="captured into a graph"):
        expose(two, mixed_descriptors(device))
    assert two.owner.statistics().outstanding == before


def mixed_descriptors(device: FakeDevice) -> list[Descriptor]:
    return described(mixed(device, 0))
