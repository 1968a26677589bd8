"""What the ranks of group D run: sent by name to processes of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from stopping import stop_process

import torch_nixl
from field.two import LARGE
from torch_nixl.engine.connection import Connection
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import Rank

HUGE = 1 << 26
"""Elements of float32 in 256 MiB."""


def make(rank: Rank, timeout: float = 30.0) -> Communicator:
    return Communicator(rank.store(), rank.rank, rank.world_size, timeout=timeout)


def lost(call: Callable[[], object]) -> int | None:
    """The rank that a call finds lost."""
    try:
        call()
    except torch_nixl.PeerLostError as error:
        return error.rank
    raise AssertionError("no error")


def await_path(rank: Rank, name: str) -> str:
    path = rank.directory / name
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{name} never came"
        time.sleep(0.005)
    return path.read_text()


def killed_in_handshake(rank: Rank) -> None:
    """Rank 1 is stopped once it can be reached, and killed when rank 0 has said HELLO to it."""
    communicator = make(rank)
    if rank.rank == 1:
        (rank.directory / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    pid = int(await_path(rank, "pid"))
    while _state(pid) != "T":
        time.sleep(0.005)
    works = [communicator.isend(torch.zeros(3), 1), communicator.isend(torch.zeros(LARGE), 1)]
    works.append(communicator.irecv(1))
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    # The small one has left, as far as rank 0 can tell.
    assert [lost(work.wait) for work in works[1:]] == [1, 1]
    assert lost(lambda: communicator.recv(1)) == 1
    assert time.monotonic() - started < 5
    communicator.close()


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def both_send_first(rank: Rank) -> bool:
    """Both ranks isend, then irecv; then both send at once, which can't work and times out."""
    with make(rank) as communicator:
        other = 1 - rank.rank
        sent, out = torch.full((1 << 22,), float(rank.rank)), torch.empty(1 << 22)
        for _ in range(30):
            works = [communicator.isend(sent, other), communicator.irecv(other, out=out)]
            for work in works:
                work.wait()
            assert float(out[-1]) == other
        started = time.monotonic()
        try:
            communicator.send(sent, other, tag=1, timeout=0.5)
        except torch_nixl.TransferTimeout:
            assert time.monotonic() - started < 10
        else:
            return False
        communicator.isend(torch.tensor(1), other, tag=2)
        communicator.recv(other, tag=2)
        assert communicator.iprobe(other, tag=1) is None, "what timed out is withdrawn"
    return True


def chain_of_batches(rank: Rank) -> bool:
    """Rank 2 receives from 0 and 1; 1 sends only after it got from 2 what came from 0."""
    with make(rank) as communicator:
        if rank.rank == 0:
            communicator.send(torch.full((LARGE,), 7.0), 2)
        elif rank.rank == 1:
            communicator.send(communicator.recv(2), 2)
        else:
            outs = [torch.zeros(LARGE) for _ in range(2)]
            batch = [
                SimpleNamespace(op="irecv", tensor=out, peer=peer, tag=0)
                for peer, out in enumerate(outs)
            ]
            works = communicator.batch_isend_irecv(batch)
            works[0].wait()
            communicator.send(outs[0], 1)
            works[1].wait()
            assert torch.equal(outs[0], outs[1])
            assert float(outs[1][-1]) == 7.0
    return True


def start_at_once(rank: Rank, count: int) -> int:
    """Every rank starts several agents in threads, all at one moment."""
    (rank.directory / f"ready{rank.rank}").write_text("ready")
    for other in range(rank.world_size):
        await_path(rank, f"ready{other}")
    names = []

    def start() -> None:
        with Connection.open(f"start{rank.rank}") as connection:
            names.append(connection.name)

    threads = [threading.Thread(target=start) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return len(set(names))


def abort_beside_a_stopped_rank(rank: Rank) -> bool:
    """Rank 2 stops; the others have sends and receives with it, and abort."""
    communicator = make(rank)
    if rank.rank == 2:
        for other in (0, 1):
            communicator.send(torch.tensor(os.getpid()), other)
        for other in (0, 1):
            await_path(rank, f"aborted{other}")
        communicator.abort()
        return True
    pid = int(communicator.recv(2))
    if rank.rank == 0:
        communicator.recv(1)  # That rank, too, has what it needs.
        stop_process(pid)
        communicator.send(torch.tensor(1), 1)
    else:
        communicator.send(torch.tensor(1), 0)
        communicator.recv(0)
    try:
        works = [communicator.isend(torch.zeros(LARGE), 2), communicator.irecv(2)]
        started = time.monotonic()
        communicator.abort()
        took = time.monotonic() - started
        ended = all(isinstance(work.exception(), torch_nixl.ClosedError) for work in works)
    finally:
        (rank.directory / f"aborted{rank.rank}").write_text("aborted")
        if rank.rank == 0:
            await_path(rank, "aborted1")
            os.kill(pid, signal.SIGCONT)
    assert took < 5, f"abort took {took} s"
    return ended


def killed_in_mid_transfer(rank: Rank) -> None:
    """Rank 1 is killed while large messages go both ways."""
    communicator = make(rank)
    other = 1 - rank.rank
    sent, out = torch.ones(HUGE), torch.empty(HUGE)
    communicator.send(torch.tensor(os.getpid()), other)
    pid = int(communicator.recv(other))
    for turn in range(1_000_000):
        try:
            works = [communicator.isend(sent, other), communicator.irecv(other, out=out)]
            if rank.rank == 0 and turn == 2:
                os.kill(pid, signal.SIGKILL)
            for work in works:
                work.wait()
        except torch_nixl.PeerLostError as error:
            found = error.rank
            break
    assert found == 1
    assert lost(lambda: communicator.send(torch.tensor(1), 1)) == 1
    communicator.close()


def killed_while_idle(rank: Rank) -> None:
    """Rank 1 is killed while nothing is under way; rank 0 then sends and receives."""
    communicator = make(rank)
    other = 1 - rank.rank
    communicator.send(torch.tensor(os.getpid()), other)
    pid = int(communicator.recv(other))
    if rank.rank == 1:
        while True:
            signal.pause()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    error: BaseException | None = None
    # The first may still seem to leave: nothing tells of the death before it.
    while not isinstance(error, torch_nixl.PeerLostError):
        assert time.monotonic() < deadline
        try:
            communicator.isend(torch.zeros(LARGE), 1).wait(5)
        except torch_nixl.TransferError as caught:
            error = caught
    assert error.rank == 1
    assert lost(lambda: communicator.recv(1)) == 1
    communicator.close()
