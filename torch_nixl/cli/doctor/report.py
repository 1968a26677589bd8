"""The doctor's report. Its JSON form is what ``--json`` prints.

Sizes are in bytes, times in seconds or microseconds as their names say, GB/s is 10^9 bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

PathKind = Literal["cma", "shared memory", "rdma", "tcp", "unknown"]
Severity = Literal["error", "warning", "note"]
Across = Literal["switch", "host bridge", "NUMA node", "system", "unknown"]
"""The nearest that two PCI devices share: ``system`` if not even a NUMA node."""


class Value(BaseModel):
    """What was found: frozen, and checked where it comes from another process."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Versions(Value):
    """What is installed. None: it isn't, or could not be loaded."""

    torch_nixl: str
    python: str
    torch: str | None
    torch_cuda: str | None = None
    """The CUDA version that torch was built for, such as ``12.8``. None: for none."""
    nixl: str | None
    nixl_wheel: str | None = None
    """The wheel that was loaded, such as ``nixl-cu13 1.5.1``: NIXL brings one for each CUDA."""
    ucx: str | None = None
    platform: str


class Backend(Value):
    """One of NIXL's plugins, and whether an agent with it could be made."""

    name: str
    works: bool
    detail: str = ""
    seconds: float


class UcxDevice(Value):
    """A transport that UCX can use here, and the device it uses it on."""

    transport: str
    device: str


class Interface(Value):
    """A network interface."""

    name: str
    up: bool
    loopback: bool
    mtu: int | None
    speed_gbit_per_s: float | None
    """None where the driver names none, as most virtual ones do."""
    bridge: bool = False
    addresses: tuple[str, ...] = ()
    """IPv4."""
    pci: str | None = None
    """Address on the PCI bus, such as ``0000:41:00.0``. None: it isn't on one."""
    numa_node: int | None = None


class RdmaDevice(Value):
    """An RDMA device and the state of its ports, such as ``ACTIVE``."""

    name: str
    port_states: tuple[str, ...]
    speeds_gbit_per_s: tuple[float | None, ...] = ()
    """Of each port."""
    pci: str | None = None
    numa_node: int | None = None


class Gpu(Value):
    """A GPU on the PCI bus, whether or not torch can use it."""

    pci: str
    vendor: str
    driver: str | None
    numa_node: int | None


class Distance(Value):
    """What lies between a GPU and a network card; less is faster."""

    gpu: str
    """Its PCI address."""
    nic: str
    """Name of an interface or an RDMA device."""
    across: Across


class Host(Value):
    """What the operating system says of this process's place."""

    interfaces: tuple[Interface, ...]
    rdma_devices: tuple[RdmaDevice, ...]
    gpus: tuple[Gpu, ...] = ()
    distances: tuple[Distance, ...] = ()
    """From each GPU to each network card on the PCI bus."""
    gpu_direct: bool = False
    """A kernel module that lets network cards reach NVIDIA GPUs' memory is loaded."""
    socket_buffer_bytes: int | None = None
    """Most that a program may ask for (net.core.rmem_max, wmem_max; the lesser). None: unknown."""
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
    in_user_namespace: bool = False
    """As in a rootless container: uid 0 here is another user outside."""
    confined_by: str | None = None
    """The profile of AppArmor or SELinux that this process runs under."""


class CmaTrial(Value):
    """Whether one process can read the memory of a sibling by process_vm_readv."""

    works: bool
    needs_consent: bool = False
    """It works only once the target has allowed it by prctl(PR_SET_PTRACER), as UCX does."""
    error: str | None = None
    """Name of the errno, such as ``EPERM``, or what else went wrong."""
    own_error: str | None = None
    """The same for a process's own memory, which only a filter of system calls forbids."""
    dumpable: bool | None = None
    """False: the kernel protects the target, which has changed its user or privileges."""


class Path(Value):
    """How bytes move between two processes on this host, and how fast."""

    works: bool
    failure: str | None = None
    kind: PathKind = "unknown"
    read_lane: str | None = None
    """What UCX moves large READs by, such as ``cma/memory`` or ``tcp/lo``."""
    write_lane: str | None = None
    control_lane: str | None = None
    read_bytes: int | None = None
    """Size of each READ: 64 MiB, or less where that takes long."""
    read_gb_per_s: float | None = None
    """Median of several READs."""
    write_bytes: int | None = None
    write_gb_per_s: float | None = None
    round_trip_p50_us: float | None = None
    """Of messages of 8 bytes between two polling processes."""
    round_trip_p99_us: float | None = None
    copy_gb_per_s: float | None = None
    """Of a copy within one process, of as many bytes: what CMA can reach."""


class Setting(Value):
    """An environment variable that counts here, and who set it."""

    name: str
    value: str
    source: str


class TorchGpu(Value):
    """A GPU as torch sees it."""

    name: str
    pci: str | None
    memory_bytes: int


class GpuTrial(Value):
    """What torch says of its GPUs."""

    devices: tuple[TorchGpu, ...] = ()
    failure: str | None = None
    """Why it can't use them."""


class UcxModule(Value):
    """A part of UCX that comes as a library of its own."""

    name: str
    present: bool
    loaded: bool
    detail: str = ""
    """Why it is not loaded."""


class Finding(Value):
    """Something worth knowing, and how to mend it."""

    name: str
    """Which of those in docs/troubleshooting.md, such as ``CMA_DENIED``."""
    severity: Severity
    problem: str
    mend: str


class Report(Value):
    """All that the doctor found."""

    schema_version: Literal[1] = 1
    can_move: bool
    """Two processes here moved tensors' bytes both ways, and the bytes were right."""
    versions: Versions
    host: Host
    cma: CmaTrial
    backends: tuple[Backend, ...]
    ucx_devices: tuple[UcxDevice, ...]
    ucx_modules: tuple[UcxModule, ...] = ()
    torch_gpus: GpuTrial | None = None
    """None: not asked, since there is no sign of a GPU."""
    path: Path
    streams: tuple[str, ...] = ()
    """For each device: ``cuda:0: streams wait for transfers, by cuda.bindings``, or why not."""
    environment: tuple[Setting, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_status(self) -> int:
        return 0 if self.can_move else 1
