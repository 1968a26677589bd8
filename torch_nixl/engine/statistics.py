"""Figures of a connection."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_nixl.engine.registry import RegistryStatistics


@dataclass(frozen=True, slots=True)
class ConnectionStatistics:
    """What a Connection has done since it was made.

    Attributes:
        operations: Operations that ended well. A tensor that is sent or received between ranks is
            one, however many transfers it took; small ones that had to wait for nothing are in a
            Communicator's figures only.
        nbytes: Bytes of those.
        failures: Operations that ended otherwise, by the name of the error.
        registrations: Regions registered with the library.
        deregistrations: Regions deregistered.
        cache_hits: Registrations that were found in the cache.
        live_registrations: Regions registered now.
        registered_bytes: Bytes of those.
        remotes: Remotes known now.
        remotes_lost: Remotes that were lost.
        remotes_relearned: Times a remote was forgotten and learned anew to make room for regions.
        outstanding: Operations that have not been released.
        frames_received: Control frames that arrived.
        frames_refused: Frames that were not acceptable.
    """

    operations: int
    nbytes: int
    failures: dict[str, int]
    registrations: int
    deregistrations: int
    cache_hits: int
    live_registrations: int
    registered_bytes: int
    remotes: int
    remotes_lost: int
    remotes_relearned: int
    outstanding: int
    frames_received: int
    frames_refused: int


@dataclass(slots=True)
class Counters:
    """The counters behind `ConnectionStatistics`."""

    operations: int = 0
    nbytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    relearned: int = 0
    frames_received: int = 0
    frames_refused: int = 0

    def count_end(self, nbytes: int, error: BaseException | None) -> None:
        """Count an operation that has ended."""
        if error is None:
            self.operations += 1
            self.nbytes += nbytes
        else:
            kind = type(error).__name__
            self.failures[kind] = self.failures.get(kind, 0) + 1

    def freeze(
        self, registry: RegistryStatistics, num_remotes: int, num_outstanding: int
    ) -> ConnectionStatistics:
        """The figures of this moment."""
        return ConnectionStatistics(
            operations=self.operations,
            nbytes=self.nbytes,
            failures=dict(self.failures),
            registrations=registry.registrations,
            deregistrations=registry.deregistrations,
            cache_hits=registry.hits,
            live_registrations=registry.live,
            registered_bytes=registry.live_bytes,
            remotes=num_remotes,
            remotes_lost=self.lost,
            remotes_relearned=self.relearned,
            outstanding=num_outstanding,
            frames_received=self.frames_received,
            frames_refused=self.frames_refused,
        )
