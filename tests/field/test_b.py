"""Field reports, group B: freed, recycled or re-registered memory. Here: descriptors."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from connect.pairs import DEADLINE, Pair, pattern

from field.two import until
from torch_nixl import connect
from torch_nixl.engine import spans, starting
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.arrays import as_memory
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.registry import Registry
from torch_nixl.errors import ClosedError, RegistrationError, TransferError
from torch_nixl.testing import (
    LoopbackConnector,
    LoopbackFabric,
    Rank,
    run_ranks,
)

SIZE = 1 << 20
"""So much isn't moved byte by byte before a test has looked."""


def until_it_moves(operation: Any) -> None:
    until(lambda: operation._operation.in_flight > 0)


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


def test_b1_memory_that_lives_and_lies_elsewhere(pair: Pair) -> None:
    source, target = torch.ones(1000), torch.zeros(1000)
    pair.move(source, target)
    source.share_memory_().fill_(2.0)  # type: ignore[no-untyped-call]
    pair.move(source, target)
    assert bool((target == 2.0).all())


def test_b1_memory_that_lives_and_is_larger() -> None:
    """As after two calls of `resize_` the second of which found room at the first address."""
    registry = Registry(LoopbackFabric().adapter("a"))
    large = tensor_memory(torch.zeros(64, dtype=torch.uint8))
    small = replace(large, layout=spans.single(large.base, 16), nbytes=16, extent=16)
    registry.release(registry.acquire(small))
    held = registry.acquire(large)
    assert held.entry is not None
    assert held.entry.registration.region.nbytes == 64


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
    source, target = bytearray(b"1") * (1 << 26), bytearray(1 << 26)
    ours, theirs = connect.Descriptor(source), connect.Descriptor(target)
    ours.register_with_connector(pair.other.connection())
    theirs.register_with_connector(pair.owner.connection())
    exposed = pair.writable(theirs)
    writing = pair.write(ours, exposed.metadata())
    ours.deregister_with_connector(pair.other.connection())
    theirs.deregister_with_connector(pair.owner.connection())
    writing.wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert target == source


def test_b5_what_moves_stays_registered() -> None:
    """For certain, where the bytes stand still meanwhile."""
    fabric = LoopbackFabric()
    with LoopbackConnector(fabric) as owner, LoopbackConnector(fabric) as other:
        pair = Pair(owner, other)
        pair.move(bytearray(8), bytearray(8))
        ends = [
            (owner, connect.Descriptor(bytearray(SIZE))),
            (other, connect.Descriptor(b"1" * SIZE)),
        ]
        for connector, descriptor in ends:
            descriptor.register_with_connector(connector.connection())
        fabric.delay(1)
        exposed = pair.writable(ends[0][1])
        writing = pair.write(ends[1][1], exposed.metadata())
        until_it_moves(writing)
        for connector, descriptor in ends:
            descriptor.deregister_with_connector(connector.connection())
            assert connector.statistics().live_registrations == 1
        fabric.delay(None)
        writing.wait(DEADLINE)
        exposed.wait(DEADLINE)
        for connector, _ in ends:
            until(lambda: connector.statistics().live_registrations == 0)  # noqa: B023 - called in this turn


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


@pytest.mark.parametrize("order", ["whole whole", "part part", "part whole", "whole part"])
def test_b8_the_same_memory_registered_again(pair: Pair, order: str) -> None:
    # By the side that moves: it has NIXL look its own memory up. Of a tensor all is registered that
    # its storage has; memory whose owner is foreign as it is. What lies behind the part would be
    # hidden by it if the two were registered under one device id.
    connection = pair.other.connection()
    before = pair.other.statistics().registrations
    buffer = bytearray(pattern(1000).tobytes())
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    parts = {"whole": whole[600:], "part": memoryview(buffer)[250:500]}
    names = order.split()
    descriptors = [connect.Descriptor(parts[name]) for name in names]
    for descriptor in descriptors:
        descriptor.register_with_connector(connection)
    assert pair.other.statistics().registrations == before + len(set(names))
    for name, descriptor in zip(names, descriptors, strict=True):
        target = bytearray(descriptor.size)
        exposed = pair.writable(target)
        pair.write(descriptor, exposed.metadata()).wait(DEADLINE)
        exposed.wait(DEADLINE)
        assert target == np.asarray(parts[name]).tobytes()
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
        before = connector.statistics().registrations
        for start in (0, 5, 7):
            with connect.ReadableOperation(connection, connect.Descriptor(x[start:])):
                pass
        assert connector.statistics().registrations == before + 1
        del x
        gc.collect()
        connection.engine.registry.collect()  # as whoever registers next does
        assert connector.statistics().live_registrations == 0


def test_b10_a_step_that_fails_after_the_registration_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TransferError("the stream is being captured")

    fabric = LoopbackFabric()
    with LoopbackConnector(fabric) as owner, LoopbackConnector(fabric) as other:
        engine, source, target = other.connection().engine, bytes(16), bytearray(8)
        offer = owner.connection().engine.expose(Direction.READ, [as_memory(source)]).offer()
        with pytest.raises(TransferError, match="does not match"):
            engine.claim(offer, [as_memory(target)])
        monkeypatch.setattr(starting, "order_of_memories", fail)
        with pytest.raises(TransferError, match="captured"):
            engine.expose(Direction.READ, [as_memory(source)])
        figures = other.statistics()
        assert (figures.registrations, figures.live_registrations) == (2, 0)


@pytest.mark.parametrize("nbytes", [0, 100])
def test_b12_nothing_to_release(pair: Pair, nbytes: int) -> None:
    memory = bytearray(nbytes)
    with pair.readable(memory) as exposed:
        pass
    exposed.__exit__(None, None, None)
    exposed._operation.cancel()
    exposed._operation.abort(ClosedError("twice"))
    assert exposed.wait_released(DEADLINE)
    pair.move(memory, bytearray(nbytes))


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


@pytest.mark.parametrize("moves", ["read", "write"])
def test_b16_what_moves_holds_its_memory_though_nobody_else_does(moves: str) -> None:
    fabric = LoopbackFabric()
    with LoopbackConnector(fabric) as owner, LoopbackConnector(fabric) as other:
        pair = Pair(owner, other)
        pair.move(torch.ones(10), torch.zeros(10))
        # The bytes stay, so that a test that fails doesn't end in a crash.
        arena = bytearray(4 * SIZE)
        theirs, ours = torch.full((SIZE,), 1.0), torch.frombuffer(arena, dtype=torch.float32)
        ours.fill_(2.0)
        storage = ours.untyped_storage()
        gone: list[bool] = []
        weakref.finalize(storage, gone.append, True)
        fabric.delay(1)
        exposed = pair.readable(theirs) if moves == "read" else pair.writable(theirs)
        told = exposed.metadata()
        moving = pair.read(told, ours) if moves == "read" else pair.write(ours, told)
        until_it_moves(moving)
        del ours, storage, moving
        gc.collect()
        assert not gone
        fabric.delay(None)
        exposed.wait(DEADLINE)
        until(lambda: bool(gone))
        assert bool((theirs == (1.0 if moves == "read" else 2.0)).all())


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
