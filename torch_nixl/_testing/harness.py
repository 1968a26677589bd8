"""What conformance checks run on: adapters in this process, and a peer that can be mistreated.

A `Harness` makes both for one implementation. `LoopbackHarness` keeps all of it in this process;
`NixlHarness` gives each peer a process of its own, so that it can be killed and stopped for real.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from torch_nixl.engine.adapter import Adapter, MemoryKind, Region
from torch_nixl.engine.loopback import LoopbackFabric, Mode
from torch_nixl.engine.nixl import NixlAdapter

PEER_BYTES = 1 << 20
"""Size of the buffer that a `Peer` registers, filled with zeros."""

PEER_DEVICE_ID = 5
"""Device id that a `Peer` registers its buffer with."""

_REPLY_TIMEOUT = 60.0


class Peer(Protocol):
    """An agent elsewhere, with `PEER_BYTES` registered bytes. Makes progress only in `drain`."""

    @property
    def address(self) -> int:
        """Where its buffer starts, in its own address space."""
        ...

    def metadata(self) -> bytes:
        """Return its connection and its buffer's region."""
        ...

    def add_remote(self, metadata: bytes) -> str: ...

    def notify(self, remote: str, message: bytes) -> None: ...

    def drain(self) -> list[tuple[str, bytes]]: ...

    def contents(self) -> bytes:
        """Return what its buffer holds."""
        ...

    def kill(self) -> None:
        """End it at once, as ``kill -9`` does."""
        ...

    def stop(self) -> None:
        """Let it stand still until `resume`. Only `resume` and `kill` may be called then."""
        ...

    def resume(self) -> None: ...


class Harness(Protocol):
    """Makes adapters of one implementation. What it made is gone when the caller leaves it."""

    def adapter(self, name: str) -> Adapter:
        """Make an agent in this process that makes progress only when it is called."""
        ...

    def peer(self, name: str) -> Peer:
        """Make an agent that can be killed. After its end, its name can be used again."""
        ...

    def buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return zeros that stay where they are for as long as the harness lives."""
        ...


def _buffer_region(buffer: npt.NDArray[np.uint8]) -> Region:
    return Region(MemoryKind.DRAM, buffer.ctypes.data, buffer.nbytes, PEER_DEVICE_ID)


class _LoopbackPeer:
    def __init__(self, fabric: LoopbackFabric, name: str, buffer: npt.NDArray[np.uint8]) -> None:
        self._fabric = fabric
        self._adapter = fabric.adapter(name)
        self._buffer = buffer
        self._registration = self._adapter.register(_buffer_region(buffer))
        self.address = buffer.ctypes.data
        self.add_remote = self._adapter.add_remote
        self.notify = self._adapter.notify
        self.drain = self._adapter.drain

    def metadata(self) -> bytes:
        return self._adapter.metadata([self._registration], connection=True)

    def contents(self) -> bytes:
        return self._buffer.tobytes()

    def kill(self) -> None:
        self._fabric.kill(self._adapter.name)

    def stop(self) -> None:
        self._fabric.stop(self._adapter.name)

    def resume(self) -> None:
        self._fabric.resume(self._adapter.name)


class LoopbackHarness:
    """A `Harness` of loopback agents on a fabric of their own."""

    def __init__(self, *, mode: Mode = "inline") -> None:
        self.fabric = LoopbackFabric(mode=mode)
        self._buffers: list[npt.NDArray[np.uint8]] = []

    def adapter(self, name: str) -> Adapter:
        return self.fabric.adapter(name)

    def peer(self, name: str) -> Peer:
        return _LoopbackPeer(self.fabric, name, self.buffer(PEER_BYTES))

    def buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self._buffers.append(np.zeros(nbytes, np.uint8))
        return self._buffers[-1]


def _serve_peer(connection: Connection, name: str, environment: Mapping[str, str]) -> None:
    """Run in a peer's process: do what the harness asks, and make progress only then."""
    os.environ.update(environment)
    adapter = NixlAdapter(name)
    buffer = np.zeros(PEER_BYTES, np.uint8)
    registration = adapter.register(_buffer_region(buffer))
    calls = {
        "address": lambda: buffer.ctypes.data,
        "metadata": lambda: adapter.metadata([registration], connection=True),
        "add_remote": adapter.add_remote,
        "notify": adapter.notify,
        "drain": adapter.drain,
        "contents": buffer.tobytes,
    }
    while True:
        try:
            call, arguments = connection.recv()
        except EOFError:
            break
        connection.send(cast(Any, calls[call])(*arguments))
    adapter.close()


class _NixlPeer:
    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_peer, args=(theirs, name, dict(environment)), daemon=True
        )
        self._process.start()
        theirs.close()
        self.address: int = self._ask("address")

    def _ask(self, call: str, *arguments: object) -> Any:
        self._connection.send((call, arguments))
        if not self._connection.poll(_REPLY_TIMEOUT):
            raise TimeoutError(f"the peer's process did not answer {call!r}")
        return self._connection.recv()

    def metadata(self) -> bytes:
        return cast(bytes, self._ask("metadata"))

    def add_remote(self, metadata: bytes) -> str:
        return cast(str, self._ask("add_remote", metadata))

    def notify(self, remote: str, message: bytes) -> None:
        self._ask("notify", remote, message)

    def drain(self) -> list[tuple[str, bytes]]:
        return cast("list[tuple[str, bytes]]", self._ask("drain"))

    def contents(self) -> bytes:
        return cast(bytes, self._ask("contents"))

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process.is_alive():
            self._signal(signal.SIGKILL)
        self._process.join()
        self._connection.close()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)


class NixlHarness:
    """A `Harness` of NIXL agents; each peer has a process of its own.

    Args:
        environment: Variables for the peers' processes. For adapters in this process, set them
            before the first agent is made.
    """

    def __init__(self, *, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment or {}
        self._adapters: list[NixlAdapter] = []
        self._peers: list[_NixlPeer] = []
        self._buffers: list[npt.NDArray[np.uint8]] = []

    def adapter(self, name: str) -> Adapter:
        self._adapters.append(NixlAdapter(name))
        return self._adapters[-1]

    def peer(self, name: str) -> Peer:
        self._peers.append(_NixlPeer(name, self._environment))
        return self._peers[-1]

    def buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        self._buffers.append(np.zeros(nbytes, np.uint8))
        return self._buffers[-1]

    def close(self) -> None:
        """End every process and agent that this harness made. Idempotent."""
        for peer in self._peers:
            peer.kill()
        for adapter in self._adapters:
            adapter.close()


@contextmanager
def nixl_harness(**kwargs: Any) -> Iterator[NixlHarness]:
    """Make a `NixlHarness` and close it in the end."""
    harness = NixlHarness(**kwargs)
    try:
        yield harness
    finally:
        harness.close()
