"""Killing, stopping and leaving at every stage of an operation, between processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from stopping import stop_process

from torch_nixl._testing.rank_worker import Rank
from torch_nixl.engine import transfer
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.offer import Offer
from torch_nixl.errors import PeerLostError, TransferCancelled, TransferTimeout
from torch_nixl.testing import RankPool, RanksFailed

READ, WRITE = Direction.READ, Direction.WRITE
NBYTES = 256 << 20
TRANSPORTS = pytest.mark.parametrize("transport", ["cma", "tcp"])


def environment(transport: str) -> dict[str, str]:
    quiet = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
    return {**quiet, "UCX_TLS": "tcp,self"} if transport == "tcp" else quiet


def in_small_pieces() -> None:
    """Have transfers take many posts, so that there is a middle to be killed in."""
    transfer.LONG_PIECE_BYTES = transfer.PIECE_BYTES


def put(store: dist.Store, key: str, value: object) -> None:
    store.set(key, json.dumps(value))


def get(store: dist.Store, key: str) -> object:
    return json.loads(store.get(key))


def hand_over(connection: Connection, store: dist.Store, offer: Offer, key: str = "offer") -> None:
    store.set(key, offer.pack(key=None).hex())
    put(store, f"{key}-pid", os.getpid())


def take(connection: Connection, store: dist.Store, key: str = "offer") -> tuple[Offer, int]:
    pid = get(store, f"{key}-pid")
    assert isinstance(pid, int)
    data = bytes.fromhex(store.get(key).decode())
    return Offer.unpack(data, key=None, parse_metadata=connection.adapter.inspect), pid


def killed(pool: RankPool, function: Callable[..., None], victim: int, transport: str) -> None:
    """Run a function in which `victim` is killed: all others must end well, and soon."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(function, world_size=2, timeout=40, env=environment(transport))
    assert set(failed.value.failures) == {victim}, str(failed.value)
    assert "SIGKILL" in failed.value.failures[victim]


def reads_from_an_owner_that_is_killed_before_contact(rank: Rank) -> None:
    store = rank.store()
    connection = Connection.open("w", timeout=5)
    if rank.rank == 0:
        exposed = connection.expose(READ, [tensor_memory(torch.ones(100))])
        hand_over(connection, store, exposed.offer())
        store.get("killed")
        return
    offer, pid = take(connection, store)
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises((PeerLostError, TransferTimeout)):
        connection.claim(offer, [tensor_memory(torch.zeros(100))], timeout=3).wait()
    assert time.monotonic() - started < 4
    connection.close()


def reads_from_an_owner_that_is_killed_in_mid_transfer(rank: Rank) -> None:
    in_small_pieces()
    store = rank.store()
    connection = Connection.open("w", timeout=20)
    source = torch.ones(NBYTES, dtype=torch.uint8)
    if rank.rank == 0:
        exposed = connection.expose(READ, [tensor_memory(source)])
        hand_over(connection, store, exposed.offer())
        exposed.wait()
        return
    offer, pid = take(connection, store)
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    active = connection.claim(offer, [tensor_memory(target)])
    connection.progress.wait_until(lambda: active.moved_nbytes > 0, time.monotonic() + 10)
    assert not active.done
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as lost:
        active.wait()
    assert time.monotonic() - started < 2
    assert lost.value.remote == offer.owner
    assert active.wait_released(2)
    assert connection.statistics().remotes == 0
    connection.close()


def exposes_to_a_reader_that_is_killed_in_mid_transfer(rank: Rank) -> None:
    in_small_pieces()
    store = rank.store()
    connection = Connection.open("w", timeout=20)
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    if rank.rank == 0:
        exposed = connection.expose(WRITE, [tensor_memory(memory)])
        hand_over(connection, store, exposed.offer())
        with pytest.raises(PeerLostError):
            exposed.wait()
        assert exposed.wait_released(3)
        store.set("seen", "1")
        connection.close()
        return
    offer, _ = take(connection, store)
    active = connection.claim(offer, [tensor_memory(memory)])
    connection.progress.wait_until(lambda: active.moved_nbytes > 0, time.monotonic() + 10)
    os.kill(os.getpid(), signal.SIGKILL)


