"""Exchange of RdmaMetadata through a torch Store: TCPStore, FileStore, HashStore or PrefixStore.

The store only hands the metadata over; nothing else goes through it.

[Note: removal]
Stores can compare and set in one step, but not compare and delete. So a key that is to go is first
set to `_REMOVED`, by comparison with what its operation had published, and then deleted. Who
publishes under it meanwhile, in whatever process and through whatever client, waits for the
deletion, which would take the new value along. No lock of ours is held over a store's call: one
that hangs holds up its own caller only.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeAlias

from torch_nixl.connect.metadata import RdmaMetadata
from torch_nixl.connect.operation import OperationStatus
from torch_nixl.connect.passive import PassiveOperation
from torch_nixl.engine.operation import deadline_after
from torch_nixl.errors import MetadataError, TransferError

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("torch_nixl.connect")

FETCH_SECONDS: Final = 300.0
SHORTEST_PAUSE: Final = 0.001
LONGEST_PAUSE: Final = 0.020
REMOVAL_SECONDS: Final = 2.0
"""How long `publish` waits for a key's removal: who began it may have died in the middle."""
EXIT_SECONDS: Final = 2.0
"""How long the interpreter's exit waits for keys that are still to be removed."""


def publish(store: Store, key: str, operation: PassiveOperation) -> RdmaMetadata:
    """Put an operation's metadata into a store, and have it removed once the operation ends.

    Args:
        store: Any torch Store.
        key: Name in the store, one of its own for each operation: metadata is good for one, and
            whoever fetches a key before the last operation's is removed gets that one's again.
        operation: What is exposed.

    Returns:
        The metadata.

    Raises:
        TypeError: Not a passive operation.
        TransferError: The operation has ended.
    """
    if not isinstance(operation, PassiveOperation):
        raise TypeError(f"operation: expected a PassiveOperation, got {type(operation).__name__}")
    metadata = operation.metadata()
    if operation.status in _ENDED:
        raise TransferError(f"{operation!r} has ended: there is nothing to publish any more")
    text = metadata.model_dump_json()
    _write(store, key, text)
    process = os.getpid()

    def remove() -> None:
        # A forked child's words would mix with its parent's on the store's one connection.
        if os.getpid() == process:
            _remover.remove(store, key, text)

    operation.add_done_callback(remove)
    return metadata


def fetch(
    store: Store, key: str, *, timeout: float | timedelta | None = FETCH_SECONDS
) -> RdmaMetadata:
    """Wait until metadata is published under a key, and return it.

    It asks again and again, rather than wait in the store: a TCPStore that waits blocks all other
    threads that use it, `publish` of the other direction among them.

    Args:
        store: Any torch Store.
        key: Name in the store.
        timeout: Seconds, or a timedelta; None for no limit. A store whose server hangs is waited
            for all the same: its calls have deadlines of their own (`Store.set_timeout`).

    Raises:
        TimeoutError: Nothing was published by then.
        ValueError: The timeout is negative or not a number.
        MetadataError: What is there is no metadata.
    """
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    deadline = deadline_after(timeout)
    pause = SHORTEST_PAUSE
    while True:
        text = _read(store, key)
        if text:
            break
        left = LONGEST_PAUSE if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no metadata under {key!r} in the store after {timeout} s")
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, LONGEST_PAUSE)
    try:
        return RdmaMetadata.model_validate_json(text)
    except (TypeError, ValueError) as error:
        raise MetadataError(f"what the store has under {key!r} is no metadata") from error


def _write(store: Store, key: str, text: str) -> None:
    """Set a key, whoever else sets or removes it at the same time. See [Note: removal]."""
    deadline = time.monotonic() + REMOVAL_SECONDS
    expected = ""
    while True:
        found = store.compare_set(key, expected, text).decode()
        if found == text:
            return
        if found == _REMOVED and time.monotonic() < deadline:
            time.sleep(SHORTEST_PAUSE)
            expected = ""
        else:
            # Another operation's; or gone, where what was expected comes back.
            expected = "" if found == expected else found


def _read(store: Store, key: str) -> bytes:
    """Return a key's value; empty if it isn't there, or is being removed."""
    if not store.check([key]):
        return b""
    # It may go between the two calls. Comparing with what only removal writes reads without
    # waiting, and returns that also of a key that is gone.
    value: bytes = store.compare_set(key, _REMOVED, _REMOVED)
    return b"" if value == _REMOVED.encode() else value


_ENDED: Final = (OperationStatus.COMPLETE, OperationStatus.CANCELLED, OperationStatus.ERRORED)
_REMOVED: Final = "torch_nixl: removed"
_Job: TypeAlias = "tuple[Store, str, str] | None"


class _Remover:
    """Removes keys, in a thread of its own.

    Operations end in the driver's thread, in event loops and in finalizers, and a store's call may
    block: none of them can wait for it.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._exiting = False

    def remove(self, store: Store, key: str, text: str) -> None:
        """Have a key removed, unless somebody has published another value under it."""
        with self._lock:
            if not self._exiting and (self._thread is not None or self._start()):
                # Under the lock: what comes after `stop`'s last job would never be done.
                self._jobs.put((store, key, text))
                return
        self._remove_now(store, key, text)

    def _start(self) -> bool:
        """Start the thread; return False if the interpreter takes no new ones. Holds the lock."""
        thread = threading.Thread(target=self._run, name="torch_nixl-store", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Since Python 3.12, once it is exiting.
            return False
        self._thread = thread
        return True

    def after_fork(self) -> None:
        """Begin anew in a child: the thread is the parent's, and so is what it has to do."""
        self._jobs = queue.SimpleQueue()
        self._thread = None
        self._lock = threading.Lock()

    def exit(self) -> None:
        """End the thread for good: at the interpreter's end none may be inside a store."""
        self._exiting = True
        self.stop()

    def stop(self) -> None:
        """Remove what is to be removed by now, and end the thread; a later key starts a new one."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None:
            thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            store, key, text = job
            del job
            self._remove_now(store, key, text)
            # No job, no store: it may be the last to hold one.
            del store

    @staticmethod
    def _remove_now(store: Store, key: str, text: str) -> None:
        try:
            if store.compare_set(key, text, _REMOVED) == _REMOVED.encode():
                store.delete_key(key)
        except Exception as error:  # noqa: BLE001 - the store may be gone, and all ends then
            log.debug("can't remove %r from the store: %s", key, error)


_remover = _Remover()
# Registered here and not with the first key: operations end, and their keys go, in other hooks.
atexit.register(_remover.exit)
os.register_at_fork(after_in_child=_remover.after_fork)
