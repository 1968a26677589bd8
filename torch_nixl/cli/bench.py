"""`torch-nixl bench`: measures torch_nixl and its rivals side by side."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from torch_nixl.bench.session import Suite

app = typer.Typer(
    help="Measure torch_nixl and its rivals side by side, on this machine or under torchrun.",
    no_args_is_help=True,
)

_Ranks = Annotated[int, typer.Option(help="Ranks to start here; torchrun decides under torchrun.")]
_Sizes = Annotated[
    str, typer.Option(help="Message sizes, with commas, as 8,64k,1MiB. The suite's by default.")
]
_Rounds = Annotated[int, typer.Option(min=1, help="Rounds; contestants take turns in each.")]
_Device = Annotated[str, typer.Option(help="Where tensors lie: cpu or cuda.")]
_Without = Annotated[
    list[str], typer.Option("--without", help="A rival to leave out, by its name. Repeatable.")
]
_Json = Annotated[
    Path | None, typer.Option("--json", help="Write all figures there.", dir_okay=False)
]
_Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw them there: .png, .svg or .html.", dir_okay=False),
]


@app.command()
def p2p(
    ranks: _Ranks = 2,
    sizes: _Sizes = "",
    rounds: _Rounds = 7,
    device: _Device = "cpu",
    without: _Without = [],  # noqa: B006 - typer copies it
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Half a round trip between two ranks, against Gloo or NCCL and bare NIXL."""
    from torch_nixl.bench.p2p import SIZES, suite

    _run("p2p", suite, SIZES, ranks, sizes, rounds, device, without, json, plot)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="What an earlier run wrote with --json.")],
    after: Annotated[Path, typer.Argument(help="What a later one wrote.")],
) -> None:
    """Tell what got slower between two runs. Exit status 1 if anything did."""
    from torch_nixl.bench.report import Report, changes
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
    show_changes(found, Console(highlight=False))
    raise typer.Exit(any(change.verdict == "slower" for change in found))


def _run(
    name: str,
    suite: Suite,
    default_sizes: tuple[int, ...],
    ranks: int,
    sizes: str,
    rounds: int,
    device: str,
    without: list[str],
    json: Path | None,
    plot_to: Path | None,
) -> None:
    """Start ranks that run this same command, or be one of them."""
    from torch_nixl.bench.plot import check_path, plot
    from torch_nixl.bench.session import Options, is_rank, parse_size, run_suite
    from torch_nixl.bench.table import show

    try:
        chosen = tuple(sorted(map(parse_size, sizes.split(",")))) if sizes else default_sizes
        if plot_to is not None:
            check_path(plot_to)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not is_rank():
        _start_ranks(ranks)
        return
    options = Options(chosen, rounds, device, frozenset(without))
    with _announcer(name) as announce:
        report = run_suite(name, suite, options, announce)
    if report is None:
        return
    show(report, Console(highlight=False, width=None if sys.stdout.isatty() else 140))
    if json is not None:
        report.save(json)
        typer.echo(f"figures: {json}")
    if plot_to is not None:
        plot(report, plot_to)
        typer.echo(f"plot: {plot_to}")


def _start_ranks(ranks: int) -> None:
    """Become torchrun, which runs this command on each rank."""
    from torch_nixl.bench.session import torchrun_command

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.argv = torchrun_command(ranks, sys.argv[1:])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def _announcer(name: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr what is measured, if that is a terminal."""
    with Console(stderr=True).status(f"{name}: starting") as status:
        yield lambda text: status.update(f"{name}: {text}")
