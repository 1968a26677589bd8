"""Reads what UCX logs about itself. Pure: text in, values out; what isn't found is left out.

UCX has no call that tells which transport a connection uses, but it prints it at log level
``info`` (with UCX_PROTO_INFO=y, tables by protocol) and its devices at level ``debug``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch_nixl.cli.doctor.report import PathKind, UcxDevice

_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_INTERFACE = re.compile(r"created interface\[\d+\]=\S+ using (\S+?)/(\S+) on worker")
_COMPLAINT = re.compile(r"UCX\s+(?:WARN|ERROR)\s+(.*\S)")
_LANES = re.compile(r"UCX\s+INFO\s+(\S+ (?!self)\S+ cfg#\d+) (.*)")
_ACTIVE_MESSAGES = re.compile(r"(?<![\w_])am\((\S+?)[ )]")
_CELLS = re.compile(r"\|(.*)\|\s*$")
_LANE = re.compile(r"[a-z]\w*/[^\s,|]+")
_UNUSED = re.compile(r"unused environment variables?: (.*)|\(set UCX_WARN_UNUSED_ENV_VARS")


@dataclass(frozen=True, slots=True)
class Lanes:
    """What UCX moves things by to the peer, such as ``cma/memory`` or ``tcp/lo``."""

    read: str | None
    write: str | None
    control: str | None


def version(log: str) -> str | None:
    """Return UCX's version."""
    found = _VERSION.search(log)
    return found[1] if found else None


def devices(log: str) -> tuple[UcxDevice, ...]:
    """Return the transports and devices that a worker was made with, each once, in order."""
    pairs = dict.fromkeys(_INTERFACE.findall(log))
    return tuple(UcxDevice(transport=transport, device=device) for transport, device in pairs)


def complaints(log: str, ignored: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the texts of warnings and errors, each once, in order.

    Args:
        log: What UCX logged.
        ignored: Environment variables that may be left unused without a complaint.
    """
    texts = []
    for text in dict.fromkeys(_COMPLAINT.findall(log)):
        if unused := _UNUSED.match(text):
            # "unused environment variables: UCX_A (maybe: UCX_B?); UCX_C"
            names = {item.split()[0] for item in (unused[1] or "").split(";") if item.strip()}
            if names <= ignored:
                continue
        texts.append(text)
    return tuple(texts)


def lanes(log: str) -> Lanes:
    """Return what the log says of the connection to another process.

    Of the connection of an agent to itself, which each agent has, it says nothing.
    """
    read = write = control = None
    title = what = ""
    for line in log.splitlines():
        if found := _LANES.search(line):
            active = _ACTIVE_MESSAGES.search(found[2])
            control = active[1] if active else control
        cells = _CELLS.search(line)
        if cells is None:
            continue
        row = [cell.strip() for cell in cells[1].split("|")]
        if len(row) == 1:
            # Two lines of one cell head each table: whose it is, and what for.
            if "cfg#" in row[0]:
                title, what = row[0], ""
            else:
                what = row[0]
        elif len(row) == 3 and row[0].endswith("..inf") and " self " not in f" {title} ":
            # Large transfers may be striped: "52% on tcp/lo and 48% on tcp/eth0".
            lane = " ".join(_LANE.findall(row[2])) or None
            if what.startswith("remote memory read"):
                read = lane
            elif what.startswith("remote memory write"):
                write = lane
    return Lanes(read, write, control)


def kind(lane: str | None) -> PathKind:
    """Say what kind of path a lane is."""
    transport = (lane or "").partition("/")[0]
    if transport == "cma":
        return "cma"
    if transport in {"posix", "sysv", "xpmem", "knem", "self"}:
        return "shared memory"
    if transport == "tcp":
        return "tcp"
    if re.match(r"(rc|dc|ud|gga|srd|ib)(_|$)", transport):
        return "rdma"
    return "unknown"
