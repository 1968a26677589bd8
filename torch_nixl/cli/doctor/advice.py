"""Turns what was found into problems, each with one line that says how to mend it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch_nixl.cli.doctor.report import Backend, CmaTrial, Finding, Host, Path, UcxDevice

_MIN_SHM_BYTES = 256 << 20
_MIN_MEMLOCK_BYTES = 1 << 30
_RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd")


def advise(
    *,
    host: Host,
    cma: CmaTrial,
    backends: Sequence[Backend],
    devices: Sequence[UcxDevice],
    path: Path,
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
        path: How bytes move between two processes here.
        nixl_failure: Why NIXL can't be used at all, or None.
        ucx_complaints: What UCX warned of while the path was tried.
        environment: This process's environment variables.
    """
    findings = [
        *_about_nixl(nixl_failure, host),
        *_about_path(path, backends, nixl_failure, environment),
        *_about_cma(cma, path, host, environment),
        *_about_rdma(host, devices, environment),
        *_about_limits(host),
        *_about_load(host, path),
        *_about_complaints(ucx_complaints, path),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(findings, key=lambda finding: order[finding.severity]))


def _about_nixl(failure: str | None, host: Host) -> Iterator[Finding]:
    if not host.home_readable:
        yield Finding(
            severity="error",
            problem=f"NIXL looks for .nixl.cfg in HOME, {host.home}, which this user may not read",
            mend="set HOME to a folder that this user can read",
        )
    if failure is not None:
        mend = "install it into this environment: pip install nixl"
        if "can't be imported" not in failure:
            mend = "reinstall it: pip install --force-reinstall --no-deps nixl nixl-cu12 nixl-cu13"
        yield Finding(severity="error", problem=f"NIXL can't be used: {failure}", mend=mend)


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
            severity="error", problem=f"the UCX backend can't be used: {ucx.detail}", mend=mend
        )
    elif not path.works and nixl_failure is None:
        mend = "make sure that nothing blocks TCP between processes here, on any interface"
        if chosen:
            mend = f"try without {', '.join(chosen)}"
        yield Finding(
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
        yield Finding(
            severity="warning",
            problem=(
                "one process may not read another's memory (process_vm_readv: "
                f"{cma.error}), so bytes between processes of this host go over TCP"
            ),
            mend=_allow_cma(cma, host),
        )
    elif path.works and path.kind == "tcp":
        mend = "run the doctor with UCX_LOG_LEVEL=info to see which transports UCX considers"
        if "UCX_TLS" in environment:
            mend = f"add cma to UCX_TLS (now {environment['UCX_TLS']}), or unset it"
        yield Finding(
            severity="warning",
            problem="bytes between processes of this host go over TCP, although CMA works here",
            mend=mend,
        )


def _allow_cma(cma: CmaTrial, host: Host) -> str:
    if cma.error == "ENOSYS":
        return "use a kernel with CONFIG_CROSS_MEMORY_ATTACH; some sandboxes, like gVisor, lack it"
    scope = host.yama_ptrace_scope
    if scope is not None and scope >= 2 and not host.cap_sys_ptrace:
        again = " (3 lasts until the next boot)" if scope == 3 else ""
        return f"as root: sysctl kernel.yama.ptrace_scope=1, now {scope}{again}"
    if host.seccomp_mode == 2:
        return "in a container: start it with --cap-add=SYS_PTRACE, which also lets seccomp pass it"
    return (
        "run both processes as the same user, without setuid programs in between, "
        "or give them CAP_SYS_PTRACE"
    )


def _about_rdma(
    host: Host, devices: Sequence[UcxDevice], environment: Mapping[str, str]
) -> Iterator[Finding]:
    if not host.rdma_devices:
        return
    names = ", ".join(device.name for device in host.rdma_devices)
    if not any("ACTIVE" in device.port_states for device in host.rdma_devices):
        yield Finding(
            severity="warning",
            problem=f"no port of the RDMA devices ({names}) is active",
            mend="check cable, switch and subnet manager: `ibstat` shows the ports",
        )
    elif devices and not any(_is_rdma(device) for device in devices):
        mend = "in a container: pass --device=/dev/infiniband and install rdma-core"
        if "UCX_TLS" in environment:
            mend = f"add rc and ud to UCX_TLS (now {environment['UCX_TLS']}), or unset it"
        yield Finding(
            severity="warning", problem=f"UCX does not use the RDMA devices ({names})", mend=mend
        )
    if host.memlock_bytes is not None and host.memlock_bytes < _MIN_MEMLOCK_BYTES:
        yield Finding(
            severity="warning",
            problem=f"only {host.memlock_bytes} bytes may be pinned, and RDMA pins what it moves",
            mend="raise the limit: ulimit -l unlimited, or --ulimit memlock=-1 for a container",
        )


def _is_rdma(device: UcxDevice) -> bool:
    return device.transport.partition("_")[0] in _RDMA_TRANSPORTS


def _about_limits(host: Host) -> Iterator[Finding]:
    if host.shm_bytes is None or host.shm_bytes < _MIN_SHM_BYTES:
        size = "missing" if host.shm_bytes is None else f"{host.shm_bytes} bytes large"
        yield Finding(
            severity="note",
            problem=f"/dev/shm is {size}; torch's data loaders share tensors there",
            mend="in a container: --shm-size=2g",
        )
    if not any(interface.up and not interface.loopback for interface in host.interfaces):
        yield Finding(
            severity="note",
            problem="no network interface but the loopback is up: no other host can be reached",
            mend="bring one up, or start the container with a network",
        )


def _about_load(host: Host, path: Path) -> Iterator[Finding]:
    if path.works and host.load > max(1, host.num_cores - 1):
        yield Finding(
            severity="note",
            problem=(
                f"{host.load:.1f} other processes wanted the {host.num_cores} cores while two were "
                "to poll: the figures are lower, the latencies higher than on a quiet machine"
            ),
            mend="measure again when nothing else runs",
        )


def _about_complaints(complaints: Sequence[str], path: Path) -> Iterator[Finding]:
    if path.works:
        for complaint in complaints:
            yield Finding(
                severity="note",
                problem=f"UCX warns: {complaint}",
                mend="correct or unset the UCX_ variable it names; `env | grep UCX_` lists yours",
            )
