"""What the doctors of two hosts say of the way between them."""

from __future__ import annotations

import pytest

from torch_nixl.cli.doctor.hosts_advice import advise_hosts, expected_gb_per_s
from torch_nixl.cli.doctor.hosts_report import HostEnd, Visit
from torch_nixl.cli.doctor.report import Interface, Path, RdmaDevice

ETH0 = Interface(
    name="eth0", up=True, loopback=False, mtu=1500, speed_gbit_per_s=10.0, addresses=("10.0.0.1",)
)
NIC = RdmaDevice(name="mlx5_0", port_states=("ACTIVE",), speeds_gbit_per_s=(400.0,))
END = HostEnd(
    hostname="a",
    torch_nixl="0.1.0",
    nixl="1.5.1",
    address="10.0.0.1",
    interface=ETH0,
    path_mtu=1500,
    interfaces=(ETH0,),
    rdma_devices=(),
    socket_buffer_bytes=4 << 20,
    settings=(),
)
BY_TCP = Path(
    works=True, kind="tcp", read_lane="tcp/eth0", write_lane="tcp/eth0", write_gb_per_s=1.1
)


def _end(**changes: object) -> HostEnd:
    return END.model_copy(update=changes)


def _visit(here: HostEnd = END, there: HostEnd = END, path: Path = BY_TCP) -> Visit:
    return Visit(here=here, there=there, outgoing=path, incoming=path)


def _names(visit: Visit | None, failure: str = "") -> list[str]:
    return [finding.name for finding in advise_hosts(visit, failure)]


def test_good_way_has_no_findings() -> None:
    assert _names(_visit()) == []
    assert expected_gb_per_s(_visit()) == 1.25


@pytest.mark.parametrize(
    ("there", "name"),
    [
        (_end(nixl="1.4.0"), "VERSIONS_DIFFER"),
        (_end(interface=ETH0.model_copy(update={"mtu": 9000}), path_mtu=9000), "MTU_DIFFERS"),
        (_end(path_mtu=1450), "PATH_MTU_SMALLER"),
        (_end(socket_buffer_bytes=212992), "SOCKET_BUFFERS_SMALL"),
        (_end(interface=ETH0.model_copy(update={"name": "eth1"})), "OTHER_INTERFACE"),
    ],
)
def test_difference_of_the_other_host_is_named(there: HostEnd, name: str) -> None:
    assert _names(_visit(there=there)) == [name]


def test_same_fault_of_both_is_said_once() -> None:
    small = _end(path_mtu=1400)
    assert _names(_visit(small, small)) == ["PATH_MTU_SMALLER"]


def test_writes_far_below_the_links_speed_are_a_warning_with_both_figures() -> None:
    slow = BY_TCP.model_copy(update={"write_gb_per_s": 0.25})
    [finding] = advise_hosts(_visit(path=slow), "")
    assert finding.name == "BELOW_LINK_SPEED"
    assert "0.25 GB/s, 20 % of the link's 1.25" in finding.problem


def test_speed_is_that_of_the_slower_link_and_of_what_ucx_chose() -> None:
    slower = _end(interfaces=(ETH0.model_copy(update={"speed_gbit_per_s": 1.0}),))
    assert expected_gb_per_s(_visit(there=slower)) == 0.125
    silent = _end(interfaces=(ETH0.model_copy(update={"speed_gbit_per_s": None}),))
    assert expected_gb_per_s(_visit(there=silent)) is None
    by_rdma = Path(works=True, kind="rdma", write_lane="rc_mlx5/mlx5_0:1")
    with_nic = _end(rdma_devices=(NIC,))
    assert expected_gb_per_s(_visit(with_nic, with_nic, by_rdma)) == 50.0
    for odd in ("rc_mlx5/mlx5_0:2", "rc_mlx5/mlx5_0:x", "rc_mlx5/mlx5_0", "cma/memory"):
        path = by_rdma.model_copy(update={"write_lane": odd})
        assert expected_gb_per_s(_visit(with_nic, with_nic, path)) is None
    both = BY_TCP.model_copy(update={"write_lane": "tcp/eth0 tcp/eth1"})
    second = ETH0.model_copy(update={"name": "eth1"})
    striped = _end(interfaces=(ETH0, second))
    assert expected_gb_per_s(_visit(striped, striped, both)) == 2.5


def test_tcp_between_hosts_with_rdma_is_a_warning() -> None:
    with_nic = _end(rdma_devices=(NIC,))
    assert _names(_visit(with_nic, with_nic)) == ["RDMA_UNUSED"]
    assert _names(_visit(with_nic, END)) == []


def test_failure_names_the_interface_to_try() -> None:
    broken = Path(works=False, failure="waited in vain")
    [finding] = advise_hosts(_visit(path=broken), "waited in vain")
    assert finding.severity == "error"
    assert "waited in vain" in finding.problem
    assert "--interface eth0" in finding.mend
    assert _names(None, "killed by SIGSEGV") == ["HOSTS_FAILED"]
    alone = Visit(here=END, outgoing=broken, incoming=broken)
    assert expected_gb_per_s(alone) is None
    assert _names(alone, "the other process ended") == ["HOSTS_FAILED"]
