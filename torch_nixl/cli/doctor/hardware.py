"""GPUs and network cards as the kernel lists them, and what lies between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch_nixl.cli.doctor.report import Across, Distance, Gpu, Interface, RdmaDevice
from torch_nixl.cli.doctor.sysfs import folders, numa_node, pci_chain, read, read_int

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# Display controllers without a screen, and processing accelerators. NVIDIA's have screens, too.
_GPU_CLASSES = ("0x0302", "0x0380", "0x1200")
_NVIDIA_CLASSES = (*_GPU_CLASSES, "0x0300")


def read_interfaces(
    root: Path, addresses: Callable[[str], tuple[str, ...]]
) -> tuple[Interface, ...]:
    """Return the network interfaces, by name.

    Args:
        root: Where /sys is looked for.
        addresses: Returns an interface's addresses.
    """
    return tuple(
        _read_interface(folder, addresses(folder.name))
        for folder in folders(root / "sys/class/net")
        # Files of the bonding driver lie there, too.
        if (folder / "flags").exists()
    )


def _read_interface(folder: Path, addresses: tuple[str, ...]) -> Interface:
    flags = read_int(folder / "flags") or 0
    speed = read_int(folder / "speed")
    chain = pci_chain(folder / "device")
    return Interface(
        name=folder.name,
        up=bool(flags & _IFF_UP),
        loopback=bool(flags & _IFF_LOOPBACK),
        mtu=read_int(folder / "mtu"),
        speed_gbit_per_s=speed / 1000 if speed is not None and speed > 0 else None,
        bridge=(folder / "bridge").is_dir(),
        addresses=addresses,
        pci=chain[-1] if chain else None,
        numa_node=numa_node(folder / "device"),
    )


def read_rdma_devices(root: Path) -> tuple[RdmaDevice, ...]:
    """Return the RDMA devices, by name."""
    found = []
    for folder in folders(root / "sys/class/infiniband"):
        ports = folders(folder / "ports")
        chain = pci_chain(folder / "device")
        device = RdmaDevice(
            name=folder.name,
            # A port's state reads "4: ACTIVE", its rate "100 Gb/sec (4X EDR)".
            port_states=tuple(
                (read(port / "state") or "unknown").rpartition(" ")[2] for port in ports
            ),
            speeds_gbit_per_s=tuple(_to_speed(read(port / "rate")) for port in ports),
            pci=chain[-1] if chain else None,
            numa_node=numa_node(folder / "device"),
        )
        found.append(device)
    return tuple(found)


def _to_speed(rate: str | None) -> float | None:
    found = re.match(r"([\d.]+) Gb/sec", rate or "")
    return float(found[1]) if found else None


def read_gpus(root: Path) -> tuple[Gpu, ...]:
    """Return the GPUs on the PCI bus, by address."""
    return tuple(_gpus(root))


def _gpus(root: Path) -> Iterator[Gpu]:
    for folder in folders(root / "sys/bus/pci/devices"):
        vendor = _VENDORS.get(read(folder / "vendor") or "")
        classes = _NVIDIA_CLASSES if vendor == "NVIDIA" else _GPU_CLASSES
        if vendor is None or not (read(folder / "class") or "").startswith(classes):
            continue
        driver = folder / "driver"
        yield Gpu(
            pci=folder.name,
            vendor=vendor,
            driver=driver.resolve().name if driver.exists() else None,
            numa_node=numa_node(folder),
        )


def read_distances(
    root: Path,
    gpus: Sequence[Gpu],
    interfaces: Sequence[Interface],
    rdma_devices: Sequence[RdmaDevice],
) -> tuple[Distance, ...]:
    """Return what lies between each GPU and each network card on the PCI bus."""
    nics: list[tuple[str, Path, int | None]] = [
        (nic.name, root / "sys/class" / group / nic.name / "device", nic.numa_node)
        for group, cards in (("net", interfaces), ("infiniband", rdma_devices))
        for nic in cards
        if nic.pci is not None
    ]
    found = []
    for gpu in gpus:
        chain = pci_chain(root / "sys/bus/pci/devices" / gpu.pci)
        for name, device, node in nics:
            across = _across(chain, pci_chain(device), gpu.numa_node, node)
            found.append(Distance(gpu=gpu.pci, nic=name, across=across))
    return tuple(found)


def _across(
    first: Sequence[str], second: Sequence[str], first_node: int | None, second_node: int | None
) -> Across:
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared += 1
    if shared > 1:
        return "switch"
    if shared == 1:
        return "host bridge"
    if first_node is None or second_node is None:
        return "unknown"
    return "NUMA node" if first_node == second_node else "system"
