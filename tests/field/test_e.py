"""Field reports, group E: the connect classes under load and restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from connect.pairs import DEADLINE, Pair, bounded, pattern

from torch_nixl import connect
from torch_nixl.errors import MetadataError, TransferCancelled, TransferError


def test_e1_many_tasks_read_from_one_producer_and_some_give_up(pair: Pair) -> None:
    random.seed(1)
    count = 64
    sources = [torch.from_numpy(pattern(100_000, seed)) for seed in range(count)]
    targets = [torch.zeros_like(source) for source in sources]

    async def read(number: int) -> None:
        exposed = await pair.owner.create_readable(connect.Descriptor(sources[number]))
        told = exposed.metadata()
        with connect.Remote(pair.other.connection(), told.nixl_metadata):
            reading = await pair.other.begin_read(told, connect.Descriptor(targets[number]))
            if number % 4 == 0:
                await asyncio.sleep(random.random() / 100)
                reading.cancel()
                with contextlib.suppress(TransferCancelled):  # it may have been complete
                    await reading
                return
            await asyncio.gather(reading.wait_for_completion(), exposed.wait_for_completion())
            assert torch.equal(sources[number], targets[number])

    async def scenario() -> None:
        await asyncio.gather(*map(read, range(count)))

    bounded(scenario())


def test_e2_quick_operations_leave_a_slow_one_alone(pair: Pair) -> None:
    source = torch.ones(1 << 28, dtype=torch.uint8)
    target = torch.zeros_like(source)
    pair.move(pattern(10), bytearray(10))

    def figures() -> tuple[int, int, int]:
        return (
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            pair.other.statistics().remotes,
        )

    before = figures()
    slow = pair.readable(source)
    reading = pair.read(slow.metadata(), target)
    for seed in range(50):
        content, small = pattern(1000, seed), bytearray(1000)
        pair.move(content, small)
        assert small == content.tobytes()
    reading.wait(DEADLINE)
    slow.wait(DEADLINE)
    assert bool(target.all())
    assert figures() == before


def test_e7_a_peer_registers_more_after_contact(pair: Pair) -> None:
    first, second, target = torch.ones(100), torch.full((200,), 2.0), torch.zeros(200)
    pair.move(first, target[:100])
    gone = pair.readable(second)
    told = gone.metadata()
    pair.read(told, target).wait(DEADLINE)
    gone.wait(DEADLINE)
    assert torch.equal(target, second)
    third = torch.full((200,), 3.0)
    with pair.readable(third) as exposed:
        pair.read(exposed.metadata(), target).wait(DEADLINE)
    assert torch.equal(target, third)
    target.zero_()
    with pytest.raises(TransferError):
        pair.read(told, target).wait(DEADLINE)
    assert not target.any()


_EVERY_END = """
import gc
from torch_nixl import connect
connector = connect.Connector()
connection = connector.connection()
kept = connect.ReadableOperation(connection, connect.Descriptor(bytearray(8)))
remote = connect.Remote(connection, kept.metadata().nixl_metadata)
reading = connect.ReadOperation(connection, kept.metadata(), connect.Descriptor(bytearray(8)))
reading.wait(10)
writable = connect.WritableOperation(connection, connect.Descriptor(bytearray(8)))
dropped = connect.Descriptor(bytearray(8))
dropped.register_with_connector(connection)
for broken in (lambda: connect.Remote(connection, "b64:x"), lambda: connect.Descriptor(None)):
    try:
        broken()
    except ValueError:
        pass
del dropped, writable, remote
gc.collect()
connector.close()
connector.abort()
connect.Connector().connection()
"""


def test_e8_every_way_to_end_is_silent() -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", _EVERY_END],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")


def test_e10_both_directions_at_once(pair: Pair) -> None:
    back = Pair(pair.other, pair.owner)
    failures: list[BaseException] = []

    def work(way: Pair, seed: int) -> None:
        try:
            for number in range(200):
                content = pattern(random.randint(1, 20_000), seed + number)
                target = bytearray(len(content))
                way.move(content, target)
                assert target == content.tobytes()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(way, seed))
        for way, seed in ((pair, 1), (back, 1000), (pair, 2000))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_e12_an_unknown_peer_is_named(pair: Pair) -> None:
    with pair.readable(bytearray(8)) as exposed:
        told = exposed.metadata()
        other = pair.readable(bytearray(8))
        wrong = told.model_copy(update={"nixl_metadata": other.metadata().nixl_metadata})
        same = wrong.nixl_metadata == told.nixl_metadata
        assert not same
        with pytest.raises(MetadataError):
            pair.read(wrong, bytearray(8))
        started = time.monotonic()
        reading = pair.read(told, bytearray(8))
        reading.wait(DEADLINE)
        assert time.monotonic() - started < DEADLINE
        assert pair.owner.name in str(reading._operation)
