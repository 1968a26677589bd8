"""Moves bytes between two processes that have met, and measures it.

The *initiator* posts every transfer and asks; the *target* owns the far memory and answers.
"""

from __future__ import annotations

import os
import secrets
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from torch_nixl.cli.doctor.channel import Channel
from torch_nixl.cli.doctor.children import Json
from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind, Region
from torch_nixl.engine.nixl import NixlAdapter
from torch_nixl.errors import MetadataError

MAX_NBYTES = 64 << 20
_MIN_NBYTES = 1 << 20
_NUM_TRANSFERS = 7
_NUM_ROUND_TRIPS = 1000
_NUM_WARM_UP = 100
_BUDGET_S = 3.0
_PATIENCE_S = 15.0
# An id that is no device's: it works only if the backend leaves ids to us, as the engine needs.
_DEVICE_ID = 7
_TARGETS_FILL, _WRITTEN_FILL = 0x5A, 0xC3
_PING, _IS_WRITTEN, _YES, _NO = b"8 bytes.", b"written?", b"yes", b"no"
_DONE = b"done"


@dataclass(frozen=True, slots=True)
class End:
    """One of the two processes, with the other one known to it."""

    adapter: Adapter
    remote: str
    memory: npt.NDArray[np.uint8]
    remote_address: int
    channel: Channel


def meet(channel: Channel) -> End:
    """Make an agent, tell the other end of it, and learn of the other's.

    Raises:
        EOFError: The other end has ended.
        MetadataError: What the other end told is not NIXL's metadata of a known version.
        OSError: The channel is broken, or its deadline has passed.
        RemoteFailure: The other end gives up.
        TorchNixlError: NIXL refuses.
    """
    memory = np.zeros(MAX_NBYTES, dtype=np.uint8)
    address = memory.ctypes.data
    adapter = NixlAdapter(f"doctor-{os.getpid()}-{secrets.token_hex(4)}")
    registration = adapter.register(Region(MemoryKind.DRAM, address, MAX_NBYTES, _DEVICE_ID))
    blob = adapter.metadata([registration], connection=True)
    channel.send(struct.pack("<Q", address) + blob)
    told = channel.receive()
    if len(told) < 8:
        raise MetadataError(f"the other end told {len(told)} bytes instead of its metadata")
    # Malformed metadata can crash NIXL.
    adapter.inspect(told[8:])
    remote = adapter.add_remote(told[8:])
    return End(adapter, remote, memory, struct.unpack_from("<Q", told)[0], channel)


def serve(end: End) -> None:
    """Be the target, until the initiator says over the channel that it is done.

    Raises:
        EOFError: The initiator has ended.
        OSError: The channel is broken, or its deadline has passed.
        RemoteFailure: The initiator gives up.
    """
    end.memory.fill(_TARGETS_FILL)
    end.channel.send(_DONE)
    while not end.channel.ready():
        for _ in range(100):
            for sender, message in end.adapter.drain():
                if message.startswith(_IS_WRITTEN) and len(message) == len(_IS_WRITTEN) + 8:
                    (nbytes,) = struct.unpack_from("<Q", message, len(_IS_WRITTEN))
                    message = _YES if np.all(end.memory[:nbytes] == _WRITTEN_FILL) else _NO
                end.adapter.notify(sender, message)
            # There may be fewer free cores than processes: the other one has to get its turn.
            os.sched_yield()
        if time.monotonic() > end.channel.deadline:
            raise TimeoutError("waited in vain for the initiator to finish")
    end.channel.receive()


