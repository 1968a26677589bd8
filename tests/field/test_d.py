"""Field reports, group D: hangs, by death, abort, timeouts and batches. Here: ranks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import FileStore

import torch_nixl
from field import rank_programs
from field.two import DEADLINE, LARGE, Two, two_ranks
from torch_nixl.engine.connection import Connection
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import RankPool, RanksFailed, run_ranks

HUGE = 1 << 24
"""Elements of float32 in 64 MiB."""


@pytest.mark.parametrize("mover", ["receiver", "sender"])
def test_d1_a_failed_transfer_is_told_to_the_other_side(
    mover: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise torch_nixl.TransferError("scripted")

    # Over CMA the receiver reads, so it is the sender that has to be told. Over TCP the sender
    # writes.
    if mover == "sender":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    with two_ranks() as two:
        work = two.a.isend(torch.zeros(LARGE), 1)
        two.b.probe(0)
        with monkeypatch.context() as patch:
            moving = two.a if mover == "sender" else two.b
            patch.setattr(moving.connection.adapter, "prepare", refuse)
            started = time.monotonic()
            with pytest.raises(torch_nixl.TransferError, match="scripted"):
                two.b.recv(0)
            with pytest.raises(torch_nixl.TransferError, match="scripted"):
                work.wait()
            assert time.monotonic() - started < 2
        assert torch.equal(two.move(torch.ones(LARGE)), torch.ones(LARGE))


def test_d2_killed_in_the_middle_of_the_handshake(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_pool.run(rank_programs.killed_in_handshake, world_size=2)
    assert list(caught.value.failures) == [1], caught.value


@pytest.mark.parametrize("count", [10, LARGE], ids=["small", "large"])
def test_d4_completion_shows_without_a_wait(two: Two, count: int) -> None:
    delays = []
    for _ in range(5):
        receive = two.b.irecv(0)
        assert not receive.is_completed()
        send = two.a.isend(torch.ones(count), 1)
        started = time.monotonic()
        while not (receive.is_completed() and send.is_completed()):
            assert time.monotonic() - started < DEADLINE
            time.sleep(0.001)
        delays.append(time.monotonic() - started)
    assert min(delays) < 0.1


def test_d5_isend_does_not_wait_for_a_receive(two: Two) -> None:
    tensor = torch.ones(HUGE)
    delays = []
    works = []
    for _ in range(5):
        started = time.monotonic()
        works.append(two.a.isend(tensor, 1))
        delays.append(time.monotonic() - started)
    assert min(delays) < 0.02
    for work in works:
        assert not work.is_completed()
        two.b.recv(0)
        work.wait(DEADLINE)


def test_d6_both_send_first(rank_pool: RankPool) -> None:
    assert rank_pool.run(rank_programs.both_send_first, world_size=2) == [True, True]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the later one first"])
def test_d8_one_that_is_not_matched_does_not_block_the_others(
    two: Two, order: tuple[int, int]
) -> None:
    outs = [torch.zeros(LARGE) for _ in order]
    receives = two.b.batch_isend_irecv(
        [SimpleNamespace(op="irecv", tensor=out, peer=0, tag=tag) for tag, out in enumerate(outs)]
    )
    for tag in order:
        assert not receives[tag].is_completed()
        two.a.isend(torch.full((LARGE,), 1.0 + tag), 1, tag=tag).wait(DEADLINE)
        receives[tag].wait(DEADLINE)
        assert bool((outs[tag] == 1 + tag).all())


def test_d9_a_batch_does_not_wait_for_the_slowest_rank(rank_pool: RankPool) -> None:
    assert rank_pool.run(rank_programs.chain_of_batches, world_size=3) == [True] * 3


@pytest.mark.parametrize("count", [10, LARGE], ids=["small", "large"])
def test_d10_several_tags_waited_for_in_reverse(two: Two, count: int) -> None:
    sends = [two.a.isend(torch.full((count,), float(tag)), 1, tag=tag) for tag in range(3)]
    receives = [two.b.irecv(0, tag=tag) for tag in range(3)]
    for tag in (2, 1, 0):
        received = receives[tag].result(DEADLINE)
        assert received is not None
        assert bool((received == tag).all())
        sends[tag].wait(DEADLINE)


@pytest.mark.parametrize("ending", ["return", "exception", "at once"])
def test_d11_the_sender_ends_with_sends_unfinished(tmp_path: Path, ending: str) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    program = Path(__file__).with_name("leaving.py")
    sender = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "store"), ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with Communicator(store, 1, 2, timeout=60, connection=Connection.open("stays")) as rank:
            assert torch.equal(rank.recv(0), torch.eye(4))
            (tmp_path / "go").touch()
            # The large one may arrive while the other interpreter ends, or fail; never hang.
            started = time.monotonic()
            large = rank.irecv(0, tag=1)
            with contextlib.suppress(torch_nixl.PeerLostError):
                large.wait()
            received = large.result() if large.is_success() else torch.ones(1)
            assert received is not None
            assert bool((received == 1).all())
            with pytest.raises(torch_nixl.PeerLostError):
                rank.recv(0, tag=2)
            assert time.monotonic() - started < 15
            rank.connection.abort()
        _, told = sender.communicate(timeout=30)
    finally:
        sender.kill()
        sender.wait()
    assert sender.returncode == (1 if ending == "exception" else 0), told
    assert ("RuntimeError: as planned" in told) == (ending == "exception")
    for bad in ("Fatal", "Exception ignored", "Segmentation", "terminate called"):
        assert bad not in told


def test_d12_closed_straight_after_a_large_send() -> None:
    with two_ranks() as two, ThreadPoolExecutor() as pool:
        sent = torch.arange(1 << 26, dtype=torch.int32)
        work = two.a.isend(sent, 1)
        closing = pool.submit(two.a.close)
        received = two.b.recv(0)
        closing.result(DEADLINE)
        assert torch.equal(received, sent)
        assert work.is_success()


def test_d13_a_rank_sends_to_itself(two: Two) -> None:
    for count in (3, LARGE):
        two.a.send(torch.ones(count), 0)
        assert torch.equal(two.a.recv(0), torch.ones(count))


@pytest.mark.parametrize("count", [10, LARGE], ids=["small", "large"])
def test_d14_all_to_all_by_hand_with_the_own_rank(two: Two, count: int) -> None:
    works, outs = [], {}
    for rank, communicator in enumerate((two.a, two.b)):
        outs[rank] = [torch.zeros(count) for _ in range(2)]
        batch = []
        for peer in range(2):
            value = torch.full((count,), 10.0 * rank + peer)
            batch.append(SimpleNamespace(op="isend", tensor=value, peer=peer, tag=0))
            batch.append(SimpleNamespace(op="irecv", tensor=outs[rank][peer], peer=peer, tag=0))
        works += communicator.batch_isend_irecv(batch)
    for work in works:
        work.wait(DEADLINE)
    for rank in range(2):
        assert [float(out[-1]) for out in outs[rank]] == [rank, 10.0 + rank]


def test_d16_before_anything_says_which_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    started = time.monotonic()
    with pytest.raises(ValueError, match="store=, rank= and world_size="):
        torch_nixl.recv_tensor(src=0)
    assert time.monotonic() - started < 1


def test_d19_both_send_more_than_the_other_has_room_for(two: Two) -> None:
    count = 600
    sides = ((two.a, 1), (two.b, 0))
    works = [
        [side.isend(torch.full((2000,), float(turn)), other) for turn in range(count)]
        for side, other in sides
    ]
    assert two.a.statistics().queued > 0
    for side, other in sides:
        for turn in range(count):
            assert float(side.recv(other)[-1]) == turn
    for work in (*works[0], *works[1]):
        work.wait(DEADLINE)


def test_d21_eight_agents_start_at_once(rank_pool: RankPool) -> None:
    assert rank_pool.run(rank_programs.start_at_once, args=(2,), world_size=4) == [2] * 4


def test_d21_eight_threads_start_agents_at_once() -> None:
    barrier = threading.Barrier(8)

    def start(number: int) -> str:
        barrier.wait(DEADLINE)
        with Connection.open(f"thread{number}") as connection:
            return connection.name

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(start, range(8), timeout=60))
    assert len(set(names)) == 8


def test_d23_others_abort_while_one_is_stopped(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(rank_programs.abort_beside_a_stopped_rank, world_size=3))


def test_d25_killed_in_mid_transfer_without_registration_cache() -> None:
    environment = {"UCX_MEM_EVENTS": "n", "UCX_MEM_MMAP_HOOK_MODE": "none"}
    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank_programs.killed_in_mid_transfer, 2, env=environment)
    assert list(caught.value.failures) == [1], caught.value


def test_d27_an_idle_peer_is_killed(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_pool.run(rank_programs.killed_while_idle, world_size=2)
    assert list(caught.value.failures) == [1], caught.value
