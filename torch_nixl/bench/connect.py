"""Reads through `torch_nixl.connect` against dynamo's `nixl_connect` and bare NIXL."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torch_nixl.bench.connect_program import WARMUPS
from torch_nixl.bench.raw import NAME as RAW
from torch_nixl.bench.raw import RawAgent
from torch_nixl.bench.report import OURS
from torch_nixl.bench.session import TIMEOUT, Case, Contestant, Session

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)

DYNAMO = "dynamo"
OWNER, READER = 0, 1

_PROGRAM = Path(__file__).with_name("connect_program.py")


def suite(session: Session) -> list[Case]:
    """A read at each size, as its reader and as its owner see it.

    A round: the owner makes a readable operation and tells its metadata as JSON, the reader begins
    the read, both complete. Bare NIXL: the owner says that it may, the reader reads from where it
    knows, and says so. In between the owner writes other bytes, and both look at what they have.
    """
    programs = {OURS: _Program(session, sys.executable, "torch_nixl.connect")}
    if session.takes_part(DYNAMO):
        python = _dynamo_python(session)
        if python:
            program = _Program(session, python, "dynamo.nixl_connect")
            reason = program.missing(session)
            if not reason:
                programs[DYNAMO] = program
            elif session.options.dynamo:
                raise RuntimeError(f"{python} has no dynamo.nixl_connect: {reason}")
            else:
                session.missing[DYNAMO] = reason
    reason = programs[OURS].missing(session)
    if reason:
        raise RuntimeError(f"torch_nixl.connect can't be used: {reason}")
    for program in programs.values():
        program.meet(session)
    raw = _Raw(session) if session.takes_part(RAW) else None
    return [
        Case(f"read, its {name}", nbytes, partial(_make, session, programs, raw, role, nbytes))
        for name, role in (("reader", READER), ("owner", OWNER))
        for nbytes in session.options.sizes
    ]


def _dynamo_python(session: Session) -> str:
    """The Python that has dynamo, or "" and the reason is noted. The same on all ranks."""
    if session.options.dynamo:
        return session.options.dynamo
    found = all(session.exchange(find_spec("dynamo") is not None))
    if not found:
        session.missing[DYNAMO] = "not installed here; --dynamo PYTHON names an environment that is"
    return sys.executable if found else ""


def _make(
    session: Session,
    programs: Mapping[str, _Program],
    raw: _Raw | None,
    role: int,
    nbytes: int,
) -> dict[str, Contestant]:
    contestants: dict[str, Contestant] = {
        name: partial(program.rounds, nbytes) for name, program in programs.items()
    }
    if raw is not None:
        contestants[RAW] = partial(raw.rounds, nbytes)

    def counted(run: Contestant) -> Contestant:
        def contestant(count: int) -> Any:
            taken = run(count)
            return taken if session.rank == role else [0.0] * len(taken)

        return contestant

    return {name: counted(run) for name, run in contestants.items()}


class _Raw:
    """The rounds of `connect_program`, over bare NIXL in this very process."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._buffer = torch.zeros(max(session.options.sizes), dtype=torch.uint8)
        self._agent = RawAgent(session, self._buffer)
        self._number = 0

    def rounds(self, nbytes: int, count: int) -> list[float]:
        """Read so many times; return what each took on this side."""
        tensor = self._buffer[:nbytes]
        taken = []
        for _ in range(WARMUPS + count):
            self._number += 1
            expected = self._number % 251
            if self._session.rank == OWNER:
                tensor.fill_(expected)
            self._session.barrier()
            started = time.perf_counter()
            if self._session.rank == OWNER:
                self._agent.notify(b"read")
                self._agent.await_message()
            elif self._session.rank == READER:
                self._agent.await_message()
                self._agent.move(False, nbytes, b"done")
            taken.append(time.perf_counter() - started)
            # Memory that another core has just written, or that has been looked at, is not read
            # and written as fast as what nobody touches.
            ends = (int(tensor.min()), int(tensor.max()))
            if self._session.rank <= READER and ends != (expected, expected):
                raise RuntimeError(f"wrong data in a round of {nbytes} bytes")
        return taken[WARMUPS:]


class _Program:
    """This rank's `connect_program` over one library. Ranks after the first two have none."""

    def __init__(self, session: Session, python: str, module: str) -> None:
        self._name = module
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._start_error = ""
        if session.rank > READER:
            return
        # Another environment has its own packages.
        paths = os.pathsep.join(path for path in sys.path if path)
        changes = {"PYTHONPATH": paths} if python == sys.executable else {}
        environment = {**os.environ, **changes}
        if python != sys.executable:
            environment.pop("PYTHONPATH", None)
        role = "owner" if session.rank == OWNER else "reader"
        try:
            self._process = subprocess.Popen(
                [python, str(_PROGRAM), module, role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        except OSError as error:
            self._start_error = f"{python} can't be run: {error.strerror}"
            return
        session.stack.callback(self._end)

    def missing(self, session: Session) -> str:
        """Why a rank lacks the library; empty if none does."""
        reason = self._start_error
        if self._process is not None:
            try:
                reason = self._answer().get("missing", "")
            except RuntimeError as error:
                reason = str(error)
        return next((reason for reason in session.exchange(reason) if reason), "")

    def meet(self, session: Session) -> None:
        """Connect the two sides: the owner's listens."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        key = session.exchange(secrets.token_hex(16))[OWNER]
        if session.rank == OWNER:
            self._ask({"key": key, "host": host})
        port = self._answer()["port"] if session.rank == OWNER else 0
        port = session.exchange(port)[OWNER]
        if session.rank == READER:
            self._ask({"key": key, "host": host, "port": port})

    def rounds(self, nbytes: int, count: int) -> list[float]:
        """Read so many times; return what each took on this side."""
        taken = [0.0]
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._ask({"nbytes": nbytes, "count": count})
            taken = self._answer()
        self._session.barrier()
        self._rest()
        return taken

    def _rest(self) -> None:
        """Stand still until the next turn: a library's threads may spin while nothing is to do."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def _ask(self, what: Mapping[str, object]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._death()) from None

    def _answer(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise RuntimeError(
                    f"{self._name} did not answer within {TIMEOUT.total_seconds()} s"
                )
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise RuntimeError(self._death())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _death(self) -> str:
        return f"the program over {self._name} ended, see above"

    def _end(self) -> None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
