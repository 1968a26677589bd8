"""`torch-nixl doctor`, for one host or two."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from torch_nixl.cli.doctor import DEFAULT_PORT

if TYPE_CHECKING:
    from torch_nixl.cli.doctor.hosts_report import HostsReport

app = typer.Typer(
    help="Say whether tensors can move here, which way, how fast, and what to mend.",
    invoke_without_command=True,
)

_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document and nothing else to stdout.")
]
_Interface = Annotated[
    str | None,
    typer.Option(help="Network interface to use. All by default: UCX chooses."),
]


@app.callback()
def doctor(context: typer.Context, json: _Json = False) -> None:
    """Say whether tensors can move between processes here, which way, how fast, what to mend.

    Exit status 0 if they can, 1 if not. Takes about ten seconds. For two hosts: serve on one,
    connect on the other.
    """
    if context.invoked_subcommand is not None:
        if json:
            raise typer.BadParameter(f"put --json behind {context.invoked_subcommand}")
        return
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


@app.command()
def serve(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="To listen on; 0: any that is free.")
    ] = DEFAULT_PORT,
    interface: _Interface = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for the other host.")] = 600,
    json: _Json = False,
) -> None:
    """Wait for `torch-nixl doctor connect` from another host, and test the way there and back.

    Ends after one visit. Set TORCH_NIXL_SECRET on both hosts to let nobody else in.
    """
    from torch_nixl.cli.doctor import hosts

    def on_listening(address: str, number: int) -> None:
        typer.echo(
            f"listening on {address}:{number}; on the other host: "
            f"torch-nixl doctor connect HOST:{number}",
            err=True,
        )
        if not os.environ.get("TORCH_NIXL_SECRET") and not address.startswith("127."):
            typer.echo(
                "TORCH_NIXL_SECRET is not set: whoever reaches this port may be the other host, "
                "and can read and write the test process's memory",
                err=True,
            )

    def say(text: str) -> None:
        typer.echo(text, err=True)

    with _sentences():
        _tell(hosts.serve(port, interface, wait, say, on_listening), json)


@app.command()
def connect(
    peer: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the other one serves.")],
    interface: _Interface = None,
    json: _Json = False,
) -> None:
    """Test the way to a host that runs `torch-nixl doctor serve`, and back."""
    from torch_nixl.cli.doctor import hosts
    from torch_nixl.cli.doctor.render import progress

    host, port = _parse(peer)
    with _sentences():
        if json:
            report = hosts.connect(host, port, interface, _say_nothing)
        else:
            with progress() as announce:
                report = hosts.connect(host, port, interface, announce)
        _tell(report, json)


def _say_nothing(_: str) -> None:
    pass


def _parse(peer: str) -> tuple[str, int]:
    host, colon, port = peer.rpartition(":")
    if not colon:
        host, port = peer, str(DEFAULT_PORT)
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise typer.BadParameter(f"{peer} is not HOST:PORT")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """End with a sentence where there was no visit to report on."""
    from torch_nixl.cli.doctor.hosts import NoVisitError

    try:
        yield
    except NoVisitError as error:
        typer.echo(f"torch-nixl: {error}", err=True)
        raise typer.Exit(1) from None


def _tell(report: HostsReport, json: bool) -> None:
    if json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        from torch_nixl.cli.doctor.hosts_render import render_hosts

        render_hosts(report)
    raise typer.Exit(report.exit_status)
