"""What is wrong or worth knowing about the way between two hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from torch_nixl.cli.doctor.advice import by_severity
from torch_nixl.cli.doctor.hosts_report import HostEnd, Visit
from torch_nixl.cli.doctor.report import Finding, Path

_POOR_SHARE = 0.5
_WANTED_BUFFER_BYTES = 4 << 20


def expected_gb_per_s(visit: Visit) -> float | None:
    """Return what the slower of the two hosts' links carries, of those that UCX chose."""
    if visit.there is None:
        return None
    speeds = (_speed(visit.here, visit.outgoing), _speed(visit.there, visit.incoming))
    if speeds[0] is None or speeds[1] is None:
        return None
    return min(speeds[0], speeds[1]) / 8


def _speed(end: HostEnd, path: Path) -> float | None:
    """Return the Gbit/s of the devices by which an end writes."""
    speeds = [_device_speed(end, name) for name in _devices(path)]
    known = [speed for speed in speeds if speed is not None]
    return sum(known) if known and len(known) == len(speeds) else None


def _devices(path: Path) -> list[str]:
    """Return a path's devices, such as ``eth0`` or ``mlx5_0:1``."""
    lanes = (path.write_lane or path.read_lane or "").split()
    return [lane.partition("/")[2] for lane in lanes]


def _device_speed(end: HostEnd, name: str) -> float | None:
    for interface in end.interfaces:
        if interface.name == name:
            return interface.speed_gbit_per_s
    device, _, port = name.partition(":")
    for item in end.rdma_devices:
        if (
            item.name == device
            and port.isdecimal()
            and 0 < int(port) <= len(item.speeds_gbit_per_s)
        ):
            return item.speeds_gbit_per_s[int(port) - 1]
    return None


def advise_hosts(visit: Visit | None, failure: str) -> tuple[Finding, ...]:
    """Return what was found, errors first.

    Args:
        visit: What the processes found; None: they found nothing.
        failure: Why no bytes moved; empty: they did.
    """
    findings = list(_about_failure(visit, failure))
    if visit is not None and visit.there is not None:
        findings += _about_ends(visit.here, visit.there)
        if not failure:
            findings += _about_way(visit, visit.here, visit.there)
    return by_severity(findings)


def _about_failure(visit: Visit | None, failure: str) -> Iterator[Finding]:
    if not failure:
        return
    mend = (
        "run `torch-nixl doctor` on both hosts; let all TCP ports between them through, since "
        "NIXL listens on random ones; and name the interface that leads to the other host, on "
        "both: --interface NAME, in programs UCX_NET_DEVICES=NAME"
    )
    if visit is not None and visit.here.interface is not None:
        mend = mend.replace("NAME", visit.here.interface.name)
    yield Finding(
        name="HOSTS_FAILED",
        severity="error",
        problem=f"no bytes moved between the hosts: {failure}",
        mend=mend,
    )


def _about_ends(here: HostEnd, there: HostEnd) -> Iterator[Finding]:
    if (here.torch_nixl, here.nixl) != (there.torch_nixl, there.nixl):
        yield Finding(
            name="VERSIONS_DIFFER",
            severity="warning",
            problem=(
                f"{here.hostname} has torch_nixl {here.torch_nixl} and NIXL {here.nixl}, "
                f"{there.hostname} {there.torch_nixl} and {there.nixl}"
            ),
            mend="install the same versions on both",
        )
    if here.interface is None or there.interface is None:
        return
    if here.interface.mtu != there.interface.mtu:
        yield Finding(
            name="MTU_DIFFERS",
            severity="warning",
            problem=(
                f"{here.interface.name} of {here.hostname} has an MTU of {here.interface.mtu} "
                f"bytes, {there.interface.name} of {there.hostname} {there.interface.mtu}: large "
                "packets may be dropped without a word"
            ),
            mend="as root: ip link set NAME mtu BYTES, the same on both and no more than switches",
        )
    for end in (here, there):
        assert end.interface is not None
        # The loopback's is a byte more than a packet of IPv4 can have.
        mtu = None if end.interface.loopback else end.interface.mtu
        if end.path_mtu is not None and mtu is not None and end.path_mtu < mtu:
            yield Finding(
                name="PATH_MTU_SMALLER",
                severity="note",
                problem=(
                    f"packets of {mtu} bytes leave {end.hostname}, and only {end.path_mtu} get "
                    "through: something between the hosts, such as a tunnel, carries less"
                ),
                mend=f"raise the MTU of what is between to {mtu}, or lower {end.hostname}'s",
            )


def _about_way(visit: Visit, here: HostEnd, there: HostEnd) -> Iterator[Finding]:
    for end, path in ((here, visit.outgoing), (there, visit.incoming)):
        devices = _devices(path)
        if path.kind == "tcp" and end.interface is not None and end.interface.name not in devices:
            yield Finding(
                name="OTHER_INTERFACE",
                severity="note",
                problem=(
                    f"the doctors talk by {end.interface.name} of {end.hostname}, and UCX chose "
                    f"{', '.join(devices) or 'one that it does not name'}"
                ),
                mend=f"if that is the slower one: UCX_NET_DEVICES={end.interface.name}",
            )
        limit = end.socket_buffer_bytes
        if path.kind == "tcp" and limit is not None and limit < _WANTED_BUFFER_BYTES:
            yield Finding(
                name="SOCKET_BUFFERS_SMALL",
                severity="note",
                problem=f"{end.hostname} allows sockets buffers of only {limit} bytes",
                mend=(
                    "as root: sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304; "
                    "matters on fast or long links"
                ),
            )
    if visit.outgoing.kind == "tcp" and all(_has_active_rdma(end) for end in (here, there)):
        yield Finding(
            name="RDMA_UNUSED",
            severity="warning",
            problem="bytes go over TCP, though both hosts have an active RDMA port",
            mend="run `torch-nixl doctor` on both; unset UCX_TLS and UCX_NET_DEVICES",
        )
    yield from _about_speed(visit)


def _has_active_rdma(end: HostEnd) -> bool:
    return any("ACTIVE" in device.port_states for device in end.rdma_devices)


def _about_speed(visit: Visit) -> Iterator[Finding]:
    expected = expected_gb_per_s(visit)
    measured = max(
        (path.write_gb_per_s or 0.0 for path in (visit.outgoing, visit.incoming)), default=0.0
    )
    if expected is not None and measured < expected * _POOR_SHARE:
        yield Finding(
            name="BELOW_LINK_SPEED",
            severity="warning",
            problem=(
                f"WRITEs reach {measured:.2f} GB/s, {100 * measured / expected:.0f} % of the "
                f"link's {expected:.2f}"
            ),
            mend=(
                "see whether `iperf3 -P 4` between the hosts reaches more: if not, it's the "
                "network (MTU, other traffic, a link that came up slower); if so, one core is the "
                "limit: an MTU of 9000, or RDMA"
            ),
        )