def initiate(end: End) -> dict[str, Json]:
    """Be the initiator; return what was measured, as fields of `report.Path`.

    Raises:
        EOFError: The target has ended.
        OSError: The channel is broken, or its deadline has passed.
        RemoteFailure: The target gives up.
        RuntimeError: Wrong bytes arrived.
        TimeoutError: A message or a transfer made no progress for `_PATIENCE_S`.
        TorchNixlError: NIXL refuses.
    """
    end.memory.fill(0)
    # The target's memory is ready.
    end.channel.receive()
    ping = partial(_ask, end, _PING)
    _repeat(ping, _NUM_WARM_UP)
    trips = sorted(_repeat(ping, _NUM_ROUND_TRIPS))
    read_bytes, reads = _measure(end, Direction.READ)
    if not np.all(end.memory[:read_bytes] == _TARGETS_FILL):
        raise RuntimeError("a READ brought wrong bytes")
    end.memory.fill(_WRITTEN_FILL)
    write_bytes, writes = _measure(end, Direction.WRITE)
    if _ask(end, _IS_WRITTEN + struct.pack("<Q", write_bytes)) != _YES:
        raise RuntimeError("a WRITE brought wrong bytes")
    end.channel.send(_DONE)
    return {
        "read_bytes": read_bytes,
        "read_gb_per_s": round(read_bytes / statistics.median(reads) / 1e9, 3),
        "write_bytes": write_bytes,
        "write_gb_per_s": round(write_bytes / statistics.median(writes) / 1e9, 3),
        "round_trip_p50_us": round(trips[len(trips) // 2] * 1e6, 1),
        "round_trip_p99_us": round(trips[len(trips) * 99 // 100] * 1e6, 1),
        "copy_gb_per_s": round(read_bytes / statistics.median(_copies(end, read_bytes)) / 1e9, 3),
    }


def _copies(end: End, nbytes: int) -> list[float]:
    """Return what copies of so many bytes within this process take, which CMA's can't undercut."""
    target = np.zeros(nbytes, dtype=np.uint8)
    copy = partial(np.copyto, target, end.memory[:nbytes])
    copy()
    return _repeat(copy, _NUM_TRANSFERS)


def _measure(end: End, direction: Direction) -> tuple[int, list[float]]:
    """Return a size that several transfers of take bearable time, and the time of each."""
    nbytes = _MIN_NBYTES
    # The first one pays for what is set up on first use.
    _repeat(partial(_move, end, direction, nbytes), 2)
    seconds = min(_repeat(partial(_move, end, direction, nbytes), 2))
    while nbytes < MAX_NBYTES and seconds * _NUM_TRANSFERS * 2 < _BUDGET_S:
        nbytes, seconds = nbytes * 2, seconds * 2
    # Room that is written for the first time costs extra.
    _move(end, direction, nbytes)
    return nbytes, _repeat(partial(_move, end, direction, nbytes), _NUM_TRANSFERS)


def _repeat(function: Callable[[], object], count: int) -> list[float]:
    """Call so many times, or fewer, at least once, if that takes long; return seconds of each."""
    times: list[float] = []
    until = time.monotonic() + _BUDGET_S
    while len(times) < count and (not times or time.monotonic() < until):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times


def _ask(end: End, message: bytes) -> bytes:
    end.adapter.notify(end.remote, message)
    patience = time.monotonic() + _PATIENCE_S
    while True:
        for _ in range(100):
            for _, answer in end.adapter.drain():
                return answer
            os.sched_yield()
        _check(end, patience, "an answer")


def _move(end: End, direction: Direction, nbytes: int) -> None:
    local = np.array([[end.memory.ctypes.data, nbytes, _DEVICE_ID]], dtype=np.uint64)
    remote = np.array([[end.remote_address, nbytes, _DEVICE_ID]], dtype=np.uint64)
    kind = MemoryKind.DRAM
    transfer = end.adapter.prepare(direction, kind, local, kind, remote, end.remote)
    done = end.adapter.post(transfer)
    patience = time.monotonic() + _PATIENCE_S
    while not done:
        done = end.adapter.poll(transfer)
        _check(end, patience, f"a {direction.value} of {nbytes} bytes")
    end.adapter.release(transfer)


def _check(end: End, patience: float, awaited: str) -> None:
    if end.channel.ready():
        # Nothing is due now but bad news.
        end.channel.receive()
        raise MetadataError("the other end spoke out of turn")
    if time.monotonic() > min(patience, end.channel.deadline):
        raise TimeoutError(f"waited in vain for {awaited}")
