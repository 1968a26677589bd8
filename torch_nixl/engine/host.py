"""What a connection needs of its own process: who it is, and when it forks or ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch_nixl.engine.wire import Identity
from torch_nixl.errors import BackendError, ClosedError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection

log = logging.getLogger("torch_nixl.host")

EXIT_SECONDS = 2.0
"""How long all forgotten connections together may take to end at interpreter exit."""

_open: weakref.WeakSet[Connection] = weakref.WeakSet()

_forked_in_use = False
_condition = threading.Condition()
_num_opening = 0
_exiting = False


def identity() -> Identity:
    """Which process this is, so that peers on the same host can tell whether it has died."""
    pid = os.getpid()
    return Identity(_host(), pid, _start_time(pid) or 0)


def is_alive(peer: Identity) -> bool:
    """Whether a process on this host still runs."""
    return _start_time(peer.pid) == peer.start_time


@functools.cache
def _host() -> bytes:
    """16 bytes that differ between machines, boots and pid namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.blake2b(f"{boot}{namespace}".encode(), digest_size=16).digest()


def _start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None if it's gone or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name, in parentheses, may hold anything; the fields after it are proc(5)'s.
    state, *fields = stat.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def check_not_forked_in_use() -> None:
    """Refuse to make an agent where none can work.

    UCX has a thread of its own while an agent lives. A child forked then inherits the belief that
    it runs, but not the thread: its agents never make contact.

    Raises:
        BackendError: This process was forked from one that had an open connection.
    """
    if _forked_in_use:
        raise BackendError(
            "this process was forked while a connection was open, and NIXL can't work in it: "
            "start it with multiprocessing's 'spawn', or fork before the first connection"
        )


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Have the interpreter's exit wait for an agent that is being made, and refuse later ones.

    Raises:
        ClosedError: The interpreter is exiting.
    """
    global _num_opening
    with _condition:
        if _exiting:
            raise ClosedError("the interpreter is exiting: no connection can be opened")
        _num_opening += 1
    try:
        yield
    finally:
        with _condition:
            _num_opening -= 1
            _condition.notify_all()


def watch(connection: Connection) -> None:
    """Close a connection at interpreter exit, and disown it in forked children."""
    _open.add(connection)


def watched() -> list[Connection]:
    """The connections of this process that are open."""
    return list(_open)


def unwatch(connection: Connection) -> None:
    """Undo `watch`."""
    _open.discard(connection)


def keep_for_ever(value: object) -> None:
    """Never let `value` be freed, not even at interpreter exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@atexit.register
def _close_all() -> None:
    global _exiting
    deadline = time.monotonic() + EXIT_SECONDS
    with _condition:
        _exiting = True
        # A daemon thread that is inside NIXL when the interpreter ends aborts the process.
        _condition.wait_for(lambda: _num_opening == 0, EXIT_SECONDS)
    left = list(_open)
    while left:
        connection = left.pop()
        # Each gets its share: one that can't end must not cost the others their farewell.
        seconds = max(0.0, deadline - time.monotonic()) / (1 + len(left))
        try:
            connection.close(seconds)
        except Exception:  # Nor must one that raises: of which only the log can tell.
            log.exception("%r could not be closed at exit", connection)


def _after_fork_in_child() -> None:
    global _forked_in_use, _condition, _num_opening
    _condition = threading.Condition()
    _num_opening = 0
    for connection in list(_open):
        connection.disown()
        _forked_in_use = True
    _open.clear()
    _host.cache_clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
