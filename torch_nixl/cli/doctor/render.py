"""Shows a report to a person, by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_nixl.cli.doctor.report import CmaTrial, Host, Path, Report

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show the step that is under way on stderr, if that is a terminal."""
    console = Console(stderr=True)
    with console.status("starting") as status:
        yield lambda step: status.update(escape(step))


def render(report: Report, console: Console | None = None) -> None:
    """Print the report."""
    console = console or Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in _rows(report):
        table.add_row(key, escape(value))
    console.print(table)
    for finding in report.findings:
        style = _STYLES[finding.severity]
        console.print()
        console.print(f"[{style}]{finding.severity}[/] {escape(finding.problem)}", soft_wrap=True)
        console.print(f"  mend: {escape(finding.mend)}", soft_wrap=True)
    console.print()
    if report.can_move:
        console.print(f"[bold green]Tensors can move here[/], by {escape(_name(report.path))}.")
    else:
        console.print("[bold red]Tensors can't move here.[/]")


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    versions = report.versions
    yield "torch_nixl", f"{versions.torch_nixl}, Python {versions.python}, {versions.platform}"
    yield "torch", versions.torch or "not installed"
    wheel = f" (loaded: {versions.nixl_wheel})" if versions.nixl_wheel else ""
    yield "NIXL", f"{versions.nixl or 'not installed'}{wheel}"
    yield "UCX", versions.ucx or "unknown"
    works = [backend.name for backend in report.backends if backend.works]
    yield "backends", ", ".join(works) or "none"
    for backend in report.backends:
        if not backend.works:
            yield f"  {backend.name}", f"no: {backend.detail}"
    devices = [f"{device.transport}/{device.device}" for device in report.ucx_devices]
    yield "UCX devices", ", ".join(devices) or "none"
    yield from _host_rows(report.host)
    yield "CMA", _describe_cma(report.cma)
    yield from _path_rows(report.path)
    for line in report.streams:
        device, _, text = line.partition(": ")
        yield f"streams of {device}", text
    for setting in report.environment:
        yield setting.name, f"{setting.value} (set by {setting.source})"


def _host_rows(host: Host) -> Iterator[tuple[str, str]]:
    up = [interface.name for interface in host.interfaces if interface.up]
    yield "interfaces up", ", ".join(up) or "none"
    rdma = [f"{device.name} ({', '.join(device.port_states)})" for device in host.rdma_devices]
    yield "RDMA devices", ", ".join(rdma) or "none"
    yield "/dev/shm", "none" if host.shm_bytes is None else f"{host.shm_bytes / 1e9:.1f} GB"
    pinned = host.memlock_bytes
    yield "memory lock limit", "unlimited" if pinned is None else f"{pinned} bytes"
    yield "process", ", ".join(_describe_process(host))
    yield "cores", f"{host.num_cores}, load {host.load:.1f}"


def _describe_process(host: Host) -> Iterator[str]:
    yield f"uid {host.uid}"
    yield f"CAP_SYS_PTRACE {'yes' if host.cap_sys_ptrace else 'no'}"
    yield f"seccomp {'unknown' if host.seccomp_mode is None else host.seccomp_mode}"
    yield f"no_new_privs {'yes' if host.no_new_privs else 'no'}"
    yield f"Yama {'none' if host.yama_ptrace_scope is None else host.yama_ptrace_scope}"


def _describe_cma(cma: CmaTrial) -> str:
    if not cma.works:
        return f"no: {cma.error}"
    return "works, with the target's consent, which UCX gives" if cma.needs_consent else "works"


def _path_rows(path: Path) -> Iterator[tuple[str, str]]:
    yield "path on this host", _name(path) if path.works else f"none: {path.failure}"
    if path.read_gb_per_s is not None:
        yield "  READ 64 MiB", f"{path.read_gb_per_s:.2f} GB/s over {path.read_lane}"
    if path.write_gb_per_s is not None:
        yield "  WRITE 64 MiB", f"{path.write_gb_per_s:.2f} GB/s over {path.write_lane}"
    if path.round_trip_p50_us is not None:
        times = f"p50 {path.round_trip_p50_us:.1f} us, p99 {path.round_trip_p99_us:.1f} us"
        yield "  8 B round trip", f"{times} over {path.control_lane}"


def _name(path: Path) -> str:
    return {
        "cma": "CMA (one copy, by the kernel)",
        "tcp": "TCP",
        "rdma": "RDMA",
        "shared memory": "shared memory",
        "unknown": "an unknown path",
    }[path.kind]
