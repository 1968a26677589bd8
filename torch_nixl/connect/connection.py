"""Connection and Remote: the two ends, under the names that the seed gives them.

Both are thin: the engine's Connection (`torch_nixl.engine.connection`) does the work and owns
remotes for as long as it lives, so that one operation's end never cuts off another.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from types import TracebackType
from typing import TYPE_CHECKING

from torch_nixl.connect.exchange import PublicBlobs
from torch_nixl.connect.metadata import decode_blob
from torch_nixl.engine.connection import Connection as Engine

if TYPE_CHECKING:
    from torch_nixl.connect.connector import Connector


class Connection:
    """This process's end. A `Connector` makes one and shares it among all its operations.

    Args:
        connector: Whose it is.
        number: Its number there, from 1.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The number is below 1.
        BackendError: NIXL is missing or can't be set up.
    """

    def __init__(self, connector: Connector, number: int) -> None:
        from torch_nixl.connect.connector import Connector

        if not isinstance(connector, Connector):
            raise TypeError(f"connector: expected a Connector, got {type(connector).__name__}")
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"number: expected an int, got {type(number).__name__}")
        if number < 1:
            raise ValueError(f"number: expected 1 or more, got {number}")
        self._connector = connector
        self.engine: Engine = connector.open_engine()
        self.blobs = PublicBlobs(self.engine)
        self.num_awaiting = 0  # coroutines; a hint, so that no lock guards it
        self._references: Counter[str] = Counter()
        self._dropped: deque[str] = deque()
        self._lock = threading.Lock()
        # Operations hold their Connection, so nobody can reach this end any more once it dies.
        weakref.finalize(self, _forget, self.engine).atexit = False
        # So that there is a thread that does it, though this end is never used.
        self.engine.progress.kick()

    @property
    def connector(self) -> Connector:
        return self._connector

    @property
    def metadata(self) -> bytes:
        """NIXL's blob that tells how to reach this end. It names no memory."""
        return self.engine.metadata(())[0]

    @property
    def name(self) -> str:
        """The agent's name: the worker id, and what makes it unique to this incarnation."""
        return self.engine.name

    async def initialize(self) -> None:
        """Do nothing: a Connection is ready when it is made."""

    def acquire_remote_ref(self, name: str) -> None:
        """Count one more use of a remote.

        Counted for code that asks; what remotes are kept for is the operations with them.
        """
        with self._lock:
            self._take_in_dropped()
            self._references[name] += 1

    def release_remote_ref(self, name: str) -> bool:
        """Count one use less; return whether that was the last. False for unknown names, too."""
        with self._lock:
            self._take_in_dropped()
            return self._release(name)

    def drop_remote_ref(self, name: str) -> None:
        """Do what `release_remote_ref` does, later: for finalizers, which may not take locks."""
        self._dropped.append(name)

    def _take_in_dropped(self) -> None:
        while self._dropped:
            self._release(self._dropped.popleft())

    def _release(self, name: str) -> bool:
        if name not in self._references:
            return False
        self._references[name] -= 1
        if self._references[name] > 0:
            return False
        del self._references[name]
        return True

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Connection(is_initialized={not self.engine.closed}, name={self.name!r})"


class Remote:
    """Another worker's end, as its metadata names it. Making one contacts nobody.

    Args:
        connection: This process's end.
        nixl_metadata: The far agent's metadata: the text of `RdmaMetadata.nixl_metadata`, or NIXL's
            blob as bytes.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The metadata is empty or can't be decoded (MetadataError).
    """

    def __init__(self, connection: Connection, nixl_metadata: bytes | str) -> None:
        if not isinstance(connection, Connection):
            raise TypeError(f"connection: expected a Connection, got {type(connection).__name__}")
        if not isinstance(nixl_metadata, (bytes, str)):
            raise TypeError(
                f"nixl_metadata: expected bytes or a str, got {type(nixl_metadata).__name__}"
            )
        if not nixl_metadata:
            raise ValueError("nixl_metadata: it is empty")
        if isinstance(nixl_metadata, str):
            nixl_metadata = decode_blob(nixl_metadata)
        self._connection = connection
        self.blob: bytes = nixl_metadata
        self.info = connection.engine.adapter.inspect(nixl_metadata)
        connection.acquire_remote_ref(self.name)
        self._finalizer = weakref.finalize(self, connection.drop_remote_ref, self.name)
        self._finalizer.atexit = False

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def name(self) -> str:
        """The far agent's name."""
        return self.info.agent

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._finalizer.detach() is not None:
            self._connection.release_remote_ref(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Remote(name={self.name}, connection={self._connection.name})"


def _forget(engine: Engine) -> None:
    """Close the engine of a forgotten Connection. Runs in a finalizer, so the driver does it."""
    if not engine.closed:
        timeout = 300.0 if engine.timeout is None else engine.timeout
        engine.progress.call_from_finalizer(lambda: engine.close(timeout))
