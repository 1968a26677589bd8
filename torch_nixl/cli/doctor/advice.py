"""Turns what was found into problems, each with one line that says how to mend it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch_nixl.cli.doctor.denial import explain_denial
from torch_nixl.cli.doctor.device_advice import advise_gpus, advise_rdma, advise_streams
from torch_nixl.cli.doctor.network_advice import advise_network
from torch_nixl.cli.doctor.report import (
    Backend,
    CmaTrial,
    Finding,
    GpuTrial,
    Host,
    Path,
    UcxDevice,
    UcxModule,
    Versions,
)

_MIN_SHM_BYTES = 256 << 20
_POOR_SHARE = 0.4


def advise(
    *,
    host: Host,
    cma: CmaTrial,
    backends: Sequence[Backend],
    devices: Sequence[UcxDevice],
    modules: Sequence[UcxModule],
    torch_gpus: GpuTrial | None,
    streams: Sequence[str],
    versions: Versions,
    path: Path,
    host_failure: str | None,
    nixl_failure: str | None,
    ucx_complaints: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[Finding, ...]:
    """Return what is wrong or worth knowing, errors first.

    Args:
        host: From the operating system.
        cma: Whether cross memory attach works.
        backends: NIXL's plugins as tried.
        devices: What UCX can use.
        modules: UCX's modules for GPUs and RDMA.
        torch_gpus: What torch says of GPUs, if it was asked.
        streams: For each device, whether its streams can wait for transfers.
        versions: What is installed.
        path: How bytes move between two processes here.
        host_failure: Why the system can't be read, or None.
        nixl_failure: Why NIXL can't be used at all, or None.
        ucx_complaints: What UCX warned of while the path was tried.
        environment: This process's environment variables.
    """
    findings = [
        *_about_nixl(nixl_failure, host),
        *_about_path(path, backends, nixl_failure, environment),
        *_about_cma(cma, path, host, environment),
        *advise_rdma(host, devices, environment),
        *advise_gpus(host, torch_gpus, modules, versions, environment),
        *advise_streams(streams),
        *advise_network(host, environment),
        *_about_limits(host, host_failure),
        *_about_load(host, path),
        *_about_speed(host, path),
        *_about_complaints(ucx_complaints, path),
    ]
    return by_severity(findings)


def by_severity(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return findings, each once, with errors first, then warnings, then notes."""
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: order[finding.severity]))


def _about_nixl(failure: str | None, host: Host) -> Iterator[Finding]:
    if not host.home_readable:
        yield Finding(
            name="HOME_UNREADABLE",
            severity="error",
            problem=f"NIXL looks for .nixl.cfg in HOME, {host.home}, which this user may not read",
            mend="set HOME to a folder that this user can read",
        )
    if failure is not None:
        mend = "install it into this environment: pip install nixl"
        if "can't be imported" not in failure:
            mend = "reinstall it: pip install --force-reinstall --no-deps nixl nixl-cu12 nixl-cu13"
        yield Finding(
            name="NIXL_UNUSABLE",
            severity="error",
            problem=f"NIXL can't be used: {failure}",
            mend=mend,
        )


def _about_path(
    path: Path,
    backends: Sequence[Backend],
    nixl_failure: str | None,
    environment: Mapping[str, str],
) -> Iterator[Finding]:
    ucx = next((backend for backend in backends if backend.name == "UCX"), None)
    chosen = [f"{name}={environment[name]}" for name in _choices(environment)]
    if ucx is not None and not ucx.works:
        mend = "see the log of a program run with UCX_LOG_LEVEL=info and NIXL_LOG_LEVEL=INFO"
        if chosen:
            mend = (
                f"unset {' '.join(_choices(environment))} (now {', '.join(chosen)}), or choose "
                "what exists here and keep tcp among the transports"
            )
        yield Finding(
            name="UCX_UNUSABLE",
            severity="error",
            problem=f"the UCX backend can't be used: {ucx.detail}",
            mend=mend,
        )
    elif not path.works and nixl_failure is None:
        mend = "make sure that nothing blocks TCP between processes here, on any interface"
        if chosen:
            mend = f"try without {', '.join(chosen)}"
        yield Finding(
            name="PAIR_FAILED",
            severity="error",
            problem=f"two processes here could not move bytes: {path.failure}",
            mend=mend,
        )


