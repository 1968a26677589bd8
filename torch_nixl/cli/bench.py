"""`torch-nixl bench`: measures torch_nixl and its rivals side by side."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

app = typer.Typer(
    help="Measure torch_nixl and its rivals side by side, on this machine or under torchrun.",
    no_args_is_help=True,
)

_Ranks = Annotated[
    int,
    typer.Option(min=2, help="Ranks to start here; where a launcher started them, it decides."),
]
_Sizes = Annotated[
    str, typer.Option(help="Message sizes, with commas, as 8,64k,1MiB. The suite's by default.")
]
_Rounds = Annotated[int, typer.Option(min=1, help="Rounds; contestants take turns in each.")]
_Device = Annotated[str, typer.Option(help="Where tensors lie: cpu or cuda.")]
_Only = Annotated[
    list[str], typer.Option("--only", help="A word; run what has it in its name. Repeatable.")
]
_Without = Annotated[
    list[str], typer.Option("--without", help="A rival to leave out, by its name. Repeatable.")
]
_Pin = Annotated[bool, typer.Option("--pin", help="Keep each rank on one core.")]
_Json = Annotated[
    Path | None, typer.Option("--json", help="Write all figures there.", dir_okay=False)
]
_Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw them there: .png, .svg or .html.", dir_okay=False),
]
_Dynamo = Annotated[
    str, typer.Option(help="A Python that has ai-dynamo-runtime; this one by default.")
]


def _add(name: str, description: str) -> None:
    """Add a command that runs a suite which needs nothing but the common options."""

    @app.command(name, help=description)
    def command(
        ranks: _Ranks = 2,
        sizes: _Sizes = "",
        rounds: _Rounds = 7,
        device: _Device = "cpu",
        only: _Only = [],  # noqa: B006 - typer copies it
        without: _Without = [],  # noqa: B006
        pin: _Pin = False,
        json: _Json = None,
        plot: _Plot = None,
    ) -> None:
        _run(name, ranks, sizes, rounds, device, only, without, pin, json, plot)


@app.command()
def p2p(
    ranks: _Ranks = 2,
    sizes: _Sizes = "",
    rounds: _Rounds = 5,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="256 MiB, channels of more sizes, and a tree, too: two minutes."
        ),
    ] = False,
    device: _Device = "cpu",
    only: _Only = [],  # noqa: B006
    without: _Without = [],  # noqa: B006
    pin: _Pin = False,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Two ranks: round trips, channels, message rate and calls, against Gloo or NCCL and bare NIXL.

    Takes about half a minute on idle cores.
    """
    _run("p2p", ranks, sizes, rounds, device, only, without, pin, json, plot, full=full)


_add("collectives", "All ranks: each collective against Gloo's or NCCL's.")
_add("kv", "Two ranks: a handoff of scattered KV pages against bare NIXL.")
_add("metrics", "What metrics, traces and spans cost: a round trip with each of them on and off.")


@app.command()
def connect(
    ranks: _Ranks = 2,
    sizes: _Sizes = "",
    rounds: _Rounds = 7,
    only: _Only = [],  # noqa: B006
    without: _Without = [],  # noqa: B006
    dynamo: _Dynamo = "",
    pin: _Pin = False,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Two ranks: a read through torch_nixl.connect, against dynamo's nixl_connect, bare NIXL."""
    _run("connect", ranks, sizes, rounds, "cpu", only, without, pin, json, plot, dynamo)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="What an earlier run wrote with --json.")],
    after: Annotated[Path, typer.Argument(help="What a later one wrote.")],
) -> None:
    """Tell what got slower between two runs. Exit status 1 if anything did."""
    from torch_nixl.bench.report import Report, changes, differences
    from torch_nixl.bench.table import show_changes

    reports = []
    for path in (before, after):
        try:
            reports.append(Report.load(path))
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{path} is no report: {str(error).splitlines()[0]}") from None
    try:
        found = changes(*reports)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(highlight=False)
    show_changes(found, console)
    for sentence in differences(*reports):
        console.print(sentence, markup=False)
    raise typer.Exit(any(change.verdict == "slower" for change in found))


def require_torch() -> None:
    """Find out here, rather than on every rank, that torch is missing.

    Raises:
        ModuleNotFoundError: It is.
    """
    try:
        found = importlib.util.find_spec("torch")
    except ValueError:  # A stand-in without a spec.
        found = None
    if found is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


