"""Figures with what issues ask of them: `torch_nixl.bench` measures, this compares and prints."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from torch_nixl.bench.launch import is_rank, start_ranks
from torch_nixl.bench.report import OURS, Measurement, Report, this_machine
from torch_nixl.bench.session import Options, Session, open_session
from torch_nixl.bench.sizes import size_name

ROWS = "TORCH_NIXL_BENCH_ROWS"
"""Names the file to which rank 0 of a program writes its rows."""

LARGE = 16 << 20
"""Size from which a bandwidth is compared instead of a time."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        what: What was measured.
        ours: Our figure, with its unit in `unit`.
        unit: Unit of both figures.
        limit: What the ratio, or our figure where there is no rival, is to reach; None for nothing.
        rival: The rival's figure, of the same run.
        lower_is_better: Whether less is more.
        note: Who the rival is, or anything that one has to know.
    """

    what: str
    ours: float
    unit: str
    limit: float | None
    rival: float | None = None
    lower_is_better: bool = True
    note: str = ""

    @property
    def value(self) -> float:
        """What `limit` is compared with."""
        return self.ours if self.rival is None else self.ours / self.rival

    @property
    def passed(self) -> bool:
        if self.limit is None:
            return True
        return self.value <= self.limit if self.lower_is_better else self.value >= self.limit


Rows: TypeAlias = Iterator[Row]
Body: TypeAlias = Callable[[Session], Iterable[Row]]


def row(measured: Measurement, rival: str, limit: float | None) -> Row:
    """Our figure against a rival's: the bandwidth of what is large, else the time."""
    ours, theirs = measured.median(OURS), measured.median(rival)
    if measured.nbytes >= LARGE:
        rates = measured.bandwidth(OURS), measured.bandwidth(rival)
        what = f"{measured.what}, {size_name(measured.nbytes)}, bandwidth"
        return Row(what, rates[0], "GB/s", limit, rates[1], lower_is_better=False, note=rival)
    size = f", {size_name(measured.nbytes)}" if measured.nbytes else ""
    return Row(f"{measured.what}{size}, p50", ours * 1e6, "us", limit, theirs * 1e6, note=rival)


def rows(report: Report, limits: Mapping[tuple[str, int, str], float], *, prefix: str = "") -> Rows:
    """A row for each rival of each measurement.

    Args:
        report: What was measured.
        limits: By what was done, size and rival, what the ratio is to reach.
        prefix: Goes before each row's name.
    """
    for measured in report.measurements:
        for rival in measured.seconds:
            if rival != OURS:
                limit = limits.get((measured.what, measured.nbytes, rival))
                yield renamed(row(measured, rival, limit), prefix)


def renamed(one: Row, prefix: str) -> Row:
    return Row(**{**asdict(one), "what": prefix + one.what})


def alternate(
    contestants: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Run on one rank, in turn, what another rank answers; return the figures of each.

    Every second round goes backwards, so that nobody always finds the caches as the same one left
    them.
    """
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for _ in range(rounds):
        for name in names:
            figures[name].append(contestants[name]())
        names.reverse()
    return figures


def bench(*arguments: str) -> Report:
    """What `torch-nixl bench` measures with these arguments."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        subprocess.run(
            [sys.executable, "-m", "torch_nixl.cli.main", "bench", *arguments, "--json", str(path)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return Report.load(path)


def be_a_rank(body: Body) -> None:
    """On a rank: measure, and on rank 0 write the rows of all, what all have only once."""
    with open_session(Options(sizes=())) as session:
        gathered = session.exchange(list(body(session)))
        if session.rank == 0:
            found = dict.fromkeys(one for rank in gathered for one in rank)
            Path(os.environ[ROWS]).write_text(json.dumps([asdict(one) for one in found]))


def from_ranks(
    *arguments: str, environment: Mapping[str, str] | None = None, ranks: int = 2
) -> list[Row]:
    """Run a program, which there calls `be_a_rank`, on each rank; return the rows."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/rows.json"
        start_ranks(ranks, arguments, {**(environment or {}), ROWS: path})
        return [Row(**one) for one in json.loads(Path(path).read_text())]


def main(title: str, body: Body, description: str) -> None:
    """Be a program that measures `body` on two ranks, and prints its rows."""
    if is_rank():
        be_a_rank(body)
        return
    options = parser(description).parse_args()
    show(title, from_ranks(sys.argv[0]), options.json)


def parser(description: str) -> argparse.ArgumentParser:
    """Options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return made


def show(title: str, rows: Sequence[Row], path: str | None) -> None:
    """Print a table and, if asked to, write JSON."""
    machine = this_machine()
    table = Table(title=f"{title} (load average {machine.load:.1f})")
    for column in ("", "ours", "rival", "ratio", "to reach", "", "note"):
        table.add_column(column, justify="left" if column in ("", "note") else "right")
    for one in rows:
        sign = "<=" if one.lower_is_better else ">="
        unit = "" if one.rival is not None else f" {one.unit}"
        table.add_row(
            one.what,
            f"{one.ours:.4g} {one.unit}",
            "" if one.rival is None else f"{one.rival:.4g} {one.unit}",
            "" if one.rival is None else f"{one.value:.2f}",
            "" if one.limit is None else f"{sign} {one.limit:g}{unit}",
            "" if one.limit is None else "reached" if one.passed else "missed",
            one.note,
        )
    Console(width=150 if not sys.stdout.isatty() else None).print(table)
    if path:
        document = {
            "title": title,
            "rows": [asdict(one) for one in rows],
            "machine": machine.model_dump(),
        }
        Path(path).write_text(json.dumps(document, indent=2))
