"""Forked children with a deadline, whose failures are results.

For the doctor's worker process only: it has one thread and makes no agent itself, so that forking
it is safe and a child starts with everything imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

_OUTPUT_LIMIT = 1 << 20
_GRACE_S = 1.0
_PR_SET_PDEATHSIG = 1
# Our errors' messages stand by themselves; other errors' names are needed to understand them.
_OWN_ERROR = re.compile(r"^torch_nixl\.errors\.\w+: ")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a child.

    Attributes:
        value: What its function returned. None if it failed.
        failure: Why it failed, in a few words. None if it didn't.
        output: What it and its libraries wrote to stdout and stderr.
        killed_late: It was killed because it was not done in time.
    """

    value: Json
    failure: str | None
    output: str
    killed_late: bool = False


@dataclass(slots=True)
class _Child:
    pid: int
    pipe: int
    output: int
    received: bytearray = field(default_factory=bytearray)
    open: bool = True


def run_together(functions: Sequence[Callable[[], Json]], timeout: float) -> list[Outcome]:
    """Run each function in a child of its own, all at the same time.

    Args:
        functions: What to run. What they return must be JSON.
        timeout: Seconds, for all of them. Those that are not done then are killed; once one has
            failed, the others have a second to end by themselves.

    Returns:
        What became of each, in order. Nothing that a child does raises here.
    """
    deadline = time.monotonic() + timeout
    sys.stdout.flush()
    children = [_start(function) for function in functions]
    try:
        _receive(children, deadline)
    finally:
        outcomes = [_finish(child, timeout) for child in children]
    return outcomes


def first_failure(outcomes: Sequence[Outcome]) -> str | None:
    """Return why one of the children failed; the one that did by itself, if any did. Else None."""
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    failed.sort(key=lambda outcome: outcome.killed_late)
    return failed[0].failure if failed else None


def _start(function: Callable[[], Json]) -> _Child:
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as file:
        output = os.dup(file.fileno())
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(pid, reader, output)
    libc = ctypes.CDLL(None)
    # Nothing may return from here into the parent's code: not an exception, not an exit handler.
    status = 1
    try:
        # Should the worker be killed, then so is what it started.
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(reader)
        answer = json.dumps({"value": function()})
        with os.fdopen(writer, "wb") as stream:
            stream.write(answer.encode())
        status = 0
    except BaseException:  # noqa: BLE001
        os.write(2, traceback.format_exc().encode())
    # What C libraries have written so far, logs among it, may still be in their buffers.
    libc.fflush(None)
    os._exit(status)


def _receive(children: Sequence[_Child], deadline: float) -> None:
    while waiting := [child for child in children if child.open]:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        ready, _, _ = select.select([child.pipe for child in waiting], [], [], left)
        for child in waiting:
            if child.pipe in ready:
                piece = os.read(child.pipe, 1 << 16)
                child.received += piece
                child.open = bool(piece)
                if not child.open and not child.received:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)


def _finish(child: _Child, timeout: float) -> Outcome:
    if child.open:
        os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pipe)
    output = os.pread(child.output, _OUTPUT_LIMIT, 0).decode(errors="replace")
    os.close(child.output)
    if child.open:
        return Outcome(None, f"no answer within {timeout:g} s", output, killed_late=True)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome(None, f"the process was killed by {name}", output)
    try:
        return Outcome(json.loads(child.received)["value"], None, output)
    except ValueError:
        # The last line of a traceback is its message.
        lines = output.strip().splitlines()
        last = lines[-1] if lines else "the process ended without a word"
        return Outcome(None, _OWN_ERROR.sub("", last), output)
