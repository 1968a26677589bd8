"""The ranks of a benchmark: started here, or by torchrun or another launcher, on several hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

STORE = "TORCH_NIXL_BENCH_STORE"
"""Names the file through which ranks find each other that were started here. No port is taken."""

GRACE = 5.0
"""Seconds that ranks get to end by themselves after one has failed."""


class RanksFailed(Exception):
    """A rank ended before its time. Says which and how."""


def is_rank() -> bool:
    """Whether a launcher started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(
    ranks: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """Run this Python with `arguments` on so many ranks, and wait until all have ended.

    No process is left behind: not after an error, and not if this process is killed.

    Args:
        ranks: How many.
        arguments: What follows ``python``, the same for all.
        environment: Changes to this process's own.

    Raises:
        RanksFailed: One died or failed; the others were given `GRACE` seconds, then killed.
    """
    with tempfile.TemporaryDirectory(prefix="torch_nixl_bench_") as directory:
        common = {
            # torchrun would set the first, too.
            "OMP_NUM_THREADS": "1",
            "NIXL_LOG_LEVEL": "ERROR",
            **os.environ,
            **(environment or {}),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            STORE: f"{directory}/store",
        }
        processes: list[subprocess.Popen[bytes]] = []
        try:
            processes.extend(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    stdin=subprocess.PIPE,  # It ends with this process, see `end_with_parent`.
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(ranks)
            )
            _await(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()


def end_with_parent() -> None:
    """Let this rank end when whoever started it does, if that was `start_ranks`."""
    if STORE in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # Nothing is ever written there.
    os.read(0, 1)
    os._exit(1)


def _await(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = None
    blamed = ""
    while True:
        states = [process.poll() for process in processes]
        failed = {rank: state for rank, state in enumerate(states) if state}
        if failed and deadline is None:
            # Whom a signal ended is to blame: the others only missed it.
            rank = min(failed, key=lambda rank: (failed[rank] > 0, rank))
            blamed = _sentence(rank, failed[rank])
            deadline = time.monotonic() + GRACE
        if None not in states:
            break
        if deadline is not None and time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    if blamed:
        raise RanksFailed(blamed)


def _sentence(rank: int, state: int) -> str:
    if state > 0:
        return f"rank {rank} failed with status {state}, and the run ended with it"
    try:
        name = signal.Signals(-state).name
    except ValueError:
        name = f"signal {-state}"
    return f"rank {rank} was ended by {name}, and the run ended with it"
