"""What the ranks of the NIXL tests run: sent by name to processes of their own."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from stopping import stop_process

import torch_nixl
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import Rank

COUNTS = (0, 1, 1000, 70_001, 700_001)
LARGE = 1 << 20


def make(rank: Rank, timeout: float = 30.0) -> Communicator:
    return Communicator(rank.store(), rank.rank, rank.world_size, timeout=timeout)


def value(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) % 89 + 3 * rank).to(dtype)


def everything(rank: Rank) -> int:
    """Every collective at every size, sync, against torch. What is left outstanding."""
    size, me = rank.world_size, rank.rank
    with make(rank) as group:
        for count in COUNTS:
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                values = [value(one, count, dtype) for one in range(size)]
                mine = values[me]
                total = sum(one.double() for one in values)
                assert isinstance(total, torch.Tensor)
                total = total.to(dtype)
                out = mine.clone()
                torch_nixl.all_reduce_tensor(out, group=group)
                assert torch.equal(out, total), (count, dtype)
                out = mine.clone()
                torch_nixl.reduce_tensor(out, 0, group=group)
                assert torch.equal(out, total if me == 0 else mine), (count, dtype)
                torch_nixl.broadcast_tensor(out, 0, group=group)
                assert torch.equal(out, total)
                whole = torch.zeros(size * count, dtype=dtype)
                torch_nixl.all_gather_tensor(whole, mine, group=group)
                assert torch.equal(whole, torch.cat(values))
                swapped = torch.zeros(size * count, dtype=dtype)
                torch_nixl.all_to_all_tensor(swapped, whole, group=group)
                assert torch.equal(swapped, torch.cat([mine_of(values, me)] * size))
                torch_nixl.reduce_scatter_tensor(out, [mine] * size, group=group)
                assert torch.equal(out, total)
                parts = list(whole.chunk(size)) if me == size - 1 and count else None
                if count:
                    torch_nixl.scatter_tensor(out, parts, size - 1, group=group)
                    assert torch.equal(out, mine)
                back = [torch.zeros_like(mine) for _ in range(size)] if me == 0 else None
                torch_nixl.gather_tensor(mine, back, 0, group=group)
                assert all(torch.equal(a, b) for a, b in zip(back or (), values, strict=False))
                torch_nixl.barrier(group=group)
        # Another thread may have ended the last message, and not forgotten it yet.
        group.connection.progress.wait_until(
            lambda: group.statistics().outstanding == 0, time.monotonic() + 10
        )
        return group.statistics().outstanding


def mine_of(values: list[torch.Tensor], rank: int) -> torch.Tensor:
    return values[rank]


def overlapping(rank: Rank) -> bool:
    """Async collectives end while this rank does something else, and in any order of waiting."""
    size = rank.world_size
    with make(rank) as group:
        torch_nixl.barrier(group=group)
        tensors = [torch.full((10 ** (i % 7),), float(i + rank.rank)) for i in range(21)]
        works = [torch_nixl.all_reduce_tensor(one, group=group, async_op=True) for one in tensors]
        deadline = time.monotonic() + 20
        while not all(work is not None and work.is_completed() for work in works):
            assert time.monotonic() < deadline, works
            time.sleep(0.01)
        return all(
            bool((one == size * i + sum(range(size))).all()) for i, one in enumerate(tensors)
        )


def beside_a_busy_interpreter(rank: Rank) -> bool:
    """The thread that waits gets on though others hold the GIL."""
    with make(rank) as group:
        stop = threading.Event()

        def spin() -> None:
            while not stop.is_set():
                sum(range(1000))

        thread = threading.Thread(target=spin)
        thread.start()
        try:
            tensor = torch.ones(LARGE)
            for _ in range(3):
                torch_nixl.all_reduce_tensor(tensor, group=group)
        finally:
            stop.set()
            thread.join()
        return bool((tensor == rank.world_size**3).all())


def killed(rank: Rank, count: int) -> None:
    """Rank 1 dies while the others wait for it."""
    group = make(rank)
    torch_nixl.barrier(group=group)
    if rank.rank == 1:
        group.recv(0)
        os.kill(os.getpid(), signal.SIGKILL)
    work = torch_nixl.all_reduce_tensor(torch.ones(count), group=group, async_op=True)
    assert work is not None
    if rank.rank == 0:
        group.send(torch.tensor(1), 1)
    started = time.monotonic()
    seen = ""
    try:
        work.wait(20)
    except torch_nixl.PeerLostError as error:
        seen = str(error)
    assert "rank 1" in seen, seen
    assert "collective 1, all_reduce" in seen, seen
    assert time.monotonic() - started < 8
    assert work.wait_released(5)
    try:
        torch_nixl.barrier(group=group)
    except torch_nixl.PeerLostError:
        group.close()
        return
    raise AssertionError("the group still works")


def stopped(rank: Rank) -> str:
    """Rank 1 stands still; the others name it at the deadline, and it learns of it later."""
    group = make(rank)
    torch_nixl.barrier(group=group)
    other = (rank.rank + 1) % rank.world_size
    if rank.rank == 1:
        group.send(torch.tensor(os.getpid()), 0)
        group.recv(0, tag=1)
        verdict = ""
        try:
            torch_nixl.all_reduce_tensor(torch.ones(LARGE), group=group)
        except torch_nixl.TransferTimeout as error:
            verdict = str(error)
        group.close()
        return verdict
    pid = int(group.recv(1)) if rank.rank == 0 else 0
    verdict = ""
    try:
        if pid:
            stop_process(pid)
        torch_nixl.all_reduce_tensor(torch.ones(LARGE), group=group, timeout=1.5)
    except torch_nixl.TransferTimeout as error:
        verdict = str(error)
    finally:
        if pid:
            os.kill(pid, signal.SIGCONT)
            group.send(torch.tensor(1), other, tag=1)
    group.close()
    return verdict


def beside_gloo(rank: Rank) -> bool:
    """On the default group and a part of it, by process group, beside Gloo."""
    dist.init_process_group("gloo", store=rank.store(), rank=rank.rank, world_size=rank.world_size)
    torch_nixl.init()
    size = rank.world_size
    tensor = torch.ones(3)
    torch_nixl.all_reduce_tensor(tensor)
    part = dist.new_group([size - 2, size - 1])
    if rank.rank >= size - 2:
        # Ranks are those of the group.
        torch_nixl.broadcast_tensor(
            tensor if rank.rank == size - 2 else torch.zeros(3), 0, group=part
        )
        torch_nixl.all_reduce_tensor(tensor, group=part)
    dist.barrier()
    torch_nixl.shutdown()
    dist.destroy_process_group()
    return bool((tensor == size * (2 if rank.rank >= size - 2 else 1)).all())
