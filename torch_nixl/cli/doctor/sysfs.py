"""Reads small files of /sys and /proc; what can't be read is None."""

from __future__ import annotations

import re
from pathlib import Path

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


def read(path: Path) -> str | None:
    """Return a file's text without the white space around it."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def to_int(text: str | None) -> int | None:
    """Return a decimal or 0x number."""
    try:
        return int(text or "", 0)
    except ValueError:
        return None


def read_int(path: Path) -> int | None:
    """Return the number that a file holds."""
    return to_int(read(path))


def folders(path: Path) -> list[Path]:
    """Return the folders, and links to folders, in a folder, by name."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []


def pci_chain(device: Path) -> tuple[str, ...]:
    """Return what a device hangs on, from the host bridge down to the device's own PCI function.

    Args:
        device: A folder or link of /sys that leads to the device.

    Returns:
        Such as ``("pci0000:40", "0000:40:01.1", "0000:41:00.0")``. Empty: it isn't on a PCI bus.
    """
    try:
        parts = device.resolve(strict=True).parts
    except OSError:
        return ()
    chain = [part for part in parts if _PCI_ROOT.fullmatch(part) or _PCI.fullmatch(part)]
    return tuple(chain) if len(chain) > 1 else ()


def numa_node(device: Path) -> int | None:
    """Return the NUMA node that a device, or what it hangs on, is near to; None if none is."""
    try:
        folder = device.resolve(strict=True)
    except OSError:
        return None
    # A device on a bus of its own, such as virtio's, doesn't say; the PCI function above it does.
    for place in (folder, *folder.parents):
        node = read_int(place / "numa_node")
        if node is not None:
            return node if node >= 0 else None
    return None
