"""What this process has registered with its agent, each stretch of memory once.

[Note: device ids]
The library finds a registration by kind, device id and address, and looks only at the one that
starts last before the address: two that nest or overlap under one device id hide each other, and
what a remote was told stays told for ever. For host memory the device id has no other meaning, so
each host registration gets one of its own, a generation that no other memory is given. Nested,
overlapping and recycled memory then can't be confused, on either side. Where the id is the
physical device's (`Capabilities.free_device_ids`), and for memory exposed to dynamo's peers, which
always say 0, that way is closed; the reader then makes room before it learns of a region that
would hide another (`remotes.Remote.learn`).

[Note: recycled memory]
Allocators hand out the same addresses again, and remotes never forget what they were told, so a
new generation for each would grow their tables without end. A region of the same kind, address and
size as one that has died gets that one's device id back, provided that its metadata is the same to
the byte: to a remote the two are one region. What is behind it may then be read only under a grant
(`grants.py`), never because the address is known.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch_nixl.engine.adapter import Adapter, MemoryKind, Region, Registration, Spans
from torch_nixl.engine.memory import Memory, require_in_place
from torch_nixl.engine.performance import look_at_device_memory, look_at_registrations
from torch_nixl.engine.shared import SharedRegistrations
from torch_nixl.engine.spans import with_device
from torch_nixl.errors import ClosedError

PUBLIC_DEVICE_ID = 0
"""The device id under which memory is exposed to peers that know of no other (dynamo's)."""

MAX_RETIRED = 4096
"""Dead regions whose device id is kept for reuse. See [Note: recycled memory]."""

_Key = tuple[MemoryKind, int, int, int]


@dataclass(slots=True, eq=False)
class _Entry:
    """One registered extent and those who use it."""

    key: _Key
    registration: Registration
    blob: bytes
    anchor: weakref.ref[object] | None
    finalizer: weakref.finalize[..., object] | None = None
    users: int = 0
    public: Registration | None = None
    dead: bool = False


@dataclass(slots=True, eq=False)
class RegisteredMemory:
    """Memory together with the registration it lies in, held until `Registry.release`.

    Attributes:
        memory: What was registered; keeps the memory itself alive.
        device_id: The device id to name this memory by.
        spans: The memory's spans, ``[n, 3]``: address, nbytes, device id.
        entry: The registry's own record; None for memory of no bytes, which needs none.
    """

    memory: Memory
    device_id: int
    spans: Spans
    entry: _Entry | None

    @property
    def blob(self) -> bytes:
        """Metadata that tells a known remote of this region."""
        return b"" if self.entry is None else self.entry.blob


@dataclass(slots=True)
class RegistryStatistics:
    """Counters since the start; `live` and `live_bytes` are of this moment."""

    registrations: int = 0
    deregistrations: int = 0
    hits: int = 0
    live: int = 0
    live_bytes: int = 0


class Registry:
    """The registration cache of one agent.

    Entries are keyed by what owns the memory (a tensor's storage, an array's buffer), never by
    address alone: a recycled address is other memory. Address and size are compared at each
    look-up, since `Tensor.resize_` moves a living storage. An entry goes when its owner dies,
    when its memory moves, or when `max_bytes` is exceeded and nobody uses it. Memory without a
    weakly referenceable owner is registered for as long as it is in use.
    """

    def __init__(self, adapter: Adapter, *, max_bytes: int | None = None) -> None:
        self._adapter = adapter
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._anchored: OrderedDict[tuple[int, MemoryKind, int], _Entry] = OrderedDict()
        self._plain: dict[_Key, _Entry] = {}
        self._shared = SharedRegistrations(adapter.capabilities.backends)
        self._orphans: deque[tuple[int, MemoryKind, int]] = deque()
        self._waste: deque[Registration] = deque()
        self._retired: OrderedDict[_Key, tuple[int, bytes]] = OrderedDict()
        self._generations = itertools.count(1)
        self._closed = False
        self.statistics = RegistryStatistics()

    def acquire(self, memory: Memory, *, public: bool = False) -> RegisteredMemory:
        """Register what `memory` lies in, or find that it is, and hold it.

        Args:
            memory: Any stretch of memory; its whole allocation is registered.
            public: Also register it under `PUBLIC_DEVICE_ID`.

        Raises:
            RegistrationError: The library refused; nothing is held.
            ValueError: The memory's storage has moved since, or lies in too many pieces.
            ClosedError: The registry is closed.
        """
        require_in_place(memory)
        spans = memory.spans
        if memory.nbytes == 0:
            return RegisteredMemory(memory, 0, with_device(spans, 0), None)
        if self._orphans or self._waste:
            self.collect()
        with self._lock:
            if self._closed:
                raise ClosedError("the connection is closed: no memory can be registered")
            entry = self._find(memory)
            if entry is None:
                entry = self._register(memory)
            else:
                self.statistics.hits += 1
            if public and entry.public is None:
                try:
                    self._publish(entry)
                except BaseException:
                    if entry.users == 0 and entry.anchor is None:
                        self._drop(entry)  # nothing else would ever
                    raise
            entry.users += 1
            if self._max_bytes is not None and self.statistics.live_bytes > self._max_bytes:
                self._evict(self._max_bytes)
        device_id = entry.registration.region.device_id
        return RegisteredMemory(memory, device_id, with_device(spans, device_id), entry)

    def release(self, registered: RegisteredMemory) -> None:
        """Give up one hold. The registration may stay cached."""
        entry = registered.entry
        if entry is None:
            return
        with self._lock:
            self._leave(entry)
        if self._orphans or self._waste:
            self.collect()

    def collect(self) -> None:
        """Deregister what died since. Called by the progress driver, never by a finalizer."""
        if not self._orphans and not self._waste:
            return
        with self._lock:
            while self._orphans:
                slot = self._orphans.popleft()
                entry = self._anchored.get(slot)
                # The slot may have been taken over by a new owner with the same id().
                if entry is not None and entry.anchor is not None and entry.anchor() is None:
                    self._retire(slot, entry)
            self._deregister()

    def close(self) -> None:
        """Forget everything: the agent is destroyed, and its registrations with it."""
        with self._lock:
            self._closed = True
            for entry in self._anchored.values():
                if entry.finalizer is not None:
                    entry.finalizer.detach()
            self._anchored.clear()
            self._plain.clear()
            self._shared.clear()
            self._orphans.clear()
            self._waste.clear()

    # All below: the lock is held.

    def _leave(self, entry: _Entry) -> None:
        entry.users -= 1
        assert entry.users >= 0, "released more often than acquired"
        if entry.users == 0 and (entry.dead or entry.anchor is None) and not self._closed:
            self._drop(entry)

    def _deregister(self) -> None:
        while self._waste:
            self._adapter.deregister(self._waste.popleft())
            self.statistics.deregistrations += 1

    def _find(self, memory: Memory) -> _Entry | None:
        anchor = memory.anchor
        if anchor is None:
            return self._plain.get(_key(memory))
        slot = (id(anchor), memory.kind, memory.device_id)
        entry = self._anchored.get(slot)
        if entry is None:
            return None
        _, _, base, extent = entry.key
        assert entry.anchor is not None
        if entry.anchor() is not anchor or base != memory.base or extent != memory.extent:
            self._retire(slot, entry)
            return None
        if self._max_bytes is not None:
            self._anchored.move_to_end(slot)
        return entry

    def _register(self, memory: Memory) -> _Entry:
        key = _key(memory)
        registration, blob = self._register_region(key)
        anchor = memory.anchor
        entry = _Entry(key, registration, blob, None if anchor is None else weakref.ref(anchor))
        if anchor is None:
            self._plain[key] = entry
        else:
            slot = _slot(memory)
            entry.finalizer = weakref.finalize(anchor, _bury, self._orphans.append, slot)
            entry.finalizer.atexit = False
            self._anchored[slot] = entry
        self.statistics.registrations += 1
        self.statistics.live += 1
        self.statistics.live_bytes += memory.extent
        look_at_registrations(self.statistics.registrations, self.statistics.hits)
        if memory.kind is MemoryKind.VRAM and "UCX" in self._adapter.capabilities.backends:
            look_at_device_memory()
        return entry

    def _register_region(self, key: _Key) -> tuple[Registration, bytes]:
        kind, physical_id, address, nbytes = key
        if kind not in self._adapter.capabilities.free_device_ids:
            registration = self._share(Region(kind, address, nbytes, physical_id), strict=True)
            return registration, self._adapter.metadata([registration], connection=False)
        retired = self._retired.pop(key, None)
        if retired is not None:
            # Never two registrations of one region under one id: NIXL crashes when one of them
            # goes while transfers look the other up.
            self._deregister()
            device_id, old_blob = retired
            registration = self._adapter.register(Region(kind, address, nbytes, device_id))
            blob = self._adapter.metadata([registration], connection=False)
            if blob == old_blob:
                return registration, blob
            self._waste.append(registration)
        registration = self._adapter.register(
            Region(kind, address, nbytes, next(self._generations))
        )
        return registration, self._adapter.metadata([registration], connection=False)

    def _publish(self, entry: _Entry) -> None:
        region = entry.registration.region
        if region.kind in self._adapter.capabilities.free_device_ids:
            public = Region(region.kind, region.address, region.nbytes, PUBLIC_DEVICE_ID)
            entry.public = self._share(public, strict=False)

    def _share(self, region: Region, *, strict: bool) -> Registration:
        """Find or make a registration under a device id that others use, too, and count a user.

        Raises:
            RegistrationError: The library refused, or `strict` does: see `SharedRegistrations`.
        """
        found = self._shared.find(region, strict=strict)
        if found is None:
            self._deregister()
            found = self._adapter.register(region)
            self._shared.add(found)
        return found

    def _unshare(self, registration: Registration) -> None:
        if self._shared.leave(registration):
            self._waste.append(registration)

    def _retire(self, slot: tuple[int, MemoryKind, int], entry: _Entry) -> None:
        """Take an entry whose memory died or moved out of the cache."""
        if self._anchored.get(slot) is entry:
            del self._anchored[slot]
        if entry.finalizer is not None:
            entry.finalizer.detach()
        entry.dead = True
        if entry.users == 0:
            self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        """Have an entry that nobody uses deregistered."""
        if self._plain.get(entry.key) is entry:
            del self._plain[entry.key]
        region = entry.registration.region
        if region.kind in self._adapter.capabilities.free_device_ids:
            self._retired[entry.key] = (region.device_id, entry.blob)
            while len(self._retired) > MAX_RETIRED:
                self._retired.popitem(last=False)
            self._waste.append(entry.registration)
        else:
            self._unshare(entry.registration)
        if entry.public is not None:
            self._unshare(entry.public)
        self.statistics.live -= 1
        self.statistics.live_bytes -= entry.key[3]

    def _evict(self, max_bytes: int) -> None:
        for slot, entry in list(self._anchored.items()):
            if entry.users == 0:
                self._retire(slot, entry)
                if self.statistics.live_bytes <= max_bytes:
                    return


def borrow(memories: Iterable[RegisteredMemory]) -> list[RegisteredMemory]:
    """The same memories for one more operation, which neither holds nor releases them."""
    return [RegisteredMemory(one.memory, one.device_id, one.spans, None) for one in memories]


def regions_by_kind(memories: Iterable[RegisteredMemory]) -> list[list[Registration]]:
    """The regions that memories lie in, each once, in one list for each kind of memory."""
    found: dict[MemoryKind, dict[int, Registration]] = {}
    for held in memories:
        if held.entry is not None:
            registration = held.entry.registration
            found.setdefault(held.memory.kind, {})[id(registration)] = registration
    return [list(group.values()) for group in found.values()]


def public_regions(memories: Iterable[RegisteredMemory]) -> list[Registration]:
    """The regions that memories lie in, each once under each of its device ids."""
    found: dict[int, Registration] = {}
    for held in memories:
        if held.entry is not None:
            for one in (held.entry.registration, held.entry.public):
                if one is not None:
                    found[id(one)] = one
    return list(found.values())


def _key(memory: Memory) -> _Key:
    return (memory.kind, memory.device_id, memory.base, memory.extent)


def _slot(memory: Memory) -> tuple[int, MemoryKind, int]:
    return (id(memory.anchor), memory.kind, memory.device_id)


def _bury(
    append: Callable[[tuple[int, MemoryKind, int]], None], slot: tuple[int, MemoryKind, int]
) -> None:
    """Note that an owner died. Runs in a finalizer, so it only appends."""
    append(slot)
