"""Field reports, group E: the connect classes under load and restart."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from connect.pairs import DEADLINE, Pair, bounded, pattern

from torch_nixl import connect
from torch_nixl.errors import MetadataError, PeerLostError, TransferCancelled, TransferError
from torch_nixl.testing import LoopbackConnector, LoopbackFabric


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

    async def read_again_and_again(number: int) -> None:
        for _ in range(3):
            targets[number].zero_()
            await read(number)

    async def scenario() -> None:
        await asyncio.gather(*map(read_again_and_again, range(count)))

    bounded(scenario())


def test_e1_threads_that_meet_one_peer_load_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = LoopbackFabric()
    with LoopbackConnector(fabric) as owner, LoopbackConnector(fabric) as other:
        pair = Pair(owner, other)
        adapter = other.connection().engine.adapter
        add = adapter.add_remote
        loaded: list[str] = []

        def add_slowly(blob: bytes) -> str:
            if adapter.inspect(blob).connections:
                loaded.append("so often")
                time.sleep(0.02)  # for the others to come
            return add(blob)

        monkeypatch.setattr(adapter, "add_remote", add_slowly)
        exposed = [pair.readable(pattern(100, number)) for number in range(8)]
        targets = [bytearray(100) for _ in exposed]

        def read(number: int) -> None:
            pair.read(exposed[number].metadata(), targets[number]).wait(DEADLINE)

        with ThreadPoolExecutor(len(exposed)) as threads:
            list(threads.map(read, range(len(exposed))))
        assert loaded == ["so often"]
        assert targets == [pattern(100, number).tobytes() for number in range(8)]


@pytest.mark.parametrize("over", ["nixl", "loopback"])
def test_e2_quick_operations_leave_a_slow_one_alone(pair: Pair, over: str) -> None:
    """On the loopback, so slowly that none of the quick ones can come after it."""
    fabric = LoopbackFabric(mode="tcp")
    if over == "loopback":
        pair = Pair(LoopbackConnector(fabric), LoopbackConnector(fabric))
    source = torch.ones(1 << (28 if over == "nixl" else 22), dtype=torch.uint8)
    target = torch.zeros_like(source)
    pair.move(pattern(10), bytearray(10))

    def figures() -> tuple[int, int, int]:
        return (
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            pair.other.statistics().remotes,
        )

    before = figures()
    fabric.delay(100)
    slow = pair.readable(source)
    reading = pair.read(slow.metadata(), target)
    for seed in range(50):
        content, small = pattern(100, seed), bytearray(100)
        pair.move(content, small)
        assert small == content.tobytes()
    assert over == "nixl" or reading.status is connect.OperationStatus.IN_PROGRESS
    fabric.delay(None)
    reading.wait(DEADLINE)
    slow.wait(DEADLINE)
    assert bool(target.all())
    assert figures() == before


def test_e4_a_lost_peer_is_not_forgotten_while_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when another is met."""
    fabric = LoopbackFabric(mode="tcp")
    owner, other, newcomer = (LoopbackConnector(fabric) for _ in range(3))
    with owner, other, newcomer:
        pair = Pair(owner, other)
        pair.move(pattern(10), bytearray(10))
        fabric.delay(1)
        exposed = pair.readable(bytes(1 << 20))
        target = bytearray(b"1") * (1 << 20)
        reading = pair.read(exposed.metadata(), target)
        deadline = time.monotonic() + DEADLINE
        while target[0]:
            assert time.monotonic() < deadline
        engine = other.connection().engine
        remote = engine.contacts.get(owner.connection().name)
        assert remote is not None
        removed: list[str] = []
        monkeypatch.setattr(engine.adapter, "remove_remote", removed.append)
        engine.contacts.lose(remote, PeerLostError("for a moment", remote=remote.name))
        Pair(newcomer, other).move(pattern(10), bytearray(10))
        assert not removed
        fabric.delay(None)
        assert reading.wait_released(DEADLINE)
        while not removed:
            assert time.monotonic() < deadline
        assert not any(target)
        owner.abort()  # Nobody tells it that the reader is done.


