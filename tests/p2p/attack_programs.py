"""Two ranks, of which one is killed or stopped at every stage of a message.

One process forks both for each scenario, and never uses NIXL itself: to import torch afresh for
each would take most of the time.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import FileStore

import torch_nixl
from p2p.programs import make
from torch_nixl.p2p import protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import Rank

HUGE = 1 << 24
"""Elements of float32 in 64 MiB."""

STAGES = ("contact", "offer", "transfer", "after")
PR_SET_PDEATHSIG = 1


def scenarios(
    rank: Rank, signs: tuple[int, ...], repeats: int, stages: tuple[str, ...]
) -> dict[str, str]:
    """Run every scenario with these signals; return what went wrong, by scenario."""
    wrong = {}
    for repeat, stage, role, sign in itertools.product(
        range(repeats), stages, ("sends", "receives"), signs
    ):
        name = f"{stage}, the victim {role}, {signal.Signals(sign).name}, {repeat}"
        directory = rank.directory / name
        directory.mkdir()
        told = _scenario(directory, sign, stage, role)
        if told:
            wrong[name] = told
    return wrong


def _scenario(directory: Path, sign: int, stage: str, role: str) -> str:
    victim = _fork(directory, 1, lambda rank: _victim(rank, sign, stage, role))
    survivor = _fork(directory, 0, lambda rank: _survivor(rank, victim, sign, stage, role))
    deadline = time.monotonic() + 40
    ended = 0
    while not ended and time.monotonic() < deadline:
        ended, _ = os.waitpid(survivor, os.WNOHANG)
        time.sleep(0.01)
    for pid in (victim, *(() if ended else (survivor,))):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    output = directory / "0.output"
    told = output.read_text() if output.exists() else "it said nothing"
    return "" if told == "well" else told if ended else f"hung; {told}"


def _fork(directory: Path, number: int, program: Callable[[Rank], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    told = "well"
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        program(Rank(number, 2, directory))
    except BaseException:  # noqa: BLE001 - a forked child must not return
        told = traceback.format_exc()
    finally:
        (directory / f"{number}.output").write_text(told)
        os._exit(0)


def _victim(rank: Rank, sign: int, stage: str, role: str) -> None:
    communicator = make(rank)
    me = os.getpid()
    if stage == "contact":
        os.kill(me, sign)
    else:
        communicator.send(torch.tensor(1), 0)
        communicator.recv(0)
    if stage == "offer":
        if role == "sends":
            communicator.isend(torch.ones(HUGE), 0, timeout=5)
            communicator.isend(torch.tensor(2), 0, tag=2)
        assert int(communicator.recv(0, tag=3)) == 3
        os.kill(me, sign)
    elif stage == "transfer":
        tensor = torch.ones(HUGE)
        try:
            while True:
                if role == "sends":
                    communicator.send(tensor, 0, timeout=2)
                else:
                    communicator.recv(0, out=tensor, timeout=2)
        except torch_nixl.TransferError:
            pass
    elif stage == "after":
        if role == "sends":
            communicator.send(torch.ones(HUGE), 0)
            communicator.send(torch.tensor(2), 0, tag=2)
        else:
            assert bool((communicator.recv(0) == 1).all())
        assert int(communicator.recv(0, tag=3)) == 3
        os.kill(me, sign)
    # Stopped, and gone on: what timed out at the other side must not stand in the way.
    received = communicator.recv(0, tag=9)
    communicator.send(received + 1, 0, tag=9)
    communicator.close()
    while True:
        signal.pause()


def _survivor(rank: Rank, victim: int, sign: int, stage: str, role: str) -> None:
    kills = sign == signal.SIGKILL
    communicator = make(rank, timeout=30.0 if kills else 0.5)
    if stage != "contact":
        communicator.recv(1, timeout=30)
        communicator.send(torch.tensor(1), 1)
    out = torch.zeros(HUGE)
    works: list[torch_nixl.Work] = []
    if stage == "offer" and role == "sends":
        communicator.probe(1, timeout=30)
        communicator.probe(1, tag=2, timeout=30)
    elif stage == "offer":
        works = [communicator.isend(torch.ones(HUGE), 1)]
    elif stage == "after" and role == "sends":
        assert bool((communicator.recv(1, out=out, timeout=30) == 1).all())
        communicator.probe(1, tag=2, timeout=30)
    elif stage == "after":
        communicator.send(torch.ones(HUGE), 1, timeout=30)
    if stage in ("offer", "after"):
        communicator.send(torch.tensor(3), 1, tag=3)
    if stage == "transfer":
        works = [_stream(communicator, victim, sign, role, out)]
    _await_signal(victim, kills=kills)
    started = time.monotonic()
    if stage in ("offer", "after") and role == "sends":
        # What has arrived whole is there, whatever became of its sender.
        assert int(communicator.recv(1, tag=2)) == 2
    calls: list[Callable[[], torch_nixl.Work]] = [
        lambda: communicator.irecv(1, out=out),
        lambda: communicator.irecv(1, tag=8),
        lambda: communicator.isend(torch.ones(HUGE), 1, tag=8),
    ]
    if role == "receives":
        calls.reverse()
    errors = []
    for call in calls:
        # A loss that is known already shows at once.
        error = _error(lambda call=call: works.append(call()))  # type: ignore[misc]
        if error is not None:
            errors.append(error)
    for error in (*errors, *(_error(work.wait) for work in works)):
        if kills:
            assert isinstance(error, torch_nixl.PeerLostError), error
            assert error.rank == 1
        else:
            assert isinstance(error, torch_nixl.TransferTimeout), error
    assert time.monotonic() - started < 5
    if not kills:
        os.kill(victim, signal.SIGCONT)
        communicator.send(torch.tensor(5), 1, tag=9, timeout=30)
        assert int(communicator.recv(1, tag=9, timeout=30)) == 6
    for work in works:
        assert work.wait_released(10), work
    before = out.clone()
    started = time.monotonic()
    communicator.close()
    assert time.monotonic() - started < 5
    assert torch.equal(out, before)


def _stream(
    communicator: Communicator, victim: int, sign: int, role: str, out: torch.Tensor
) -> torch_nixl.Work:
    """Move large messages until the victim, which is hit at some moment, moves no more."""
    tensor = torch.ones(HUGE)
    for turn in range(1_000_000):
        if role == "sends":
            work = communicator.irecv(1, out=out, timeout=2)
        else:
            work = communicator.isend(tensor, 1, timeout=2)
        if turn == 2:
            threading.Timer(random.random() * 0.05, os.kill, (victim, sign)).start()
        if _error(work.wait) is not None:
            return work
    raise AssertionError("the victim lives")


def _await_signal(victim: int, *, kills: bool) -> None:
    deadline = time.monotonic() + 30
    while True:
        with open(f"/proc/{victim}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        if state == ("Z" if kills else "T"):
            return
        assert time.monotonic() < deadline, state
        time.sleep(0.005)


def _error(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except torch_nixl.TransferError as error:
        return error
    return None


def restarts(rank: Rank, count: int) -> tuple[list[int], str]:
    """Rank 1 is killed and started again over one store, time and again; keys after each."""
    keys: list[int] = []
    # Held throughout: the first FileStore on a file that ends leaves a key of its own there.
    store = FileStore(str(rank.directory / "store"), 2)
    for turn in range(count):
        victim = _fork(rank.directory, 1, _serve)
        survivor = _fork(rank.directory, 0, lambda one, victim=victim: _use(one, victim))  # type: ignore[misc]
        os.waitpid(survivor, 0)
        os.waitpid(victim, 0)
        told = (rank.directory / "0.output").read_text()
        if told != "well":
            return keys, f"turn {turn}: {told}"
        keys.append(store.num_keys())
    return keys, ""


def _serve(rank: Rank) -> None:
    communicator = make(rank)
    while True:
        communicator.send(communicator.recv(0), 0)


def _use(rank: Rank, victim: int) -> None:
    with make(rank) as communicator:
        try:
            for count in (1, HUGE):
                work = communicator.isend(torch.ones(count), 1)
                assert bool((communicator.recv(1) == 1).all())
                work.wait()
            work = communicator.irecv(1)
        finally:
            os.kill(victim, signal.SIGKILL)
        assert isinstance(_error(work.wait), torch_nixl.PeerLostError)


def rounds(rank: Rank, count: int) -> tuple[int, int]:
    """Many rounds of all kinds of messages; return how many files and bytes they cost."""
    with make(rank, timeout=100.0) as communicator:
        other = 1 - rank.rank
        sizes = (0, 1, 100, 5000, protocol.EAGER_NBYTES // 4 + 1, 100_000)
        rng = random.Random(1)  # The same on both sides.
        out = torch.empty(max(sizes))
        before = (0, 0)
        for turn in range(count):
            if turn == min(500, count // 2):
                before = _files_and_memory()
            size = rng.choices(sizes, (3, 20, 20, 20, 1, 1))[0]
            tag, way = rng.randrange(3), rng.randrange(4)
            sent = torch.full((size,), float(turn % 1000) + rank.rank)
            if way == 0:
                work = communicator.isend(sent, other, tag=tag)
                received = communicator.recv(other, tag=tag)
            elif way == 1:
                receive = communicator.irecv(other, out=out[:size], tag=tag)
                work = communicator.isend(sent, other, tag=tag)
                receive.wait()
                received = out[:size]
            elif way == 2:
                work = communicator.isend(sent, other, tag=tag)
                received = communicator.recv(tag=tag, out=out[:size])
            else:
                work = communicator.isend(sent, other, tag=tag)
                assert communicator.probe(other, tag=tag).shape == (size,)
                received = communicator.recv(tag=tag)
            assert received.shape == (size,)
            assert bool((received == turn % 1000 + other).all()), turn
            work.wait()
        files, memory = _files_and_memory()
        assert communicator.statistics().outstanding == 0
        assert communicator.statistics().unexpected == 0
        return files - before[0], memory - before[1]


def _files_and_memory() -> tuple[int, int]:
    with open("/proc/self/statm") as file:
        return len(os.listdir("/proc/self/fd")), int(file.read().split()[1]) * 4096
