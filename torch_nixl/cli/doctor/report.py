"""The doctor's report. Its JSON form is what ``--json`` prints.

Sizes are in bytes, times in seconds or microseconds as their names say, GB/s is 10^9 bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

PathKind = Literal["cma", "shared memory", "rdma", "tcp", "unknown"]
Severity = Literal["error", "warning", "note"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Versions(_Value):
    """What is installed. None: it isn't, or could not be loaded."""

    torch_nixl: str
    python: str
    torch: str | None
    nixl: str | None
    nixl_wheel: str | None = None
    """The wheel that was loaded, such as ``nixl-cu13 1.5.1``: NIXL brings one for each CUDA."""
    ucx: str | None = None
    platform: str


class Backend(_Value):
    """One of NIXL's plugins, and whether an agent with it could be made."""

    name: str
    works: bool
    detail: str = ""
    seconds: float


class UcxDevice(_Value):
    """A transport that UCX can use here, and the device it uses it on."""

    transport: str
    device: str


class Interface(_Value):
    """A network interface."""

    name: str
    up: bool
    loopback: bool
    mtu: int | None
    speed_gbit_per_s: float | None
    """None where the driver names none, as most virtual ones do."""


class RdmaDevice(_Value):
    """An RDMA device and the state of its ports, such as ``ACTIVE``."""

    name: str
    port_states: tuple[str, ...]


class Host(_Value):
    """What the operating system says of this process's place."""

    interfaces: tuple[Interface, ...]
    rdma_devices: tuple[RdmaDevice, ...]
    shm_bytes: int | None
    """Size of /dev/shm. None: there is none."""
    memlock_bytes: int | None
    """How much memory may be pinned. None: unlimited."""
    home: str | None
    home_readable: bool
    num_cores: int
    """Cores that this process may run on."""
    load: float
    """Average number of runnable processes over the last minute, before the trials."""
    uid: int
    cap_sys_ptrace: bool
    no_new_privs: bool
    seccomp_mode: int | None
    """0 off, 1 strict, 2 filter. None: unknown."""
    yama_ptrace_scope: int | None
    """None: the kernel has no Yama."""


class CmaTrial(_Value):
    """Whether one process can read the memory of a sibling by process_vm_readv."""

    works: bool
    needs_consent: bool = False
    """It works only once the target has allowed it by prctl(PR_SET_PTRACER), as UCX does."""
    error: str | None = None
    """Name of the errno, such as ``EPERM``, or what else went wrong."""


class Path(_Value):
    """How bytes move between two processes on this host, and how fast."""

    works: bool
    failure: str | None = None
    kind: PathKind = "unknown"
    read_lane: str | None = None
    """What UCX moves large READs by, such as ``cma/memory`` or ``tcp/lo``."""
    write_lane: str | None = None
    control_lane: str | None = None
    read_gb_per_s: float | None = None
    """Median of READs of 64 MiB."""
    write_gb_per_s: float | None = None
    round_trip_p50_us: float | None = None
    """Of messages of 8 bytes between two polling processes."""
    round_trip_p99_us: float | None = None


class Setting(_Value):
    """An environment variable that UCX reads, and who set it."""

    name: str
    value: str
    source: str


class Finding(_Value):
    """Something worth knowing, and how to mend it."""

    severity: Severity
    problem: str
    mend: str


class Report(_Value):
    """All that the doctor found."""

    schema_version: Literal[1] = 1
    can_move: bool
    """Two processes here moved tensors' bytes both ways, and the bytes were right."""
    versions: Versions
    host: Host
    cma: CmaTrial
    backends: tuple[Backend, ...]
    ucx_devices: tuple[UcxDevice, ...]
    path: Path
    streams: tuple[str, ...] = ()
    """For each device: ``cuda:0: streams wait for transfers, by cuda.bindings``, or why not."""
    environment: tuple[Setting, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_status(self) -> int:
        return 0 if self.can_move else 1