def test_e6_no_frame_numbers_of_a_peer_that_has_left_are_kept() -> None:
    """The rest of what is remembered of a peer: `../connect/test_faults.py`."""
    fabric = LoopbackFabric()
    owner, other = (LoopbackConnector(fabric, secret="shared") for _ in range(2))
    with owner, other:
        Pair(owner, other).move(pattern(8), bytearray(8))
        known = owner.connection().engine.codec._guards
        assert list(known) == [other.connection().name]
        other.close()
        deadline = time.monotonic() + DEADLINE
        while known:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_e7_a_peer_registers_more_after_contact(pair: Pair) -> None:
    target = torch.zeros(200)
    pair.move(torch.ones(100), target[:100])
    arena = bytearray(target.nbytes)
    second = torch.frombuffer(arena, dtype=torch.float32).fill_(2)
    used, withdrawn = pair.readable(second), pair.readable(second)
    told = [one.metadata() for one in (used, withdrawn)]
    pair.read(told[0], target).wait(DEADLINE)
    used.wait(DEADLINE)
    assert torch.equal(target, second)
    withdrawn.cancel()
    del second, used, withdrawn
    gc.collect()
    # In its place, to the byte.
    third = torch.frombuffer(arena, dtype=torch.float32).fill_(3)
    with pair.readable(third) as exposed:
        pair.read(exposed.metadata(), target).wait(DEADLINE)
    assert torch.equal(target, third)
    with pair.readable(third):
        for stale in told:
            target.zero_()
            started = time.monotonic()
            with pytest.raises(TransferError):
                pair.read(stale, target).wait(DEADLINE)
            assert time.monotonic() - started < DEADLINE / 2
            assert not target.any()


_EVERY_END = """
import gc, time
import torch
from torch_nixl import connect
connector = connect.Connector()
connection = connector.connection()
owned = torch.zeros(8)
connect.ReadableOperation(connection, connect.Descriptor(owned))
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
other = connect.Connector()
told = connect.ReadableOperation(connection, connect.Descriptor(bytearray(8))).metadata()
exposed = connect.ReadableOperation(connection, connect.Descriptor(bytearray(8)))
read = connect.ReadOperation(
    other.connection(), exposed.metadata(), connect.Descriptor(bytearray(8))
)
read.wait(10)
other.close()
while connector.statistics().remotes > 1 or connection.engine.lost.lingering:
    time.sleep(0.001)
third = connect.Connector()
left = connect.WritableOperation(third.connection(), connect.Descriptor(bytearray(8)))
third.abort()
connector.close()
connector.abort()
forgetful = connect.Connector()
forgotten = forgetful.connection().engine
told = connect.ReadableOperation(
    forgetful.connection(), connect.Descriptor(bytearray(8))
).metadata()
del forgetful
gc.collect()
while not forgotten.closed:
    time.sleep(0.001)
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
            for number in range(350):
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
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("over", ["nixl", "loopback"])
def test_e12_an_unknown_peer_is_named(pair: Pair, over: str) -> None:
    """The worker's id in place of its agent's name; and an agent that nobody knows."""
    if over == "loopback":
        fabric = LoopbackFabric()
        pair = Pair(LoopbackConnector(fabric, "owner"), LoopbackConnector(fabric, "other"))
    engine, worker_id = pair.other.connection().engine, pair.owner.name
    agent = pair.owner.connection().name
    assert agent != worker_id
    with pytest.raises(MetadataError, match=f"'{agent}'.*'{worker_id}'"):
        engine.contact(worker_id, pair.owner.connection().metadata)
    assert engine.contacts.get(worker_id) is None
    with pytest.raises(MetadataError, match=f"'{worker_id}'.*isn't known"):
        engine.adapter.notify(worker_id, b"done")
    with pair.readable(bytearray(8)) as exposed:
        told = exposed.metadata()
        reading = pair.read(told, bytearray(8))
        reading.wait(DEADLINE)
        assert agent in str(reading._operation)
