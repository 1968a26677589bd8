"""Two doctors on two hosts: one serves, the other connects, and bytes move between them both ways.

The doctors talk over a TCP connection of their own (`channel`); what moves the bytes is a process
of each (`hosts_worker`), with a deadline.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from torch_nixl.cli.doctor.channel import Channel, RemoteFailure, greet
from torch_nixl.cli.doctor.host import ipv4_addresses
from torch_nixl.cli.doctor.hosts_advice import advise_hosts, expected_gb_per_s
from torch_nixl.cli.doctor.hosts_report import HostsReport, Visit
from torch_nixl.cli.doctor.hosts_worker import Agreed
from torch_nixl.cli.doctor.programs import run_program
from torch_nixl.errors import MetadataError

GREETING_TIMEOUT_S = 10.0
VISIT_TIMEOUT_S = 90.0
"""Seconds for everything between two doctors that have met. Healthy hosts need about ten."""
_GRACE_S = 10.0


class NoVisitError(RuntimeError):
    """There was no other doctor, and why."""


def serve(
    port: int,
    interface: str | None,
    wait: float,
    announce: Callable[[str], None],
    on_listening: Callable[[str, int], None],
) -> HostsReport:
    """Wait for another host's doctor, and look at the way between the two hosts with it.

    Whoever else connects is sent away, and the wait goes on.

    Args:
        port: To listen on; 0: any that is free.
        interface: Network interface to listen on and to move bytes by. None: all; UCX chooses.
        wait: Seconds to wait for the other one.
        announce: Called with a few words before each step.
        on_listening: Called with the address and the port.

    Raises:
        NoVisitError: The port is taken, the interface has no address, or nobody came in time.
    """
    address = _address_of(interface) if interface else "0.0.0.0"
    try:
        server = socket.create_server((address, port))
    except OSError as error:
        raise NoVisitError(
            f"port {port} can't be listened on ({error.strerror}): choose another by --port, 0 for "
            "any that is free"
        ) from None
    with server:
        on_listening(address, server.getsockname()[1])
        deadline = time.monotonic() + wait
        while (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, (peer, _) = server.accept()
            except TimeoutError:
                break
            with connection:
                try:
                    channel = _greet(connection, serves=True)
                except (EOFError, MetadataError, OSError, RemoteFailure) as error:
                    announce(f"sent {peer} away: {error}")
                    continue
                return _look(channel, interface, announce)
    raise NoVisitError(f"no other doctor came within {wait:g} s")


def connect(
    host: str, port: int, interface: str | None, announce: Callable[[str], None]
) -> HostsReport:
    """Look at the way to a host on which a doctor serves.

    Args:
        host: Its name or address.
        port: That the other doctor listens on.
        interface: Network interface to move bytes by. None: UCX chooses.
        announce: Called with a few words before each step.

    Raises:
        NoVisitError: There is no doctor, it has another secret, or the interface has no address.
    """
    source = (_address_of(interface), 0) if interface else None
    announce(f"connecting to {host}")
    try:
        connection = socket.create_connection((host, port), GREETING_TIMEOUT_S, source)
    except OSError as error:
        reason = error.strerror or str(error)
        raise NoVisitError(
            f"{host}:{port} can't be reached ({reason}): is `torch-nixl doctor serve` running "
            "there, and does a firewall let its port through?"
        ) from None
    with connection:
        try:
            channel = _greet(connection, serves=False)
        except (EOFError, MetadataError, OSError, RemoteFailure) as error:
            raise NoVisitError(f"no doctor at {host}:{port} for us: {error}") from None
        return _look(channel, interface, announce)


def _address_of(interface: str) -> str:
    addresses = ipv4_addresses(interface)
    if not addresses:
        raise NoVisitError(f"{interface} is no interface with an IPv4 address; see `ip address`")
    return addresses[0]


def _greet(connection: socket.socket, *, serves: bool) -> Channel:
    deadline = time.monotonic() + GREETING_TIMEOUT_S
    secret = os.environ.get("TORCH_NIXL_SECRET", "")
    return greet(connection, deadline, serves=serves, secret=secret)


def _notice_silence(connection: socket.socket) -> None:
    """Have the kernel end a connection whose other host is gone, as when a cable is cut."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 20_000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _look(channel: Channel, interface: str | None, announce: Callable[[str], None]) -> HostsReport:
    """Have a process move bytes over what was agreed, and report."""
    announce("moving bytes both ways")
    _notice_silence(channel.connection)
    agreed = Agreed(
        seconds=VISIT_TIMEOUT_S,
        key=None if channel.key is None else channel.key.hex(),
        serves=channel.serves,
        num_sent=channel.num_sent,
        num_received=channel.num_received,
    )
    heard: list[Visit] = []
    timeout = VISIT_TIMEOUT_S + _GRACE_S
    handle = channel.connection.fileno()
    ended = run_program(
        "torch_nixl.cli.doctor.hosts_worker",
        lambda line: heard.append(Visit.model_validate_json(line)),
        timeout,
        arguments=[str(handle)],
        descriptors=[handle],
        said=agreed.model_dump_json().encode(),
        environment={"UCX_NET_DEVICES": interface} if interface else None,
    )
    visit = heard[0] if heard else None
    if visit is None:
        failure = f"the process that was to move bytes ended ({ended.why(timeout)})"
    else:
        failure = visit.outgoing.failure or visit.incoming.failure or ""
    return HostsReport(
        can_move=not failure,
        visit=visit,
        failure=failure or None,
        expected_gb_per_s=expected_gb_per_s(visit) if visit is not None else None,
        findings=advise_hosts(visit, failure),
    )
