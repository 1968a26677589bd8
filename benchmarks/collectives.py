"""torch_nixl's collectives against Gloo's, in the same ranks of one run.

    python benchmarks/collectives.py [--json FILE] [--ranks 2 4] [--only NAME ...] [--pin]

Ranks on one host, each a process with one thread for torch. A figure is the time of one call, the
slowest rank's, the median of interleaved rounds of several calls in a row; the note has the ratio
of the fastest rounds, which a busy machine disturbs less. Sizes are those of one rank's tensor:
what is broadcast, reduced or sent; for all_gather what each rank gives, for reduce_scatter what
each rank gets, for all_to_all what each rank sends in all.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch
import torch.distributed as dist
from pair import Row, Side, interleave, median, report

import torch_nixl
from torch_nixl.p2p.communicator import Communicator

SIZES = (8, 1 << 20, 64 << 20)
CALLS = {8: 10, 1 << 20: 4, 64 << 20: 1}
ROUNDS = {8: 40, 1 << 20: 25, 64 << 20: 9}
TWO_RANKS = {
    "broadcast": 0.5,
    "all_gather": 0.5,
    "all_to_all": 0.5,
    "gather": 0.5,
    "all_reduce": 0.7,
    "reduce_scatter": 0.7,
}
"""Largest ratio on 2 ranks from 1 MiB on."""
SMALL = {"barrier": 0.5, "all_reduce": 0.6}
"""Largest ratio at 8 bytes on 2 ranks."""
MORE_RANKS = 1.05
"""Largest ratio from 1 MiB on where there are more ranks than cores."""

Call = Callable[[], object]


def calls(nbytes: int, group: Communicator) -> dict[str, tuple[Call, Call]]:
    """Each collective, ours and Gloo's, on tensors of that size."""
    count, size, rank = nbytes // 4, group.world_size, group.rank
    tensor, other = torch.zeros(count), torch.zeros(count)
    whole = torch.zeros(count * size)
    root = 0
    parts = list(whole.chunk(size)) if rank == root else None
    shared = count // size * size or size
    sent, got = torch.zeros(shared), torch.zeros(shared)
    made: dict[str, tuple[Call, Call]] = {
        "broadcast": (
            lambda: torch_nixl.broadcast_tensor(tensor, root, group=group),
            lambda: dist.broadcast(tensor, root),
        ),
        "all_reduce": (
            lambda: torch_nixl.all_reduce_tensor(tensor, group=group),
            lambda: dist.all_reduce(tensor),
        ),
        "all_gather": (
            lambda: torch_nixl.all_gather_tensor(whole, tensor, group=group),
            lambda: dist.all_gather_into_tensor(whole, tensor),
        ),
        "reduce_scatter": (
            lambda: torch_nixl.reduce_scatter_tensor(other, whole, group=group),
            lambda: dist.reduce_scatter_tensor(other, whole),
        ),
        "all_to_all": (
            lambda: torch_nixl.all_to_all_tensor(got, sent, group=group),
            lambda: dist.all_to_all_single(got, sent),
        ),
        "gather": (
            lambda: torch_nixl.gather_tensor(tensor, parts, root, group=group),
            lambda: dist.gather(tensor, parts, root),
        ),
    }
    if nbytes == SIZES[0]:
        made["barrier"] = (lambda: torch_nixl.barrier(group=group), lambda: dist.barrier())
    return made


def measure(call: Call, count: int) -> float:
    """Seconds of one call, on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        call()
    seconds = torch.tensor((time.perf_counter() - started) / count)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def limit_of(name: str, nbytes: int, world_size: int) -> float:
    """What the ratio is to reach; infinity where nothing is asked for."""
    if nbytes == SIZES[0]:
        return SMALL.get(name, float("inf")) if world_size == 2 else float("inf")
    return TWO_RANKS[name] if world_size == 2 else MORE_RANKS


def body(rank: int, world_size: int, path: str, only: list[str], pin: bool, results: Pipe) -> None:
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/gloo", world_size)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=120),
    )
    rows = []
    with Communicator(dist.FileStore(f"{path}/ours", world_size), rank, world_size) as group:
        torch_nixl.barrier(group=group)
        for nbytes in SIZES:
            for name, (ours, gloo) in calls(nbytes, group).items():
                if only and name not in only:
                    continue
                count = CALLS[nbytes]
                ours(), gloo()
                contestants = {
                    "ours": lambda: measure(ours, count),  # noqa: B023
                    "gloo": lambda: measure(gloo, count),  # noqa: B023
                }
                figures = interleave(contestants, ROUNDS[nbytes])
                least = min(figures["ours"]) / min(figures["gloo"])
                what = f"{name}, {size_name(nbytes)}" if name != "barrier" else name
                rows.append(
                    Row(
                        f"{world_size} ranks: {what}",
                        median(figures["ours"]) * 1e6,
                        "us",
                        limit_of(name, nbytes, world_size),
                        median(figures["gloo"]) * 1e6,
                        note=f"Gloo; least against least {least:.2f}",
                    )
                )
        dist.barrier()
    dist.destroy_process_group()
    results.send(rows if rank == 0 else [])


def size_name(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def run(world_size: int, only: list[str], pin: bool, timeout: float) -> Side:
    """Measure in so many fresh processes."""
    context = multiprocessing.get_context("spawn")
    path = tempfile.mkdtemp(prefix="torch_nixl_collectives_")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=body, args=(rank, world_size, path, only, pin, pipes[rank][1]))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    try:
        rows: list[Row] = []
        for receiver, sender in pipes:
            sender.close()
            if not receiver.poll(max(0.0, deadline - time.monotonic())):
                raise SystemExit(f"the benchmark did not end within {timeout:.0f} s")
            rows += receiver.recv()
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return Side(world_size, rows=rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument(
        "--pin", action="store_true", help="keep each rank on a core of its own, as far as they go"
    )
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    sides = [
        run(world_size, options.only, options.pin, timeout=600) for world_size in options.ranks
    ]
    report("collectives", sides, options.json)
