"""One agent of the loopback fake. Made by `loopback.LoopbackFabric`, which says what it is for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from torch_nixl.engine.adapter import (
    Capabilities,
    Direction,
    Indices,
    MemoryKind,
    Region,
    Spans,
)
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.loopback_tables import Blob, check_tellable
from torch_nixl.engine.loopback_world import Agent, Job, Link, Piece, World
from torch_nixl.errors import (
    ClosedError,
    MetadataError,
    PeerLostError,
    RegistrationError,
    TorchNixlError,
)

Call: TypeAlias = Literal["register", "add_remote", "notify", "prepare", "post"]


@dataclass(eq=False, slots=True)
class _Registration:
    region: Region
    alive: bool = True


@dataclass(eq=False, slots=True)
class _SpanList:
    kind: MemoryKind
    spans: Spans
    link: Link | None
    released: bool = False


@dataclass(eq=False, slots=True)
class _Transfer:
    link: Link
    direction: Direction
    pieces: tuple[Piece, ...]
    job: Job | None = None
    done: bool = False
    notified: bool = False
    released: bool = False


class LoopbackAdapter:
    """One agent. Made by `LoopbackFabric.adapter`; see `Adapter` for the contract."""

    def __init__(self, world: World, agent: Agent, capabilities: Capabilities) -> None:
        self.agent = agent
        self._world = world
        self._capabilities = capabilities
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.agent.alive else "dead"
        return f"<LoopbackAdapter {self.name!r}, {state}, {len(self.agent.jobs)} under way>"

    @property
    def name(self) -> str:
        return self.agent.name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def register(self, region: Region) -> _Registration:
        with self._world.lock:
            self._check_open()
            default = RegistrationError(f"scripted: {region.nbytes} bytes were refused")
            self._fail("register", default)
            if region.address == 0 and region.nbytes > 0:
                raise RegistrationError(f"{region.nbytes} bytes at address 0 were refused")
            self.agent.regions.add(region, self.agent.key)
            return _Registration(region)

    def deregister(self, registration: Any) -> None:
        with self._world.lock:
            self._check_open()
            assert registration.alive, "region deregistered twice"
            region = registration.region
            last = self.agent.regions.count(region) == 1
            for job in self.agent.jobs:
                for piece in job.pieces:
                    inside = (piece.kind, piece.device_id) == (
                        region.kind,
                        region.device_id,
                    ) and region.address <= piece.local < region.address + region.nbytes
                    # NIXL would go on using the memory, and crash once it is gone.
                    assert not (last and inside), "region deregistered while a transfer uses it"
            registration.alive = False
            self.agent.regions.remove(region)

    def metadata(self, registrations: Sequence[Any], *, connection: bool) -> bytes:
        with self._world.lock:
            self._check_open()
            regions = [registration.region for registration in registrations]
            check_tellable(regions, connection=connection)
            assert all(registration.alive for registration in registrations), "deregistered"
            keys = {region: self.agent.regions.key(region) for region in regions}
            return Blob(self.name, self.agent.incarnation, connection, keys).encode()

    def add_remote(self, metadata: bytes) -> str:
        with self._world.lock:
            self._check_open()
            self._fail("add_remote", MetadataError("scripted: metadata were refused"))
            blob = Blob.decode(metadata)
            if blob.name == self.name or blob.name in self.agent.poisoned:
                raise MetadataError(f"metadata of {blob.name!r} can't be used in this process")
            link = self.agent.links.get(blob.name)
            if link is None:
                link = self._connect(blob)
            elif blob.connection and blob.incarnation != link.target.incarnation:
                raise MetadataError(f"{blob.name!r} is known as another agent; remove it first")
            for region, key in blob.keys.items():
                if region in link.told and link.told.key(region) != key:
                    self.remove_remote(blob.name)
                    self.agent.poisoned.add(blob.name)
                    raise MetadataError(f"{blob.name!r} tells another key for a known region")
            for region, key in blob.keys.items():
                if region not in link.told:
                    link.told.add(region, key)
            return blob.name

    def inspect(self, metadata: bytes) -> BlobInfo:
        return Blob.decode(metadata).info()

    def _connect(self, blob: Blob) -> Link:
        if not blob.connection:
            raise MetadataError(f"{blob.name!r} isn't known, and its connection isn't told")
        target = self._world.living(blob.name)
        if target is None or target.incarnation != blob.incarnation:
            raise PeerLostError(f"{blob.name!r} can't be reached", remote=blob.name)
        return self.agent.links.setdefault(blob.name, Link(self.agent, target))

    def remove_remote(self, remote: str) -> None:
        with self._world.lock:
            self._check_open()
            link = self.agent.links.pop(remote, None)
            if link is not None:
                link.removed = True
                link.unsent.clear()

    def notify(self, remote: str, message: bytes) -> None:
        with self._world.lock:
            self._check_open()
            link = self._known(remote)
            self._fail("notify", PeerLostError("scripted: connection lost", remote=remote), link)
            if self.agent.alive:
                self._world.send(link, bytes(message))

    def drain(self) -> list[tuple[str, bytes]]:
        with self._world.lock:
            self._check_open()
            self._world.progress(self.agent)
            if not self.agent.running:
                return []
            arrived = list(self.agent.inbox)
            self.agent.inbox.clear()
            return arrived

    def prepare(
        self,
        direction: Direction,
        local_kind: MemoryKind,
        local: Spans,
        remote_kind: MemoryKind,
        remote_spans: Spans,
        remote: str,
    ) -> _Transfer:
        with self._world.lock:
            self._check_open()
            link = self._known(remote)
            self._fail("prepare", MetadataError("scripted: spans were refused"))
            self._look_up(remote_kind, remote_spans, link)
            self._look_up(local_kind, local, None)
            return self._transfer(direction, local_kind, local, remote_spans, link)

    def prepare_list(self, kind: MemoryKind, spans: Spans, remote: str | None) -> _SpanList:
        with self._world.lock:
            self._check_open()
            if len(spans) == 0:
                raise ValueError("a span list needs at least one span")
            link = None if remote is None else self._known(remote)
            self._look_up(kind, spans, link)
            return _SpanList(kind, spans.copy(), link)

    def release_list(self, spans: Any) -> None:
        with self._world.lock:
            self._check_open()
            assert not spans.released, "a span list was released twice"
            spans.released = True

    def prepare_indexed(
        self,
        direction: Direction,
        local: Any,
        local_indices: Indices,
        remote_spans: Any,
        remote_indices: Indices,
    ) -> _Transfer:
        with self._world.lock:
            self._check_open()
            for spans in (local, remote_spans):
                assert not spans.released, "a span list was used after its release"
            if local.link is not None or remote_spans.link is None:
                raise ValueError("the first list must be of local spans, the second of a remote's")
            for indices, spans in ((local_indices, local), (remote_indices, remote_spans)):
                if indices.dtype != np.int32:
                    raise ValueError(f"indices must be int32, got {indices.dtype}")
                if len(indices) and not 0 <= indices.min() <= indices.max() < len(spans.spans):
                    raise ValueError(f"an index is out of range for {len(spans.spans)} spans")
            self._fail("prepare", MetadataError("scripted: spans were refused"))
            link: Link = remote_spans.link
            if link.removed:
                raise MetadataError(f"{link.target.name!r} was removed")
            return self._transfer(
                direction,
                local.kind,
                local.spans[local_indices],
                remote_spans.spans[remote_indices],
                link,
            )

    def post(self, transfer: Any, notification: bytes = b"") -> bool:
        with self._world.lock:
            self._check_open()
            assert not transfer.released, "a transfer was used after its release"
            assert transfer.job is None, "a transfer was posted while under way"
            if not notification and transfer.notified:
                raise ValueError("a transfer once posted with a notification needs one each time")
            link: Link = transfer.link
            if link.removed:
                raise MetadataError(f"{link.target.name!r} was removed")
            transfer.done = False
            lost = PeerLostError("scripted: transfer failed", remote=link.target.name)
            self._fail("post", lost, link)
            transfer.notified = bool(notification)
            job = Job(link, transfer.direction, deque(transfer.pieces), notification)
            transfer.job = job
            try:
                if self.agent.alive:
                    self._world.start(job)
                return self._observe(transfer)
            except TorchNixlError:
                raise
            except BaseException:
                # Interrupted by a signal, which the library's own call can't be: not posted.
                transfer.job, transfer.done = None, False
                if job in self.agent.jobs:
                    self.agent.jobs.remove(job)
                raise

    def poll(self, transfer: Any) -> bool:
        with self._world.lock:
            self._check_open()
            assert not transfer.released, "a transfer was used after its release"
            started = transfer.job is not None or transfer.done or transfer.link.broken
            assert started, "a transfer was polled before post"
            self._world.progress(self.agent)
            return self._observe(transfer)

    def release(self, transfer: Any) -> None:
        with self._world.lock:
            self._check_open()
            assert not transfer.released, "a transfer was released twice"
            transfer.released = True
            if transfer.job is not None:
                transfer.job.released = True
                if not transfer.job.pieces and transfer.job in self.agent.jobs:
                    # Nothing is left to land.
                    self.agent.jobs.remove(transfer.job)

    def disown(self) -> None:
        self._closed = True

    def close(self) -> None:
        with self._world.lock:
            self._closed = True
            if self.agent.alive:
                self._world.end(self.agent)

    # --- Helpers; callers hold the lock ---

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"agent {self.name!r} is closed")

    def _fail(self, what: Call, default: Exception, link: Link | None = None) -> None:
        """Raise what the script says, or that the link is broken."""
        failures = self.agent.failures[what]
        if failures:
            error = failures.popleft() or default
            if link is not None and isinstance(error, PeerLostError):
                link.broken = True
            raise error
        if link is not None:
            # A peer that came back under its name gives its predecessor's end away at once.
            successor = self._world.living(link.target.name)
            if link.broken or (successor is not None and successor is not link.target):
                link.broken = True
                raise PeerLostError(f"{link.target.name!r} is lost", remote=link.target.name)

    def _known(self, remote: str) -> Link:
        if remote == self.name:
            link = self.agent.links.setdefault(remote, Link(self.agent, self.agent))
            link.told = self.agent.regions
            return link
        if remote not in self.agent.links:
            raise MetadataError(f"agent {remote!r} isn't known")
        return self.agent.links[remote]

    def _look_up(self, kind: MemoryKind, spans: Spans, link: Link | None) -> None:
        table = self.agent.regions if link is None else link.told
        row = table.first_missing(kind, spans)
        if row is not None:
            address, nbytes, device_id = spans[row].tolist()
            what = f"span {row}: {nbytes} bytes at {address:#x}, device {device_id},"
            if link is None:
                raise RegistrationError(f"{what} lie in no registered region")
            raise MetadataError(f"{what} lie in no region that {link.target.name!r} has told")

    def _transfer(
        self, direction: Direction, kind: MemoryKind, local: Spans, remote: Spans, link: Link
    ) -> _Transfer:
        if len(local) == 0 or len(local) != len(remote) or (local[:, 1] != remote[:, 1]).any():
            raise ValueError(
                f"{len(local)} local and {len(remote)} remote spans must be equally many, "
                "at least one, and pairwise equally large"
            )
        pieces = tuple(
            Piece(kind, here, device_id, there, nbytes)
            for (here, nbytes, device_id), there in zip(
                local.tolist(), remote[:, 0].tolist(), strict=True
            )
        )
        return _Transfer(link, direction, pieces)

    def _observe(self, transfer: _Transfer) -> bool:
        """Return whether the transfer is complete; the first time, send its message."""
        job, link = transfer.job, transfer.link
        if transfer.done or not self.agent.running:
            return transfer.done
        if link.removed:
            raise MetadataError(f"{link.target.name!r} was removed while a transfer was under way")
        if link.broken:
            # Final: the memory is free again, and every later poll says the same.
            if job is not None and job in self.agent.jobs:
                self.agent.jobs.remove(job)
            raise PeerLostError(f"{link.target.name!r} is lost", remote=link.target.name)
        assert job is not None
        if not self._world.complete(job):
            return False
        self.agent.jobs.remove(job)
        transfer.job, transfer.done = None, True
        if job.notification:
            self._world.send(link, job.notification)
        return True