def _run(
    name: str,
    ranks: int,
    sizes: str,
    rounds: int,
    device: str,
    only: list[str],
    without: list[str],
    pin: bool,
    json: Path | None,
    plot_to: Path | None,
    dynamo: str = "",
    full: bool = False,
) -> None:
    """Start ranks that run this same command, or be one of them."""
    from torch_nixl.bench.launch import RanksFailed, is_rank, start_ranks
    from torch_nixl.bench.plot import check_path, plot
    from torch_nixl.bench.sizes import parse_size

    try:
        chosen = tuple(sorted({parse_size(size) for size in sizes.split(",")})) if sizes else ()
        if plot_to is not None:
            check_path(plot_to)
        if dynamo and shutil.which(dynamo) is None:
            raise ValueError(f"{dynamo} is no program that can be run")
        for path in (json, plot_to):
            _check_writable(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not is_rank():
        require_torch()
        try:
            start_ranks(ranks, ["-m", "torch_nixl.cli.main", *sys.argv[1:]])
        except RanksFailed as error:
            _fail(str(error))
        return
    if int(os.environ["WORLD_SIZE"]) < 2:
        _fail("a benchmark takes two ranks or more: torchrun --nproc-per-node=2, or --ranks 2")

    from torch_nixl.bench.session import Options, run_suite
    from torch_nixl.bench.suites import find
    from torch_nixl.bench.table import show

    suite, default_sizes = find(name, full=full)
    options = Options(
        chosen or default_sizes,
        rounds,
        device,
        frozenset(without),
        only=tuple(only),
        pin=pin,
        dynamo=dynamo,
        full=full,
    )
    rank = int(os.environ["RANK"])
    try:
        with _listener(name, rank) as listener:
            report = run_suite(name, suite, options, listener)
    except (RuntimeError, ValueError) as error:
        _fail(f"rank {rank}: {_sentence(error)}")
    if report is None:
        return
    show(report, Console(highlight=False, width=None if sys.stdout.isatty() else 160))
    if json is not None:
        report.save(json)
        typer.echo(f"figures: {json}")
    if plot_to is not None:
        try:
            plot(report, plot_to)
        except ValueError as error:
            _fail(str(error))
        typer.echo(f"plot: {plot_to}")


def _check_writable(path: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.absolute().parent}")


def _sentence(error: Exception) -> str:
    """An error as its first line, or what to do about it where that is known."""
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        port = os.environ.get("MASTER_PORT", "")
        return f"port {port} is taken: set MASTER_PORT, or torchrun's --master-port, to a free one"
    if "Connection closed by peer" in text or "Connection reset by peer" in text:
        return "another rank has ended: its own output says why"
    return text.splitlines()[0] if text else type(error).__name__


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"torch-nixl bench: {sentence}", err=True)
    raise typer.Exit(1)


class _Listener:
    """Says on stderr what is measured: a line for each thing, or, on a terminal, a bar."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name = name
        self._progress = progress
        self._task = progress.add_task(f"{name}: starting", total=None)
        self._said = ""

    def begin(self, count: int, seconds: float) -> None:
        things = "1 measurement" if count == 1 else f"{count} measurements"
        self._say(f"{self._name}: {things}, about {_about(seconds)} on idle cores")

    def step(self, done: int, total: int, what: str) -> None:
        self._progress.update(
            self._task, completed=done, total=total, description=f"{self._name}: {what}"
        )
        if self._progress.disable and what != self._said:
            self._say(f"{self._name}: {done / total:4.0%} {what}")
        self._said = what

    def _say(self, line: str) -> None:
        self._progress.console.print(
            line, markup=False, emoji=False, highlight=False, soft_wrap=True
        )


def _about(seconds: float) -> str:
    """A time as one says it."""
    if seconds < 95:
        return f"{max(1, round(seconds / 5)) * 5} s"
    return f"{seconds / 60:.0f} minutes"


@contextlib.contextmanager
def _listener(name: str, rank: int) -> Iterator[_Listener]:
    """Say how far it is and how long the rest will take; rank 0 alone is asked to."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    is_shown = rank == 0 and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        yield _Listener(name, progress)
