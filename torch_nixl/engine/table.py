"""The operations of a connection that have not been released, by every name they go by."""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch_nixl.engine import wire
from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.remotes import Remote
from torch_nixl.engine.transfer import TransferOperation

MAX_ENDED = 4096
"""Ended grants whose end is remembered, to tell late claimants why."""


class OperationTable:
    """Holds operations, so that those that nobody holds end nevertheless."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._all: dict[Operation, None] = {}
        self._offers: dict[bytes, PassiveOperation] = {}
        self._keys: dict[bytes, PassiveOperation] = {}
        self._claims: dict[int, ActiveOperation] = {}
        self._ended: OrderedDict[bytes, wire.Reason] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def all(self) -> list[Operation]:
        """A copy: the table changes under whoever goes through it."""
        with self._lock:
            return list(self._all)

    def add(self, operation: Operation) -> None:
        """Hold an operation until it is released."""
        with self._lock:
            self._all[operation] = None
            if isinstance(operation, PassiveOperation):
                self._offers[operation.key] = operation
            elif isinstance(operation, ActiveOperation):
                self._claims[operation.claim] = operation
            elif isinstance(operation, TransferOperation):
                assert operation.remote is not None
                operation.remote.flight += 1
                operation.counted = True

    def add_key(self, operation: PassiveOperation, key: bytes) -> None:
        """Let a message that is `key` end an operation."""
        with self._lock:
            operation.foreign_key = key
            self._keys[key] = operation

    def remove(self, operation: Operation) -> None:
        """Let go of a released operation."""
        with self._lock:
            if self._all.pop(operation, self) is self:
                return
            if isinstance(operation, PassiveOperation):
                self._offers.pop(operation.key, None)
                if operation.foreign_key:
                    self._keys.pop(operation.foreign_key, None)
                self._ended[operation.key] = operation.grant.reason or wire.Reason.UNKNOWN
                while len(self._ended) > MAX_ENDED:
                    self._ended.popitem(last=False)
            elif isinstance(operation, TransferOperation):
                if operation.counted:
                    assert operation.remote is not None
                    operation.remote.flight -= 1
                if isinstance(operation, ActiveOperation):
                    self._claims.pop(operation.claim, None)

    def offer(self, key: bytes) -> PassiveOperation | None:
        return self._offers.get(key)

    def why_ended(self, key: bytes) -> wire.Reason:
        """Why an offer of that key is not to be had any more."""
        return self._ended.get(key, wire.Reason.UNKNOWN)

    def claim(self, number: int, remote: Remote) -> ActiveOperation | None:
        """Our claim of that number, if it was made to that remote."""
        operation = self._claims.get(number)
        return operation if operation is not None and operation.remote is remote else None

    def by_message(self, message: bytes) -> PassiveOperation | None:
        """The operation that this message ends, by a foreign peer's rules."""
        return self._keys.get(message)
