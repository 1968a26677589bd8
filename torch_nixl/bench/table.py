"""Reports as tables, by rich."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from torch_nixl.bench.report import OURS, Change, Measurement, Report
from torch_nixl.bench.sizes import size_name, time_name

_STYLES = {
    "win": "green",
    "loss": "bold red",
    "even": "yellow",
    "faster": "green",
    "slower": "bold red",
    "same": "",
}
_FROM_BANDWIDTH = 1 << 20
"""Sizes from which figures are shown as bandwidth."""


def show(report: Report, console: Console) -> None:
    """Print a report: our figure, and for each rival its own and the ratio of times."""
    machine = report.machine
    table = Table(
        title=f"{report.suite}: {report.ranks} ranks on {machine.cores} cores ({machine.arch}), "
        f"{report.device}, load average {machine.load:.1f}",
        caption="ratio: our time / the rival's, median of the rounds and (quartiles); below 1 we "
        "are faster. Times: median, and the 99th percentile where a round has enough runs",
    )
    names = dict.fromkeys(name for one in report.measurements for name in one.seconds)
    rivals = [name for name in names if name != OURS]
    table.add_column("")
    figures = [name for rival in rivals for name in (rival, "ratio")]
    for column in ("size", OURS, *figures):
        # A narrow terminal folds what it has no room for; nothing is cut off.
        table.add_column(column, justify="right", overflow="fold")
    for one in report.measurements:
        compared = {comparison.rival: comparison for comparison in one.comparisons()}
        size = size_name(one.nbytes) if one.nbytes else ""
        row = [one.what, size, figure(one, OURS)]
        for name in rivals:
            comparison = compared.get(name)
            if comparison is None:
                row += ["", ""]
                continue
            style = _STYLES[comparison.verdict]
            row.append(figure(one, name))
            row.append(
                f"[{style}]{comparison.ratio:.2f} ({comparison.low:.2f}-{comparison.high:.2f}) "
                f"{comparison.verdict}[/]"
            )
        table.add_row(*row)
    console.print(table)
    for name, reason in report.missing.items():
        console.print(f"without {name}: {reason}", markup=False)


def figure(measurement: Measurement, name: str) -> str:
    """A contestant's figure, as time or bandwidth."""
    if measurement.nbytes >= _FROM_BANDWIDTH:
        return f"{measurement.bandwidth(name):.2f} GB/s"
    tail = measurement.tail(name)
    middle = time_name(measurement.median(name))
    return middle if tail is None else f"{middle}, p99 {time_name(tail)}"


def show_changes(changes: list[Change], console: Console) -> None:
    """Print what got slower or faster between two runs."""
    table = Table(
        caption="slower, faster: the quartiles of the two runs don't overlap, of three rounds or "
        "more. Rivals: how they changed, and with them the machine"
    )
    for column in ("", "size", "before", "after", "after / before", "rivals", ""):
        table.add_column(column, justify="left" if not column else "right")
    for one in changes:
        style = _STYLES[one.verdict]
        verdict = f"[{style}]{one.verdict}[/]" if style else one.verdict
        table.add_row(
            one.what,
            size_name(one.nbytes) if one.nbytes else "",
            time_name(one.before),
            time_name(one.after),
            f"{one.after / one.before:.2f}",
            "" if one.rivals is None else f"{one.rivals:.2f}",
            verdict,
        )
    console.print(table)
