"""Runs a module of the doctor as a process of its own, with a deadline, and hears what it says."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 64 << 10
_LINE_LIMIT = 4 << 20


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended.

    Attributes:
        status: Its exit status; negative: the signal that killed it.
        in_time: It ended by itself.
        last_line: The last line that it wrote to stdout or stderr.
    """

    status: int
    in_time: bool
    last_line: str

    def why(self, timeout: float) -> str:
        """Say how it ended, in a few words.

        Args:
            timeout: The seconds that it had.
        """
        if not self.in_time:
            reason = f"not done within {timeout:g} s"
        elif self.status < 0:
            reason = f"killed by {signal.Signals(-self.status).name}"
        else:
            reason = f"status {self.status}"
        return f"{reason}: {self.last_line}" if self.last_line else reason


def run_program(
    module: str,
    hear: Callable[[bytes], None],
    timeout: float,
    *,
    arguments: Sequence[str] = (),
    descriptors: Sequence[int] = (),
    said: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a module until it ends; kill it, and all that it started, when its time has passed.

    Args:
        module: Is run as ``python -m MODULE FD PARENT ARGUMENTS...``, where FD takes what it
            reports, and PARENT is this process, for `die_with_parent`.
        hear: Called with each line that it writes to FD, without the line's end.
        timeout: Seconds.
        arguments: Further arguments.
        descriptors: File descriptors that it inherits.
        said: What it finds on stdin.
        environment: Variables to set besides this process's own.
    """
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as stdin:
        stdin.write(said)
        stdin.seek(0)
        # A session of its own, so that its children can be killed with it.
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(writer), str(os.getpid()), *arguments],
            stdin=stdin,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            pass_fds=[writer, *descriptors],
            start_new_session=True,
        )
        os.close(writer)
        deadline = time.monotonic() + timeout
        try:
            for line in _read_lines(reader, deadline):
                hear(line)
        finally:
            os.close(reader)
            # It has ended, or its time has passed.
            in_time = time.monotonic() < deadline
            status = _end(process)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - _TAIL_BYTES))
        lines = output.read().decode(errors="replace").strip().splitlines()
    return Ended(status, in_time, lines[-1] if lines else "")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends.

    Args:
        parent: Which that is. If it has ended already, so does this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the process that started this one has ended")


def _read_lines(descriptor: int, deadline: float) -> Iterator[bytes]:
    """Yield lines until the other side ends or the deadline passes."""
    received = b""
    while (left := deadline - time.monotonic()) > 0 and len(received) < _LINE_LIMIT:
        ready, _, _ = select.select([descriptor], [], [], left)
        piece = os.read(descriptor, 1 << 16) if ready else b""
        if not piece:
            return
        *lines, received = (received + piece).split(b"\n")
        yield from lines


def _end(process: subprocess.Popen[bytes]) -> int:
    """Wait for a program, or kill it and all its children. Returns its exit status."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=0.5)
    os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=5)
    # The kernel itself hangs, as in a file system whose server is gone. It is dead when that ends.
    return -signal.SIGKILL
