"""Two processes with one operation, of which one dies, stops or leaves at a chosen moment.

Importing torch takes seconds, so a server imports it once and forks both processes of each round,
before any connection is open. Each then ends as a program does: through the interpreter's exit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ACTIONS = ("kill", "stop", "close", "abort", "exit", "raise", "_exit")
MOMENTS = ("before", "contact", "middle", "after")
SIZES = (4096, 64 << 20)

_PROGRAM = Path(__file__).with_name("dying_program.py")

WAIT_SECONDS = 10.0
"""Within which the survivor's operation ends, and its memory is its own again."""

_LIBRARYS = re.compile(
    r"[EW]\d{4} [\d:.]+ +\d+ (?:ucx_\w+|nixl_agent)\.cpp:\d+\] "
    r"|\[[\d.]+\] \[.*?\] +\w+\.c:\d+ +UCX +(?:ERROR|WARN) "
)
"""A line that NIXL or UCX logs; neither a failed assertion nor a crash."""

HANG_SECONDS = 45.0
"""After which a process shows where its threads stand, and ends."""


@dataclass(frozen=True, slots=True)
class Round:
    """What happens in one round.

    Attributes:
        victim: ``"owner"`` or ``"active"``: who acts.
        action: What it does, of `ACTIONS`.
        moment: When, of `MOMENTS`.
        reads: Whether the memory is read, or written.
        nbytes: Of the memory.
        delay: Seconds from the moment to the action.
        frees: Whether the survivor frees its memory once that is its own, rather than watch it.
        cancels: Whether the survivor cancels its operation meanwhile.
        transports: For ``UCX_TLS``; empty for UCX's own choice.
        met: Whether the two have read before: then they know that they are on one host, and each
            moves a half where it is much and UCX has the choice.
    """

    victim: str
    action: str
    moment: str
    reads: bool
    nbytes: int
    delay: float
    frees: bool
    cancels: bool
    transports: str
    met: bool

    @classmethod
    def draw(cls, rng: random.Random, transports: str) -> Round:
        moment = rng.choice(MOMENTS)
        return cls(
            victim=rng.choice(("owner", "active")),
            action=rng.choice(ACTIONS),
            moment=moment,
            reads=rng.random() < 0.5,
            nbytes=rng.choice(SIZES),
            delay=rng.choice((0.0, 0.001, 0.01, 0.05)) * rng.random(),
            frees=rng.random() < 0.5,
            cancels=rng.random() < 0.25,
            transports=transports,
            met=rng.random() < 0.5,
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process of a round ended.

    Attributes:
        status: Its exit code; negative for a signal.
        told: What it said of its operation; empty if it could not.
        output: All that it printed, UCX's errors included, which go to stdout.
    """

    status: int
    told: str
    output: str


class Server:
    """Forks the processes of rounds. A context."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # NIXL's and UCX's levels are their own defaults: what a user would see is what counts.
        quiet = ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL", "UCX_TLS")
        environment = {name: value for name, value in os.environ.items() if name not in quiet}
        # TCP on one host is slow, as it says.
        environment["TORCH_NIXL_PERFORMANCE_WARNINGS"] = "0"
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(_PROGRAM), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()

    def _ask(self, question: dict[str, Any], fds: list[int]) -> Any:
        socket.send_fds(self._control, [json.dumps(question).encode()], fds)
        return json.loads(self._control.recv(1 << 16))

    def start(self, role: str, one: Round) -> Child:
        output = self._directory / f"{role}.output"
        into, out_of = os.pipe(), os.pipe()
        with open(output, "wb") as printed:
            fds = [into[0], printed.fileno(), printed.fileno(), out_of[1]]
            pid = self._ask({"role": role, "round": dataclasses.asdict(one)}, fds)
        os.close(into[0])
        os.close(out_of[1])
        return Child(pid, into[1], out_of[0], output, lambda: self._ask({"reap": pid}, []))


class Child:
    """One process of a round."""

    def __init__(
        self, pid: int, into: int, out_of: int, output: Path, reap: Callable[[], int | None]
    ) -> None:
        self.pid = pid
        self._into = os.fdopen(into, "w", buffering=1)
        self._out_of = os.fdopen(out_of, "r")
        self._output = output
        self._reap = reap
        self._status: int | None = None

    def hear(self) -> str:
        """Return its next line; empty once it has ended."""
        return self._out_of.readline().rstrip("\n")

    def tell(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._into.write(text + "\n")

    def resume(self, seconds: float) -> None:
        """Have it go on once it has stopped, after a while."""
        while _state(self.pid) not in "TZX":
            time.sleep(0.001)
        time.sleep(seconds)
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> Ended:
        """Wait for its end, which comes by itself: see `HANG_SECONDS`."""
        told = self._out_of.read().strip()
        deadline = time.monotonic() + HANG_SECONDS
        while self._status is None:
            self._status = self._reap()
            if self._status is None:
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(0.002)
        self._out_of.close()
        with contextlib.suppress(BrokenPipeError):
            self._into.close()
        return Ended(self._status, told, self._output.read_text(errors="replace"))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def play(server: Server, one: Round) -> dict[str, Ended]:
    """Play a round; return how each of ``"victim"`` and ``"survivor"`` ended."""
    owner, active = server.start("owner", one), server.start("active", one)
    children = {"owner": owner, "active": active}
    victim = children[one.victim]
    if one.met:
        active.tell(owner.hear())
    told = owner.hear()
    active.hear()  # It is up.
    if one.moment == "before":
        # The victim acts first, and the other finds what it leaves.
        victim.tell("act")
        victim.hear()
        if one.action in ("close", "abort"):
            victim.hear()
        active.tell(told)
    else:
        active.tell(told)
        victim.tell("act")
        victim.hear()
    if one.action == "stop":
        victim.resume(0.3)
    ended = {role: child.end() for role, child in children.items()}
    survivor = "active" if one.victim == "owner" else "owner"
    return {"victim": ended[one.victim], "survivor": ended[survivor]}


def faults(one: Round, ended: dict[str, Ended]) -> Iterator[str]:
    """Yield what was not as it should be."""
    status = {"kill": -signal.SIGKILL, "raise": 1}.get(one.action, 0)
    victim, survivor = ended["victim"], ended["survivor"]
    if victim.status != status:
        yield f"the victim ended with {victim.status}"
    if survivor.status != 0:
        yield f"the survivor ended with {survivor.status}"
    if not survivor.told.endswith("went on"):
        yield f"the survivor said {survivor.told!r}"
    said = victim.output.splitlines()
    if one.action == "raise":
        if not (said and said[0].startswith("Traceback") and said[-1] == "ValueError: mine"):
            yield "the victim's own error is not all that it printed"
    elif not _is_quiet(said, may_log=one.action == "abort"):
        yield "the victim printed something"
    farewell = one.action in ("close", "exit", "raise", "stop")
    alone = not farewell or one.moment in ("before", "contact")
    if not _is_quiet(survivor.output.splitlines(), may_log=alone):
        yield "the survivor printed something"


def _is_quiet(said: list[str], *, may_log: bool) -> bool:
    """Whether nothing was printed, or only what NIXL and UCX log of a broken connection."""
    return not said or (may_log and all(_LIBRARYS.match(line) for line in said))
