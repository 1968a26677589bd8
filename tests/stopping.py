"""Processes that stand still."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

SECONDS = 10.0
"""How long a process may take to stop on a busy machine."""


def stop_process(pid: int) -> None:
    """Stop a process; return once it stands still.

    The signal takes effect only when one of its threads is scheduled, which then stops the others:
    until then it may still answer.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + SECONDS
    while _states(pid) != {"T"}:
        assert time.monotonic() < until, f"process {pid} has not stopped: {_states(pid)}"
        time.sleep(0.001)


def _states(pid: int) -> set[str]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return {(one / "stat").read_text().rpartition(")")[2].split()[0] for one in threads}
