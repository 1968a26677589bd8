"""A worker is killed, stopped or restarted: the other side ends in bounded time and goes on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interop.client import Peer
from interop.dynamo_peer import Buffer, digest, pattern

from connect.pairs import DEADLINE
from torch_nixl import connect
from torch_nixl.connect import OperationStatus
from torch_nixl.engine import liveness
from torch_nixl.errors import MetadataError, PeerLostError, TransferTimeout

pytestmark = pytest.mark.timeout(120)

MODULE = "torch_nixl.connect"
PATHS = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
SEED = 3
LARGE = 256 << 20
ENDS = (PeerLostError, TransferTimeout)
BOUND = 10.0


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    started: list[Peer] = []

    def start(worker_id: str = "") -> Peer:
        started.append(Peer(sys.executable, MODULE, env=PATHS, worker_id=worker_id))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


@pytest.fixture(scope="module")
def healthy() -> Iterator[Peer]:
    peer = Peer(sys.executable, MODULE, env=PATHS)
    yield peer
    said = peer.stderr()
    peer.close()
    assert said == ""


@pytest.fixture(scope="module")
def connector() -> Iterator[connect.Connector]:
    made = connect.Connector(timeout=DEADLINE)
    yield made
    made.abort()


def expose_there(peer: Peer, size: int, *, reads: bool = True) -> connect.RdmaMetadata:
    names = peer.call("buffers", kind="torch", sizes=[size])["names"]
    if size < LARGE:
        peer.call("fill", buffers=names, seed=SEED)
    role = "create_readable" if reads else "create_writable"
    text = peer.call(role, buffers=names)["metadata"]
    return connect.RdmaMetadata.model_validate_json(text)


def begin_there(peer: Peer, told: connect.RdmaMetadata, size: int, *, reads: bool = True) -> str:
    names = peer.call("buffers", kind="torch", sizes=[size])["names"]
    role = "begin_read" if reads else "begin_write"
    return str(peer.call(role, buffers=names, metadata=told.model_dump_json())["op"])


def begin_here(
    connector: connect.Connector, told: connect.RdmaMetadata, target: Any, *, reads: bool = True
) -> Any:
    connection, descriptor = connector.connection(), connect.Descriptor(target)
    if reads:
        return connect.ReadOperation(connection, told, descriptor)
    return connect.WriteOperation(connection, descriptor, told)


def expose_here(connector: connect.Connector, memory: Any, *, reads: bool = True) -> Any:
    role = connect.ReadableOperation if reads else connect.WritableOperation
    return role(connector.connection(), connect.Descriptor(memory))


def read_from(connector: connect.Connector, peer: Peer) -> None:
    """Prove that the connector and the peer work."""
    target = Buffer.make("numpy", 4096)
    begin_here(connector, expose_there(peer, 4096), target.data).wait(DEADLINE)
    assert digest(target.view) == digest(pattern(SEED, 4096))


def be_read_by(connector: connect.Connector, peer: Peer) -> None:
    source = Buffer.make("numpy", 4096, SEED)
    exposed = expose_here(connector, source.data)
    begin_there(peer, exposed.metadata(), 4096)
    exposed.wait(DEADLINE)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"


def ends_within(operation: Any, seconds: float) -> None:
    started = time.monotonic()
    with pytest.raises(ENDS):
        operation.wait(seconds)
    assert time.monotonic() - started < seconds + 5.0
    assert operation.status is OperationStatus.ERRORED


@pytest.mark.parametrize("stage", ["before contact", "after contact"])
@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
def test_the_owner_is_killed_before_the_transfer(
    connector: connect.Connector, healthy: Peer, start: Callable[..., Peer], stage: str, reads: bool
) -> None:
    victim = start()
    if stage == "after contact":
        read_from(connector, victim)
    told = expose_there(victim, 4096, reads=reads)
    victim.kill()
    target = np.full(4096, 9, np.uint8)
    try:
        operation = begin_here(connector, told, target, reads=reads)
    except PeerLostError as error:
        said = str(error)
    else:
        ends_within(operation, BOUND)
        said = ""
    if said and stage == "before contact":
        assert "its process has ended, or no network device leads" in said
    assert bool((target == 9).all())
    read_from(connector, healthy)


@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
def test_the_owner_is_killed_in_the_middle(
    connector: connect.Connector, healthy: Peer, start: Callable[..., Peer], reads: bool
) -> None:
    victim = start()
    told = expose_there(victim, LARGE, reads=reads)
    memory = np.zeros(LARGE, np.uint8)
    operation = begin_here(connector, told, memory, reads=reads)
    until(lambda: operation._operation.moved_nbytes > 0)
    victim.kill()
    try:
        operation.wait(BOUND)
    except ENDS:
        assert operation.status is OperationStatus.ERRORED
    assert operation.wait_released(BOUND)
    read_from(connector, healthy)


@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
def test_who_transfers_is_killed_in_the_middle(
    connector: connect.Connector, healthy: Peer, start: Callable[..., Peer], reads: bool
) -> None:
    victim = start()
    exposed = expose_here(connector, np.zeros(LARGE, np.uint8), reads=reads)
    begin_there(victim, exposed.metadata(), LARGE, reads=reads)
    until(lambda: exposed.status is not OperationStatus.INITIALIZED)
    victim.kill()
    try:
        exposed.wait(BOUND)
    except ENDS:
        assert exposed.status is OperationStatus.ERRORED
    assert exposed.wait_released(BOUND), "the killed peer can't touch it any more"
    be_read_by(connector, healthy)


@pytest.mark.parametrize("stage", ["before contact", "after contact"])
def test_who_was_to_read_is_killed_and_the_owner_times_out(
    connector: connect.Connector, healthy: Peer, start: Callable[..., Peer], stage: str
) -> None:
    victim = start()
    if stage == "after contact":
        be_read_by(connector, victim)
    exposed = expose_here(connector, np.zeros(4096, np.uint8))
    exposed.metadata()
    victim.kill()
    ends_within(exposed, 0.5)
    be_read_by(connector, healthy)


def test_killed_after_completion_harms_nobody(
    connector: connect.Connector, healthy: Peer, start: Callable[..., Peer]
) -> None:
    victim = start()
    target = Buffer.make("numpy", 4096)
    told = expose_there(victim, 4096)
    reading = begin_here(connector, told, target.data)
    reading.wait(DEADLINE)
    be_read_by(connector, victim)
    victim.kill()
    assert reading.status is OperationStatus.COMPLETE
    assert digest(target.view) == digest(pattern(SEED, 4096))
    try:
        again = begin_here(connector, told, target.data)
    except PeerLostError:
        pass
    else:
        ends_within(again, BOUND)
    read_from(connector, healthy)
    be_read_by(connector, healthy)


def held_for_peers() -> tuple[int, int]:
    """How many sockets this process has open, and how many pages it shares with others."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    sockets = [link for link in links if link.is_symlink() and "socket:" in str(link.readlink())]
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "rw-s" in line]
    return len(sockets), len(shared)


