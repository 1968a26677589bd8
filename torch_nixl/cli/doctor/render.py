"""Shows a report to a person, by rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_nixl.cli.doctor.report import (
    Across,
    CmaTrial,
    Finding,
    GpuTrial,
    Host,
    Interface,
    Path,
    RdmaDevice,
    Report,
)

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_ACROSS: dict[Across, str] = {
    "switch": "nearest: below one switch or port",
    "host bridge": "near: below one host bridge",
    "NUMA node": "within one NUMA node",
    "system": "far: on another NUMA node",
    "unknown": "unknown",
}


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show the step that is under way on stderr, if that is a terminal."""
    console = Console(stderr=True)
    with console.status("starting") as status:
        yield lambda step: status.update(escape(step))


def render(report: Report, console: Console | None = None) -> None:
    """Print the report."""
    console = console or Console(highlight=False)
    show(console, _rows(report), report.findings)
    if report.can_move:
        console.print(f"[bold green]Tensors can move here[/], by {escape(_name(report.path))}.")
    else:
        console.print("[bold red]Tensors can't move here.[/]")


def show(console: Console, rows: Iterable[tuple[str, str]], findings: Sequence[Finding]) -> None:
    """Print a table of two columns, and findings with their mends."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, escape(_printable(value)))
    console.print(table)
    for finding in findings:
        style, problem = _STYLES[finding.severity], escape(_printable(finding.problem))
        console.print()
        console.print(f"[{style}]{finding.severity} {finding.name}[/] {problem}", soft_wrap=True)
        console.print(f"  mend: {escape(_printable(finding.mend))}", soft_wrap=True)
    console.print()


def _printable(text: str) -> str:
    """Return text without what moves a terminal's cursor: some of it comes from another host."""
    return "".join(character if character.isprintable() else " " for character in text)


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    versions = report.versions
    yield "torch_nixl", f"{versions.torch_nixl}, Python {versions.python}, {versions.platform}"
    cuda = f", for CUDA {versions.torch_cuda}" if versions.torch_cuda else ""
    yield "torch", f"{versions.torch or 'not installed'}{cuda}"
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
    for module in report.ucx_modules:
        yield f"UCX module {module.name}", "loaded" if module.loaded else f"no: {module.detail}"
    yield from _host_rows(report.host)
    yield from _gpu_rows(report.host, report.torch_gpus)
    yield "CMA", _describe_cma(report.cma)
    yield from path_rows("path on this host", report.path)
    for line in report.streams:
        device, _, text = line.partition(": ")
        yield f"streams of {device}", text
    for setting in report.environment:
        yield setting.name, f"{setting.value} (set by {setting.source})"


def _host_rows(host: Host) -> Iterator[tuple[str, str]]:
    up = [describe_interface(item) for item in host.interfaces if item.up]
    yield "interfaces up", "; ".join(up) or "none"
    yield "RDMA devices", "; ".join(map(_describe_rdma, host.rdma_devices)) or "none"
    yield "/dev/shm", "none" if host.shm_bytes is None else f"{host.shm_bytes / 1e9:.1f} GB"
    pinned = host.memlock_bytes
    yield "memory lock limit", "unlimited" if pinned is None else f"{pinned} bytes"
    yield "process", ", ".join(_describe_process(host))
    yield "cores", f"{host.num_cores}, load {host.load:.1f}"


def describe_interface(item: Interface) -> str:
    """Return a network interface in a few words."""
    facts = [*item.addresses, f"MTU {item.mtu}"]
    if item.speed_gbit_per_s is not None:
        facts.append(f"{item.speed_gbit_per_s:g} Gbit/s")
    return f"{item.name} ({', '.join(facts)})"


def _describe_rdma(device: RdmaDevice) -> str:
    speeds = [f"{speed:g} Gbit/s" for speed in device.speeds_gbit_per_s if speed is not None]
    return f"{device.name} ({', '.join([*device.port_states, *speeds])})"


def _gpu_rows(host: Host, trial: GpuTrial | None) -> Iterator[tuple[str, str]]:
    if not host.gpus:
        yield "GPUs", "none on the PCI bus"
    seen = {gpu.pci: gpu for gpu in trial.devices} if trial is not None else {}
    for gpu in host.gpus:
        torch_gpu = seen.get(gpu.pci)
        name = f"{torch_gpu.name}, {torch_gpu.memory_bytes / 1e9:.0f} GB" if torch_gpu else ""
        node = "" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}"
        facts = [name or gpu.vendor, f"driver {gpu.driver or 'none'}", node]
        yield f"GPU {gpu.pci}", ", ".join(filter(None, facts))
        for line in host.distances:
            if line.gpu == gpu.pci:
                yield f"  to {line.nic}", _ACROSS[line.across]
    if trial is not None and trial.failure is not None:
        yield "GPUs in torch", f"no: {trial.failure}"


def _describe_process(host: Host) -> Iterator[str]:
    yield f"uid {host.uid}"
    yield f"CAP_SYS_PTRACE {'yes' if host.cap_sys_ptrace else 'no'}"
    yield f"seccomp {'unknown' if host.seccomp_mode is None else host.seccomp_mode}"
    yield f"no_new_privs {'yes' if host.no_new_privs else 'no'}"
    yield f"Yama {'none' if host.yama_ptrace_scope is None else host.yama_ptrace_scope}"
    if host.in_user_namespace:
        yield "in a user namespace"
    if host.confined_by is not None:
        yield f"confined by {host.confined_by}"


def _describe_cma(cma: CmaTrial) -> str:
    if not cma.works:
        return f"no: {cma.error}"
    return "works, with the target's consent, which UCX gives" if cma.needs_consent else "works"


def path_rows(title: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield what is known of a path."""
    yield title, _name(path) if path.works else f"none: {path.failure}"
    for name, nbytes, speed, lane in (
        ("READ", path.read_bytes, path.read_gb_per_s, path.read_lane),
        ("WRITE", path.write_bytes, path.write_gb_per_s, path.write_lane),
    ):
        if nbytes is not None and speed is not None:
            yield f"  {name} {nbytes >> 20} MiB", f"{speed:.2f} GB/s over {lane}"
    if path.kind == "cma" and path.copy_gb_per_s is not None:
        yield "  to be expected", f"{path.copy_gb_per_s:.2f} GB/s: a copy within one process"
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
