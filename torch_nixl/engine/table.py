"""The operations of a connection that have not been released, by every name they go by.

Looking after them costs by what is going on, not by how many there are: a server may expose ten
thousand pages and have two transfers running.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections import OrderedDict

from torch_nixl.engine import wire
from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.operation import Operation
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.remotes import Remote
from torch_nixl.engine.transfer import TransferOperation
from torch_nixl.errors import ClosedError

MAX_ENDED = 4096
"""Ended grants whose end is remembered, to tell late claimants why."""


class OperationTable:
    """Holds operations, so that those that nobody holds end nevertheless.

    Attributes:
        transfers: Those that move bytes, or wait for leave to.
        busy: Exposed memory that a peer was granted, or may still touch; and what else waits for
            a peer that is to be pinged.
        ended: Those that are done and not released yet.
        watched: Those whose end is waited for by somebody who doesn't poll.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._all: dict[Operation, None] = {}
        self._offers: dict[bytes, PassiveOperation] = {}
        self._keys: dict[bytes, PassiveOperation] = {}
        self._claims: dict[tuple[bytes, int], ActiveOperation] = {}
        self._ended: OrderedDict[bytes, wire.Reason] = OrderedDict()
        self._deadlines: list[tuple[float, int, weakref.ref[Operation]]] = []
        self._numbers = itertools.count()
        self._closed = False
        self.transfers: dict[TransferOperation, None] = {}
        self.busy: dict[Operation, None] = {}
        self.watched: dict[Operation, None] = {}
        self.ended: dict[Operation, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def all(self) -> list[Operation]:
        """A copy: the table changes under whoever goes through it."""
        with self._lock:
            return list(self._all)

    def after_fork(self, lock: threading.Lock) -> None:
        """Replace the lock, which another thread may have held at the fork."""
        self._lock = lock

    def close(self) -> list[Operation]:
        """Take in no more operations; return those that are left."""
        with self._lock:
            self._closed = True
            return list(self._all)

    def add(self, operation: Operation) -> None:
        """Hold an operation until it is released; not at all if it is already.

        Raises:
            ClosedError: The connection was closed meanwhile.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the connection was closed before the operation could start")
            if operation.released:
                return  # Another thread ended it before it was started.
            self._all[operation] = None
            operation.started_at = time.monotonic()
            if isinstance(operation, PassiveOperation):
                self._offers[operation.key] = operation
            elif isinstance(operation, TransferOperation):
                self.transfers[operation] = None
                if isinstance(operation, ActiveOperation):
                    self._claims[operation.key, operation.claim] = operation
                if operation.starts_counted:
                    assert operation.remote is not None
                    operation.remote.flight += 1
                    operation.counted = True
            if operation.deadline is not None:
                entry = (operation.deadline, next(self._numbers), weakref.ref(operation))
                heapq.heappush(self._deadlines, entry)
                if len(self._deadlines) > 2 * len(self._all) + 64:
                    self._deadlines = [entry for entry in self._deadlines if _is_running(entry[2])]
                    heapq.heapify(self._deadlines)

    def add_key(self, operation: PassiveOperation, key: bytes) -> None:
        """Let a message that is `key` end an operation."""
        with self._lock:
            operation.foreign_key = key
            self._keys[key] = operation

    def remove(self, operation: Operation) -> None:
        """Let go of a released operation.

        May be interrupted anywhere, and called again: what finds it for that goes last.
        """
        with self._lock:
            if operation in self._all:
                self.watched.pop(operation, None)
                if isinstance(operation, PassiveOperation):
                    self._offers.pop(operation.key, None)
                    self.busy.pop(operation, None)
                    if operation.foreign_key:
                        self._keys.pop(operation.foreign_key, None)
                    self._ended[operation.key] = operation.grant.reason or wire.Reason.UNKNOWN
                    while len(self._ended) > MAX_ENDED:
                        self._ended.popitem(last=False)
                elif isinstance(operation, TransferOperation):
                    self.transfers.pop(operation, None)
                    if isinstance(operation, ActiveOperation):
                        self._claims.pop((operation.key, operation.claim), None)
                    self._uncount(operation)
                self._all.pop(operation, None)
            self.ended.pop(operation, None)

    def uncount(self, operation: TransferOperation) -> None:
        """Note that nothing of an operation is under way any more, though it is not released."""
        with self._lock:
            self._uncount(operation)

    def _uncount(self, operation: TransferOperation) -> None:
        if operation.counted:
            assert operation.remote is not None
            operation.counted = False  # Without a call before the other one.
            operation.remote.flight -= 1

    def overdue(self, now: float) -> list[Operation]:
        """Operations whose deadline has passed. Each is returned once, unless a thread waits."""
        if not self._deadlines or self._deadlines[0][0] > now:
            return []
        late: list[Operation] = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                _, number, reference = heapq.heappop(self._deadlines)
                operation = reference()
                if operation is None or operation.done:
                    continue
                if operation.attended:
                    # Whoever waits looks at the deadline; look again in case it gives up early.
                    heapq.heappush(self._deadlines, (now + 1.0, number, reference))
                else:
                    late.append(operation)
        return late

    def offer(self, key: bytes) -> PassiveOperation | None:
        return self._offers.get(key)

    def why_ended(self, key: bytes) -> wire.Reason:
        """Why an offer of that key is not to be had any more."""
        return self._ended.get(key, wire.Reason.UNKNOWN)

    def claim(self, key: bytes, number: int, remote: Remote) -> ActiveOperation | None:
        """What moves under that offer and number, if the offer is that remote's."""
        operation = self._claims.get((key, number))
        return operation if operation is not None and operation.remote is remote else None

    def claims(self, remote: Remote) -> list[ActiveOperation]:
        """All that claim what is that remote's."""
        with self._lock:
            return [one for one in self._claims.values() if one.remote is remote]

    def by_message(self, message: bytes) -> PassiveOperation | None:
        """The operation that this message ends, by a foreign peer's rules."""
        return self._keys.get(message)


def _is_running(reference: weakref.ref[Operation]) -> bool:
    operation = reference()
    return operation is not None and not operation.done
