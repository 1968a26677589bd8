"""What all operations have in common.

Each has an operation of the engine, which moves the bytes, owns the memory and knows the end. The
engine's driver advances it from the moment it is made, whoever waits.
"""

from __future__ import annotations

import copy
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Final, TypeVar

from torch_nixl.connect.connection import Connection
from torch_nixl.connect.descriptor import Descriptor, as_descriptors
from torch_nixl.connect.exchange import OPERATION_KINDS
from torch_nixl.connect.waiting import Awaiter
from torch_nixl.engine.operation import Operation
from torch_nixl.errors import TransferCancelled

Self = TypeVar("Self", bound="AbstractOperation")

CANCEL_SECONDS: Final = 5.0
"""How long `cancel` waits unless told otherwise."""


class OperationKind(enum.IntEnum):
    """What the active side does."""

    UNSPECIFIED = 0
    READ = 1
    WRITE = 2

    def __str__(self) -> str:
        return "<invalid>" if self is OperationKind.UNSPECIFIED else self.name

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class OperationStatus(enum.IntEnum):
    """Where an operation stands. COMPLETE, CANCELLED and ERRORED are final."""

    UNINITIALIZED = 0
    INITIALIZED = 1
    IN_PROGRESS = 2
    COMPLETE = 3
    CANCELLED = 4
    ERRORED = 5

    def __str__(self) -> str:
        return _STATUS_TEXTS[self]

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


_STATUS_TEXTS: Final = dict(
    zip(OperationStatus, ("<invalid>", "INIT", "PROC", "DONE", "STOP", "ERR"), strict=True)
)
DIRECTIONS: Final = {OperationKind(kind): found for found, kind in OPERATION_KINDS.items()}
"""What the engine calls the two kinds."""


class AbstractOperation(ABC):
    """What all operations have in common. A context manager, and awaitable.

    `wait` blocks a thread, ``await operation`` and `wait_for_completion` wait in an event loop; any
    number of threads and loops may wait for one operation.
    """

    # Only the concrete classes say what they are made of: none but they can be made.
    @abstractmethod
    def __init__(
        self,
        connection: Connection,
        operation_kind: OperationKind,
        local_descriptors: Descriptor | list[Descriptor],
        remote_descriptors: Descriptor | list[Descriptor] | None,
        notification_key: str | None,
    ) -> None:
        if not isinstance(connection, Connection):
            raise TypeError(f"connection: expected a Connection, got {type(connection).__name__}")
        if not isinstance(operation_kind, OperationKind):
            raise TypeError(
                f"operation_kind: expected an OperationKind, got {type(operation_kind).__name__}"
            )
        if operation_kind not in DIRECTIONS:
            raise ValueError("operation_kind: expected READ or WRITE")
        self._connection = connection
        self._kind = operation_kind
        self._local = as_descriptors(local_descriptors)
        self._operation: Operation

    def _begin(self, operation: Operation) -> None:
        self._operation = operation
        self._awaiter = Awaiter(self._connection, operation)
        for descriptor in self._local:
            descriptor.use(operation)

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def operation_kind(self) -> OperationKind:
        return self._kind

    @property
    def status(self) -> OperationStatus:
        """Where the operation stands. Reading it does nothing else."""
        if not self._operation.done:
            return self._running_status()
        match self._operation.error:
            case None:
                return OperationStatus.COMPLETE
            case TransferCancelled():
                return OperationStatus.CANCELLED
            case _:
                return OperationStatus.ERRORED

    def _running_status(self) -> OperationStatus:
        return OperationStatus.IN_PROGRESS

    async def wait_for_completion(self, timeout: float | None = None) -> None:
        """Wait in the running event loop until the operation has ended.

        Cancelling the waiting task cancels nothing else.

        Args:
            timeout: Seconds after which the operation ends with `TransferTimeout`; None leaves
                that to the deadline that it was made with.

        Raises:
            TransferTimeout: Time is up. The memory stays owned: see `wait_released`.
            TransferCancelled: This side or the other cancelled.
            LeaseExpired: The peer's offer had lapsed.
            PeerLostError: The peer died or left.
            MetadataError: The peer knows no such operation, or not any more.
            TransferError: The transfer failed, here or on the other side.
            ClosedError: The connection was closed meanwhile.
        """
        await self._awaiter.wait(timeout)
        error = self._operation.error
        if error is not None:
            # A copy: an exception that is raised gathers frames, and with them what those hold.
            raise copy.copy(error) from error.__cause__

    def __await__(self) -> Generator[None, None, None]:
        return self.wait_for_completion().__await__()

    def wait(self, timeout: float | None = None) -> None:
        """Block this thread until the operation has ended.

        Args:
            timeout: As for `wait_for_completion`, whose errors this raises.
        """
        self._operation.wait(timeout)

    def wait_released(self, timeout: float | None = None) -> bool:
        """Block until no one else touches the memory any more; return False if time is up first.

        Differs from the operation's end only after a timeout, a cancel or a failure.

        Args:
            timeout: Seconds; None waits as long as it takes, which a stopped peer can make long.
        """
        return self._operation.wait_released(timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the operation has ended, in the thread that notices; at once if so.

        It must be quick, and hold no reference to the operation, which it would keep alive.
        """
        self._operation.add_done_callback(callback)

    def __enter__(self: Self) -> Self:
        return self

    @abstractmethod
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def texts(self) -> str:
        """Return the part of the repr that all operations share."""
        local = self._local[0] if len(self._local) == 1 else list(self._local)
        return f"operation_kind={self._kind}, local_descriptors={local!r}"