def _choices(environment: Mapping[str, str]) -> list[str]:
    return [name for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in environment]


def _about_cma(
    cma: CmaTrial, path: Path, host: Host, environment: Mapping[str, str]
) -> Iterator[Finding]:
    if not cma.works:
        why, mend = explain_denial(cma, host)
        yield Finding(
            name="CMA_DENIED",
            severity="warning",
            problem=(
                "one process may not read another's memory (process_vm_readv: "
                f"{cma.error}; {why}), so bytes between processes of this host go over TCP"
            ),
            mend=mend,
        )
    elif path.works and path.kind == "tcp":
        mend = "run the doctor with UCX_LOG_LEVEL=info to see which transports UCX considers"
        if "UCX_TLS" in environment:
            mend = f"add cma to UCX_TLS (now {environment['UCX_TLS']}), or unset it"
        yield Finding(
            name="CMA_UNUSED",
            severity="warning",
            problem="bytes between processes of this host go over TCP, although CMA works here",
            mend=mend,
        )


def _about_limits(host: Host, host_failure: str | None) -> Iterator[Finding]:
    if host_failure is not None:
        yield Finding(
            name="SYSTEM_UNREADABLE",
            severity="warning",
            problem=f"/sys, /proc or HOME can't be read: {host_failure}",
            mend="look whether HOME is on a file server that is gone, and at `dmesg`",
        )
        return
    if host.shm_bytes is None or host.shm_bytes < _MIN_SHM_BYTES:
        size = "missing" if host.shm_bytes is None else f"{host.shm_bytes} bytes large"
        yield Finding(
            name="SHM_SMALL",
            severity="note",
            problem=f"/dev/shm is {size}; torch's data loaders share tensors there",
            mend="in a container: --shm-size=2g",
        )


def _about_load(host: Host, path: Path) -> Iterator[Finding]:
    if path.works and _is_busy(host):
        yield Finding(
            name="CORES_BUSY",
            severity="note",
            problem=(
                f"{host.load:.1f} other processes wanted the {host.num_cores} cores while two were "
                "to poll: the figures are lower, the latencies higher than on a quiet machine"
            ),
            mend="measure again when nothing else runs",
        )


def _about_speed(host: Host, path: Path) -> Iterator[Finding]:
    expected, measured = path.copy_gb_per_s, path.read_gb_per_s
    if path.kind != "cma" or expected is None or measured is None or _is_busy(host):
        return
    if measured < expected * _POOR_SHARE:
        yield Finding(
            name="BELOW_COPY_SPEED",
            severity="note",
            problem=(
                f"READs reach {measured:.2f} GB/s by CMA, {100 * measured / expected:.0f} % of the "
                f"{expected:.2f} of a copy within one process"
            ),
            mend=(
                "measure again on idle cores; keep both processes on one NUMA node (`numactl "
                "--cpunodebind=0 --membind=0`); in a sandbox such as gVisor the kernel's part is "
                "slow, and nothing helps"
            ),
        )


def _is_busy(host: Host) -> bool:
    return host.load > max(1, host.num_cores - 1)


def _about_complaints(complaints: Sequence[str], path: Path) -> Iterator[Finding]:
    if path.works:
        for complaint in complaints:
            yield Finding(
                name="UCX_COMPLAINS",
                severity="note",
                problem=f"UCX warns: {complaint}",
                mend="correct or unset the UCX_ variable it names; `env | grep UCX_` lists yours",
            )
