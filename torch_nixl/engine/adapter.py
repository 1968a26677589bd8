"""What the engine needs from a transfer library, and nothing more.

`nixl.NixlAdapter` implements it over NIXL, `loopback.LoopbackAdapter` over a scripted fake in this
process. Both pass the same conformance checks (`torch_nixl.testing`).

An adapter is one agent: a name, registered memory, and remotes that it can move bytes to and from.
All spans are numpy arrays of shape ``[n, 3]``, dtype uint64, C-contiguous, with the columns
address, nbytes, device id. See [Note: device ids] in `registry.py` for what a device id means.

Threads: every method may be called from any thread, except that one `Transfer` belongs to one
thread at a time. No method may be called from a finalizer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch_nixl.engine.blob import BlobInfo

Spans: TypeAlias = npt.NDArray[np.uint64]
Indices: TypeAlias = npt.NDArray[np.int32]


class MemoryKind(enum.Enum):
    """Where bytes lie, in the words of NIXL's memory segments."""

    DRAM = "DRAM"
    VRAM = "VRAM"
    FILE = "FILE"
    BLOCK = "BLOCK"
    OBJECT = "OBJ"

    # Members are compared by identity; Enum's own hash is a Python function, on the hot path.
    __hash__ = object.__hash__


class Direction(enum.Enum):
    """Which way bytes move, seen from the process that posts the transfer."""

    READ = "READ"
    WRITE = "WRITE"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of memory to register: ``nbytes`` bytes from ``address``."""

    kind: MemoryKind
    address: int
    nbytes: int
    device_id: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the adapter's backends allow.

    Attributes:
        free_device_ids: Kinds of memory whose device id the library does not interpret, so that
            each registration can have one of its own. See [Note: device ids].
        backends: Names of the backends that were set up.
        version: The library's version.
    """

    free_device_ids: frozenset[MemoryKind]
    backends: tuple[str, ...]
    version: str


class Registration(Protocol):
    """A registered region. Alive until `Adapter.deregister`."""

    @property
    def region(self) -> Region: ...


class Transfer(Protocol):
    """A prepared movement of bytes. Alive until `Adapter.release`."""


class SpanList(Protocol):
    """Spans that were looked up once, to be used by many transfers."""


class Adapter(Protocol):
    """One agent of a transfer library."""

    @property
    def name(self) -> str:
        """The agent's name, unique among all agents that can reach each other."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    def register(self, region: Region) -> Registration:
        """Make a region usable by transfers, as their local side or as a remote's target.

        Raises:
            RegistrationError: The library refused.
        """
        ...

    def deregister(self, registration: Registration) -> None:
        """Undo `register`. Does not revoke what remotes were told: no library here can."""
        ...

    def metadata(self, registrations: Sequence[Registration], *, connection: bool) -> bytes:
        """Return the blob from which a remote learns of these regions.

        Args:
            registrations: Regions to tell; may be empty if `connection` is True.
            connection: Whether to include how to reach this agent. A remote that does not know
                the agent yet needs it.
        """
        ...

    def add_remote(self, metadata: bytes) -> str:
        """Learn of a remote agent, or of more regions of a known one, and return its name.

        Knowledge only grows: a region once told stays told until `remove_remote`.

        Raises:
            MetadataError: The blob was refused, or tells regions of an agent that isn't known.
            PeerLostError: The agent can't be reached.
        """
        ...

    def inspect(self, metadata: bytes) -> BlobInfo:
        """Check that a blob is what `metadata` writes, and say what it holds.

        The library trusts its input to a degree that lets altered blobs crash it, so nothing
        from outside may reach `add_remote` unseen.

        Raises:
            MetadataError: It is not, or the library's version is one whose blobs are not known.
        """
        ...

    def remove_remote(self, remote: str) -> None:
        """Forget a remote. Transfers to it that are under way keep moving bytes."""
        ...

    def notify(self, remote: str, message: bytes) -> None:
        """Send a message. FIFO for each pair of agents, unbounded, never blocks.

        Returning says nothing about arrival: messages to an agent that has died since, and
        messages sent before the first contact was answered, can be lost without an error.

        Raises:
            PeerLostError: The connection is known to be broken.
        """
        ...

    def drain(self) -> list[tuple[str, bytes]]:
        """Make progress and return the messages that arrived, as (sender's name, message)."""
        ...

    def prepare(
        self,
        direction: Direction,
        local_kind: MemoryKind,
        local: Spans,
        remote_kind: MemoryKind,
        remote_spans: Spans,
        remote: str,
    ) -> Transfer:
        """Set up a transfer between equally long span lists, pairwise equally large.

        Raises:
            MetadataError: A remote span lies in no region that the remote has told.
            RegistrationError: A local span lies in no registered region.
            PeerLostError: The connection is known to be broken.
        """
        ...

    def prepare_list(self, kind: MemoryKind, spans: Spans, remote: str | None) -> SpanList:
        """Look up spans once: local ones if `remote` is None, else that remote's.

        Raises:
            MetadataError, RegistrationError: As for `prepare`.
        """
        ...

    def release_list(self, spans: SpanList) -> None:
        """Free a span list. No transfer prepared from it may be under way."""
        ...

    def prepare_indexed(
        self,
        direction: Direction,
        local: SpanList,
        local_indices: Indices,
        remote_spans: SpanList,
        remote_indices: Indices,
    ) -> Transfer:
        """Set up a transfer from rows of two span lists; neighbouring rows are merged.

        Raises:
            ValueError: An index is out of range, or the counts differ.
        """
        ...

    def post(self, transfer: Transfer, notification: bytes = b"") -> bool:
        """Start a transfer; return True if it has completed already.

        Args:
            transfer: From `prepare` or `prepare_indexed`; can be posted again once complete.
            notification: A message for the remote, sent when this side observes completion.

        Raises:
            PeerLostError: The remote died, or one of the sides' memory can't be accessed.
        """
        ...

    def poll(self, transfer: Transfer) -> bool:
        """Make progress; return True once the transfer has completed.

        Complete means: the bytes are visible on the side that receives them.

        Raises:
            PeerLostError: As for `post`.
        """
        ...

    def release(self, transfer: Transfer) -> None:
        """Free a transfer. One that is under way is NOT aborted: bytes keep landing."""
        ...

    def disown(self) -> None:
        """Never enter the library again, not even to free anything: for forked children."""
        ...

    def close(self) -> None:
        """Destroy the agent. The only call that stops transfers posted by this agent."""
        ...
