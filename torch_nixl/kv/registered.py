"""A cache registered with a connection: memory, its description, and which pages are held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from torch_nixl.engine import wire
from torch_nixl.engine.arrays import as_memory
from torch_nixl.engine.memory import require_in_place, require_writable
from torch_nixl.engine.streams import StreamOrder, device_of_memory
from torch_nixl.errors import MetadataError
from torch_nixl.kv.cache import KVCache
from torch_nixl.kv.leases import PageLedger
from torch_nixl.kv.overlap import Sharing, sharing
from torch_nixl.kv.plan import Run
from torch_nixl.kv.pools import Pool, pack_pool

if TYPE_CHECKING:
    from torch_nixl.engine.blob import BlobInfo
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.registry import RegisteredMemory

MAX_POOL: Final = wire.MAX_BODY - 64
"""Most bytes that describe a cache: they have to fit in a frame."""


class RegisteredPool:
    """The pages of one cache on one connection, for all services that hand them over.

    Args:
        connection: The connection.
        cache: The cache.
        others: Others on it, which may be of the same pages.

    Attributes:
        cache: Whose.
        pool: What other sides are told.
        packed: The same as bytes.
        num_users: Services and requests that need it registered.
        held: The registrations, for each group and region.
        devices: Those whose streams use the memory; none for host memory.
    """

    def __init__(
        self, connection: Connection, cache: KVCache, others: Sequence[RegisteredPool] = ()
    ) -> None:
        self._connection = connection
        self.cache = cache
        self.num_users = 0
        self.held: tuple[RegisteredMemory, ...] = ()
        self._ledgers = _ledgers(cache, others)
        flat = [[_whole(owner) for owner in owners] for owners in cache.owners]
        held: list[RegisteredMemory] = []
        try:
            regions = []
            for owners in flat:
                rows = np.empty((len(owners), 2), np.uint64)
                for index, owner in enumerate(owners):
                    memory = as_memory(owner, name="tensors")
                    require_writable(memory, "tensors")
                    held += [connection.register(memory)]
                    rows[index] = memory.base, held[-1].device_id
                regions.append(rows)
            kinds = {one.memory.kind for one in held}
            if len(kinds) != 1:
                raise ValueError("the groups of a cache have to lie in one kind of memory")
            self.pool = Pool(
                cache.compatibility,
                cache.layouts,
                tuple(regions),
                kinds.pop(),
                connection.metadata(held, connection=False),
            )
            self.packed = pack_pool(self.pool)
            if len(self.packed) > MAX_POOL:
                raise ValueError(
                    f"the description of a cache of {cache.num_layers} layers has "
                    f"{len(self.packed)} bytes, more than {MAX_POOL}: have fewer, larger tensors"
                )
        except BaseException:
            for one in held:
                connection.registry.release(one)
            raise
        self.held = tuple(held)
        found = [device_of_memory(one.memory) for one in held]
        self.devices = tuple(dict.fromkeys(one for one in found if one is not None))

    def order(self, stream: object) -> StreamOrder | None:
        """Note what is queued for the pages by now; None for host memory.

        To be called without the hub's lock: it may wait for the device.

        Args:
            stream: None for each device's current one.

        Raises:
            ValueError: `stream` is none of the pool's devices.
            TransferError: The stream is being captured into a graph.
        """
        if self.devices:
            return StreamOrder(self.devices, stream)
        if stream is not None:
            raise ValueError("stream=: the cache lies in host memory, which no stream uses")
        return None

    def enter(self) -> None:
        """Count one more user."""
        self.num_users += 1

    def leave(self) -> bool:
        """Count one less; return whether it was the last, and the memory is registered no more."""
        self.num_users -= 1
        if self.num_users:
            return False
        held, self.held = self.held, ()
        for one in held:
            self._connection.registry.release(one)
        return True

    @property
    def num_held(self) -> int:
        """How many pages requests hold."""
        return sum(ledger.num_held for ledger, _ in self._ledgers)

    def hold(self, runs: Sequence[Run], *, exclusive: bool) -> None:
        """Hold the pages of a request. See `PageLedger.hold`.

        Raises:
            ValueError: As there; or the cache's memory has moved since it was registered.
        """
        for one in self.held:
            require_in_place(one.memory)
        done = []
        try:
            for ledger, groups in self._ledgers:
                pages = np.concatenate([runs[group].pages for group in groups])
                ledger.hold(pages, exclusive=exclusive)
                done.append((ledger, pages))
        except ValueError:
            for ledger, pages in done:
                ledger.release(pages)
            raise

    def release(self, runs: Sequence[Run]) -> None:
        """Give up one hold of each page."""
        for ledger, groups in self._ledgers:
            ledger.release(np.concatenate([runs[group].pages for group in groups]))


def check_regions(pool: Pool, infos: Sequence[BlobInfo], sender: str) -> None:
    """Check that a pool lies in what its sender's metadata tells of.

    Raises:
        MetadataError: It is another agent's, or a region lies in none of it.
    """
    told: dict[int, list[tuple[int, int]]] = {}
    for info in infos:
        if info.agent != sender:
            raise MetadataError(f"metadata of {info.agent} from {sender}")
        for address, nbytes, device_id in info.regions(pool.kind).tolist():
            told.setdefault(device_id, []).append((address, nbytes))
    for layout, regions in zip(pool.layouts, pool.regions, strict=True):
        for (address, device_id), nbytes in zip(
            regions.tolist(), layout.region_nbytes, strict=True
        ):
            if not any(
                base <= address and address + nbytes <= base + extent
                for base, extent in told.get(device_id, ())
            ):
                raise MetadataError(
                    f"{sender} has a cache in memory that its metadata tells not of"
                )


def _whole(owner: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    storage = owner.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=owner.device).set_(storage)


def _ledgers(
    cache: KVCache, others: Sequence[RegisteredPool]
) -> list[tuple[PageLedger, list[int]]]:
    """One ledger for each set of groups whose pages are the same memory, in other caches, too.

    Raises:
        ValueError: Two share memory, but a page of one is not a page of the other.
    """
    known = [
        (ledger, pool.cache, group)
        for pool in others
        for ledger, groups in pool._ledgers
        for group in groups
    ]
    found: dict[PageLedger, list[int]] = {}
    for group, layout in enumerate(cache.layouts):
        same: set[PageLedger] = set()
        for ledger, other, index in known:
            how = sharing(layout, _bases(cache, group), other.layouts[index], _bases(other, index))
            if how is Sharing.SAME:
                same.add(ledger)
            if how is Sharing.CROSSED or len(same) > 1:
                what = "groups share" if other is cache else "it shares"
                whose = "" if other is cache else " with another cache of this connection"
                raise ValueError(f"{what} memory{whose}, but a page of one is no page of the other")
        ledger = same.pop() if same else PageLedger(layout.num_pages)
        known.append((ledger, cache, group))
        found.setdefault(ledger, []).append(group)
    return list(found.items())


def _bases(cache: KVCache, group: int) -> list[int]:
    return [owner.untyped_storage().data_ptr() for owner in cache.owners[group]]
