"""Reports as plots, by matplotlib: time and bandwidth against size."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from torch_nixl.bench.report import OURS, Report
from torch_nixl.bench.sizes import size_name

SUFFIXES = (".png", ".svg", ".html")


def check_path(path: Path) -> None:
    """Refuse a path that no plot can be written to.

    Raises:
        ValueError: It has another suffix.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a name that ends with {', '.join(SUFFIXES)}")


def plot(report: Report, path: Path) -> None:
    """Draw what was measured, a row for each thing: left its time, right its bandwidth.

    Args:
        report: What to draw.
        path: A ``.png``, ``.svg`` or ``.html`` file.

    Raises:
        ValueError: It has another suffix, or nothing that was measured has a size.
    """
    check_path(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    # What moves nothing has no place on an axis of sizes.
    moved = [one for one in report.measurements if one.nbytes]
    whats = list(dict.fromkeys(one.what for one in moved))
    if not whats:
        raise ValueError("nothing to draw: no measurement has a size")
    figure = Figure(figsize=(11, 4.2 * len(whats)), layout="constrained")
    axes = figure.subplots(len(whats), 2, squeeze=False)
    machine = report.machine
    figure.suptitle(
        f"{report.suite}, {report.ranks} ranks on {machine.cores} cores ({machine.arch}), "
        f"{report.device}; torch {machine.torch}, nixl {machine.nixl}, {machine.time}",
        fontsize=10,
    )
    for row, what in zip(axes, whats, strict=True):
        measurements = [one for one in moved if one.what == what]
        names = list(dict.fromkeys(name for one in measurements for name in one.seconds))
        for name in names:
            points = sorted(
                ((one.nbytes, one) for one in measurements if name in one.seconds),
                key=lambda point: point[0],
            )
            sizes = [nbytes for nbytes, _ in points]
            width = 2.2 if name == OURS else 1.3
            row[0].plot(
                sizes,
                [one.median(name) * 1e6 for _, one in points],
                marker="o",
                linewidth=width,
                label=name,
            )
            row[1].plot(
                sizes,
                [one.bandwidth(name) for _, one in points],
                marker="o",
                linewidth=width,
                label=name,
            )
        for axis, label in zip(row, ("microseconds", "GB/s"), strict=True):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(what)
            axis.set_ylabel(label)
            axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_name(int(size))))
            axis.tick_params(axis="x", rotation=45)
            axis.grid(visible=True, which="both", alpha=0.25)
            axis.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    if path.suffix != ".html":
        figure.savefig(path, dpi=130)
        return
    text = io.StringIO()
    figure.savefig(text, format="svg")
    drawing = text.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    path.write_text(
        "<!doctype html>\n<meta charset='utf-8'>\n<title>torch_nixl</title>\n"
        f"<body style='margin:2em;background:white'>{drawing}</body>\n"
    )
