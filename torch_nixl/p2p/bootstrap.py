"""How ranks find each other: a store that all of them reach, used until first contact.

Keys, below the Communicator's prefix. `k` counts how often a rank has made a Communicator with this
prefix: all ranks do so equally often, so the k-th of one belongs to the k-th of the others.

    made/<rank>     how often that rank has made one; stays, unless the prefix is used but once
    <k>/nonce       random; whoever comes first sets it, and all take it for their context
    <k>/<rank>      how to reach that rank; removed when it closes
    <k>/left        how many have closed; the last one removes it and the nonce
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import secrets
import threading
import time
from collections.abc import Callable

from torch.distributed import Store

from torch_nixl.engine.envelope import seal, unseal
from torch_nixl.errors import ClosedError, MetadataError, TransferError, TransferTimeout

LEAVE_SECONDS = 3.0
"""How long closing waits for the store."""

_SLICE_SECONDS = 1.0
_FIRST_SLICE_SECONDS = 0.05

_MAX_BROKEN = 3
"""Times in a row that a store may fail at once, instead of at its timeout."""


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

    def publish(self, metadata: bytes) -> None:
        """Tell the others how to reach this rank."""
        self._store.set(f"{self._prefix}/{self._rank}", seal(metadata, key=self._key).hex())

    def fetch(self, rank: int, timeout: float | None, has_come: Callable[[], bool]) -> bytes:
        """Wait until a rank has published how to reach it, or has come by itself.

        Args:
            rank: Which.
            timeout: Seconds; None for no limit.
            has_come: Whether it has. Asked now and then.

        Returns:
            What it published; nothing if it has come by itself.

        Raises:
            TransferTimeout: It hasn't within `timeout` seconds.
            TransferError: The store doesn't work any more.
            MetadataError: What it published is not acceptable.
            ClosedError: This Communicator was closed meanwhile.
        """
        key = f"{self._prefix}/{rank}"
        deadline = None if timeout is None else time.monotonic() + timeout
        longest = _FIRST_SLICE_SECONDS
        broken = 0
        while True:
            if has_come():
                return b""
            started = time.monotonic()
            left = longest if deadline is None else deadline - started
            if self._left:
                raise ClosedError("the Communicator was closed")
            seconds = max(0.001, min(left, longest))
            try:
                self._store.wait([key], datetime.timedelta(seconds=seconds))
                text = self._store.get(key)
                break
            # What a store raises at its timeout differs between stores and releases.
            except RuntimeError as error:
                waited = time.monotonic() - started
                if waited >= seconds / 2:
                    broken = 0
                elif seconds >= _FIRST_SLICE_SECONDS:
                    broken += 1
                    if broken == _MAX_BROKEN:
                        raise TransferError(
                            f"rank {rank} can't be looked up: the store that ranks find each other "
                            f"through does not work any more: {error}"
                        ) from error
                    time.sleep(seconds - waited)  # A store that fails at once: not too often.
                if left <= 0:
                    raise TransferTimeout(
                        f"rank {rank} has not made its Communicator within {timeout:.3g} s, or has "
                        "closed it already"
                    ) from error
            longest = min(2 * longest, _SLICE_SECONDS)
        try:
            return unseal(bytes.fromhex(text.decode()), key=self._key)
        except ValueError as error:
            raise MetadataError(f"rank {rank} has published something else: {error}") from error

    def leave(self) -> None:
        """Remove this rank's keys, and the last one the rest.

        Returns after `LEAVE_SECONDS` though the store has not answered: if its host is cut off, it
        never will, and its calls take no timeout.
        """
        if self._left:
            return
        self._left = True
        tidying = threading.Thread(target=self._tidy, name="torch_nixl store", daemon=True)
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
