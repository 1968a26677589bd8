"""A rank's process: runs what the parent sends, one function after another, until told to end."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, Store

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stack of each of its threads, also when it holds the GIL."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a function runs: the first argument of every function given to `run_ranks`.

    Attributes:
        rank: From 0 to ``world_size - 1``.
        world_size: How many ranks run the function.
        directory: Empty at the start, shared by the ranks of this run, removed after it.
    """

    rank: int
    world_size: int
    directory: Path

    def store(self) -> Store:
        """Return a store that is this run's own, at the same place on every rank."""
        return FileStore(str(self.directory / "store"), self.world_size)


@dataclass(frozen=True, slots=True)
class Task:
    """A function to run, as sent to each rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: Rank
    environment: Mapping[str, str]


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _end_with_parent(life: int) -> None:
    # The parent holds the other end and writes nothing: reading ends when it does.
    os.read(life, 1)
    os._exit(1)


def _perform(data: bytes) -> bytes:
    """Run a pickled `Task`; return a pickled (succeeded, result or traceback)."""
    try:
        task: Task = pickle.loads(data)  # noqa: S301 - from the parent, over its own socket
        with _environment(task.environment):
            result = task.function(task.rank, *task.args)
        return pickle.dumps((True, result))
    except BaseException:  # noqa: BLE001 - what it raises is its result, an exit included
        return pickle.dumps((False, traceback.format_exc()))


def main(connection_fd: int, life: int, stacks: str) -> None:
    """Serve until the connection ends.

    Args:
        connection_fd: Socket over which tasks come and results go.
        life: Pipe that ends with the parent.
        stacks: File to write stacks to at `DUMP_SIGNAL`.
    """
    connection = Connection(connection_fd)
    threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
    with open(stacks, "w") as file:
        faulthandler.enable()
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
        # What takes long is done once, before the first deadline runs.
        torch.set_num_threads(1)
        connection.send_bytes(b"ready")
        while True:
            try:
                data = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_perform(data))
            sys.stdout.flush()
            sys.stderr.flush()


if __name__ == "__main__":
    # Under its own name, so that the classes above are the ones that the parent pickled.
    from torch_nixl._testing import rank_worker

    rank_worker.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
