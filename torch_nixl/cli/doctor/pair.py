"""Moves bytes between two processes as two ranks would, and measures it.

The *initiator* posts every transfer and asks; the *target* owns the far memory and answers.
"""

from __future__ import annotations

import os
import secrets
import socket
import statistics
import struct
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath

import numpy as np
import numpy.typing as npt

from torch_nixl.cli.doctor import ucxlog
from torch_nixl.cli.doctor.children import Json, first_failure, run_together
from torch_nixl.cli.doctor.report import Path
from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind, Region
from torch_nixl.engine.nixl import NixlAdapter

NBYTES = 64 << 20
_NUM_TRANSFERS = 7
_NUM_ROUND_TRIPS = 1000
_NUM_WARM_UP = 100
# An id that is no device's: it works only if the backend leaves ids to us, as the engine needs.
_DEVICE_ID = 7
_TARGETS_FILL, _WRITTEN_FILL = 0x5A, 0xC3
_PING, _IS_WRITTEN, _YES, _NO = b"8 bytes.", b"written?", b"yes", b"no"


@dataclass(frozen=True, slots=True)
class _End:
    """One of the two processes, with the other one known to it."""

    adapter: Adapter
    remote: str
    memory: npt.NDArray[np.uint8]
    remote_address: int
    control: socket.socket
    deadline: float


def try_pair(timeout: float, environment: dict[str, str]) -> tuple[Path, str]:
    """Let two children move bytes both ways.

    Args:
        timeout: Seconds for everything.
        environment: Variables to set in the children, so that UCX says what it does.

    Returns:
        What was found, and what UCX and NIXL said on both sides.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryDirectory() as folder:
        for end in (ours, theirs):
            end.settimeout(timeout)
        logs = [FilePath(folder, name) for name in ("initiator", "target")]
        tasks = [
            partial(_run, is_target, end, environment | {"UCX_LOG_FILE": str(log)}, timeout)
            for is_target, end, log in zip((False, True), (ours, theirs), logs, strict=True)
        ]
        outcomes = run_together(tasks, timeout)
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    lanes = ucxlog.lanes(texts[0])
    found: dict[str, Json] = {
        "kind": ucxlog.kind(lanes.read or lanes.write),
        "read_lane": lanes.read,
        "write_lane": lanes.write,
        "control_lane": lanes.control,
    }
    failure = first_failure(outcomes)
    measured = outcomes[0].value
    if isinstance(measured, dict):
        found |= measured
    path = Path.model_validate(found | {"works": failure is None, "failure": failure})
    return path, "\n".join([*texts, *(outcome.output for outcome in outcomes)])


def _run(
    is_target: bool, control: socket.socket, environment: dict[str, str], timeout: float
) -> Json:
    deadline = time.monotonic() + timeout
    os.environ.update(environment)
    memory = np.full(NBYTES, _TARGETS_FILL if is_target else 0, dtype=np.uint8)
    address = memory.ctypes.data
    adapter = NixlAdapter(f"doctor-{os.getpid()}-{secrets.token_hex(4)}")
    registration = adapter.register(Region(MemoryKind.DRAM, address, NBYTES, _DEVICE_ID))
    blob = adapter.metadata([registration], connection=True)
    control.sendall(struct.pack("<QI", address, len(blob)) + blob)
    remote_address, size = struct.unpack("<QI", _receive(control, 12))
    remote = adapter.add_remote(_receive(control, size))
    end = _End(adapter, remote, memory, remote_address, control, deadline)
    try:
        return _serve(end) if is_target else _initiate(end)
    finally:
        adapter.close()


def _receive(control: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        piece = control.recv(nbytes - len(received))
        if not piece:
            raise EOFError("the other process ended")
        received += piece
    return received


def _serve(end: _End) -> Json:
    """Answer messages until the initiator says over the socket that it is done."""
    end.control.setblocking(False)
    while True:
        for _ in range(100):
            for sender, message in end.adapter.drain():
                if message == _IS_WRITTEN:
                    message = _YES if bool(np.all(end.memory == _WRITTEN_FILL)) else _NO
                end.adapter.notify(sender, message)
            # There may be fewer free cores than processes: the other one has to get its turn.
            os.sched_yield()
        try:
            end.control.recv(1)
        except BlockingIOError:
            _check(end, "the initiator to finish")
        else:
            return None


def _initiate(end: _End) -> Json:
    for _ in range(_NUM_WARM_UP):
        _ask(end, _PING)
    trips = sorted(_timed(partial(_ask, end, _PING)) for _ in range(_NUM_ROUND_TRIPS))
    reads = [_timed(partial(_move, end, Direction.READ)) for _ in range(_NUM_TRANSFERS)]
    if not np.all(end.memory == _TARGETS_FILL):
        raise RuntimeError("a READ brought wrong bytes")
    end.memory.fill(_WRITTEN_FILL)
    writes = [_timed(partial(_move, end, Direction.WRITE)) for _ in range(_NUM_TRANSFERS)]
    if _ask(end, _IS_WRITTEN) != _YES:
        raise RuntimeError("a WRITE brought wrong bytes")
    end.control.sendall(b".")
    return {
        "read_gb_per_s": round(NBYTES / statistics.median(reads) / 1e9, 3),
        "write_gb_per_s": round(NBYTES / statistics.median(writes) / 1e9, 3),
        "round_trip_p50_us": round(trips[_NUM_ROUND_TRIPS // 2] * 1e6, 1),
        "round_trip_p99_us": round(trips[_NUM_ROUND_TRIPS * 99 // 100] * 1e6, 1),
    }


def _timed(function: partial[bytes] | partial[None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _ask(end: _End, message: bytes) -> bytes:
    end.adapter.notify(end.remote, message)
    while True:
        for _ in range(100):
            for _, answer in end.adapter.drain():
                return answer
            os.sched_yield()
        _check(end, "an answer")


def _move(end: _End, direction: Direction) -> None:
    local = np.array([[end.memory.ctypes.data, NBYTES, _DEVICE_ID]], dtype=np.uint64)
    remote = np.array([[end.remote_address, NBYTES, _DEVICE_ID]], dtype=np.uint64)
    kind = MemoryKind.DRAM
    transfer = end.adapter.prepare(direction, kind, local, kind, remote, end.remote)
    done = end.adapter.post(transfer)
    while not done:
        done = end.adapter.poll(transfer)
        _check(end, f"a {direction.value}")
    end.adapter.release(transfer)


def _check(end: _End, awaited: str) -> None:
    if time.monotonic() > end.deadline:
        raise TimeoutError(f"waited in vain for {awaited}")