def exposes_to_a_writer_that_is_killed_when_done(rank: Rank) -> None:
    store = rank.store()
    connection = Connection.open("w", timeout=20)
    memory = torch.zeros(100)
    if rank.rank == 0:
        exposed = connection.expose(WRITE, [tensor_memory(memory)])
        hand_over(connection, store, exposed.offer())
        exposed.wait()
        assert memory.all()
        store.set("seen", "1")
        # A second one finds nobody, and others can still be served.
        alone = connection.expose(READ, [tensor_memory(memory)], timeout=0.5)
        with pytest.raises(TransferTimeout):
            alone.wait()
        own = connection.expose(READ, [tensor_memory(memory)])
        connection.claim(own.offer(), [tensor_memory(torch.zeros(100))]).wait()
        connection.close()
        return
    offer, _ = take(connection, store)
    connection.claim(offer, [tensor_memory(torch.ones(100))]).wait()
    store.get("seen")
    os.kill(os.getpid(), signal.SIGKILL)


@TRANSPORTS
@pytest.mark.parametrize(
    ("function", "victim"),
    [
        (reads_from_an_owner_that_is_killed_before_contact, 0),
        (reads_from_an_owner_that_is_killed_in_mid_transfer, 0),
        (exposes_to_a_reader_that_is_killed_in_mid_transfer, 1),
        (exposes_to_a_writer_that_is_killed_when_done, 1),
    ],
)
def test_the_survivor_of_a_kill_learns_of_it(
    function: Callable[[Rank], None], victim: int, transport: str
) -> None:
    with RankPool(2) as pool:
        killed(pool, function, victim, transport)


def reads_from_an_owner_that_is_stopped(rank: Rank) -> None:
    store = rank.store()
    connection = Connection.open("w", timeout=20)
    source = torch.arange(1000.0)
    if rank.rank == 0:
        for key in ("first", "second", "third"):
            exposed = connection.expose(READ, [tensor_memory(source)])
            hand_over(connection, store, exposed.offer(), key)
        store.get("over")
        connection.close()
        return
    offer, pid = take(connection, store, "first")
    connection.claim(offer, [tensor_memory(torch.zeros(1000))]).wait()
    offer, _ = take(connection, store, "second")
    third, _ = take(connection, store, "third")
    stop_process(pid)
    try:
        started = time.monotonic()
        late = connection.claim(offer, [tensor_memory(torch.zeros(1000))], timeout=0.5)
        with pytest.raises(TransferTimeout):
            late.wait()
        assert time.monotonic() - started < 2
    finally:
        os.kill(pid, signal.SIGCONT)
    assert late.wait_released(5)
    target = torch.zeros(1000)
    connection.claim(third, [tensor_memory(target)]).wait()
    assert torch.equal(source, target)
    store.set("over", "1")
    connection.close()


