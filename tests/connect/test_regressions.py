"""Faults that a review of the connect classes proved, and that stay mended."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from connect.pairs import DEADLINE, Pair, bounded, describe, pattern
from torch_nixl import connect
from torch_nixl.engine import host, remotes
from torch_nixl.engine.grants import GrantState
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.errors import TransferError, TransferTimeout
from torch_nixl.testing import LoopbackConnector, LoopbackFabric

MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "resize": lambda tensor: tensor.resize_(1 << 20),
    "shrink": lambda tensor: tensor.untyped_storage().resize_(0),
    "share": lambda tensor: tensor.share_memory_(),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_descriptor_whose_storage_has_moved_is_refused(
    pair: Pair, move: Callable[[torch.Tensor], object]
) -> None:
    tensor = torch.full((1000,), 5.0)
    kept = connect.Descriptor(tensor)
    move(tensor)
    with pytest.raises(ValueError, match="moved or shrunk"):
        pair.readable(kept)
    with pytest.raises(ValueError, match="moved or shrunk"):
        pair.writable(kept)
    exposed = pair.readable(torch.zeros(1000))
    with pytest.raises(ValueError, match="moved or shrunk"):
        pair.read(exposed.metadata(), kept)
    with pytest.raises(ValueError, match="moved or shrunk"):
        kept.register_with_connector(pair.owner.connection())


def test_a_dropped_read_of_a_forgotten_connector_ends() -> None:
    owner = connect.Connector("owner")
    source, target = torch.arange(1 << 16), torch.zeros(1 << 16, dtype=torch.int64)
    exposed = connect.ReadableOperation(owner.connection(), connect.Descriptor(source))

    def read_and_forget() -> None:
        other = connect.Connector("other")
        connect.ReadOperation(other.connection(), exposed.metadata(), connect.Descriptor(target))

    read_and_forget()
    gc.collect()
    exposed.wait(DEADLINE)
    assert torch.equal(source, target)
    owner.close()


EXITS = {
    "a daemon thread opens a connection": """
import threading, time
from torch_nixl.engine import host
connector = connect.Connector("a")
opening = threading.Thread(target=connector.connection, daemon=True)
opening.start()
while opening.is_alive() and not host._num_opening:
    time.sleep(0.001)
""",
    "an operation is published": """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
connector = connect.Connector("a")
operation = connect.ReadableOperation(connector.connection(), connect.Descriptor(torch.ones(4)))
connect.publish(store, "key", operation)
""",
}


@pytest.mark.parametrize("program", EXITS.values(), ids=EXITS)
def test_exit_is_clean_while(program: str) -> None:
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", f"import torch\nfrom torch_nixl import connect\n{program}"],
            capture_output=True,
            timeout=60,
            env={
                **os.environ,
                "NIXL_LOG_LEVEL": "FATAL",
                "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
            },
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_more_stretches_than_metadata_can_name_are_refused_at_once(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"1000000 stretches.*contiguous"):
        pair.readable(torch.zeros(1000, 1000).t())


def test_fetch_takes_torchs_own_timeouts_and_refuses_none_that_are_none() -> None:
    store = HashStore()
    with pytest.raises(TimeoutError):
        connect.fetch(store, "key", timeout=timedelta(milliseconds=10))
    for timeout in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            connect.fetch(store, "key", timeout=timeout)


def test_a_bad_timeout_ends_nothing(pair: Pair) -> None:
    exposed = pair.readable(torch.ones(10))
    for timeout in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            bounded(exposed.wait_for_completion(timeout=timeout))
        with pytest.raises(ValueError, match="timeout"):
            exposed.cancel(timeout=timeout)
    assert exposed.status is connect.OperationStatus.INITIALIZED
    reading = pair.read(exposed.metadata(), torch.zeros(10))
    reading.wait(DEADLINE)
    exposed.wait(DEADLINE)


def test_a_descriptor_outlives_the_connection_it_was_registered_with(pair: Pair) -> None:
    descriptor = connect.Descriptor(torch.ones(4))
    with connect.Connector("short") as connector:
        descriptor.register_with_connector(connector.connection())
        registered = [descriptor.is_registered]
    registered.append(descriptor.is_registered)
    descriptor.register_with_connector(pair.owner.connection())
    registered.append(descriptor.is_registered)
    assert registered == [True, False, True]
    descriptor.deregister_with_connector(pair.owner.connection())


def test_threads_that_register_one_descriptor_register_it_once() -> None:
    # A Connector of its own: what tests before have left with another goes at any time.
    with connect.Connector("threads") as connector:
        connection = connector.connection()
        for _ in range(50):
            descriptor = describe((torch.ones(64).data_ptr(), 16))
            threads = [
                threading.Thread(target=descriptor.register_with_connector, args=(connection,))
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert connection.engine.statistics().live_registrations == 1
            descriptor.deregister_with_connector(connection)
            assert connection.engine.statistics().live_registrations == 0


def test_an_operation_that_has_ended_is_not_published(pair: Pair) -> None:
    exposed = pair.readable(torch.ones(4))
    exposed.metadata()
    exposed.cancel()
    with pytest.raises(TransferError, match="ended"):
        connect.publish(HashStore(), "key", exposed)


def test_a_descriptor_is_not_pickled() -> None:
    with pytest.raises(TypeError, match="metadata"):
        pickle.dumps(connect.Descriptor(torch.ones(4)))


def test_memory_of_a_dead_peer_is_kept_until_what_it_sent_has_ended_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TCP this process reads and writes for the dead one: to free the memory at once kills."""
    fabric = LoopbackFabric()
    owner = LoopbackConnector(fabric, "owner", timeout=DEADLINE)
    reader = LoopbackConnector(fabric, "reader", timeout=DEADLINE)
    two = Pair(owner, reader)
    monkeypatch.setattr(remotes, "SETTLING_LOOKS", 1 << 30)
    # It dies before it has said how it ended.
    monkeypatch.setattr(PassiveOperation, "on_done", lambda self, remote, frame: None)
    exposed = two.readable(pattern(64))
    reading = two.read(exposed.metadata(), bytearray(64))
    engine = owner.connection().engine
    passive = exposed._passive
    reading.wait(DEADLINE)
    assert passive.grant.state is GrantState.GRANTED
    monkeypatch.setattr(host, "is_alive", lambda identity: False)
    with pytest.raises(TransferTimeout):
        exposed.cancel(timeout=0.2)
    assert passive.remote is not None and engine.liveness.is_gone(passive.remote)
    assert passive.memories and not passive.released
    monkeypatch.setattr(remotes, "SETTLING_LOOKS", 3)
    assert exposed.wait_released(DEADLINE)
    for one in (owner, reader):
        one.abort()
