"""Field reports, group B: freed, recycled or re-registered memory. Here: descriptors."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from connect.pairs import DEADLINE, Pair, pattern

from torch_nixl import connect
from torch_nixl.errors import RegistrationError
from torch_nixl.testing import LoopbackConnector, LoopbackFabric, Rank, run_ranks


def recycle(pair: Pair) -> None:
    """Expose 16, then all 64 bytes at one address."""
    arena = bytearray(pattern(64).tobytes())
    small = torch.frombuffer(arena, count=16, dtype=torch.uint8)
    target = torch.zeros(16, dtype=torch.uint8)
    pair.move(small, target)
    address = small.data_ptr()
    del small
    gc.collect()
    large = torch.frombuffer(arena, count=64, dtype=torch.uint8)
    assert large.data_ptr() == address
    target = torch.zeros(64, dtype=torch.uint8)
    pair.move(large, target)
    assert torch.equal(large, target)


def test_b1_larger_memory_at_the_same_address(pair: Pair) -> None:
    recycle(pair)


def test_b2_descriptors_of_random_lengths(pair: Pair) -> None:
    random.seed(2)
    for _ in range(500):
        source = torch.from_numpy(pattern(random.randint(1, 50_000), random.randrange(1 << 30)))
        descriptor = connect.Descriptor(source)
        assert descriptor.size == source.nbytes
        target = torch.zeros_like(source)
        pair.move(descriptor, target)
        assert torch.equal(source, target)
        del source, descriptor, target
    assert pair.other.statistics().remotes_relearned == 0


def without_memory_hooks(rank: Rank) -> bool:
    pair = Pair(connect.Connector(), connect.Connector())
    with pair.owner, pair.other:
        for _ in range(20):
            recycle(pair)
    return True


def test_b4_recycled_memory_without_memory_hooks() -> None:
    assert run_ranks(without_memory_hooks, 1, env={"UCX_MEM_EVENTS": "n"}, timeout=60.0) == [True]


def test_b5_deregistered_while_in_use(pair: Pair) -> None:
    source, target = torch.ones(1 << 26, dtype=torch.uint8), torch.zeros(1 << 26, dtype=torch.uint8)
    ours, theirs = connect.Descriptor(source), connect.Descriptor(target)
    ours.register_with_connector(pair.other.connection())
    theirs.register_with_connector(pair.owner.connection())
    exposed = pair.writable(theirs)
    writing = pair.write(ours, exposed.metadata())
    ours.deregister_with_connector(pair.other.connection())
    theirs.deregister_with_connector(pair.owner.connection())
    writing.wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert bool(target.all())


@pytest.mark.parametrize("over", ["nixl", "loopback"])
def test_b7_tensors_that_share_memory(pair: Pair, over: str) -> None:
    """NIXL reads what its owner has deregistered, too; the loopback does not."""
    if over == "loopback":
        fabric = LoopbackFabric()
        pair = Pair(LoopbackConnector(fabric), LoopbackConnector(fabric))
    x, target = torch.arange(10.0), torch.zeros(2)
    registry = pair.owner.connection().engine.registry
    registry.collect()
    before = registry.statistics.deregistrations
    whole, part = pair.readable(x), pair.readable(x[0:2])
    pair.read(whole.metadata(), torch.zeros(10)).wait(DEADLINE)
    whole.wait(DEADLINE)
    del whole
    gc.collect()
    registry.collect()
    assert registry.statistics.deregistrations == before
    pair.read(part.metadata(), target).wait(DEADLINE)
    assert target.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("order", [("whole", "whole"), ("half", "whole"), ("whole", "half")])
def test_b8_the_same_memory_registered_again(pair: Pair, order: tuple[str, str]) -> None:
    connection = pair.owner.connection()
    # An array whose owner is foreign is registered as it is, not as part of a storage.
    buffer = bytearray(pattern(1000).tobytes())
    parts = {"whole": memoryview(buffer), "half": memoryview(buffer)[500:]}
    descriptors = [connect.Descriptor(parts[name]) for name in order]
    for descriptor in descriptors:
        descriptor.register_with_connector(connection)
    for name, descriptor in zip(order, descriptors, strict=True):
        target = bytearray(descriptor.size)
        pair.move(descriptor, target)
        assert target == bytes(parts[name])
    for descriptor in descriptors:
        descriptor.deregister_with_connector(connection)


def test_b10_a_failure_half_way_leaves_nothing_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with connect.Connector() as connector:
        connection = connector.connection()
        adapter = connection.engine.adapter
        register = adapter.register
        calls: list[object] = []

        def fail_late(region: Any) -> Any:
            calls.append(region)
            if len(calls) == 4:  # each memory is registered for both kinds of peers
                raise RegistrationError(f"refused {region}")
            return register(region)

        monkeypatch.setattr(adapter, "register", fail_late)
        memories = [connect.Descriptor(bytearray(16)) for _ in range(3)]
        with pytest.raises(RegistrationError):
            connect.ReadableOperation(connection, memories)
        figures = connector.statistics()
        assert (figures.live_registrations, figures.outstanding) == (0, 0)
        x = torch.zeros(10)
        with connect.ReadableOperation(connection, connect.Descriptor(x[5:])):
            pass


def test_b12_nothing_to_release(pair: Pair) -> None:
    with pair.readable(torch.empty(0)) as exposed:
        pass
    exposed.__exit__(None, None, None)
    assert exposed.wait_released(DEADLINE)


def test_b13_a_refused_registration_is_an_error_with_the_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with connect.Connector() as connector:
        connection = connector.connection()
        agent: Any = connection.engine.adapter
        bindings = agent._agent

        def refuse(*args: Any) -> None:
            raise agent._errors[0]("out of memory")

        monkeypatch.setattr(bindings, "register_mem", refuse)
        with pytest.raises(RegistrationError, match="4096 bytes"):
            connect.ReadableOperation(connection, connect.Descriptor(bytearray(4096)))
        with pytest.raises(RegistrationError, match="4096 bytes"):
            connect.Descriptor(bytearray(4096)).register_with_connector(connection)


@pytest.mark.parametrize("cancels", ["reader", "owner"])
def test_b14_what_was_cancelled_is_written_to_no_more(
    monkeypatch: pytest.MonkeyPatch, cancels: str
) -> None:
    """Over TCP, where bytes are under way for a while, and releasing a transfer stops none."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = torch.zeros_like(source)
    with connect.Connector() as owner, connect.Connector() as other:
        pair = Pair(owner, other)
        pair.move(torch.ones(10), torch.zeros(10))
        for _ in range(5):
            exposed = pair.readable(source)
            reading = pair.read(exposed.metadata(), target)
            while not (reading._operation.in_flight or reading._operation.done):
                time.sleep(0.0002)
            (reading if cancels == "reader" else exposed).cancel(timeout=DEADLINE)
            assert reading.wait_released(DEADLINE)
            target.fill_(7)
            pair.move(torch.ones(10), torch.zeros(10))
            time.sleep(0.02)
            assert bool((target == 7).all())


