"""Hosts on one machine: network namespaces joined by veth, each with processes of its own.

A host has a pid namespace, too: without it the ranks would see that they are on one machine, and
learn of a death from /proc rather than from the network.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = {"ip": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}
PREFIX = "tnx"

_numbers = itertools.count()


def run(*command: str) -> str:
    """Run a command that takes a moment; return what it printed.

    Raises:
        RuntimeError: It failed. Says how.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    missing = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if missing:
        return f"needs Debian's {' and '.join(sorted(missing))}"
    try:
        with network(2) as net:
            net.link(0, 1, "try", 0)
            run(*net.command(0), "true")
    except RuntimeError as error:
        return f"the kernel refuses: {error}"
    return ""


@dataclass(slots=True)
class Link:
    """A cable: the interface has one name, and one /24, on both hosts."""

    net: Network
    hosts: tuple[int, int]
    name: str

    def cut(self) -> None:
        """Take one end down: nothing passes, and neither side is told."""
        run("ip", "-n", self.net.names[self.hosts[1]], "link", "set", self.name, "down")

    def restore(self) -> None:
        run("ip", "-n", self.net.names[self.hosts[1]], "link", "set", self.name, "up")


class Network:
    """Some hosts, and what runs on them."""

    def __init__(self, num_hosts: int) -> None:
        number = next(_numbers)
        self.names = [f"{PREFIX}-{os.getpid()}-{number}-{host}" for host in range(num_hosts)]
        self._others: list[str] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def link(self, first: int, second: int, name: str, subnet: int) -> Link:
        """Join two hosts; host number h has the address 10.77.<subnet>.<h + 1>."""
        theirs = self.names[second]
        self._join(first, theirs, name, name, f"10.77.{subnet}.{first + 1}/24")
        address = f"10.77.{subnet}.{second + 1}/24"
        run("ip", "-n", theirs, "address", "add", address, "dev", name)
        return Link(self, (first, second), name)

    def switch(self, name: str, subnet: int) -> None:
        """Join all hosts by one network, a bridge in a namespace of its own."""
        middle = f"{self.names[0]}-switch"
        run("ip", "netns", "add", middle)
        self._others.append(middle)
        run("ip", "-n", middle, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", middle, "link", "set", "bridge", "up")
        for host in range(len(self.names)):
            port = f"port{host}"
            self._join(host, middle, name, port, f"10.77.{subnet}.{host + 1}/24")
            run("ip", "-n", middle, "link", "set", port, "master", "bridge")

    def trap(self, host: int, nowhere: int, name: str) -> None:
        """Give a host a bridge like Docker's: up, and at an address that every host has."""
        ours = self.names[host]
        run("ip", "-n", ours, "link", "add", name, "type", "bridge")
        self._join(host, self.names[nowhere], "container", f"container-{host}", "172.17.0.2/16")
        run("ip", "-n", ours, "link", "set", "container", "master", name)
        run("ip", "-n", ours, "address", "flush", "dev", "container")
        run("ip", "-n", ours, "address", "add", "172.17.0.1/16", "dev", name)
        run("ip", "-n", ours, "link", "set", name, "up")

    def double(self, host: int, nowhere: int, name: str) -> None:
        """Give a host an interface at an address that other hosts have, too."""
        self._join(host, self.names[nowhere], name, f"{name}-{host}", "192.168.9.1/24")

    def island(self, host: int, nowhere: int, name: str) -> None:
        """Give a host an interface from which others of its subnet can't be reached."""
        self._join(host, self.names[nowhere], name, f"{name}-{host}", f"192.168.9.{host + 1}/24")

    def _join(self, host: int, peer: str, name: str, far_name: str, address: str) -> None:
        ours = self.names[host]
        far = ("type", "veth", "peer", "name", far_name, "netns", peer)
        run("ip", "link", "add", name, "netns", ours, *far)
        run("ip", "-n", ours, "address", "add", address, "dev", name)
        run("ip", "-n", ours, "link", "set", name, "up")
        run("ip", "-n", peer, "link", "set", far_name, "up")

    def command(self, host: int) -> list[str]:
        """What runs the command that follows on a host, until it or this process ends."""
        inside = ["ip", "netns", "exec", self.names[host]]
        return [
            *inside,
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
        ]

    def torchrun(
        self,
        program: Path,
        *args: str,
        directory: Path,
        num_hosts: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start one rank on each of the first so many hosts; they meet on subnet 1."""
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            # Namespaces of one kernel would use Cross Memory Attach, which hosts can't.
            "UCX_TLS": "tcp,self",
            **(env or {}),
        }
        for host in range(num_hosts):
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={num_hosts}", "--nproc-per-node=1", f"--node-rank={host}"),
                *("--master-addr=10.77.1.1", "--master-port=29400"),
            ]
            command = [*torchrun, str(program), *args, str(directory)]
            self.start(host, command, directory / f"{host}.output", variables)

    def start(
        self, host: int, command: Sequence[str], output: Path, env: Mapping[str, str] | None = None
    ) -> int:
        """Start what a host runs; return its process id as this host sees it."""
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*self.command(host), *command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._processes[host] = process
        return process.pid

    def kill(self, host: int) -> None:
        """End all processes of a host at once, as kill -9 does."""
        process = self._processes.pop(host, None)
        if process is not None:
            process.kill()
            process.wait()

    def sent_nbytes(self, host: int, name: str) -> int:
        """Bytes that have left a host by an interface."""
        path = f"/sys/class/net/{name}/statistics/tx_bytes"
        return int(run("ip", "netns", "exec", self.names[host], "cat", path))

    def open(self) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        """Remove everything. Links go with their namespaces."""
        for host in list(self._processes):
            self.kill(host)
        for name in (*self.names, *self._others):
            with contextlib.suppress(RuntimeError):  # Not made, if making it was what failed.
                run("ip", "netns", "delete", name)


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """Some hosts without links; removed at the end, whatever happened."""
    _sweep()
    net = Network(num_hosts)
    try:
        net.open()
        yield net
    finally:
        net.close()


def _sweep() -> None:
    """Remove what test runs that were killed have left."""
    for line in run("ip", "netns", "list").splitlines():
        found = re.match(rf"({PREFIX}-(\d+)-\d+-\d+(-switch)?)\b", line)
        if found and not Path(f"/proc/{found[2]}").exists():
            with contextlib.suppress(RuntimeError):  # Another run sweeps, too.
                run("ip", "netns", "delete", found[1])


def await_files(net: Network, directory: Path, names: Sequence[str], seconds: float) -> None:
    """Wait until the ranks have made all of these files.

    Raises:
        AssertionError: They haven't in time, or a rank has failed. Says what ranks printed.
    """
    deadline = time.monotonic() + seconds
    while not all((directory / name).exists() for name in names):
        failed = sorted(path.name for path in directory.glob("*.failed"))
        if failed or time.monotonic() > deadline:
            texts = sorted((*directory.glob("*.failed"), *directory.glob("*.output")))
            told = "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in texts)
            raise AssertionError(f"{list(names)} not there after {seconds} s\n{told}")
        time.sleep(0.02)
