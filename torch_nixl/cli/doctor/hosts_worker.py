"""Moves bytes to and from another host, in a process of its own.

`python -m torch_nixl.cli.doctor.hosts_worker FD PARENT SOCKET`

Finds on stdin what its parent agreed with the other host's doctor, and writes one line of JSON, a
`Visit`, to FD. What kills or hangs it is for its parent to notice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import tempfile
import time
from pathlib import Path as FilePath

from pydantic import BaseModel, ConfigDict

from torch_nixl import __version__
from torch_nixl.cli.doctor.channel import Channel, RemoteFailure
from torch_nixl.cli.doctor.hardware import read_interfaces, read_rdma_devices
from torch_nixl.cli.doctor.host import installed_version, ipv4_addresses, socket_buffer_bytes
from torch_nixl.cli.doctor.hosts_report import HostEnd, Visit
from torch_nixl.cli.doctor.programs import die_with_parent
from torch_nixl.cli.doctor.report import Path, Setting

_IP_MTU = 14


class Agreed(BaseModel):
    """The state of the channel, and how long there is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    key: str | None
    """In hexadecimal digits."""
    serves: bool
    num_sent: int
    num_received: int


def main(descriptor: int, handle: int) -> None:
    """Be one of the two ends, and report on `descriptor`."""
    agreed = Agreed.model_validate_json(sys.stdin.read())
    root = FilePath("/")
    with socket.socket(fileno=handle) as connection:
        channel = Channel(
            connection,
            time.monotonic() + agreed.seconds,
            None if agreed.key is None else bytes.fromhex(agreed.key),
            agreed.serves,
            agreed.num_sent,
            agreed.num_received,
        )
        visit = _visit(channel, _describe_host(connection, root))
    os.write(descriptor, visit.model_dump_json().encode() + b"\n")


def _describe_host(connection: socket.socket, root: FilePath) -> HostEnd:
    address = connection.getsockname()[0]
    interfaces = read_interfaces(root, ipv4_addresses)
    try:
        path_mtu = connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        path_mtu = None
    return HostEnd(
        hostname=socket.gethostname(),
        torch_nixl=__version__,
        nixl=installed_version("nixl"),
        address=address,
        interface=next((item for item in interfaces if address in item.addresses), None),
        path_mtu=path_mtu,
        interfaces=interfaces,
        rdma_devices=read_rdma_devices(root),
        socket_buffer_bytes=socket_buffer_bytes(root),
        settings=tuple(
            Setting(name=name, value=os.environ[name], source="user")
            for name in ("UCX_NET_DEVICES", "UCX_TLS")
            if name in os.environ
        ),
    )


def _visit(channel: Channel, here: HostEnd) -> Visit:
    there = None
    try:
        channel.send(here.model_dump_json().encode())
        there = HostEnd.model_validate_json(channel.receive())
        outgoing, incoming = _exchange(channel)
    except RemoteFailure as error:
        failure = f"the other host says: {error}"
    except (EOFError, OSError, RuntimeError, ValueError) as error:
        # What pydantic refuses, it explains at length.
        failure = next(iter(str(error).splitlines()), type(error).__name__)
        with contextlib.suppress(OSError):
            channel.send_failure(failure)
    else:
        return Visit(here=here, there=there, outgoing=outgoing, incoming=incoming)
    broken = Path(works=False, failure=failure)
    return Visit(here=here, there=there, outgoing=broken, incoming=broken)


def _exchange(channel: Channel) -> tuple[Path, Path]:
    """Return the paths as measured here and there."""
    # Only now: that NIXL is missing is something to tell the other host.
    from torch_nixl.cli.doctor.exchange import initiate, meet, serve
    from torch_nixl.cli.doctor.pair import SPOKEN, describe

    with tempfile.NamedTemporaryFile(suffix=".ucx.log") as log:
        os.environ.update(SPOKEN, UCX_LOG_FILE=log.name)
        end = meet(channel)
        try:
            if channel.serves:
                serve(end)
                measured = initiate(end)
            else:
                measured = initiate(end)
                serve(end)
            # UCX writes its log through C's buffers.
            ctypes.CDLL(None).fflush(None)
            ours = describe(FilePath(log.name).read_text(errors="replace"), measured)
            channel.send(ours.model_dump_json().encode())
            return ours, Path.model_validate_json(channel.receive())
        finally:
            end.adapter.close()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    main(int(sys.argv[1]), int(sys.argv[3]))
