"""Passive operations: they expose memory to a peer."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from types import TracebackType
from typing import ClassVar

from torch_nixl.connect.connection import Connection
from torch_nixl.connect.descriptor import MAX_SPANS, Descriptor
from torch_nixl.connect.exchange import Told, serialize, tell
from torch_nixl.connect.metadata import RdmaMetadata, encode_blob
from torch_nixl.connect.operation import (
    CANCEL_SECONDS,
    DIRECTIONS,
    AbstractOperation,
    OperationKind,
    OperationStatus,
)
from torch_nixl.engine.connection import Connection as Engine
from torch_nixl.engine.grants import GrantState
from torch_nixl.engine.operation import deadline_after
from torch_nixl.engine.passive import PassiveOperation as EnginePassive
from torch_nixl.errors import TransferTimeout


class PassiveOperation(AbstractOperation):
    """Exposes memory to the one peer that gets its metadata.

    Leaving its context, or dropping it, withdraws what nobody has taken up. What a peer has begun
    to touch stays owned until that peer is done, or gone.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no descriptor; the memory is to be written and can't be; its storage
            has moved since it was described; or it lies in more than `MAX_SPANS` stretches.
        RegistrationError: NIXL refused the memory.
        ClosedError: The connection is closed.
    """

    @abstractmethod
    def __init__(
        self,
        connection: Connection,
        operation_kind: OperationKind,
        local_descriptors: Descriptor | list[Descriptor],
        *,
        timeout: float | None = None,
    ) -> None:
        super().__init__(connection, operation_kind, local_descriptors, None, None)
        engine = connection.engine
        memories = [one.memory() for one in self._local]
        num_spans = sum(len(memory.spans) for memory in memories if len(memory.spans) > 1)
        if num_spans > MAX_SPANS:
            raise ValueError(
                f"local_descriptors: {num_spans} stretches of memory are more than the "
                f"{MAX_SPANS} that metadata can name; expose a contiguous copy"
            )
        self._serialized = serialize(self._local)
        self._passive = engine.expose(
            DIRECTIONS[operation_kind],
            memories,
            timeout=timeout,
            public=engine.metadata_key is None,
        )
        self._begin(self._passive)
        self._told: Told | None = None
        self._metadata: dict[bool, RdmaMetadata] = {}
        self._finalizer = weakref.finalize(self, _withdraw, engine, self._passive)
        self._finalizer.atexit = False

    def metadata(self, hex_encode: bool = False) -> RdmaMetadata:
        """Return what the peer needs. To be handed to one peer, over a channel that is trusted.

        Args:
            hex_encode: Write NIXL's metadata as hexadecimal digits, as old versions of dynamo did.

        Raises:
            TransferError: The operation has ended, and this is the first call.
        """
        hex_encode = bool(hex_encode)
        found = self._metadata.get(hex_encode)
        if found is None:
            serialized = self._serialized
            if self._told is None:
                connection = self._connection
                self._told = tell(connection.engine, connection.blobs, self._passive, serialized)
            told = self._told
            found = self._metadata[hex_encode] = RdmaMetadata(
                descriptors=serialized,
                nixl_metadata=encode_blob(told.blob, hex_encode=True) if hex_encode else told.text,
                notification_key=told.key,
                operation_kind=int(self._kind),
            )
        return found

    def _running_status(self) -> OperationStatus:
        if self._passive.grant.state is GrantState.OFFERED:
            return OperationStatus.INITIALIZED
        return OperationStatus.IN_PROGRESS

    def cancel(self, *, timeout: float = CANCEL_SECONDS) -> None:
        """Withdraw what is exposed. No effect on an operation that has ended.

        A peer that comes late is told so. One that has taken it up is asked to stop, and answers
        once its last piece has ended; what it has read or written by then is not known. One that
        isn't torch_nixl's can neither be told nor asked: the memory stays owned for 30 s, and what
        such a peer writes meanwhile lands in it.

        Args:
            timeout: Most seconds to wait for a peer's answer.

        Raises:
            TransferTimeout: It has not answered. The memory stays owned: see `wait_released`.
            ValueError: The timeout is negative or not a number; nothing was withdrawn.
        """
        deadline = deadline_after(timeout)
        if self._operation.done:
            return
        self._operation.cancel()
        grant = self._passive.grant
        progress = self._connection.engine.progress
        if not progress.wait_until(lambda: grant.state is GrantState.RELEASED, deadline):
            raise TransferTimeout(f"{self._operation}: the peer has not let go in {timeout} s")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._operation.done:
            self._operation.cancel()

    def __repr__(self) -> str:
        key = self._told.key if self._told is not None else ""
        return (
            f"{type(self).__name__}({self.texts()}, notification_key={key!r}, "
            f"status='{self.status}')"
        )


class _Exposing(PassiveOperation):
    """What `ReadableOperation` and `WritableOperation` are: they differ in their kind only."""

    _KIND: ClassVar[OperationKind]

    def __init__(
        self,
        connection: Connection,
        local_descriptors: Descriptor | list[Descriptor],
        *,
        timeout: float | None = None,
    ) -> None:
        super().__init__(connection, self._KIND, local_descriptors, timeout=timeout)


class ReadableOperation(_Exposing):
    """Exposes memory that a peer is to read. See `PassiveOperation`.

    Args:
        connection: This process's end.
        local_descriptors: The memory.
        timeout: Seconds until the offer lapses; the Connector's by default.
    """

    _KIND = OperationKind.READ


class WritableOperation(_Exposing):
    """Exposes memory that a peer is to write. See `PassiveOperation`.

    Args:
        connection: This process's end.
        local_descriptors: The memory.
        timeout: Seconds until the offer lapses; the Connector's by default.
    """

    _KIND = OperationKind.WRITE


def _withdraw(engine: Engine, operation: EnginePassive) -> None:
    """Have the driver withdraw what was dropped. Runs in a finalizer: no locks, no library.

    Without a warning: to drop an operation is how programs written for dynamo end it.
    """
    if not operation.done and not engine.closed:
        engine.progress.call_from_finalizer(operation.cancel)
