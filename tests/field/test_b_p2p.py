"""Field reports, group B, between ranks: freed, recycled or re-registered memory."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch
from connect.pairs import pattern

from field.two import DEADLINE, LARGE, Two, two_ranks, until
from torch_nixl.errors import PeerLostError, RegistrationError, TransferCancelled
from torch_nixl.testing import LoopbackFabric, Rank, run_ranks


def recycle(two: Two) -> None:
    """Send a quarter, then all of the bytes at one address."""
    arena = bytearray(pattern(4 * LARGE).tobytes())
    small = torch.frombuffer(arena, count=LARGE, dtype=torch.uint8)
    assert torch.equal(two.move(small), small)
    address = small.data_ptr()
    del small
    gc.collect()
    large = torch.frombuffer(arena, dtype=torch.uint8)
    assert large.data_ptr() == address
    assert torch.equal(two.move(large), large)


def test_b1_larger_memory_at_the_same_address(two: Two) -> None:
    recycle(two)


def test_b2_tensors_of_random_lengths(two: Two) -> None:
    random.seed(2)
    for _ in range(100):
        sent = torch.from_numpy(pattern(random.randint(1, 500_000), random.randrange(1 << 30)))
        received = two.move(sent)
        assert received.nbytes == sent.nbytes
        assert torch.equal(received, sent)
        del sent, received


def without_memory_hooks(rank: Rank) -> bool:
    with two_ranks() as two:
        for _ in range(20):
            recycle(two)
    return True


def test_b4_recycled_memory_without_memory_hooks() -> None:
    assert run_ranks(without_memory_hooks, 1, env={"UCX_MEM_EVENTS": "n"}, timeout=60.0) == [True]


def test_b7_tensors_that_share_memory(two: Two) -> None:
    x = torch.arange(float(2 * LARGE))
    gc.collect()
    registry = two.a.connection.registry
    registry.collect()
    before = registry.statistics.registrations, registry.statistics.deregistrations
    whole, part = two.a.isend(x, 1, tag=1), two.a.isend(x[:LARGE], 1, tag=2)
    assert torch.equal(two.b.recv(0, tag=1), x)
    whole.wait(DEADLINE)
    assert whole.wait_released(DEADLINE)
    del whole
    gc.collect()
    registry.collect()
    now = registry.statistics.registrations, registry.statistics.deregistrations
    assert now == (before[0] + 1, before[1])
    assert torch.equal(two.b.recv(0, tag=2), x[:LARGE])
    part.wait(DEADLINE)


@pytest.mark.parametrize("order", ["whole whole", "part part", "part whole", "whole part"])
def test_b8_the_same_memory_sent_again(two: Two, order: str) -> None:
    # Two storages at addresses that overlap, each registered. What lies behind the part would be
    # hidden by it if the two were registered under one device id.
    arena = bytearray(pattern(8 * LARGE).tobytes())
    whole = torch.frombuffer(arena, dtype=torch.uint8)
    part = torch.frombuffer(arena, dtype=torch.uint8, offset=2 * LARGE, count=LARGE)
    parts = {"whole": whole[4 * LARGE :], "part": part}
    for name in (*order.split(), "whole"):  # the receiver's own
        sent = torch.from_numpy(pattern(parts[name].nbytes, len(name)))
        assert torch.equal(two.move(sent, parts[name]), sent)
    works = [two.a.isend(parts[name], 1) for name in order.split()]
    for name in order.split():
        assert torch.equal(two.b.recv(0), parts[name])
    for work in works:
        work.wait(DEADLINE)


def test_b10_b13_a_refused_registration_is_an_error_and_leaves_nothing(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(region: Any) -> None:
        raise RegistrationError(f"refused {region}")

    gc.collect()
    two.a.connection.registry.collect()
    before = two.a.connection.statistics()
    with monkeypatch.context() as patch:
        patch.setattr(two.a.connection.adapter, "register", refuse)
        with pytest.raises(RegistrationError, match=str(4 * LARGE)):
            two.a.isend(torch.zeros(LARGE), 1)
    after = two.a.connection.statistics()
    assert after.live_registrations == before.live_registrations
    assert two.a.statistics().outstanding == 0
    assert two.b.iprobe(0) is None
    x = torch.arange(float(2 * LARGE))
    for start in (0, 5, 7):
        assert torch.equal(two.move(x[start:]), x[start:])
    registrations = two.a.connection.statistics().registrations
    assert registrations == after.registrations + 1


def test_b10_p2p_a_tree_half_of_which_is_refused_leaves_nothing(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, registry = two.a.connection.adapter, two.a.connection.registry
    gc.collect()
    registry.collect()
    before = registry.statistics.live
    register = adapter.register
    calls: list[object] = []

    def refuse_the_second(region: Any) -> Any:
        calls.append(region)
        if len(calls) == 2:
            raise RegistrationError(f"refused {region}")
        return register(region)

    tree = [torch.zeros(LARGE), torch.zeros(LARGE)]
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "register", refuse_the_second)
        with pytest.raises(RegistrationError):
            two.a.isend_tree(tree, 1)
    del tree
    gc.collect()
    registry.collect()
    assert registry.statistics.live == before
    assert two.a.statistics().outstanding == 0


def test_b10_p2p_a_send_that_is_refused_after_its_registration_leaves_nothing() -> None:
    with two_ranks(LoopbackFabric()) as two:
        two.move(torch.ones(1))
        two.b.close()
        until(lambda: two.a._exchange.peers[1].error is not None)
        tensor = torch.ones(LARGE)
        with pytest.raises(PeerLostError):
            two.a.isend(tensor, 1)
        with pytest.raises(PeerLostError):
            two.a.isend_tree([tensor], 1)
        del tensor
        gc.collect()
        registry = two.a.connection.registry
        registry.collect()
        assert (registry.statistics.registrations, registry.statistics.live) == (1, 0)


def test_b14_cancelled_or_dropped_at_once(two: Two) -> None:
    sent = torch.ones(1 << 24)
    for turn in range(20):
        send = two.a.isend(sent, 1)
        receive = two.b.irecv(0)
        if turn % 2:
            receive.cancel()
            assert isinstance(receive.exception(), TransferCancelled | None)
            # It may have had its message by then, or not: that one is withdrawn here.
            send.cancel()
            assert receive.wait_released(DEADLINE)
        del receive
        gc.collect()
        assert send.wait_released(DEADLINE)
    sent = torch.full((LARGE,), 3.0)
    assert torch.equal(two.move(sent), sent)


def test_b16_the_target_is_dropped_while_bytes_land(two: Two) -> None:
    sent = torch.arange(1 << 24)
    target = torch.zeros_like(sent)
    receive = two.b.irecv(0, out=target)
    send = two.a.isend(sent, 1)
    del target
    gc.collect()
    junk = [torch.full((1 << 22,), 7) for _ in range(8)]
    received = receive.result(DEADLINE)
    send.wait(DEADLINE)
    assert received is not None
    assert torch.equal(received, sent)
    del junk


@pytest.mark.parametrize("moves", ["send", "receive"])
def test_b16_what_moves_holds_its_memory_though_nobody_else_does(moves: str) -> None:
    fabric = LoopbackFabric()
    with two_ranks(fabric) as two:
        two.move(torch.ones(1))
        # The bytes stay, so that a test that fails doesn't end in a crash.
        arena = bytearray(4 * LARGE)
        ours = torch.frombuffer(arena, dtype=torch.float32).fill_(1.0)
        gone: list[bool] = []
        weakref.finalize(ours.untyped_storage(), gone.append, True)
        fabric.delay(1)
        if moves == "send":
            two.a.isend(ours, 1)
            receive = two.b.irecv(0)
        else:
            send = two.a.isend(torch.zeros(LARGE), 1)
            two.b.irecv(0, out=ours)
        until(lambda: any(one.in_flight for one in list(two.b.connection.operations.transfers)))
        del ours
        gc.collect()
        assert not gone
        fabric.delay(None)
        if moves == "send":
            received = receive.result(DEADLINE)
            assert received is not None
            assert bool(received.all())
        else:
            send.wait(DEADLINE)
        until(lambda: bool(gone))


@pytest.mark.parametrize("count", [1 << 12, 1 << 16], ids=["queued", "offered"])
def test_b17_fire_and_forget(two: Two, count: int) -> None:
    queued = two.a.statistics().queued
    for number in range(200):
        two.a.isend(torch.full((count,), number, dtype=torch.int32), 1)
    gc.collect()
    assert (two.a.statistics().queued > queued) is (count == 1 << 12)
    for number in range(200):
        assert bool((two.b.recv(0) == number).all())


def test_b18_a_dropped_send_is_not_overwritten_by_the_next(two: Two) -> None:
    for count in (1, LARGE):
        values = [1.0, 6.0] * 10
        for value in values:
            two.a.isend(torch.full((count,), value), 1)
        assert [float(two.b.recv(0)[-1]) for _ in values] == values


def test_b20_temporaries_that_nobody_waits_for(two: Two) -> None:
    async def in_a_task() -> None:
        async def send() -> None:
            two.a.isend(torch.full((LARGE,), 2.0), 1, tag=2)

        await asyncio.create_task(send())

    thread = threading.Thread(target=lambda: two.a.isend(torch.full((LARGE,), 1.0), 1, tag=1))
    thread.start()
    thread.join(DEADLINE)
    asyncio.run(in_a_task())
    gc.collect()
    junk = [torch.full((LARGE,), 9.0) for _ in range(20)]  # in what was given back, if it was
    for tag in (1, 2):
        assert bool((two.b.recv(0, tag=tag) == tag).all())
    del junk


def test_b20_temporaries_from_threads_and_tasks(two: Two) -> None:
    async def in_a_task() -> None:
        async def send() -> None:
            await two.a.isend(torch.full((LARGE,), 2.0), 1, tag=2)

        await asyncio.wait_for(asyncio.create_task(send()), DEADLINE)

    receives = [two.b.irecv(0, tag=tag) for tag in (1, 2)]
    thread = threading.Thread(target=lambda: two.a.send(torch.full((LARGE,), 1.0), 1, tag=1))
    thread.start()
    asyncio.run(in_a_task())
    thread.join(DEADLINE)
    for tag, receive in zip((1.0, 2.0), receives, strict=True):
        received = receive.result(DEADLINE)
        assert received is not None
        assert bool((received == tag).all())
