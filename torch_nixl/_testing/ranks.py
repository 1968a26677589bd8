"""Functions on several ranks, each a process of its own, that can't outlive their deadline."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch_nixl._testing.rank_worker import DUMP_SIGNAL, Rank, Task

T = TypeVar("T")

_START_TIMEOUT = 120.0
_DUMP_TIMEOUT = 5.0
_OUTPUT_TAIL = 4000

GRACE = 5.0
"""Seconds that the other ranks have to end once one has failed."""


class RanksFailed(AssertionError):
    """Not every rank returned.

    Attributes:
        failures: For each rank that did not return, what is known: its traceback, how it exited,
            or the stacks of all its threads if it hung; and the end of what it printed.
    """

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        parts = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items())]
        super().__init__("\n".join([f"ranks failed: {sorted(failures)}", *parts]))


class _Worker:
    """One process that runs tasks."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._output = directory / "output"
        self._stacks = directory / "stacks"
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        paths = [path or os.getcwd() for path in sys.path]
        with theirs, self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch_nixl._testing.rank_worker",
                    str(theirs.fileno()),
                    str(life),
                    str(self._stacks),
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
                pass_fds=(theirs.fileno(), life),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        os.close(life)
        self.connection = Connection(ours.detach())
        self._printed = 0

    def start(self, task: bytes) -> None:
        self._printed = self._output.stat().st_size
        self.connection.send_bytes(task)

    def death(self) -> str:
        """Say how the process ended by itself."""
        try:
            code = self.process.wait(_DUMP_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"closed its connection but lives\n{self.output()}"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"{how} before it returned\n{self.output()}"

    def stacks(self) -> str:
        """Make a hung process write the stacks of its threads, and return them."""
        self.process.send_signal(DUMP_SIGNAL)
        deadline = time.monotonic() + _DUMP_TIMEOUT
        text = ""
        # The dump has no end mark: it is whole once it is there and has stopped growing.
        while time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.05)
            text, before = self._stacks.read_text(), text
            if text and text == before:
                break
        return text or "(it did not answer a request for its stacks)"

    def output(self) -> str:
        text = self._output.read_bytes()[self._printed :].decode(errors="replace")
        return f"it printed: {text[-_OUTPUT_TAIL:]}" if text else ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        os.close(self._life)


class RankPool:
    """Processes that stay warm between runs, with torch imported once.

    A run that fails costs its processes: the next one gets new ones. Use as a context manager, or
    call `close`.

    Args:
        world_size: How many ranks there are.
        env: Environment variables for the processes, on top of this process's.
    """

    def __init__(self, world_size: int, *, env: Mapping[str, str] | None = None) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self._environment = dict(env or {})
        self._directory = Path(tempfile.mkdtemp(prefix="torch_nixl_ranks_"))
        self._workers: dict[int, _Worker] = {}
        self._closed = False

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each rank that has a process now."""
        return {rank: worker.process.pid for rank, worker in self._workers.items()}

    def run(
        self,
        fn: Callable[..., T],
        *,
        args: Sequence[Any] = (),
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        world_size: int | None = None,
    ) -> list[T]:
        """Run ``fn(rank, *args)`` on every rank and return the results in rank order.

        Args:
            fn: A function at the top level of a module that can be imported: it is sent by name.
                Its first argument is a `Rank`.
            args: Further arguments, the same for every rank; pickled, as are results.
            timeout: Seconds until what still runs is killed. Starting processes doesn't count.
            env: Environment variables during this run. RANK and WORLD_SIZE are set already.
            world_size: Run on the first so many ranks only.

        Raises:
            RanksFailed: A rank raised, exited or hung. Says where.
            ValueError: `fn` is in ``__main__``, which other processes don't have.
        """
        if self._closed:
            raise ValueError("this pool is closed")
        size = self.world_size if world_size is None else world_size
        if not 1 <= size <= self.world_size:
            raise ValueError(f"this pool has {self.world_size} ranks, not {size}")
        if getattr(fn, "__module__", None) == "__main__":
            raise ValueError(f"{fn!r} is in __main__: move it to a module, it is sent by name")
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        try:
            # Pickled first: what can't be sent costs no process.
            where = [Rank(rank, size, directory) for rank in range(size)]
            tasks = [
                pickle.dumps(Task(fn, tuple(args), rank, {**_variables(rank), **(env or {})}))
                for rank in where
            ]
            self._provide(size)
            try:
                results, failures = self._run(tasks, timeout)
            except BaseException:
                # Interrupted: nobody knows what the ranks are doing.
                self._end(range(size))
                raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if failures:
            # The others may be in any state: none is used again.
            self._end(range(size))
            raise RanksFailed(failures)
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        """Kill every process. Idempotent."""
        self._closed = True
        self._end(list(self._workers))
        shutil.rmtree(self._directory, ignore_errors=True)

    def _provide(self, size: int) -> None:
        """Start the processes that are missing, all at a time, and wait until they are ready."""
        dead = [rank for rank, worker in self._workers.items() if worker.process.poll() is not None]
        self._end(dead)
        missing = [rank for rank in range(size) if rank not in self._workers]
        for rank in missing:
            home = Path(tempfile.mkdtemp(dir=self._directory))
            self._workers[rank] = _Worker(home, self._environment)
        deadline = time.monotonic() + _START_TIMEOUT
        for rank in missing:
            worker = self._workers[rank]
            ready = worker.connection.poll(max(0.0, deadline - time.monotonic()))
            failure = None if ready else f"did not start in {_START_TIMEOUT} s"
            if ready:
                try:
                    worker.connection.recv_bytes()
                except EOFError:
                    failure = worker.death()
            if failure is not None:
                self._end(missing)
                raise RanksFailed({rank: failure})

    def _run(self, tasks: Sequence[bytes], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        running: dict[Connection, int] = {}
        for rank, task in enumerate(tasks):
            self._workers[rank].start(task)
            running[self._workers[rank].connection] = rank
        why = f"still ran after {timeout} s"
        while running:
            done = wait(list(running), max(0.0, deadline - time.monotonic()))
            for connection in done:
                assert isinstance(connection, Connection)
                rank = running.pop(connection)
                worker = self._workers[rank]
                try:
                    data = connection.recv_bytes()
                    succeeded, value = pickle.loads(data)  # noqa: S301 - from our own child
                except (EOFError, ConnectionResetError):
                    succeeded, value = False, worker.death()
                else:
                    if not succeeded:
                        value = f"{value}{worker.output()}"
                (results if succeeded else failures)[rank] = value
                if not succeeded and time.monotonic() + GRACE < deadline:
                    deadline = time.monotonic() + GRACE
                    why = f"still ran {GRACE} s after rank {rank} had failed"
            if not done:
                for rank in running.values():
                    worker = self._workers[rank]
                    failures[rank] = f"{why}, in:\n{worker.stacks()}{worker.output()}"
                break
        return results, failures

    def _end(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            worker = self._workers.pop(rank, None)
            if worker is not None:
                worker.end()


def _variables(rank: Rank) -> dict[str, str]:
    """Return the environment that torchrun would give a rank."""
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_WORLD_SIZE": str(rank.world_size),
    }


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Run ``fn(rank, *args)`` on ranks in fresh processes and return the results in rank order.

    See `RankPool.run` for the arguments and errors. No process is left behind.
    """
    with RankPool(world_size, env=env) as pool:
        return pool.run(fn, args=args, timeout=timeout)
