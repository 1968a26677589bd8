"""Programs' callbacks, called by a thread of their own. Pure.

What they do may take long, while the thread that notices a request's end has pages of other
requests to move, leases to keep and peers to answer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

log = logging.getLogger("torch_nixl.kv")


class Callbacks:
    """Calls callbacks one after the other. Its thread lives while there are any."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._running = False

    def add(self, callbacks: Sequence[Callable[[], None]]) -> bool:
        """Have callbacks called soon; return False if they can't be: the interpreter is exiting."""
        with self._lock:
            if callbacks and not self._running:
                thread = threading.Thread(
                    target=self._run, name="torch_nixl-kv-callbacks", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # Since Python 3.12, which takes no new threads then.
                    return False
                self._running = True
            self._queue.extend(callbacks)
            return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._running = False
                    return
                callback = self._queue.popleft()
            try:
                callback()
            except Exception:  # What waits behind it is not to blame.
                log.exception("a completion callback raised")
            del callback  # Nothing that it holds lives on while the next one runs.
