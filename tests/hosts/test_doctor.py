"""`torch-nixl doctor serve` and `connect` on two hosts."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from hosts.network import Network, network, run
from torch_nixl.cli.doctor.hosts_report import HostsReport

_DEADLINE_S = 90.0

pytestmark = pytest.mark.hosts


def _doctor(net: Network, host: int, output: Path, *arguments: str, **settings: str) -> None:
    # As in `Network.torchrun`: namespaces of one kernel would use Cross Memory Attach.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "UCX_TLS": "tcp,self",
        **settings,
    }
    command = [sys.executable, "-m", "torch_nixl.cli.main", "doctor", *arguments]
    net.start(host, command, output, environment)


def _await_text(path: Path, text: str) -> str:
    deadline = time.monotonic() + _DEADLINE_S
    while text not in (found := path.read_text()):
        assert time.monotonic() < deadline, f"{path.name}: no {text!r} in {found[-3000:]}"
        time.sleep(0.02)
    return found


def _report(path: Path) -> HostsReport:
    """Return the document, with which the output ends."""
    text = _await_text(path, "\n}\n")
    start = text.index("{\n")
    json.loads(text[start:])
    return HostsReport.model_validate_json(text[start:])


def _visit(net: Network, folder: Path, *, cut_off: bool = False) -> tuple[HostsReport, HostsReport]:
    served, connected = folder / "serve", folder / "connect"
    _doctor(net, 0, served, "serve", "--json")
    _await_text(served, "listening on")
    settings = {"UCX_NET_DEVICES": "aside"} if cut_off else {}
    _doctor(net, 1, connected, "connect", "10.77.1.1:29470", "--json", **settings)
    return _report(served), _report(connected)


def test_way_between_two_hosts_is_described_and_measured(tmp_path: Path) -> None:
    with network(2) as net:
        net.link(0, 1, "front", 1)
        # A smaller packet on one side is one of the things to find.
        run("ip", "-n", net.names[1], "link", "set", "front", "mtu", "1400")
        served, connected = _visit(net, tmp_path)
    for report in (served, connected):
        assert report.can_move, report.failure
        assert report.visit is not None
        assert report.visit.here.interface is not None
        assert report.visit.here.interface.name == "front"
        assert report.visit.outgoing.kind == "tcp"
        assert report.visit.outgoing.write_lane == "tcp/front"
        assert report.visit.outgoing.write_gb_per_s
        assert report.visit.outgoing.read_gb_per_s
        # The driver of such links says 10 Gbit/s.
        assert report.expected_gb_per_s == 1.25
        assert "MTU_DIFFERS" in {finding.name for finding in report.findings}
    assert connected.visit is not None
    assert connected.visit.here.address == "10.77.1.2"


def test_interface_that_leads_elsewhere_is_found_and_the_right_one_named(tmp_path: Path) -> None:
    with network(3) as net:
        net.link(0, 1, "front", 1)
        net.link(1, 2, "aside", 2)
        served, connected = _visit(net, tmp_path, cut_off=True)
    for report in (served, connected):
        assert not report.can_move
        [finding] = [item for item in report.findings if item.severity == "error"]
        assert finding.name == "HOSTS_FAILED"
        assert "--interface front" in finding.mend


@pytest.mark.soak
def test_link_that_is_cut_in_mid_visit_ends_both_doctors_in_half_a_minute(tmp_path: Path) -> None:
    with network(2) as net:
        link = net.link(0, 1, "front", 1)
        served, connected = tmp_path / "serve", tmp_path / "connect"
        _doctor(net, 0, served, "serve", "--json")
        _await_text(served, "listening on")
        _doctor(net, 1, connected, "connect", "10.77.1.1:29470", "--json")
        _await_text(served, "moving bytes")
        link.cut()
        started = time.monotonic()
        for output in (served, connected):
            report = _report(output)
            assert not report.can_move
            assert [finding.name for finding in report.findings] == ["HOSTS_FAILED"]
        assert time.monotonic() - started < 40
