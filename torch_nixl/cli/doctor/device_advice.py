"""What is wrong or worth knowing about GPUs and RDMA devices. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch_nixl.cli.doctor.report import (
    Across,
    Finding,
    GpuTrial,
    Host,
    UcxDevice,
    UcxModule,
    Versions,
)

_MIN_MEMLOCK_BYTES = 1 << 30
_RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd")
_NEARNESS: dict[Across, int] = {"switch": 0, "host bridge": 1, "NUMA node": 2, "system": 3}


def advise_rdma(
    host: Host, devices: Sequence[UcxDevice], environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield what stands between UCX and the host's RDMA devices.

    Args:
        host: From the operating system.
        devices: What UCX can use.
        environment: This process's environment variables.
    """
    if not host.rdma_devices:
        return
    names = ", ".join(device.name for device in host.rdma_devices)
    if not any("ACTIVE" in device.port_states for device in host.rdma_devices):
        yield Finding(
            name="RDMA_DOWN",
            severity="warning",
            problem=f"no port of the RDMA devices ({names}) is active",
            mend="check cable, switch and subnet manager: `ibstat` shows the ports",
        )
    elif devices and not any(_is_rdma(device) for device in devices):
        mend = "in a container: pass --device=/dev/infiniband and install rdma-core"
        if "UCX_TLS" in environment:
            mend = f"add rc and ud to UCX_TLS (now {environment['UCX_TLS']}), or unset it"
        yield Finding(
            name="RDMA_UNUSED",
            severity="warning",
            problem=f"UCX does not use the RDMA devices ({names})",
            mend=mend,
        )
    if host.memlock_bytes is not None and host.memlock_bytes < _MIN_MEMLOCK_BYTES:
        yield Finding(
            name="MEMLOCK_LOW",
            severity="warning",
            problem=f"only {host.memlock_bytes} bytes may be pinned, and RDMA pins what it moves",
            mend="raise the limit: ulimit -l unlimited, or --ulimit memlock=-1 for a container",
        )


def _is_rdma(device: UcxDevice) -> bool:
    return device.transport.partition("_")[0] in _RDMA_TRANSPORTS


def advise_gpus(
    host: Host,
    torch_gpus: GpuTrial | None,
    modules: Sequence[UcxModule],
    versions: Versions,
    environment: Mapping[str, str],
) -> Iterator[Finding]:
    """Yield what keeps tensors of the host's GPUs from moving, or from moving fast.

    Args:
        host: From the operating system.
        torch_gpus: What torch says of GPUs, if it was asked.
        modules: UCX's modules.
        versions: What is installed.
        environment: This process's environment variables.
    """
    yield from _about_wheel(versions)
    nvidia = [gpu for gpu in host.gpus if gpu.vendor == "NVIDIA"]
    if not nvidia:
        return
    if versions.torch is not None and versions.torch_cuda is None:
        yield Finding(
            name="TORCH_WITHOUT_CUDA",
            severity="note",
            problem=f"there are {len(nvidia)} NVIDIA GPUs, and torch {versions.torch} has no CUDA",
            mend="install torch's build for CUDA, unless only host memory is to move",
        )
    elif torch_gpus is not None and torch_gpus.failure is not None:
        yield Finding(
            name="GPU_UNUSABLE",
            severity="warning",
            problem=f"torch can't use the {len(nvidia)} NVIDIA GPUs: {torch_gpus.failure}",
            mend="see whether `nvidia-smi` works; in a container: start it with --gpus all",
        )
    else:
        yield from _about_module(modules, environment)
        yield from _about_segments(environment)
    yield from _about_distance(host)


def advise_streams(streams: Sequence[str]) -> Iterator[Finding]:
    """Yield which devices' streams can't wait for transfers by themselves.

    Args:
        streams: As in `report.Report`.
    """
    for line in streams:
        if "wait() blocks the host" in line:
            yield Finding(
                name="STREAMS_BLOCK",
                severity="note",
                problem=line,
                mend="with NVIDIA, a newer driver; elsewhere nothing. Bytes are right all the same",
            )


def _about_wheel(versions: Versions) -> Iterator[Finding]:
    found = re.match(r"nixl-cu(\d+)", versions.nixl_wheel or "")
    if found is None or versions.torch_cuda is None:
        return
    major = versions.torch_cuda.partition(".")[0]
    if found[1] != major:
        yield Finding(
            name="CUDA_WHEEL_DIFFERS",
            severity="warning",
            problem=(
                f"NIXL's wheel for CUDA {found[1]} is loaded, and torch is built for CUDA "
                f"{versions.torch_cuda}"
            ),
            mend=f"pip install nixl-cu{major}, and import torch before nixl",
        )


def _about_module(
    modules: Sequence[UcxModule], environment: Mapping[str, str]
) -> Iterator[Finding]:
    for module in modules:
        if module.name == "uct_cuda" and not module.loaded:
            mend = "pip install --force-reinstall --no-deps nixl-cu12 or nixl-cu13, as torch's CUDA"
            if module.present:
                mend = "make that library visible: in a container, --gpus all brings the driver's"
            if module.present and "UCX_TLS" in environment:
                mend = f"add cuda to UCX_TLS (now {environment['UCX_TLS']}), or unset it"
            yield Finding(
                name="HOST_STAGING",
                severity="warning",
                problem=(
                    f"UCX has not loaded its CUDA module ({module.detail}), so GPU memory can't be "
                    "moved directly"
                ),
                mend=mend,
            )


def _about_segments(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", environment.get(name, ""), re.IGNORECASE):
            yield Finding(
                name="EXPANDABLE_SEGMENTS",
                severity="warning",
                problem=(
                    f"{name} has expandable_segments: such memory is mapped piece by piece, which "
                    "CUDA IPC between processes does not share in the usual way, and which network "
                    "cards can reach only if driver and card allow it"
                ),
                mend=(
                    "unset expandable_segments where tensors move; or compare `torch-nixl bench "
                    "p2p --device cuda` with and without it"
                ),
            )
            return


def _about_distance(host: Host) -> Iterator[Finding]:
    active = {device.name for device in host.rdma_devices if "ACTIVE" in device.port_states}
    if not active:
        return
    if not host.gpu_direct:
        yield Finding(
            name="GPU_DIRECT_MISSING",
            severity="note",
            problem="no kernel module lets RDMA devices reach GPU memory (nvidia_peermem)",
            mend="as root: modprobe nvidia_peermem; not needed where driver and kernel do DMA-BUF",
        )
    for gpu in host.gpus:
        lines = [line for line in host.distances if line.gpu == gpu.pci and line.nic in active]
        known = [line for line in lines if line.across != "unknown"]
        nearest = min(known, key=lambda line: _NEARNESS[line.across], default=None)
        if nearest is not None and nearest.across == "system":
            yield Finding(
                name="GPU_FAR_FROM_NIC",
                severity="note",
                problem=(
                    f"between GPU {gpu.pci} and every active RDMA device lies the link between "
                    "processors, which is slower than the card"
                ),
                mend="use GPUs of the cards' NUMA node for what moves most, or stage through host",
            )