def exposes_to_a_reader_that_is_stopped(rank: Rank) -> None:
    in_small_pieces()
    store = rank.store()
    connection = Connection.open("w", timeout=20)
    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    if rank.rank == 0:
        exposed = connection.expose(READ, [tensor_memory(memory)])
        hand_over(connection, store, exposed.offer())
        pid = get(store, "reader")
        assert isinstance(pid, int)
        connection.progress.wait_until(lambda: exposed.remote is not None, time.monotonic() + 10)
        stop_process(pid)
        try:
            started = time.monotonic()
            with pytest.raises(TransferTimeout):
                exposed.wait(0.5)
            assert time.monotonic() - started < 2
            # It may go on reading once it runs again, so the memory is not given back yet.
            assert not exposed.wait_released(0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert exposed.wait_released(15)
        store.set("over", "1")
        connection.close()
        return
    offer, _ = take(connection, store)
    put(store, "reader", os.getpid())
    active = connection.claim(offer, [tensor_memory(memory)])
    # Either it was still moving, and then it must report failure, or it had ended before.
    with contextlib.suppress(TransferCancelled):
        active.wait()
    store.get("over")
    connection.close()


@TRANSPORTS
@pytest.mark.parametrize(
    "function", [reads_from_an_owner_that_is_stopped, exposes_to_a_reader_that_is_stopped]
)
def test_a_stopped_peer_is_a_timeout_and_can_come_back(
    rank_pool: RankPool, function: Callable[[Rank], None], transport: str
) -> None:
    rank_pool.run(function, world_size=2, timeout=50, env=environment(transport))


def talks_to_two_owners_of_which_one_dies(rank: Rank) -> None:
    store = rank.store()
    connection = Connection.open("w", timeout=20)
    source = torch.full((1000,), float(rank.rank))
    if rank.rank != 2:
        for index in range(3):
            exposed = connection.expose(READ, [tensor_memory(source)])
            hand_over(connection, store, exposed.offer(), f"{rank.rank}-{index}")
        store.get("over")
        connection.close()
        return
    for index in range(3):
        if index == 1:
            os.kill(take(connection, store, "0-0")[1], signal.SIGKILL)
        for owner in (0, 1):
            target = torch.full((1000,), -1.0)
            offer, _ = take(connection, store, f"{owner}-{index}")
            try:
                connection.claim(offer, [tensor_memory(target)], timeout=5).wait()
            except PeerLostError:
                assert owner == 0
                assert index > 0
            else:
                assert (target == owner).all()
    store.set("over", "1")
    connection.close()


def test_the_loss_of_one_peer_leaves_the_others_alone() -> None:
    with RankPool(3) as pool, pytest.raises(RanksFailed) as failed:
        pool.run(talks_to_two_owners_of_which_one_dies, timeout=40, env=environment("cma"))
    assert set(failed.value.failures) == {0}, str(failed.value)


LEAVER = """
import os, sys, threading, torch
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
connection = Connection.open("leaver")
other = Connection.open("other")
exposed = connection.expose(Direction.READ, [tensor_memory(torch.ones(1 << 24))])
active = other.claim(exposed.offer(), [tensor_memory(torch.zeros(1 << 24))])
unclaimed = connection.expose(Direction.READ, [tensor_memory(torch.ones(10))])
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "sys.exit(0)",
        "del connection, other, exposed, active, unclaimed; import gc; gc.collect()",
        "threading.Thread(target=lambda: unclaimed.wait(0.3) if False else None).start()",
        "connection.abort(); other.close()",
        "other.abort()",
    ],
)
def test_exit_with_work_outstanding_is_silent(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEAVER.format(end=end)],
        capture_output=True,
        timeout=60,
        env={**os.environ, **environment("cma"), "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


FORKER = """
import os, sys, torch
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.errors import BackendError, ClosedError
owner, reader = Connection.open("owner"), Connection.open("reader")

def read(owner, reader):
    target = torch.zeros(100)
    exposed = owner.expose(Direction.READ, [tensor_memory(torch.ones(100))])
    reader.claim(exposed.offer(), [tensor_memory(target)]).wait(10)
    exposed.wait(10)
    assert target.all()

read(owner, reader)
pid = os.fork()
if pid == 0:
    try:
        owner.expose(Direction.READ, [tensor_memory(torch.ones(1))])
    except ClosedError as error:
        assert "fork" in str(error)
    try:
        Connection.open("mine")
    except BackendError as error:
        assert "spawn" in str(error)
        sys.exit(7)
    sys.exit(1)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
read(owner, reader)
"""


def test_a_forked_child_is_refused_and_the_parent_unharmed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKER],
        capture_output=True,
        timeout=60,
        env={**os.environ, **environment("cma"), "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
