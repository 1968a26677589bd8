"""The environment variables that UCX reads, and what this package sets them to.

Nothing is set at import: `tune_environment` runs before the first agent of a process is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

TUNED_ENVIRONMENT: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "UCX_TCP_SNDBUF": (
            "4m",
            "large transfers over TCP, READ above all, are slow otherwise",
        ),
        "UCX_TCP_RCVBUF": ("4m", "as for the send buffer"),
        "UCX_TCP_TX_SEG_SIZE": ("256k", "as for the send buffer: fewer and larger segments"),
        "UCX_TCP_RX_SEG_SIZE": ("256k", "must not be below the sender's segment size"),
        "UCX_TCP_CONN_NB": (
            "y",
            "otherwise UCX aborts this process if a peer ends while it is connected to",
        ),
    }
)
"""Environment variables that UCX reads when an agent is made: (value, why). A user's value wins."""


def tuned_environment() -> list[tuple[str, str, str]]:
    """Return (name, value in force, whose it is: ``"user"`` or ``"torch_nixl"``) of each variable.

    Before the first `NixlAdapter` of this process, the value is the one that would be set. A value
    that a parent process was tuned to and handed on counts as ours, as does a user's equal one.
    """
    found = []
    for name, (tuned, _) in TUNED_ENVIRONMENT.items():
        value = os.environ.get(name, tuned)
        found.append((name, value, "torch_nixl" if value == tuned else "user"))
    return found


def tune_environment() -> None:
    """Set each variable of `TUNED_ENVIRONMENT` that the user has not set."""
    for name, (value, _) in TUNED_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


UCX_ADVICE = (
    "UCX_TLS must include tcp (shared memory alone can't report a lost peer), and "
    "UCX_NET_DEVICES must name devices that this host has (see `torch-nixl doctor`); "
    "leaving both unset usually works"
)


def ucx_settings() -> str:
    """Return the user's choice of transports and devices, for error messages."""
    return ", ".join(
        f"{name}={os.environ.get(name, '(unset)')}" for name in ("UCX_TLS", "UCX_NET_DEVICES")
    )
