"""A picture of what moved when, for Perfetto or ``chrome://tracing``.

    with torch_nixl.trace("trace.json"):
        step()

One process per rank, one row per remote, one bar per operation; small messages, which are none, are
marks. The format is Chrome's Trace Event Format; times are of the wall clock, so that what several
ranks wrote can be laid side by side, as well as their clocks agree.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from torch_nixl.engine import observers

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.operation import Operation
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.p2p.communicator import Communicator

MAX_EVENTS: Final = 1_000_000
"""Events that a trace keeps, about 200 MB: the latest ones."""

TAG: Final = (1 << 62) + 0x7ACE
"""Of the messages that gather a trace."""

Event = dict[str, Any]


class trace:  # noqa: N801 - used like a function
    """Records operations from `with` to its end and writes them to a file.

    Args:
        path: The file. Without `group`, each process should write one of its own.
        group: Gather the events of all ranks of this Communicator at the end; rank 0 writes them
            to `path`, the others write nothing. All ranks end the trace, as for a collective.
        timeout: Seconds for gathering; the Communicator's own by default.

    Raises:
        TransferTimeout, PeerLostError: At the end, with `group`: a rank did not take part. This
            rank's own events are then written to `path` with its rank before the suffix.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: Communicator | None = None,
        timeout: float | None = None,
    ) -> None:
        self._path = Path(path)
        self._group = group
        self._timeout = timeout
        self._recorder = _Recorder()

    def __enter__(self) -> trace:
        observers.ends.append(self._recorder)
        observers.messages.append(self._recorder)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        observers.ends.remove(self._recorder)
        observers.messages.remove(self._recorder)
        group = self._group
        if group is None:
            write_trace(self._path, self._recorder.events(f"pid {os.getpid()}"))
            return
        mine = self._recorder.events(f"rank {group.rank}")
        if exc_type is not None:
            # Whatever is going wrong here, the others are not to be waited for.
            write_trace(_own(self._path, group.rank), mine)
            return
        try:
            gathered = _gather(group, mine, self._timeout)
        except BaseException:
            write_trace(_own(self._path, group.rank), mine)
            raise
        if group.rank == 0:
            write_trace(self._path, gathered)


def _own(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.{rank}{path.suffix}")


def _gather(group: Communicator, mine: list[Event], timeout: float | None) -> list[Event]:
    if group.rank:
        data = bytearray(json.dumps(mine).encode())
        group.send(torch.frombuffer(data, dtype=torch.uint8), 0, tag=TAG, timeout=timeout)
        return mine
    events = list(mine)
    for rank in range(1, group.world_size):
        tensor = group.recv(rank, tag=TAG, timeout=timeout)
        events += json.loads(tensor.numpy().tobytes())
    return events


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """Write events to a file, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    partial.replace(path)


def merge_traces(path: str | os.PathLike[str], parts: Iterable[str | os.PathLike[str]]) -> None:
    """Make one trace of several, one per process, that were written without `group`.

    Raises:
        OSError: A file can't be read or written.
        ValueError: A file is not a trace.
    """
    events: list[Event] = []
    for part in parts:
        try:
            events += json.loads(Path(part).read_text())["traceEvents"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{part} is not a trace") from error
    write_trace(Path(path), events)


class _Recorder:
    """Keeps what it is told, as little as that takes; what it means is worked out at the end."""

    def __init__(self) -> None:
        self._epoch = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._bars: deque[tuple[str, str, float, float, Event]] = deque(maxlen=MAX_EVENTS)
        self._marks: deque[tuple[str, str, float, int]] = deque(maxlen=MAX_EVENTS)

    def on_end(
        self, connection: Connection, operation: Operation, error: BaseException | None
    ) -> None:
        now = time.monotonic()
        started = operation.started_at or now
        remote = operation.remote
        arguments: Event = {"nbytes": operation.nbytes}
        route = getattr(operation, "route", None)
        if route is not None:
            arguments["route"] = route.value
        if error is not None:
            arguments["error"] = f"{type(error).__name__}: {error}"
        name = "" if remote is None else remote.name
        with self._lock:
            self._bars.append((name, operation.name, started, now, arguments))

    def on_message(
        self, connection: Connection, remote: Remote, nbytes: int, *, sent: bool
    ) -> None:
        what = "message sent" if sent else "message received"
        with self._lock:
            self._marks.append((remote.name, what, time.monotonic(), nbytes))

    def events(self, process: str) -> list[Event]:
        """Everything, in Chrome's format, as done by the process of that name."""
        with self._lock:
            bars, marks = sorted(self._bars, key=lambda bar: bar[2]), list(self._marks)
        pid = os.getpid()
        rows = _Rows()
        events: list[Event] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        ]
        for remote, name, start, stop, arguments in bars:
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": "torch_nixl",
                    "ts": self._microseconds(start),
                    "dur": round((stop - start) * 1e6, 3),
                    "pid": pid,
                    "tid": rows.find(remote, start, stop),
                    "args": arguments,
                }
            )
        for remote, name, at, nbytes in marks:
            events.append(
                {
                    "ph": "i",
                    "s": "t",
                    "name": name,
                    "cat": "torch_nixl",
                    "ts": self._microseconds(at),
                    "pid": pid,
                    "tid": rows.first(remote),
                    "args": {"nbytes": nbytes},
                }
            )
        for tid, name in rows.names():
            events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            )
        return events

    def _microseconds(self, at: float) -> float:
        return round((self._epoch + at) * 1e6, 3)


class _Rows:
    """Rows for each remote: as many as it has bars that overlap: one can't hold them."""

    def __init__(self) -> None:
        self._ends: dict[str, list[float]] = {}
        self._numbers: dict[tuple[str, int], int] = {}

    def find(self, remote: str, start: float, stop: float) -> int:
        ends = self._ends.setdefault(remote, [])
        for lane, end in enumerate(ends):
            if end <= start:
                ends[lane] = stop
                return self._number(remote, lane)
        ends.append(stop)
        return self._number(remote, len(ends) - 1)

    def first(self, remote: str) -> int:
        return self._number(remote, 0)

    def _number(self, remote: str, lane: int) -> int:
        return self._numbers.setdefault((remote, lane), len(self._numbers) + 1)

    def names(self) -> list[tuple[int, str]]:
        return [
            (number, f"{remote or 'nobody yet'}{f' ({lane + 1})' if lane else ''}")
            for (remote, lane), number in self._numbers.items()
        ]
