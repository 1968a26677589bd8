"""What two doctors on two hosts found. Its JSON form is what ``--json`` prints."""

from __future__ import annotations

from typing import Literal

from torch_nixl.cli.doctor.report import (
    Finding,
    Interface,
    Path,
    RdmaDevice,
    Setting,
    Value,
)


class HostEnd(Value):
    """One of the two hosts, as its own doctor sees it."""

    hostname: str
    torch_nixl: str
    nixl: str | None
    address: str
    """Its end of the connection between the doctors."""
    interface: Interface | None
    """Which has that address. None: none has, as behind a translated address or with IPv6."""
    path_mtu: int | None
    """Largest packet that the kernel believes to get through to the other host."""
    interfaces: tuple[Interface, ...]
    rdma_devices: tuple[RdmaDevice, ...]
    socket_buffer_bytes: int | None
    settings: tuple[Setting, ...]


class Visit(Value):
    """What the two processes found that moved bytes between the hosts."""

    here: HostEnd
    there: HostEnd | None = None
    outgoing: Path
    """READs from there and WRITEs to there, posted here."""
    incoming: Path
    """The same, posted there."""


class HostsReport(Value):
    """All that was found."""

    schema_version: Literal[1] = 1
    can_move: bool
    """Bytes moved, posted from either side, and were right."""
    visit: Visit | None
    """None: the process that was to move bytes ended before it could say anything."""
    failure: str | None
    expected_gb_per_s: float | None
    """What the slower of the two links carries. None: a driver doesn't say, or it's one host."""
    findings: tuple[Finding, ...]

    @property
    def exit_status(self) -> int:
        return 0 if self.can_move else 1
