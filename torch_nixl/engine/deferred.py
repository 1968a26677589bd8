"""Things done later, and by whom: the progress driver, a device's own thread, a watcher.

Pure: no torch, no devices.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

log = logging.getLogger("torch_nixl.streams")


class Deferred:
    """What the progress driver does once something has come to pass.

    Attributes:
        entries: What it waits for, and what it then does, in no particular order.
    """

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def add(self, ready: Callable[[], bool], action: Callable[[], None]) -> None:
        """Have `action` called by the driver, without locks, once `ready` holds."""
        self.entries.append((ready, action))

    def run(self) -> bool:
        """Do what is due; return whether anything was. Called by the driver alone."""
        entries = self.entries
        moved = False
        for _ in range(len(entries)):
            ready, action = entries.popleft()
            try:
                if not ready():
                    entries.append((ready, action))
                    continue
                moved = True
                action()
            except Exception:  # What waits behind it is not to blame.
                log.exception("a deferred operation raised")
        return moved


_waiting = Deferred()
_waiting_lock = threading.Lock()
_watcher: threading.Thread | None = None


def when(ready: Callable[[], bool], action: Callable[[], None]) -> None:
    """Do what must not depend on any connection once `ready` holds, in a thread of its own."""
    global _watcher
    with _waiting_lock:
        _waiting.add(ready, action)
        if _watcher is None:
            watcher = threading.Thread(target=_watch, name="torch_nixl-streams", daemon=True)
            try:
                watcher.start()
            except RuntimeError:  # The interpreter is exiting, and takes no new threads.
                return
            _watcher = watcher


def _watch() -> None:
    global _watcher
    while True:
        _waiting.run()
        with _waiting_lock:
            if not _waiting.entries:
                _watcher = None
                return
        time.sleep(0.001)  # A point of a device's wakes nobody.


class Worker:
    """A thread that does one thing after the other, started when first needed.

    A daemon: it sleeps without holding anything unless a device is at work. It ends when nobody
    can submit anything any more.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Unlike a lock, this one can be entered by a finalizer that interrupts its own use.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Have `job` done, which must not raise."""
        if self._thread is None and not self._start():
            job()
            return
        self._jobs.put(job)

    def _start(self) -> bool:
        """Start the thread; return False if the interpreter is exiting, and takes no new ones."""
        with self._lock:
            if self._thread is None:
                # It is given no reference to this object.
                thread = threading.Thread(
                    target=_work, args=(self._jobs,), name=self._name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread = thread
                weakref.finalize(self, self._jobs.put, None).atexit = False
            return True


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        del job  # No reference is kept while it sleeps.


def perform(
    work: Callable[[], None],
    then: Callable[[BaseException | None], None],
) -> None:
    """Do work and tell how it ended: what a device's thread runs."""
    error: BaseException | None = None
    try:
        work()
    except Exception as caught:  # noqa: BLE001 - whoever waits for it is told
        error = caught
    try:
        then(error)
    except Exception:  # Nobody above could be told; the device's thread goes on with the next.
        log.exception("what follows a copy on a device raised")
