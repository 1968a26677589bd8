"""Field reports, group B, between ranks: freed, recycled or re-registered memory."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import pytest
import torch
from connect.pairs import pattern

from field.two import DEADLINE, LARGE, Two, two_ranks
from torch_nixl.errors import RegistrationError, TransferCancelled
from torch_nixl.testing import Rank, run_ranks


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
    whole, part = two.a.isend(x, 1, tag=1), two.a.isend(x[:LARGE], 1, tag=2)
    assert torch.equal(two.b.recv(0, tag=1), x)
    whole.wait(DEADLINE)
    del whole
    gc.collect()
    assert torch.equal(two.b.recv(0, tag=2), x[:LARGE])
    part.wait(DEADLINE)


@pytest.mark.parametrize("order", ["whole whole", "half whole", "whole half"])
def test_b8_the_same_memory_sent_again(two: Two, order: str) -> None:
    x = torch.arange(float(2 * LARGE))
    parts = {"whole": x, "half": x[LARGE:]}
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
    assert torch.equal(two.move(x[5:]), x[5:])


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


def test_b17_fire_and_forget(two: Two) -> None:
    for number in range(200):
        two.a.isend(torch.full((1 << 16,), number, dtype=torch.int32), 1)
    gc.collect()
    for number in range(200):
        assert bool((two.b.recv(0) == number).all())


def test_b18_a_dropped_send_is_not_overwritten_by_the_next(two: Two) -> None:
    for count in (1, LARGE):
        for value in (1.0, 6.0):
            two.a.isend(torch.full((count,), value), 1)
        assert [float(two.b.recv(0)[-1]) for _ in range(2)] == [1.0, 6.0]


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
