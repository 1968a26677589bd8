"""The commands of `torch-nixl`, by typer."""

from __future__ import annotations

from typing import Annotated

import typer

from torch_nixl import __version__
from torch_nixl.cli import bench, doctor_commands

app = typer.Typer(
    name="torch-nixl",
    help="Move PyTorch tensors between processes over NIXL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(doctor_commands.app, name="doctor")


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
