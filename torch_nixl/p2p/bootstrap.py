"""How ranks find each other: a store that all of them reach, used until first contact.

Keys, below the Communicator's prefix. `k` counts how often a rank has made a Communicator with this
prefix: all ranks do so equally often, so the k-th of one belongs to the k-th of the others.

    made/<rank>     how often that rank has made one; stays, unless the prefix is used but once
    <k>/nonce       random; whoever comes first sets it, and all take it for their context
    <k>/<rank>      how to reach that rank: the `Address`; removed when it closes
    <k>/left        how many have closed; the last one removes it and the nonce
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.distributed import Store

from torch_nixl.engine.envelope import seal, unseal
from torch_nixl.engine.wire import Identity
from torch_nixl.errors import ClosedError, MetadataError, TransferError, TransferTimeout

LEAVE_SECONDS = 3.0
"""How long closing waits for the store."""

_LOOK_SECONDS = 0.05
"""How often a rank that isn't there yet is looked for, in the store and by whether it has come."""

_FIRST_LOOK_SECONDS = 0.001

_MAX_BROKEN = 3
"""Times in a row that a store may fail."""

_ABSENT = "torch_nixl: absent"


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach a rank: its process, so that others can tell whether it has died, and agent.

    Attributes:
        identity: The process.
        metadata: NIXL's, of the agent.
    """

    identity: Identity
    metadata: bytes = field(repr=False)

    def pack(self) -> bytes:
        return self.identity.pack() + self.metadata

    @classmethod
    def unpack(cls, data: bytes) -> Address:
        """Read what `pack` returned.

        Raises:
            ValueError: It is cut.
        """
        nbytes = Identity.FIXED.size
        if len(data) <= nbytes:
            raise ValueError(f"an address of {len(data)} bytes is cut")
        return cls(Identity.unpack(data[:nbytes]), data[nbytes:])


class Bootstrap:
    """One rank's use of the store for one Communicator.

    Args:
        store: Any torch Store.
        prefix: Sets apart what this and other groups write.
        rank: This rank.
        world_size: How many there are.
        key: For `seal`: from `derive(secret, "metadata")`, or None.
        once: The prefix is not used again, so that its last key can go, too.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        world_size: int,
        key: bytes | None,
        *,
        once: bool = False,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._key = key
        self._left = False
        self._once = once
        self._made = f"{prefix}/made"
        self._incarnation = store.add(f"{self._made}/{rank}", 1)
        self._prefix = f"{prefix}/{self._incarnation}"
        mine = secrets.token_hex(16)
        nonce = store.compare_set(f"{self._prefix}/nonce", "", mine)
        digest = hashlib.sha256(b"torch_nixl p2p " + self._prefix.encode() + b" " + bytes(nonce))
        self.context = int.from_bytes(digest.digest()[:4], "little")

    def publish(self, address: Address) -> None:
        """Tell the others how to reach this rank."""
        sealed = seal(address.pack(), key=self._key)
        self._store.set(f"{self._prefix}/{self._rank}", sealed.hex())

    def fetch(
        self, rank: int, timeout: float | None, has_come: Callable[[], bool]
    ) -> Address | None:
        """Wait until a rank has published how to reach it, or has come by itself.

        Args:
            rank: Which.
            timeout: Seconds; None for no limit.
            has_come: Whether it has. Asked now and then.

        Returns:
            What it published; None if it has come by itself.

        Raises:
            TransferTimeout: It hasn't within `timeout` seconds.
            TransferError: The store doesn't work any more.
            MetadataError: What it published is not acceptable.
            ClosedError: This Communicator was closed meanwhile.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        search = _Search(self._store, f"{self._prefix}/{rank}")
        try:
            while not search.ended.is_set():
                if has_come():
                    return None
                if self._left:
                    raise ClosedError("the Communicator was closed")
                left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TransferTimeout(
                        f"rank {rank} has not made its Communicator within {timeout:.3g} s, or has "
                        "closed it already"
                    )
                search.ended.wait(min(left, _LOOK_SECONDS))
        finally:
            search.stop()
        if search.error is not None:
            raise TransferError(
                f"rank {rank} can't be looked up: the store that ranks find each other through "
                f"does not work any more: {search.error}"
            ) from search.error
        text = search.found
        try:
            return Address.unpack(unseal(bytes.fromhex(text.decode()), key=self._key))
        except ValueError as error:
            raise MetadataError(f"rank {rank}: {error}") from error

    def leave(self) -> None:
        """Remove this rank's keys, and the last one the rest.

        Returns after `LEAVE_SECONDS` though the store has not answered: if its host is cut off, it
        never will, and its calls take no timeout.
        """
        if self._left:
            return
        self._left = True
        tidying = threading.Thread(target=self._tidy, name="torch_nixl store", daemon=True)
        # Since Python 3.12 an interpreter that exits takes no new threads: the keys are left then.
        with contextlib.suppress(RuntimeError):
            tidying.start()
            tidying.join(LEAVE_SECONDS)

    def _tidy(self) -> None:
        # A store whose host has ended can't be tidied, and need not be.
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(f"{self._prefix}/{self._rank}")
            if self._store.add(f"{self._prefix}/left", 1) == self._world_size:
                self._store.delete_key(f"{self._prefix}/nonce")
                self._store.delete_key(f"{self._prefix}/left")
                if self._once:
                    self._forget_made()

    def _forget_made(self) -> None:
        """Remove the counters, unless a rank has used the prefix again all the same."""
        counters = [f"{self._made}/{rank}" for rank in range(self._world_size)]
        if all(int(self._store.get(one)) == self._incarnation for one in counters):
            for one in counters:
                self._store.delete_key(one)


class _Search:
    """Looks for a key, in a thread of its own.

    A store's calls can't be given up: one whose host stands still answers when it goes on. And they
    only look: a call that waits for a key, as `Store.wait`, prints warnings when its time is up.

    Attributes:
        ended: The key is there, or the store is broken.
        found: The key's value.
        error: What the store raised.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._stopped = threading.Event()
        self.ended = threading.Event()
        self.found = b""
        self.error: RuntimeError | None = None
        threading.Thread(target=self._run, name="torch_nixl store", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self) -> None:
        pause = _FIRST_LOOK_SECONDS
        num_broken = 0
        while not self._stopped.is_set():
            try:
                if self._look():
                    break
                num_broken = 0
            except RuntimeError as error:
                num_broken += 1
                if num_broken == _MAX_BROKEN:
                    self.error = error
                    break
            self._stopped.wait(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
        self.ended.set()

    def _look(self) -> bool:
        if not self._store.check([self._key]):
            return False
        # The key may go between the two calls. To compare reads it without waiting for it.
        value: bytes = self._store.compare_set(self._key, _ABSENT, _ABSENT)
        if value == _ABSENT.encode():
            return False
        self.found = value
        return True
