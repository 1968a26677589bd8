"""The commands of `torch-nixl`, by typer."""

from __future__ import annotations

from typing import Annotated

import typer

from torch_nixl import __version__
from torch_nixl.cli import bench

app = typer.Typer(
    name="torch-nixl",
    help="Move PyTorch tensors between processes over NIXL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torch-nixl {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Move PyTorch tensors between processes over NIXL."""


@app.command()
def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Say whether tensors can move between processes here, which way, how fast, what to mend.

    Exit status 0 if they can, 1 if not. Takes about ten seconds.
    """
    from torch_nixl.cli.doctor.examine import examine

    if json:
        report = examine()
        typer.echo(report.model_dump_json(indent=2))
    else:
        from torch_nixl.cli.doctor.render import progress, render

        with progress() as announce:
            report = examine(announce)
        render(report)
    raise typer.Exit(report.exit_status)
