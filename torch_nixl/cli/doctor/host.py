"""What can be read from the operating system without trying anything."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import re
import resource
import socket
import struct
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch_nixl import __version__
from torch_nixl.cli.doctor.hardware import (
    read_distances,
    read_gpus,
    read_interfaces,
    read_rdma_devices,
)
from torch_nixl.cli.doctor.report import Host, Versions
from torch_nixl.cli.doctor.sysfs import read, read_int, to_int

_CAP_SYS_PTRACE = 19
_SIOCGIFADDR = 0x8915
_PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")
_WHOLE_RANGE = ["0", "0", str((1 << 32) - 1)]


def read_versions() -> Versions:
    """Return what is installed, without importing any of it."""
    return Versions(
        torch_nixl=__version__,
        python=platform.python_version(),
        torch=installed_version("torch"),
        torch_cuda=_torch_cuda(),
        nixl=installed_version("nixl"),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def _torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for; importing torch would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = read(Path(spec.origin).with_name("version.py")) or ""
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def read_host(root: Path = Path("/")) -> Host:
    """Return what the operating system says of this process's place.

    Args:
        root: Where /sys, /proc and /dev are looked for.
    """
    status = _read_status(root)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    home = os.environ.get("HOME")
    interfaces = read_interfaces(root, ipv4_addresses)
    rdma_devices = read_rdma_devices(root)
    gpus = read_gpus(root)
    ids = read(root / "proc/self/uid_map")
    return Host(
        interfaces=interfaces,
        rdma_devices=rdma_devices,
        gpus=gpus,
        distances=read_distances(root, gpus, interfaces, rdma_devices),
        gpu_direct=any((root / "sys/module" / name).is_dir() for name in _PEER_MEMORY_MODULES),
        socket_buffer_bytes=socket_buffer_bytes(root),
        shm_bytes=_shm_bytes(root / "dev/shm"),
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        home=home,
        home_readable=home is None or _is_readable(Path(home)),
        num_cores=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        uid=os.getuid(),
        cap_sys_ptrace=bool(int(status.get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1),
        no_new_privs=status.get("NoNewPrivs") == "1",
        seccomp_mode=to_int(status.get("Seccomp")),
        yama_ptrace_scope=read_int(root / "proc/sys/kernel/yama/ptrace_scope"),
        in_user_namespace=ids is not None and ids.split() != _WHOLE_RANGE,
        confined_by=_confined_by(root),
    )


def ipv4_addresses(interface: str) -> tuple[str, ...]:
    """Return an interface's first IPv4 address, if it has one; empty, too, if it doesn't exist."""
    request = struct.pack("256s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            answer = fcntl.ioctl(handle.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return ()
    return (socket.inet_ntoa(answer[20:24]),)


def _read_status(root: Path) -> dict[str, str]:
    lines = (read(root / "proc/self/status") or "").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key: value.strip() for key, _, value in pairs}


def socket_buffer_bytes(root: Path) -> int | None:
    """Return the most that a program may ask for as its socket's buffers; None if unknown."""
    folder = root / "proc/sys/net/core"
    limits = [read_int(folder / name) for name in ("rmem_max", "wmem_max")]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _confined_by(root: Path) -> str | None:
    label = (read(root / "proc/self/attr/current") or "").strip("\0 \n")
    # Without SELinux, and in AppArmor's words, for a process that may do everything.
    free = not label or label.startswith(("unconfined", "kernel")) or ":unconfined_t:" in label
    return None if free else label


def _shm_bytes(path: Path) -> int | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_blocks * facts.f_frsize


def _is_readable(home: Path) -> bool:
    """Say whether NIXL can look for its configuration there; it fails where it can't."""
    try:
        (home / ".nixl.cfg").stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return os.access(home / ".nixl.cfg", os.R_OK)
