"""What is wrong or worth knowing about network interfaces and the choice among them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch_nixl.cli.doctor.report import Finding, Host, Interface
from torch_nixl.engine.nixl_environment import TUNED_ENVIRONMENT

_FAST_GBIT_PER_S = 25.0
_SMALL_MTU = 4000
_BRIDGES = ("docker", "br-", "virbr", "cni", "flannel", "podman", "lxcbr", "cali")
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def advise_network(host: Host, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what keeps other hosts from being reached, or from being reached fast.

    Args:
        host: From the operating system.
        environment: This process's environment variables.
    """
    up = [interface for interface in host.interfaces if interface.up and not interface.loopback]
    if not up:
        yield Finding(
            name="NO_NETWORK",
            severity="note",
            problem="no network interface but the loopback is up: no other host can be reached",
            mend="bring one up, or start the container with a network",
        )
    choice = environment.get("UCX_NET_DEVICES", "all")
    if choice != "all":
        yield from _about_choice(choice, host, up)
    yield from _about_bridges(choice, up)
    for interface in up:
        speed, mtu = interface.speed_gbit_per_s, interface.mtu
        if speed is not None and speed >= _FAST_GBIT_PER_S and mtu is not None and mtu < _SMALL_MTU:
            yield Finding(
                name="MTU_SMALL",
                severity="note",
                problem=f"{interface.name} has {speed:g} Gbit/s and an MTU of only {mtu} bytes",
                mend=(
                    f"as root: ip link set {interface.name} mtu 9000, on all hosts, if the "
                    "switches allow it: fewer packets, less work"
                ),
            )
    yield from _about_tuning(environment)


def _about_choice(choice: str, host: Host, up: Sequence[Interface]) -> Iterator[Finding]:
    """Look at UCX_NET_DEVICES: interfaces, RDMA devices with a port, or ``^`` and what to avoid."""
    names = [name.strip() for name in choice.lstrip("^").split(",") if name.strip()]
    rdma = {device.name for device in host.rdma_devices}
    known = {interface.name for interface in host.interfaces} | rdma
    # UCX knows patterns, which are left to it.
    plain = [name for name in names if not re.search(r"[*?\[\]]", name)]
    unknown = [name for name in plain if name.partition(":")[0] not in known]
    usable = {interface.name for interface in up} | rdma
    if unknown and host.interfaces:
        yield Finding(
            name="NET_DEVICE_UNKNOWN",
            severity="note" if choice.startswith("^") else "warning",
            problem=f"UCX_NET_DEVICES={choice} names {', '.join(unknown)}, which is not there",
            mend=f"choose among {', '.join(sorted(usable)) or 'none: no interface is up'}",
        )
    if choice.startswith("^") or len(plain) < len(names):
        return
    chosen = [name for name in plain if name.partition(":")[0] in known]
    down = [name for name in chosen if name.partition(":")[0] not in usable | {"lo"}]
    if down:
        yield Finding(
            name="NET_DEVICE_DOWN",
            severity="warning",
            problem=f"UCX_NET_DEVICES={choice} names {', '.join(down)}, which is down",
            mend=f"as root: ip link set {down[0]} up; or choose another interface",
        )
    if chosen == ["lo"]:
        yield Finding(
            name="NET_DEVICE_LOOPBACK",
            severity="warning",
            problem="UCX_NET_DEVICES=lo keeps all other hosts out of reach",
            mend="unset it, unless all ranks run on this host",
        )


def _about_bridges(choice: str, up: Sequence[Interface]) -> Iterator[Finding]:
    bridges = [item.name for item in up if item.bridge or item.name.startswith(_BRIDGES)]
    others = [item.name for item in up if item.name not in bridges]
    if not bridges or not others or choice != "all":
        return
    yield Finding(
        name="BRIDGE_UP",
        severity="note",
        problem=(
            f"{', '.join(bridges)} is up: if other hosts have a bridge at the same address, UCX "
            "may choose it, and what it sends there arrives nowhere"
        ),
        mend=f"between hosts: export UCX_NET_DEVICES={others[0]}, or ^{','.join(bridges)}",
    )


def _about_tuning(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, (tuned, _) in TUNED_ENVIRONMENT.items():
        value, wanted = to_nbytes(environment.get(name, tuned)), to_nbytes(tuned)
        if value is not None and wanted is not None and value < wanted:
            yield Finding(
                name="TUNING_LOWERED",
                severity="note",
                problem=f"{name}={environment[name]} is less than torch_nixl's {tuned}",
                mend=f"unset {name}: large transfers over TCP are slower with less",
            )
    sizes = [
        to_nbytes(environment.get(name, TUNED_ENVIRONMENT[name][0]))
        for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")
    ]
    if sizes[0] is not None and sizes[1] is not None and sizes[1] < sizes[0]:
        yield Finding(
            name="SEGMENTS_DIFFER",
            severity="warning",
            problem="UCX_TCP_RX_SEG_SIZE is less than UCX_TCP_TX_SEG_SIZE: messages don't fit",
            mend="unset both, on all hosts, or set both to the same",
        )


def to_nbytes(text: str) -> int | None:
    """Return the bytes that a size in UCX's spelling means, such as ``256k``; None if none."""
    found = re.fullmatch(r"(\d+)\s*([bkmg]?)b?", text.strip().lower())
    return int(found[1]) * _UNITS[found[2]] if found else None
