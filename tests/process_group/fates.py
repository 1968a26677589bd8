"""Ranks that die, stop or never call, and programs that never end their groups."""

from __future__ import annotations

import datetime
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from stopping import stop_process
from torch.nn.parallel import DistributedDataParallel

import torch_nixl
from process_group.groups import default_group
from torch_nixl.process_group.group import NixlProcessGroup
from torch_nixl.testing import Rank


def _seconds_to_error(name: str, one: torch.Tensor) -> tuple[float, BaseException]:
    size, rank = dist.get_world_size(), dist.get_rank()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "barrier": dist.barrier,
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather": lambda: dist.all_gather([one.clone() for _ in range(size)], one),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(size), torch.ones(size)),
        "gather": lambda: dist.gather(
            one, [one.clone() for _ in range(size)] if rank == 0 else None, 0
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(one, [one.clone() for _ in range(size)]),
    }
    began = time.monotonic()
    try:
        calls[name]()
        dist.barrier()
    except torch_nixl.TorchNixlError as error:
        return time.monotonic() - began, error
    raise AssertionError(f"{name} ended well though a rank is missing")


def killed(rank: Rank, name: str) -> None:
    """The last rank dies in the middle; the rest learn that it did."""
    one = torch.ones(1)
    with default_group(rank, timeout=60):
        dist.barrier()
        if rank.rank == rank.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        seconds, error = _seconds_to_error(name, one)
        assert isinstance(error, torch_nixl.PeerLostError), error
        assert f"rank {rank.world_size - 1}" in str(error), error
        assert "#" in str(error) or "collective" in str(error), error
        assert seconds < 5


def killed_below_libraries(rank: Rank) -> None:
    """The last rank dies; DDP and a functional collective say so, from C++ as it were."""
    with default_group(rank, timeout=60) as group:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        torch.autograd.backward(model(torch.ones(1, 4)).sum())
        if rank.rank == rank.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(torch.ones(1, 4)).sum()
        with pytest.raises(RuntimeError, match=rf"PeerLostError: .*rank {rank.world_size - 1}"):
            torch.autograd.backward(loss)
        with pytest.raises(torch_nixl.PeerLostError):
            functional.all_reduce(torch.ones(2), "sum", group) + 1


def stopped(rank: Rank) -> str:
    """The last rank stops, the rest time out; it goes on and learns so, too."""
    one = torch.ones(1)
    last = rank.world_size - 1
    with default_group(rank) as group:
        assert isinstance(group, NixlProcessGroup)
        dist.barrier()
        group.set_timeout(datetime.timedelta(seconds=1))
        store = rank.store()
        if rank.rank == last:
            store.set("pid", str(os.getpid()))
        pid = int(store.get("pid"))
        if rank.rank == 0:
            stop_process(pid)
        try:
            if rank.rank == last:
                # Runs on once it is let go.
                while not (rank.directory / "resumed").exists():
                    time.sleep(0.01)
            _, error = _seconds_to_error("all_reduce", one)
        finally:
            if rank.rank == 0:
                (rank.directory / "resumed").touch()
                os.kill(pid, signal.SIGCONT)
        assert isinstance(error, torch_nixl.TransferError), error
        return f"{type(error).__name__}: {error}"


def absent(rank: Rank, name: str) -> str:
    """The last rank never calls."""
    with default_group(rank) as group:
        assert isinstance(group, NixlProcessGroup)
        dist.barrier()
        group.set_timeout(datetime.timedelta(seconds=0.5))
        text = ""
        if rank.rank != rank.world_size - 1:
            seconds, error = _seconds_to_error(name, torch.ones(1))
            assert isinstance(error, torch_nixl.TransferTimeout), error
            assert seconds < 3
            text = str(error)
        store = rank.store()
        store.add("done", 1)
        deadline = time.monotonic() + 20
        while store.add("done", 0) < rank.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
        return text


def different(rank: Rank) -> str:
    """Rank 0 calls something else than the others."""
    with default_group(rank) as group:
        assert isinstance(group, NixlProcessGroup)
        dist.barrier()
        one = torch.ones(4 if rank.rank == 0 else 5)
        try:
            dist.all_reduce(one)
        except torch_nixl.MismatchError as error:
            return str(error)
        raise AssertionError("ranks reduced tensors of different shapes")


def many_groups(rank: Rank, count: int, alone: bool) -> dict[str, int]:
    """Groups made, used and destroyed; what more there is of everything afterwards.

    Args:
        rank: This rank.
        count: How many.
        alone: In a world on Gloo, where the agent comes and goes with each group.
    """
    with default_group(rank, "gloo" if alone else "nixl"):
        store = rank.store()
        one = torch.ones(100_000)

        def turn() -> None:
            group = dist.new_group(backend="nixl")
            dist.all_reduce(one.fill_(1.0), group=group)
            assert float(one[-1]) == rank.world_size
            dist.destroy_process_group(group)

        for _ in range(30 if not alone else 3):
            turn()
        before = _usage(store)
        for _ in range(count):
            turn()
        after = _usage(store)
        dist.barrier()
        return {name: after[name] - before[name] for name in after}


def _usage(store: dist.Store) -> dict[str, int]:
    gc.collect()
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return {
        "KiB": resident >> 10,
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "keys": keys,
        "objects": sum(isinstance(one, NixlProcessGroup) for one in gc.get_objects()),
    }


def main(how: str) -> None:
    """A program under torchrun that ends without destroying its groups."""
    backend = "cpu:gloo,cuda:nixl" if how == "mixed" else "nixl"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=20))
    one = torch.ones(4)
    dist.all_reduce(one)
    part = dist.new_group([0, 1], backend="nixl")
    dist.all_reduce(one, group=part)
    other = 1 - dist.get_rank()
    if how == "raises" and other == 0:
        raise ValueError("the user's own")
    if how == "pending":
        inbox = torch.zeros(4)
        work = dist.irecv(inbox, other, tag=99, group=part)
        assert work is not None
        work.get_future().then(lambda _: None)
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        torch.autograd.backward(model(one).sum())
        large = torch.full((1_000_000,), 7.0)
        if other == 1:
            # Received in full though this rank ends at once.
            dist.isend(large, 1)
        else:
            dist.recv(large.zero_(), 0)
            assert float(large.min()) == 7.0
    (Path(os.environ["FATES"]) / f"{dist.get_rank()}").write_text(str(float(one[0])))


if __name__ == "__main__":
    main(sys.argv[1])
