"""What can be read from the operating system without trying anything."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch_nixl import __version__
from torch_nixl.cli.doctor.report import Host, Interface, RdmaDevice, Versions

_CAP_SYS_PTRACE = 19
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


def read_versions() -> Versions:
    """Return what is installed, without importing any of it."""
    return Versions(
        torch_nixl=__version__,
        python=platform.python_version(),
        torch=installed_version("torch"),
        nixl=installed_version("nixl"),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


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
    return Host(
        interfaces=tuple(_read_interface(folder) for folder in _folders(root / "sys/class/net")),
        rdma_devices=tuple(
            RdmaDevice(
                name=folder.name,
                # A port's state reads "4: ACTIVE".
                port_states=tuple(
                    (_read(port / "state") or "unknown").rpartition(" ")[2]
                    for port in _folders(folder / "ports")
                ),
            )
            for folder in _folders(root / "sys/class/infiniband")
        ),
        shm_bytes=_shm_bytes(root / "dev/shm"),
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        home=home,
        home_readable=home is None or _is_readable(Path(home)),
        num_cores=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        uid=os.getuid(),
        cap_sys_ptrace=bool(int(status.get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1),
        no_new_privs=status.get("NoNewPrivs") == "1",
        seccomp_mode=_to_int(status.get("Seccomp")),
        yama_ptrace_scope=_to_int(_read(root / "proc/sys/kernel/yama/ptrace_scope")),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _to_int(text: str | None) -> int | None:
    try:
        return int(text or "", 0)
    except ValueError:
        return None


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []


def _read_status(root: Path) -> dict[str, str]:
    lines = (_read(root / "proc/self/status") or "").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key: value.strip() for key, _, value in pairs}


def _read_interface(folder: Path) -> Interface:
    flags = _to_int(_read(folder / "flags")) or 0
    speed = _to_int(_read(folder / "speed"))
    return Interface(
        name=folder.name,
        up=bool(flags & _IFF_UP),
        loopback=bool(flags & _IFF_LOOPBACK),
        mtu=_to_int(_read(folder / "mtu")),
        speed_gbit_per_s=speed / 1000 if speed is not None and speed > 0 else None,
    )


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
