"""What the ranks of the channel tests on NIXL run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stopping import stop_process
from torch.distributed import FileStore

import torch_nixl
from p2p.programs import make
from torch_nixl.p2p.channel import Channel
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import Rank

HUGE = 1 << 20
"""Elements of float32: 4 MiB, of which both ends move a half."""

COUNTED = ("add_remote", "deregister", "metadata", "prepare", "prepare_list", "register")


def tree(elements: int) -> dict[str, Any]:
    return {
        "w": torch.zeros(elements),
        "layers": [torch.zeros(elements // 7 + 1, dtype=torch.int16), torch.zeros(300, 5)[:, 1]],
        "empty": torch.zeros(0),
    }


def fill(channel: Channel[dict[str, Any]], value: int) -> None:
    for one in (channel.like["w"], *channel.like["layers"]):
        one.fill_(value)


def check(channel: Channel[dict[str, Any]], value: int) -> None:
    for one in (channel.like["w"], *channel.like["layers"]):
        assert bool((one == value).all()), (value, one)


def count_calls(
    owner: object,
    names: tuple[str, ...],
    replace: Callable[[object, str, object], None] = setattr,
) -> Counter[str]:
    """Count calls of an object's methods from now on, which `replace` replaces."""
    calls: Counter[str] = Counter()

    def counting(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    for name in names:
        replace(owner, name, counting(name, getattr(owner, name)))
    return calls


def steps(rank: Rank) -> str:
    """Every pair of ranks moves trees both ways, several sizes side by side, and counts calls."""
    with make(rank) as communicator:
        channels = {
            (other, elements): communicator.channel(other, like=tree(elements), tag=elements)
            for elements in (10, 30_000, HUGE)
            for other in range(rank.world_size)
            if other != rank.rank
        }
        routes = set()
        calls: Counter[str] = Counter()
        for turn in range(8):
            if turn == 2:
                calls = count_calls(communicator.connection.adapter, COUNTED)
            works = []
            for (other, elements), channel in channels.items():
                sends = (rank.rank < other) is (turn % 2 == 0)
                if sends:
                    fill(channel, 10 * turn + rank.rank)
                works.append((channel.isend() if sends else channel.irecv(), other, elements))
            for work, other, elements in works:
                work.wait()
                sends = (rank.rank < other) is (turn % 2 == 0)
                check(channels[other, elements], 10 * turn + (rank.rank if sends else other))
                routes.add(work.statistics().route)
        assert not calls, calls
        if rank.world_size == 2:
            channel = channels[1 - rank.rank, HUGE]
            for turn in range(20):
                if (rank.rank == 0) is (turn % 2 == 0):
                    fill(channel, turn)
                    channel.send()
                else:
                    channel.recv()
                    check(channel, turn)
            assert not calls, calls
            # A half by each, if the sender's word came in time.
            if rank.rank == 0:
                fill(channel, 5)
                channel.send()
            else:
                work = channel.irecv()
                work.wait()
                routes.add(work.statistics().route)
                check(channel, 5)
        # The others may still have to hear that they were done.
        for channel in channels.values():
            if rank.rank < channel.peer:
                channel.send()
            else:
                channel.recv()
    return ",".join(sorted(routes))


def stopped(rank: Rank) -> bool:
    """Rank 0 stops rank 1, times out, and goes on with it later."""
    with make(rank) as communicator:
        channel = communicator.channel(1 - rank.rank, like=tree(HUGE))
        if rank.rank == 1:
            channel.recv()
            communicator.send(torch.tensor(os.getpid()), 0)
            try:
                channel.recv()
            except torch_nixl.TransferError:
                channel.reconnect()
                channel.recv()
                check(channel, 3)
                return True
            return False
        fill(channel, 1)
        channel.send()
        pid = int(communicator.recv(1))
        stop_process(pid)
        try:
            fill(channel, 2)
            work = channel.isend(timeout=0.3)
            try:
                work.wait()
            except torch_nixl.TransferTimeout:
                pass
            else:
                return False
            assert not work.wait_released(0.1), "rank 1 may still read"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert work.wait_released(10)
        channel.reconnect()
        fill(channel, 3)
        channel.send()
    return True


def restart(rank: Rank) -> list[int]:
    """Rank 1 is killed in the middle, and started again as another process; rank 0 goes on."""
    store = str(rank.directory / "shared")
    if rank.rank == 1:
        codes = []
        for life in range(2):
            command = f"from p2p import channel_programs as c; c.live({store!r}, {life})"
            codes.append(subprocess.run([sys.executable, "-c", command], check=False).returncode)
        return codes
    communicator = Communicator(FileStore(store, 2), 0, 2, timeout=40)
    channel = communicator.channel(1, like=tree(HUGE))
    for turn in range(3):
        fill(channel, turn + 1)
        channel.send()
    (rank.directory / "now").touch()
    try:
        started = time.monotonic()
        while True:
            channel.send()
    except torch_nixl.PeerLostError:
        assert time.monotonic() - started < 10
    try:
        channel.recv()
    except torch_nixl.PeerLostError:
        pass
    else:
        return [-1]
    communicator.close()
    with Communicator(FileStore(store, 2), 0, 2, timeout=40) as again:
        channel.reconnect(again)
        for turn in range(3):
            fill(channel, 50 + turn)
            channel.send()
        channel.recv()
        check(channel, 77)
    return []


def live(store: str, life: int) -> None:
    """One life of rank 1."""
    marker = Path(store).parent / "now"
    with Communicator(FileStore(store, 2), 1, 2, timeout=40) as communicator:
        channel = communicator.channel(0, like=tree(HUGE))
        for turn in range(3):
            channel.recv()
            check(channel, turn + 1 if life == 0 else 50 + turn)
        if life == 0:
            while not marker.exists():
                channel.recv()
            work = channel.irecv()
            del work
            os.kill(os.getpid(), signal.SIGKILL)
        fill(channel, 77)
        channel.send()


def troubled(rank: Rank, seed: int, seconds: float) -> tuple[int, int]:
    """Steps with short timeouts and cancels; each end reconnects until the steps go right again.

    What arrives is whole: all of one step's bytes, of a step not earlier than the last.
    """
    rng = random.Random(seed * 10 + rank.rank)
    other = 1 - rank.rank
    good = failed = newest = 0
    with make(rank) as communicator:
        channel = communicator.channel(other, like=tree(HUGE // 4))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                timeout = rng.choice((0.0, 0.001, 0.003, 0.02, 0.5, 0.5, 0.5, 0.5))
                if rank.rank == 0:
                    newest += 1
                    fill(channel, newest % 30_000)
                    work = channel.isend(timeout=timeout)
                else:
                    work = channel.irecv(timeout=timeout)
                if rng.random() < 0.02:
                    work.cancel()
                if rng.random() < 0.5:
                    work.wait()
                else:
                    while not work.is_completed():
                        time.sleep(0)
                    work.wait()
                if rank.rank == 1:
                    came = int(channel.like["w"][0])
                    check(channel, came)
                    assert came > newest, (came, newest)
                    newest = came
                good += 1
            except torch_nixl.PeerLostError:
                raise
            except (torch_nixl.TransferError, torch_nixl.ClosedError):
                failed += 1
                channel.reconnect(timeout=20)
        # Both have stopped making trouble.
        store = rank.store()
        store.set(f"stopped{rank.rank}", "")
        store.wait([f"stopped{other}"])
        while True:
            try:
                if rank.rank == 0:
                    fill(channel, -7)
                    channel.send(timeout=15)
                else:
                    channel.recv(timeout=15)
                    check(channel, -7)
                break
            except torch_nixl.TransferError:
                channel.reconnect(timeout=20)
    return good, failed
