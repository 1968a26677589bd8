"""Waiting in event loops: one, several, cancelled, closed, and none of them polls."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
import torch

from connect.pairs import DEADLINE, Pair, bounded, over_json, pattern
from torch_nixl import connect
from torch_nixl.connect import OperationStatus
from torch_nixl.errors import TransferCancelled, TransferTimeout


def test_both_sides_complete_in_one_loop(pair: Pair) -> None:
    async def scenario() -> None:
        content, target = pattern(100_000), bytearray(100_000)
        with await pair.owner.create_readable(connect.Descriptor(content)) as exposed:
            told = over_json(exposed.metadata())
            with await pair.other.begin_read(told, connect.Descriptor(target)) as reading:
                await reading
                await exposed.wait_for_completion(timeout=DEADLINE)
        assert target == content.tobytes()

    bounded(scenario())


def test_an_async_write_completes(pair: Pair) -> None:
    async def scenario() -> None:
        content, target = pattern(100_000), bytearray(100_000)
        exposed = await pair.owner.create_writable(connect.Descriptor(target))
        writing = await pair.other.begin_write(connect.Descriptor(content), exposed.metadata())
        await asyncio.gather(writing.wait_for_completion(), exposed.wait_for_completion())
        assert target == content.tobytes()

    bounded(scenario())


def test_a_coroutine_owns_the_operation_that_it_waits_for(pair: Pair) -> None:
    """`return op.metadata(), op.wait_for_completion()`, as programs for dynamo do."""

    async def expose() -> tuple[connect.RdmaMetadata, object]:
        operation = await pair.owner.create_readable(connect.Descriptor(pattern(64)))
        return operation.metadata(), operation.wait_for_completion()

    async def scenario() -> None:
        told, completion = await expose()
        gc.collect()
        target = bytearray(64)
        await (await pair.other.begin_read(told, connect.Descriptor(target)))
        await completion  # type: ignore[misc]
        assert target == pattern(64).tobytes()

    bounded(scenario())


def test_a_timeout_ends_the_operation(pair: Pair) -> None:
    async def scenario() -> None:
        exposed = await pair.owner.create_readable(connect.Descriptor(bytearray(8)))
        started = time.monotonic()
        with pytest.raises(TransferTimeout):
            await exposed.wait_for_completion(timeout=0.1)
        assert 0.1 <= time.monotonic() - started < 2.0
        with pytest.raises(TimeoutError):
            await exposed

    bounded(scenario())


def test_a_cancelled_task_leaves_the_operation_alone(pair: Pair) -> None:
    async def scenario() -> None:
        content, target = pattern(64), bytearray(64)
        exposed = await pair.owner.create_readable(connect.Descriptor(content))
        for _ in range(50):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(exposed.wait_for_completion(), 0.001)
        assert exposed.status is OperationStatus.INITIALIZED
        assert not exposed._awaiter._futures
        waiting = [asyncio.ensure_future(exposed.wait_for_completion()) for _ in range(3)]
        await (await pair.other.begin_read(exposed.metadata(), connect.Descriptor(target)))
        await asyncio.gather(*waiting)

    bounded(scenario())


def test_other_tasks_run_while_one_waits(pair: Pair) -> None:
    async def scenario() -> None:
        exposed = await pair.owner.create_readable(connect.Descriptor(bytearray(8)))
        waiting = asyncio.ensure_future(exposed.wait_for_completion(timeout=0.3))
        turns = 0
        while not waiting.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert isinstance(waiting.exception(), TransferTimeout)
        assert turns > 20

    bounded(scenario())


def test_the_end_comes_to_several_loops_and_threads(pair: Pair) -> None:
    exposed = pair.readable(pattern(64))
    ready = threading.Barrier(5)
    ended: list[str] = []

    def in_a_loop() -> None:
        async def wait() -> None:
            waiting = asyncio.ensure_future(exposed.wait_for_completion())
            await asyncio.sleep(0)
            await asyncio.to_thread(ready.wait, DEADLINE)
            await waiting
            ended.append("loop")

        bounded(wait())

    def in_a_thread() -> None:
        ready.wait(DEADLINE)
        exposed.wait(DEADLINE)
        ended.append("thread")

    threads = [threading.Thread(target=target) for target in (in_a_loop, in_a_thread) * 2]
    for thread in threads:
        thread.start()
    ready.wait(DEADLINE)
    pair.read(exposed.metadata(), bytearray(64)).wait(DEADLINE)
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(ended) == ["loop", "loop", "thread", "thread"]


def test_a_loop_that_was_closed_is_not_woken(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    exposed = pair.readable(pattern(64))
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(exposed.wait_for_completion())
    while not exposed._awaiter._futures:
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()  # In the middle of it: nobody ends the task.
    woken = threading.Event()
    exposed.add_done_callback(woken.set)
    pair.read(exposed.metadata(), bytearray(64)).wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert woken.wait(DEADLINE)
    assert not caplog.records
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio would log it


def test_a_connector_opened_in_one_loop_works_in_another() -> None:
    connector = connect.Connector()
    try:
        connection = asyncio.run(connector._create_connection())
        opened = []

        def elsewhere() -> None:
            opened.append(asyncio.run(connector._create_connection()))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(DEADLINE)
        assert opened == [connection]

        async def use() -> None:
            exposed = await connector.create_readable(connect.Descriptor(pattern(8)))
            await (await connector.begin_read(exposed.metadata(), connect.Descriptor(bytearray(8))))
            await exposed

        bounded(use())
    finally:
        connector.close()


def test_many_gathered_waits_complete(pair: Pair) -> None:
    count = 300
    source = torch.arange(count * 16, dtype=torch.int32).view(count, 16)
    target = torch.zeros_like(source)

    async def move(index: int) -> None:
        exposed = await pair.owner.create_readable(connect.Descriptor(source[index]))
        reading = await pair.other.begin_read(exposed.metadata(), connect.Descriptor(target[index]))
        await asyncio.gather(reading.wait_for_completion(), exposed.wait_for_completion())

    async def scenario() -> None:
        await asyncio.gather(*map(move, range(count)))

    bounded(scenario())
    assert torch.equal(source, target)


def test_cancelling_from_another_task_wakes_who_waits(pair: Pair) -> None:
    async def scenario() -> None:
        exposed = await pair.owner.create_readable(connect.Descriptor(bytearray(8)))
        waiting = asyncio.ensure_future(exposed.wait_for_completion())
        await asyncio.sleep(0.01)
        exposed.cancel()
        with pytest.raises(TransferCancelled):
            await waiting

    bounded(scenario())


def test_waiting_costs_little_of_a_core(pair: Pair) -> None:
    async def scenario() -> float:
        exposed = await pair.owner.create_readable(connect.Descriptor(bytearray(8)))
        before = time.process_time()
        with pytest.raises(TimeoutError):
            await exposed.wait_for_completion(timeout=2.0)
        return (time.process_time() - before) / 2.0

    assert bounded(scenario()) < 0.25