def test_b14_cancelled_or_dropped_at_once(pair: Pair) -> None:
    source = torch.ones(1 << 26, dtype=torch.uint8)
    for turn in range(20):
        target = torch.zeros_like(source)
        exposed = pair.readable(source)
        reading = pair.read(exposed.metadata(), target)
        if turn % 2:
            reading.cancel(timeout=DEADLINE)
        del reading, target
        gc.collect()
        assert exposed.wait_released(DEADLINE)
    target = torch.zeros(10)
    pair.move(torch.ones(10), target)
    assert bool(target.all())


def test_b16_the_target_is_dropped_while_it_is_read(pair: Pair) -> None:
    source = torch.arange(1 << 24)
    target = torch.zeros_like(source)
    exposed = pair.readable(source)
    reading = pair.read(exposed.metadata(), target)
    kept = reading.results
    del target
    gc.collect()
    junk = [torch.full((1 << 22,), 7) for _ in range(8)]
    reading.wait(DEADLINE)
    (found,) = kept()
    assert torch.equal(found._data_ref, source)
    del junk


def test_b17_fire_and_forget(pair: Pair) -> None:
    targets = [torch.zeros(1 << 16, dtype=torch.int32) for _ in range(200)]
    exposed = [pair.writable(target) for target in targets]
    for number, operation in enumerate(exposed):
        pair.write(torch.full((1 << 16,), number, dtype=torch.int32), operation.metadata())
    for number, operation in enumerate(exposed):
        operation.wait(DEADLINE)
        assert bool((targets[number] == number).all())


def test_b18_a_dropped_operation_is_not_overwritten_by_the_next(pair: Pair) -> None:
    targets = [torch.zeros(1), torch.zeros(1)]
    exposed = [pair.writable(target) for target in targets]
    for value, operation in zip((1.0, 6.0), exposed, strict=True):
        pair.write(torch.full((1,), value), operation.metadata())
    for operation in exposed:
        operation.wait(DEADLINE)
    assert [target.item() for target in targets] == [1.0, 6.0]


def test_b20_temporaries_from_callbacks_and_tasks(pair: Pair) -> None:
    size = 50_000
    targets = [np.zeros(size, np.uint8) for _ in range(2)]
    exposed = [pair.writable(target) for target in targets]
    junk: list[bytes] = []

    def overwrite() -> None:
        """Take whatever memory was given back, if it was."""
        junk.extend(bytes([number]) * (size - 33) for number in range(20))

    def in_a_thread() -> None:
        pair.write(bytes(pattern(size, 1)), exposed[0].metadata())
        overwrite()

    async def in_a_task() -> None:
        async def write() -> None:
            told = exposed[1].metadata()
            await pair.other.begin_write(connect.Descriptor(bytes(pattern(size, 2))), told)
            overwrite()

        await asyncio.create_task(write())

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join(DEADLINE)
    asyncio.run(in_a_task())
    for number, operation in enumerate(exposed):
        operation.wait(DEADLINE)
        assert np.array_equal(targets[number], pattern(size, number + 1))
