"""Connector: where a worker's operations begin."""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from torch_nixl.connect.active import ReadOperation, WriteOperation
from torch_nixl.connect.connection import Connection
from torch_nixl.connect.descriptor import Descriptor, as_descriptors
from torch_nixl.connect.metadata import RdmaMetadata
from torch_nixl.connect.operation import OperationKind
from torch_nixl.connect.passive import ReadableOperation, WritableOperation
from torch_nixl.engine.blob import MAX_NAME
from torch_nixl.engine.connection import DEFAULT_TIMEOUT
from torch_nixl.engine.connection import Connection as Engine
from torch_nixl.engine.registry import RegistryStatistics
from torch_nixl.engine.statistics import ConnectionStatistics, Counters
from torch_nixl.errors import ClosedError

_Exposing = TypeVar("_Exposing", ReadableOperation, WritableOperation)


class Connector:
    """Makes operations, all on one Connection, which the first of them opens.

    Usable from any number of threads and event loops. Making one touches nothing; `close` it, or
    leave its context, to end what it opened. Forgotten ones are closed at interpreter exit.

    Args:
        worker_id: Names this worker; made up if None.
        backends: NIXL's plugins to use.
        timeout: Seconds after which operations time out unless told otherwise; None for never.
        peer_timeout: Seconds of silence after which a peer that someone waits for counts as lost.
            None leaves that to the transport and to the operations' timeouts, since a process that
            computes without releasing the GIL is silent, too.
        secret: Shared by all workers that may exchange with this one; others are refused, dynamo's
            among them. Defaults to the environment's ``TORCH_NIXL_SECRET``.
        progress_thread: Have NIXL's own thread make progress, too, sleeping at most so many
            seconds (0.01 is a good value). For programs that hold the GIL for long.

    Raises:
        TypeError: `worker_id` is neither a str nor None.
        ValueError: It is too long, or can't be printed.
    """

    def __init__(
        self,
        worker_id: str | None = None,
        *,
        backends: Sequence[str] = ("UCX",),
        timeout: float | None = DEFAULT_TIMEOUT,
        peer_timeout: float | None = None,
        secret: bytes | str | None = None,
        progress_thread: float | None = None,
    ) -> None:
        if worker_id is None:
            worker_id = uuid.uuid4().hex
        if not isinstance(worker_id, str):
            raise TypeError(f"worker_id: expected a str, got {type(worker_id).__name__}")
        if not worker_id:
            # dynamo raises TypeError here.
            raise TypeError("worker_id: expected a str that is not empty")
        if not worker_id.isprintable() or len(worker_id.encode()) > MAX_NAME // 2:
            raise ValueError(f"worker_id: expected printable text of at most {MAX_NAME // 2} bytes")
        self._worker_id = worker_id
        self._hostname = socket.gethostname()
        self._backends = tuple(backends)
        self._timeout = timeout
        self._peer_timeout = peer_timeout
        self._secret = secret
        self._progress_thread = progress_thread
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False

    @property
    def hostname(self) -> str:
        return self._hostname

    @property
    def name(self) -> str:
        """The worker id."""
        return self._worker_id

    @property
    def is_cuda_available(self) -> bool:
        """Whether this process's torch can use a CUDA device."""
        import torch

        return torch.cuda.is_available()

    async def initialize(self) -> None:
        """Do nothing. Deprecated in the seed, kept for code that calls it."""

    def connection(self) -> Connection:
        """Return this process's end; the first call opens it, which takes a while.

        Raises:
            BackendError: NIXL is missing or can't be set up.
            ClosedError: The Connector is closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self!r} is closed")
            if self._connection is None:
                self._connection = Connection(self, 1)
            return self._connection

    async def _create_connection(self) -> Connection:
        """Do what `connection` does, without blocking the event loop.

        The name is dynamo's; programs call it to be warm before the first operation.
        """
        if self._connection is not None and not self._closed:
            return self._connection
        return await asyncio.to_thread(self.connection)

    def open_engine(self) -> Engine:
        """Open an engine with this Connector's options, for `Connection`."""
        return Engine.open(
            self._worker_id,
            backends=self._backends,
            progress_thread=self._progress_thread,
            secret=self._secret,
            timeout=self._timeout,
            peer_timeout=self._peer_timeout,
        )

    async def create_readable(
        self,
        local_descriptors: Descriptor | list[Descriptor],
        *,
        timeout: float | None = None,
    ) -> ReadableOperation:
        """Expose memory that a peer is to read.

        Args:
            local_descriptors: The memory.
            timeout: Seconds until the offer lapses; the Connector's by default.

        Raises:
            TypeError: Not a Descriptor or a list of them.
            ValueError: The list is empty.
            RegistrationError: NIXL refused the memory.
            BackendError: NIXL is missing or can't be set up.
            ClosedError: The Connector is closed.
        """
        return await self._expose(ReadableOperation, local_descriptors, timeout)

    async def create_writable(
        self,
        local_descriptors: Descriptor | list[Descriptor],
        *,
        timeout: float | None = None,
    ) -> WritableOperation:
        """Expose memory that a peer is to write.

        Args:
            local_descriptors: The memory.
            timeout: Seconds until the offer lapses; the Connector's by default.

        Raises:
            TypeError: Not a Descriptor or a list of them.
            ValueError: The list is empty, or some memory is read-only or overlaps itself.
            RegistrationError: NIXL refused the memory.
            BackendError: NIXL is missing or can't be set up.
            ClosedError: The Connector is closed.
        """
        return await self._expose(WritableOperation, local_descriptors, timeout)

    async def _expose(
        self,
        role: type[_Exposing],
        local_descriptors: Descriptor | list[Descriptor],
        timeout: float | None,
    ) -> _Exposing:
        as_descriptors(local_descriptors)
        connection = await self._create_connection()
        return role(connection, local_descriptors, timeout=timeout)

    async def begin_read(
        self,
        remote_metadata: RdmaMetadata,
        local_descriptors: Descriptor | list[Descriptor],
        *,
        timeout: float | None = None,
    ) -> ReadOperation:
        """Begin to read what a peer exposes.

        Args:
            remote_metadata: Of the peer's ReadableOperation.
            local_descriptors: Where to put it; pairwise as large.
            timeout: Seconds; the Connector's by default.

        Raises:
            TypeError: An argument is of another type.
            RuntimeError: The metadata is of a WritableOperation.
            ValueError: Number or sizes differ; a target can't be written to.
            MetadataError: The metadata is altered, not authenticated, or names memory that it does
                not tell. Nothing was sent.
            PeerLostError: The peer can't be reached.
            RegistrationError: NIXL refused the memory.
            BackendError: NIXL is missing or can't be set up.
            ClosedError: The Connector is closed.
        """
        _check(remote_metadata, local_descriptors, OperationKind.READ)
        connection = await self._create_connection()
        return ReadOperation(connection, remote_metadata, local_descriptors, timeout=timeout)

    async def begin_write(
        self,
        local_descriptors: Descriptor | list[Descriptor],
        remote_metadata: RdmaMetadata,
        *,
        timeout: float | None = None,
    ) -> WriteOperation:
        """Begin to write into what a peer exposes.

        Args:
            local_descriptors: What to write; pairwise as large.
            remote_metadata: Of the peer's WritableOperation.
            timeout: Seconds; the Connector's by default.

        Raises:
            TypeError, ValueError, RuntimeError, MetadataError: As for `begin_read`.
            PeerLostError, RegistrationError, BackendError, ClosedError: As for `begin_read`.
        """
        _check(remote_metadata, local_descriptors, OperationKind.WRITE)
        connection = await self._create_connection()
        return WriteOperation(connection, local_descriptors, remote_metadata, timeout=timeout)

    def statistics(self) -> ConnectionStatistics:
        """What its Connection has done so far, as frozen values; zeros if it has none yet."""
        if self._connection is None:
            return Counters().freeze(RegistryStatistics(), 0, 0)
        return self._connection.engine.statistics()

    def close(self, timeout: float = 5.0) -> None:
        """End gracefully: withdraw what is exposed, let what moves end, tell the peers.

        Idempotent; nothing can be begun afterwards.

        Args:
            timeout: Seconds after which what has not ended is aborted.
        """
        connection = self._shut()
        if connection is not None:
            connection.engine.close(timeout)

    def abort(self) -> None:
        """End at once, and fail what has not ended with `ClosedError`. Idempotent."""
        connection = self._shut()
        if connection is not None:
            connection.engine.abort()

    def _shut(self) -> Connection | None:
        with self._lock:
            self._closed = True
            return self._connection

    def __enter__(self) -> Connector:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Connector):
            return NotImplemented
        return self._worker_id == other._worker_id

    __hash__ = None  # type: ignore[assignment]  # equal by a name that two can share

    def __str__(self) -> str:
        return self._worker_id

    def __repr__(self) -> str:
        return f"Connector(worker_id={self._worker_id!r}, hostname={self._hostname})"


def _check(metadata: object, descriptors: object, kind: OperationKind) -> None:
    """Check arguments before a Connection is opened for them."""
    if not isinstance(metadata, RdmaMetadata):
        raise TypeError(f"remote_metadata: expected RdmaMetadata, got {type(metadata).__name__}")
    as_descriptors(descriptors)
    if metadata.operation_kind != kind:
        raise RuntimeError(
            f"remote_metadata: a {kind} needs metadata of kind {int(kind)}, "
            f"got {metadata.operation_kind}"
        )
