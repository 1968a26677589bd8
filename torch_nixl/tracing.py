"""A picture of what moved when, for Perfetto or ``chrome://tracing``.

    with torch_nixl.trace("trace.json"):
        step()

One process per rank, one row per remote, one bar per operation; small messages, which are none, are
marks. The format is Chrome's Trace Event Format; times are of the wall clock, so that what several
ranks wrote can be laid side by side, as well as their clocks agree.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from torch_nixl.engine import observers

if TYPE_CHECKING:
    from torch_nixl.p2p.communicator import Communicator

log = logging.getLogger("torch_nixl.tracing")

MAX_EVENTS: Final = 1_000_000
"""Operations that a trace keeps at most, and messages: the latest ones, and at least half of that.
So many take about 130 MB and 65 MB."""

TAG: Final = (1 << 62) + 0x7ACE
"""Of the messages that gather a trace."""

Event = dict[str, Any]


class trace:  # noqa: N801 - used like a function
    """Records operations from `with` to its end and writes them to a file.

    Args:
        path: The file, replaced when all is written; what is no regular file, such as a pipe, is
            written to. Without `group`, each process should write one of its own.
        group: Gather the events of all ranks of this Communicator at the end; rank 0 writes them
            to `path`, the others write nothing. All ranks end the trace, as for a collective.
        timeout: Seconds for gathering; the Communicator's own by default.

    Attributes:
        dropped: How many events of this process there were before those that were kept; known at
            the end.

    Raises:
        OSError: At the end: the file can't be written.
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
        self.dropped = 0

    def __enter__(self) -> trace:
        self._recorder.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.stop()
        group = self._group
        name = f"pid {os.getpid()}" if group is None else f"rank {group.rank}"
        mine = self._recorder.events(name)
        self.dropped = self._recorder.dropped
        if self.dropped:
            log.warning(
                "the trace %s has the latest events only: %d before them found no room",
                self._path,
                self.dropped,
            )
        if group is None:
            write_trace(self._path, mine)
            return
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
    """Write events to a file, whole or not at all; what is no regular file is written through."""
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    if path.exists() and not path.is_file():
        # A pipe, or a device, which must not be replaced.
        path.write_text(text)
        return
    path = path.resolve()  # A link stays what it is.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


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
    """Has notes taken, and works out at the end what they mean: see [Note: notes]."""

    def __init__(self) -> None:
        self._epoch = time.time() - time.monotonic()
        self._ends = observers.EndRows(MAX_EVENTS)
        self._messages = observers.MessageRows(MAX_EVENTS)

    def start(self) -> None:
        observers.watch(end=self._ends.note, message=self._messages)

    def stop(self) -> None:
        observers.unwatch(end=self._ends.note, message=self._messages)

    @property
    def dropped(self) -> int:
        """How many events there were before those that are kept."""
        return self._ends.dropped + self._messages.dropped

    def events(self, process: str) -> list[Event]:
        """Everything, in Chrome's format, as done by the process of that name."""
        # Rows are given to bars in the order of their begins.
        bars = sorted(self._ends.rows(), key=_start)
        marks = self._messages.rows()
        pid = os.getpid()
        rows = _Rows()
        events: list[Event] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        ]
        if self.dropped:
            labels = f"latest events only: {self.dropped} before them are missing"
            events.append(
                {"ph": "M", "name": "process_labels", "pid": pid, "args": {"labels": labels}}
            )
        for bar in bars:
            _, stop, _, remote, name, nbytes, route, error = bar
            start = _start(bar)
            arguments: Event = {"nbytes": nbytes}
            if isinstance(route, enum.Enum):
                arguments["route"] = route.value
            if error is not None:
                arguments["error"] = ": ".join(error)
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
        for at, remote, nbytes, sent in marks:
            events.append(
                {
                    "ph": "i",
                    "s": "t",
                    "name": "message sent" if sent else "message received",
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


def _start(bar: observers.Ended) -> float:
    """When an operation began, or, if it never did, ended."""
    return bar[0] or bar[1]


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
