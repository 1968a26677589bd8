"""Shows a report on two hosts to a person, by rich."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from torch_nixl.cli.doctor.hosts_report import HostEnd, HostsReport
from torch_nixl.cli.doctor.render import describe_interface, path_rows, show


def render_hosts(report: HostsReport, console: Console | None = None) -> None:
    """Print the report."""
    console = console or Console(highlight=False)
    show(console, _rows(report), report.findings)
    if report.can_move:
        console.print("[bold green]Tensors can move between these hosts[/], both ways.")
    else:
        console.print("[bold red]Tensors can't move between these hosts.[/]")


def _rows(report: HostsReport) -> Iterator[tuple[str, str]]:
    visit = report.visit
    if visit is None:
        return
    yield from _host_rows("this host", visit.here)
    if visit.there is not None:
        yield from _host_rows("other host", visit.there)
    if report.can_move:
        yield from path_rows("posted here", visit.outgoing)
        yield from path_rows("posted there", visit.incoming)
        expected = report.expected_gb_per_s
        speed = "unknown: no driver names it" if expected is None else f"{expected:.2f} GB/s"
        yield "link speed", speed


def _host_rows(title: str, end: HostEnd) -> Iterator[tuple[str, str]]:
    yield title, f"{end.hostname}, torch_nixl {end.torch_nixl}, NIXL {end.nixl}"
    picked = "unknown" if end.interface is None else describe_interface(end.interface)
    yield "  interface", f"{picked}; the doctors' connection is at {end.address}"
    if end.path_mtu is not None:
        yield "  path MTU", str(end.path_mtu)
    for setting in end.settings:
        yield f"  {setting.name}", setting.value
