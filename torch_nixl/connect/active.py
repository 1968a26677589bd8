"""Active operations: they read or write what a peer exposes."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType

from torch_nixl.connect.connection import Connection, Remote
from torch_nixl.connect.descriptor import Descriptor, as_descriptors
from torch_nixl.connect.exchange import meet, understand
from torch_nixl.connect.metadata import RdmaMetadata
from torch_nixl.connect.operation import (
    CANCEL_SECONDS,
    DIRECTIONS,
    AbstractOperation,
    OperationKind,
    OperationStatus,
)
from torch_nixl.engine.operation import deadline_after
from torch_nixl.errors import TransferTimeout


class ActiveOperation(AbstractOperation):
    """Reads or writes what a peer exposes. It begins to when it is made.

    Leaving its context while it runs lets it go on; leaving by an exception cancels it. Dropping it
    lets it go on, too: the memory is held until the end.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Number or sizes of the descriptors differ from the peer's; a target can't be
            written to; a storage has moved since it was described; or the metadata is of the
            other kind (which `Connector.begin_read` and `begin_write` raise as RuntimeError).
        MetadataError: What the peer told is altered, not authenticated, or names memory that it
            does not tell. Nothing was sent.
        PeerLostError: The peer can't be reached.
        RegistrationError: NIXL refused the memory.
        ClosedError: The connection is closed.
    """

    @abstractmethod
    def __init__(
        self,
        remote: Remote,
        operation_kind: OperationKind,
        local_descriptors: Descriptor | list[Descriptor],
        remote_descriptors: Descriptor | list[Descriptor],
        notification_key: str,
        *,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(remote, Remote):
            raise TypeError(f"remote: expected a Remote, got {type(remote).__name__}")
        super().__init__(
            remote.connection,
            operation_kind,
            local_descriptors,
            remote_descriptors,
            notification_key,
        )
        if not isinstance(notification_key, str):
            raise TypeError(
                f"notification_key: expected a str, got {type(notification_key).__name__}"
            )
        theirs = as_descriptors(remote_descriptors, "remote_descriptors")
        if [one.size for one in self._local] != [one.size for one in theirs]:
            raise ValueError(
                f"local_descriptors: sizes of {[one.size for one in self._local]} bytes don't "
                f"match the peer's {[one.size for one in theirs]}"
            )
        self._remote = remote
        engine = remote.connection.engine
        understood = understand(
            engine,
            DIRECTIONS[operation_kind],
            remote.blob,
            [one.metadata for one in theirs],
            notification_key,
        )
        meet(engine, understood, remote.blob, remote.info)
        memories = [one.memory() for one in self._local]
        self._begin(engine.claim(understood.offer, memories, timeout=timeout))

    @property
    def remote(self) -> Remote:
        return self._remote

    def cancel(self, *, timeout: float = CANCEL_SECONDS) -> None:
        """End the operation, and wait until no more bytes move. No effect on one that has ended.

        NIXL can't abort: pieces under way (of up to 64 MiB) still move, no further ones start.
        Whether any, some or all bytes were written is not known; those of a target are undefined,
        here for a read, at the peer for a write. The peer is told, unless it is not torch_nixl's:
        that one never hears of the operation again.

        Args:
            timeout: Most seconds to wait for the pieces under way.

        Raises:
            TransferTimeout: Some still move. The memory stays owned: see `wait_released`.
            ValueError: The timeout is negative or not a number; nothing was cancelled.
        """
        deadline_after(timeout)
        if self._operation.done:
            return
        self._operation.cancel()
        if not self._operation.wait_released(timeout):
            raise TransferTimeout(f"{self._operation}: still under way {timeout} s after a cancel")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is not None and not self._operation.done:
            self._operation.cancel()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.texts()}, remote={self._remote}, status='{self.status}')"
        )


class ReadOperation(ActiveOperation):
    """Reads what a peer exposes into local memory. See `ActiveOperation`.

    Args:
        connection: This process's end.
        remote_metadata: Of a `ReadableOperation`.
        local_descriptors: Where to put it; pairwise as large.
        timeout: Seconds; the Connector's by default.
    """

    def __init__(
        self,
        connection: Connection,
        remote_metadata: RdmaMetadata,
        local_descriptors: Descriptor | list[Descriptor],
        *,
        timeout: float | None = None,
    ) -> None:
        remote, theirs = _check_metadata(connection, remote_metadata, OperationKind.READ)
        super().__init__(
            remote,
            OperationKind.READ,
            local_descriptors,
            theirs,
            remote_metadata.notification_key,
            timeout=timeout,
        )

    def results(self) -> list[Descriptor]:
        """Return the local descriptors, now that they hold the peer's data.

        Raises:
            RuntimeError: The operation is not complete.
        """
        status = self.status
        if status is not OperationStatus.COMPLETE:
            raise RuntimeError(f"the operation has no results: its status is {status.name}")
        return list(self._local)


class WriteOperation(ActiveOperation):
    """Writes local memory into what a peer exposes. See `ActiveOperation`.

    Args:
        connection: This process's end.
        local_descriptors: What to write; pairwise as large as what is exposed.
        remote_metadata: Of a `WritableOperation`.
        timeout: Seconds; the Connector's by default.
    """

    def __init__(
        self,
        connection: Connection,
        local_descriptors: Descriptor | list[Descriptor],
        remote_metadata: RdmaMetadata,
        *,
        timeout: float | None = None,
    ) -> None:
        remote, theirs = _check_metadata(connection, remote_metadata, OperationKind.WRITE)
        super().__init__(
            remote,
            OperationKind.WRITE,
            local_descriptors,
            theirs,
            remote_metadata.notification_key,
            timeout=timeout,
        )


def _check_metadata(
    connection: Connection, metadata: RdmaMetadata, kind: OperationKind
) -> tuple[Remote, Descriptor | list[Descriptor]]:
    if not isinstance(connection, Connection):
        raise TypeError(f"connection: expected a Connection, got {type(connection).__name__}")
    if not isinstance(metadata, RdmaMetadata):
        raise TypeError(f"remote_metadata: expected RdmaMetadata, got {type(metadata).__name__}")
    if metadata.operation_kind != kind:
        raise ValueError(
            f"remote_metadata: a {kind} needs metadata of kind {int(kind)}, "
            f"got {metadata.operation_kind}"
        )
    return Remote(connection, metadata.nixl_metadata), metadata.to_descriptors()
