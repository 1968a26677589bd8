"""`torch-nixl doctor serve` and `connect`, both on this host, and whoever else comes along."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from torch_nixl.cli.doctor import hosts
from torch_nixl.cli.doctor.hosts_render import render_hosts
from torch_nixl.cli.doctor.hosts_report import HostsReport

_DEADLINE_S = 90


def _start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("UCX_")}
    return subprocess.Popen(
        [sys.executable, "-m", "torch_nixl.cli.main", "doctor", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean | environment,
    )


@contextlib.contextmanager
def _serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A doctor that serves, and its port."""
    with _start("serve", "--port=0", "--interface=lo", *arguments, **environment) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"listening on 127\.0\.0\.1:(\d+)", process.stderr.readline())
            assert found is not None
            yield process, int(found[1])
        finally:
            process.kill()


def _finish(process: subprocess.Popen[str]) -> tuple[str, str, int]:
    try:
        stdout, stderr = process.communicate(timeout=_DEADLINE_S)
    finally:
        process.kill()
    return stdout, stderr, process.returncode


def _worker_of(process: subprocess.Popen[str]) -> int:
    """Wait for the process that moves the bytes, and return its id."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        for child in children.read_text().split():
            with contextlib.suppress(OSError):
                if "hosts_worker" in Path(f"/proc/{child}/cmdline").read_text():
                    return int(child)
        time.sleep(0.005)
    raise AssertionError("no worker was started")


def test_bytes_move_both_ways_and_both_reports_agree() -> None:
    settings = {"UCX_TLS": "tcp,self", "TORCH_NIXL_SECRET": "a secret"}
    with _serving("--json", **settings) as (server, port):
        # What is none of ours is sent away, and the wait goes on.
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            stranger.settimeout(_DEADLINE_S)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1000):
                    pass
        client = _start("connect", f"127.0.0.1:{port}", "--json", **settings)
        ours, errors, status = _finish(client)
        theirs, remarks, other_status = _finish(server)
    assert (status, other_status) == (0, 0), (errors, remarks)
    assert "sent 127.0.0.1 away" in remarks
    assert "TORCH_NIXL_SECRET is not set" not in remarks
    connected = HostsReport.model_validate_json(ours)
    served = HostsReport.model_validate_json(theirs)
    assert connected.can_move
    assert served.can_move
    assert connected.visit is not None
    assert served.visit is not None
    assert connected.visit.outgoing == served.visit.incoming
    assert connected.visit.incoming == served.visit.outgoing
    assert connected.visit.here == served.visit.there
    for path in (connected.visit.outgoing, connected.visit.incoming):
        assert path.works
        assert path.kind == "tcp"
        assert "tcp/lo" in (path.write_lane or "")
        assert path.read_gb_per_s is not None
        assert path.read_gb_per_s > 0
        assert path.write_gb_per_s is not None
        assert path.write_gb_per_s > 0
    interface = served.visit.here.interface
    assert interface is not None
    assert (interface.name, interface.mtu) == ("lo", 65536)
    # The one that served was told which to use, and the other one let UCX choose.
    chosen = {setting.name: setting.value for setting in served.visit.here.settings}
    assert chosen == {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,self"}
    _check_text(connected)


def _check_text(report: HostsReport) -> None:
    """What a person sees holds the figures, and nothing that moves a terminal's cursor."""
    assert report.visit is not None
    assert report.visit.there is not None
    odd = report.visit.there.model_copy(update={"hostname": "\x1b[2J[bold]evil"})
    visit = report.visit.model_copy(update={"there": odd})
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115 - as long as the console lives
    with console.file:
        render_hosts(report.model_copy(update={"visit": visit}), console)
    text = console.export_text()
    assert "Tensors can move between these hosts" in text
    assert f"{report.visit.outgoing.write_gb_per_s or 0:.2f} GB/s over tcp/" in text
    assert "[bold]evil" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("secret", ["another secret", ""])
def test_other_secret_is_refused_in_one_sentence_and_the_wait_goes_on(secret: str) -> None:
    with _serving(TORCH_NIXL_SECRET="a secret") as (server, port):
        client = _start("connect", f"127.0.0.1:{port}", TORCH_NIXL_SECRET=secret)
        stdout, stderr, status = _finish(client)
        assert server.poll() is None
    assert status == 1
    assert stdout == ""
    assert "TORCH_NIXL_SECRET" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("who", ["worker", "doctor"])
def test_killed_end_is_a_finding_of_the_other(who: str) -> None:
    with _serving() as (server, port):
        client = _start("connect", f"127.0.0.1:{port}", "--json")
        worker = _worker_of(server)
        os.kill(worker if who == "worker" else server.pid, signal.SIGKILL)
        started = time.monotonic()
        stdout, stderr, status = _finish(client)
        assert time.monotonic() - started < 40
        if who == "worker":
            text, _, server_status = _finish(server)
            assert server_status == 1
            assert "killed by SIGKILL" in text
    assert status == 1, stderr
    report = HostsReport.model_validate_json(stdout)
    assert not report.can_move
    assert [finding.name for finding in report.findings] == ["HOSTS_FAILED"]
    # The worker does not outlive its doctor.
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stopped_end_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "VISIT_TIMEOUT_S", 4.0)
    monkeypatch.setattr(hosts, "_GRACE_S", 4.0)
    stopped: list[int] = []
    with _serving() as (server, port):

        def stop(step: str) -> None:
            if step.startswith("moving"):
                stopped.append(_worker_of(server))
                os.kill(stopped[0], signal.SIGSTOP)

        started = time.monotonic()
        report = hosts.connect("127.0.0.1", port, None, stop)
        assert time.monotonic() - started < 20
        os.kill(stopped[0], signal.SIGKILL)
    assert not report.can_move
    assert report.failure


def test_peer_without_nixl_tells_the_other_end(tmp_path: Path) -> None:
    (tmp_path / "nixl.py").write_text("raise ImportError('no wheel fits')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with _serving(PYTHONPATH=path) as (server, port):
        report = hosts.connect("127.0.0.1", port, "lo", lambda _: None)
        text, _, status = _finish(server)
    assert status == 1
    assert "no wheel fits" in text
    assert "the other host says: NIXL can't be imported (no wheel fits)" in (report.failure or "")


def test_nobody_there_and_nobody_comes_end_in_a_sentence(free_port: int) -> None:
    with pytest.raises(hosts.NoVisitError, match="can't be reached"):
        hosts.connect("127.0.0.1", free_port, None, lambda _: None)
    with pytest.raises(hosts.NoVisitError, match="no interface with an IPv4 address"):
        hosts.connect("127.0.0.1", free_port, "eth77", lambda _: None)
    heard: list[tuple[str, int]] = []
    with pytest.raises(hosts.NoVisitError, match="came within"):
        hosts.serve(0, "lo", 0.05, lambda _: None, lambda *where: heard.append(where))
    assert heard[0][0] == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(hosts.NoVisitError, match="can't be listened on"):
            hosts.serve(port, "lo", 1.0, lambda _: None, lambda *_: None)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("peer", ["host:", ":1", "host:70000", "host:-1", "host:x"])
def test_address_that_is_none_is_refused(peer: str) -> None:
    _, stderr, status = _finish(_start("connect", peer))
    assert status == 2
    assert "HOST:PORT" in stderr