@pytest.mark.parametrize("stage", ["while it reads", "while nobody waits for it"])
def test_a_dead_peer_is_forgotten(
    healthy: Peer, start: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A field report, E6: on disconnect, not when the next peer comes."""
    monkeypatch.setattr(liveness, "CENSUS_SECONDS", 0.25)
    with connect.Connector(timeout=DEADLINE) as connector:
        engine = connector.connection().engine
        read_from(connector, healthy)
        until(lambda: connector.statistics().live_registrations == 0)
        held = held_for_peers()
        victim = start()
        read_from(connector, victim)
        be_read_by(connector, victim)
        known = {one.identity.pid: one for one in engine.contacts.all() if one.identity is not None}
        remote = known[victim.pid]
        if stage == "while it reads":
            memory = np.zeros(LARGE, np.uint8)
            exposed = expose_here(connector, memory)
            begin_there(victim, exposed.metadata(), LARGE)
            until(lambda: exposed.status is not OperationStatus.INITIALIZED)
            victim.kill()
            assert exposed.wait_released(BOUND)
            del exposed, memory
        else:
            victim.kill()
        until(lambda: connector.statistics().remotes == 1)
        until(lambda: not engine.lost.lingering)
        with pytest.raises(MetadataError, match="isn't known"):
            engine.adapter.notify(remote.name, b"")
        gc.collect()
        until(lambda: connector.statistics().live_registrations == 0)
        assert connector.statistics().outstanding == 0
        assert held_for_peers() == held
        read_from(connector, healthy)


def test_a_stopped_owner_meets_the_deadline_and_works_again(
    connector: connect.Connector, start: Callable[..., Peer]
) -> None:
    peer = start()
    told = expose_there(peer, 4096)
    peer.stop()
    try:
        target = np.zeros(4096, np.uint8)
        ends_within(begin_here(connector, told, target), 0.5)
        assert not target.any()
    finally:
        peer.resume()
    read_from(connector, peer)


def test_a_stopped_reader_keeps_the_memory_until_it_goes_on(
    connector: connect.Connector, start: Callable[..., Peer]
) -> None:
    peer = start()
    exposed = expose_here(connector, np.zeros(LARGE, np.uint8))
    begin_there(peer, exposed.metadata(), LARGE)
    until(lambda: exposed.status is not OperationStatus.INITIALIZED)
    peer.stop()
    try:
        try:
            exposed.wait(0.5)
        except TransferTimeout:
            assert not exposed.wait_released(0.1)
    finally:
        peer.resume()
    assert exposed.wait_released(BOUND)
    be_read_by(connector, peer)


def test_a_peer_restarted_under_the_same_worker_id(
    connector: connect.Connector, start: Callable[..., Peer]
) -> None:
    for _ in range(2):
        peer = start("prefill-7")
        read_from(connector, peer)
        be_read_by(connector, peer)
        peer.kill()


_LEFT_OPEN = """
import asyncio, gc, sys
from torch_nixl import connect
import torch
owner, other = connect.Connector(), connect.Connector()
kept = []
async def main():
    for size in (8, 64 << 20):
        source, target = torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        exposed = await owner.create_readable(connect.Descriptor(source))
        told = exposed.metadata()
        kept.append(await other.begin_read(told, connect.Descriptor(target)))
        kept.append(exposed)
    kept.append(await owner.create_writable(connect.Descriptor(bytearray(8))))
    kept[-1].metadata()
    kept.append(kept)
    descriptor = connect.Descriptor(bytearray(8))
    descriptor.register_with_connector(owner.connection())
    kept.append(descriptor)
    await owner.create_readable(connect.Descriptor(bytearray(8)))
asyncio.run(main())
"""


def test_what_is_left_open_at_exit_leaves_no_word() -> None:
    started = time.monotonic()
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", _LEFT_OPEN],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **PATHS, "NIXL_LOG_LEVEL": "ERROR"},
        check=False,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    assert time.monotonic() - started < 30.0
