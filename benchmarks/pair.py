"""Two processes for a benchmark: a control channel between them, figures and a table at the end."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection as Pipe

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Row:
    """One line of a table.

    Attributes:
        what: What was measured.
        ours: Our figure, with its unit in `unit`.
        rival: The rival's, of the same run.
        unit: Unit of both.
        limit: What the ratio, or our figure where there is no rival, is to reach.
        lower_is_better: Whether less is more.
        note: The rival's configuration, or anything that one has to know.
    """

    what: str
    ours: float
    unit: str
    limit: float
    rival: float | None = None
    lower_is_better: bool = True
    note: str = ""

    @property
    def value(self) -> float:
        """What `limit` is compared with."""
        return self.ours if self.rival is None else self.ours / self.rival

    @property
    def passed(self) -> bool:
        return self.value <= self.limit if self.lower_is_better else self.value >= self.limit


@dataclass(slots=True)
class Side:
    """One of the two processes, and its control channel to the other."""

    rank: int
    pipe: Pipe = None  # type: ignore[assignment]  # set while the process runs
    rows: list[Row] = field(default_factory=list)
    figures: list[float] = field(default_factory=list)

    def exchange(self, value: object) -> object:
        """Hand `value` over and return what the other side handed over. A barrier, too."""
        self.pipe.send(value)
        return self.pipe.recv()

    def wait_while(self, poll: Callable[[], object], pause: float = 0.0) -> object:
        """Poll until the other side sends something; return that."""
        while not self.pipe.poll(0):
            poll()
            if pause:
                time.sleep(pause)
        return self.pipe.recv()


def percentile(seconds: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def interleave(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run contestants in turn, so that noise meets all of them; return each one's figures."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            figures[name].append(run())
    return figures


def median(figures: Sequence[float]) -> float:
    return statistics.median(figures)


def _enter(body: Callable[[Side], None], rank: int, pipe: Pipe, results: Pipe) -> None:
    side = Side(rank, pipe)
    body(side)
    results.send(Side(rank, rows=side.rows, figures=side.figures))


def run_pair(body: Callable[[Side], None], timeout: float) -> list[Side]:
    """Run `body` in two fresh processes and return both sides as it left them."""
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    results = [context.Pipe(duplex=False) for _ in ends]
    processes = [
        context.Process(target=_enter, args=(body, rank, ends[rank], results[rank][1]))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for _, sender in results:
        sender.close()
    for end in ends:
        end.close()
    deadline = time.monotonic() + timeout
    sides: list[Side] = []
    try:
        for receiver, _ in results:
            if not receiver.poll(max(0.0, deadline - time.monotonic())):
                raise SystemExit(f"the benchmark did not end within {timeout:.0f} s")
            sides.append(receiver.recv())
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return sides


def write_json(path: str | None, document: dict[str, object]) -> None:
    """Write figures and the machine they are of, if a path was given."""
    if path:
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "arch": platform.machine()}
        with open(path, "w") as file:
            json.dump({**document, "machine": machine}, file, indent=2)


def report(title: str, sides: Sequence[Side], path: str | None) -> None:
    """Print a table and, if asked to, write JSON."""
    rows = [row for side in sides for row in side.rows]
    load = os.getloadavg()[0]
    table = Table(title=f"{title} (load average {load:.1f})")
    for column in ("", "ours", "rival", "ratio", "to reach", "", "note"):
        table.add_column(column, justify="left" if column in ("", "note") else "right")
    for row in rows:
        sign = "<=" if row.lower_is_better else ">="
        table.add_row(
            row.what,
            f"{row.ours:.4g} {row.unit}",
            "" if row.rival is None else f"{row.rival:.4g} {row.unit}",
            "" if row.rival is None else f"{row.value:.2f}",
            f"{sign} {row.limit:g}" + ("" if row.rival is not None else f" {row.unit}"),
            "reached" if row.passed else "missed",
            row.note,
        )
    Console(width=150 if not sys.stdout.isatty() else None).print(table)
    write_json(path, {"title": title, "rows": [asdict(row) for row in rows]})


def arguments(description: str) -> argparse.Namespace:
    """Options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args()
