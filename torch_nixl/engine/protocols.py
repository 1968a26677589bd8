"""What the protocols above have on a connection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection

_P = TypeVar("_P")


class Protocols:
    """One of each kind that works on this connection.

    Held by the Connection and by nothing else, so that both go together, however it ended.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._made: dict[Callable[[Connection], Any], Any] = {}
        self._lock = threading.Lock()

    def get(self, make: Callable[[Connection], _P]) -> _P:
        """What `make` makes of the connection; it is called once."""
        with self._lock:
            if make not in self._made:
                self._made[make] = make(self._connection)
            found: _P = self._made[make]
            return found

    def __contains__(self, make: Callable[[Connection], Any]) -> bool:
        return make in self._made

    def after_fork(self) -> None:
        """Replace the lock, which another thread may have held at the fork."""
        self._lock = threading.Lock()
