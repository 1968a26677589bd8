"""Each problem that the doctor knows comes with the line that mends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

import pytest

from torch_nixl.cli.doctor.advice import advise
from torch_nixl.cli.doctor.host import read_host
from torch_nixl.cli.doctor.report import (
    Backend,
    CmaTrial,
    Finding,
    Host,
    Interface,
    Path,
    RdmaDevice,
    UcxDevice,
)

HEALTHY = Host(
    interfaces=(
        Interface(name="eth0", up=True, loopback=False, mtu=1500, speed_gbit_per_s=None),
        Interface(name="lo", up=True, loopback=True, mtu=65536, speed_gbit_per_s=None),
    ),
    rdma_devices=(),
    shm_bytes=1 << 34,
    memlock_bytes=None,
    home="/root",
    home_readable=True,
    num_cores=8,
    load=0.0,
    uid=1000,
    cap_sys_ptrace=False,
    no_new_privs=False,
    seccomp_mode=0,
    yama_ptrace_scope=1,
)
CMA_WORKS = CmaTrial(works=True)
UCX_WORKS = Backend(name="UCX", works=True, seconds=0.1)
BY_CMA = Path(works=True, kind="cma", read_lane="cma/memory", write_lane="cma/memory")
BY_TCP = Path(works=True, kind="tcp", read_lane="tcp/lo", write_lane="tcp/lo")
ACTIVE_NIC = RdmaDevice(name="mlx5_0", port_states=("ACTIVE",))


def _advise(
    host: Host = HEALTHY,
    *,
    cma: CmaTrial = CMA_WORKS,
    backends: Sequence[Backend] = (UCX_WORKS,),
    devices: Sequence[UcxDevice] = (UcxDevice(transport="tcp", device="lo"),),
    path: Path = BY_CMA,
    nixl_failure: str | None = None,
    complaints: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    return advise(
        host=host,
        cma=cma,
        backends=backends,
        devices=devices,
        path=path,
        nixl_failure=nixl_failure,
        ucx_complaints=complaints,
        environment=environment or {},
    )


def _changed(**changes: object) -> Host:
    return HEALTHY.model_copy(update=changes)


def test_healthy_machine_has_no_findings() -> None:
    assert _advise() == ()


def test_missing_nixl_is_to_be_installed() -> None:
    failure = "NIXL can't be imported (No module named 'nixl')."
    broken = Path(works=False, failure=failure)
    [finding] = _advise(path=broken, nixl_failure=failure, backends=())
    assert finding.severity == "error"
    assert "pip install nixl" in finding.mend


def test_crashing_nixl_is_to_be_reinstalled() -> None:
    failure = "a process ended while importing NIXL (killed by SIGILL)"
    broken = Path(works=False, failure=failure)
    [finding] = _advise(path=broken, nixl_failure=failure, backends=())
    assert "SIGILL" in finding.problem
    assert "--force-reinstall" in finding.mend


def test_ucx_that_the_environment_breaks_names_the_variable() -> None:
    broken = Backend(name="UCX", works=False, detail="no such transport", seconds=0.1)
    environment = {"UCX_TLS": "bogus", "UCX_OTHER": "1"}
    [finding] = _advise(
        backends=[broken], path=Path(works=False, failure="x"), environment=environment
    )
    assert finding.severity == "error"
    assert finding.mend.startswith("unset UCX_TLS (now UCX_TLS=bogus)")


def test_pair_that_moves_nothing_is_an_error() -> None:
    [finding] = _advise(path=Path(works=False, failure="no answer within 45 s"))
    assert finding.severity == "error"
    assert "no answer within 45 s" in finding.problem


@pytest.mark.parametrize(
    ("error", "host", "mend"),
    [
        ("ENOSYS", HEALTHY, "CONFIG_CROSS_MEMORY_ATTACH"),
        ("EPERM", _changed(yama_ptrace_scope=2), "sysctl kernel.yama.ptrace_scope=1"),
        ("EPERM", _changed(yama_ptrace_scope=3), "until the next boot"),
        ("EPERM", _changed(yama_ptrace_scope=None, seccomp_mode=2), "--cap-add=SYS_PTRACE"),
        ("EPERM", HEALTHY, "same user"),
    ],
)
def test_denied_cma_is_a_warning_with_the_cause_mended(error: str, host: Host, mend: str) -> None:
    [finding] = _advise(host, cma=CmaTrial(works=False, error=error), path=BY_TCP)
    assert finding.severity == "warning"
    assert error in finding.problem
    assert mend in finding.mend


def test_tcp_where_cma_would_work_names_ucx_tls() -> None:
    [finding] = _advise(path=BY_TCP, environment={"UCX_TLS": "tcp,self"})
    assert finding.severity == "warning"
    assert "add cma to UCX_TLS" in finding.mend


def test_rdma_that_ucx_does_not_see_is_a_warning() -> None:
    [finding] = _advise(_changed(rdma_devices=(ACTIVE_NIC,)))
    assert "mlx5_0" in finding.problem
    assert "/dev/infiniband" in finding.mend


def test_rdma_that_ucx_uses_is_fine() -> None:
    used = UcxDevice(transport="rc_mlx5", device="mlx5_0:1")
    assert _advise(_changed(rdma_devices=(ACTIVE_NIC,)), devices=[used]) == ()


def test_rdma_port_that_is_down_is_a_warning() -> None:
    down = RdmaDevice(name="mlx5_0", port_states=("DOWN",))
    [finding] = _advise(_changed(rdma_devices=(down,)))
    assert "ibstat" in finding.mend


def test_pinning_limit_matters_only_with_rdma() -> None:
    assert _advise(_changed(memlock_bytes=65536)) == ()
    used = UcxDevice(transport="rc_mlx5", device="mlx5_0:1")
    host = _changed(memlock_bytes=65536, rdma_devices=(ACTIVE_NIC,))
    [finding] = _advise(host, devices=[used])
    assert "ulimit -l unlimited" in finding.mend


def test_unreadable_home_comes_first() -> None:
    findings = _advise(
        _changed(home="/nowhere", home_readable=False, shm_bytes=None), complaints=["odd"]
    )
    assert [finding.severity for finding in findings] == ["error", "note", "note"]
    assert "/nowhere" in findings[0].problem


def test_small_things_are_notes() -> None:
    host = _changed(shm_bytes=64 << 20, load=20.0, interfaces=HEALTHY.interfaces[1:])
    findings = _advise(host, complaints=["unused environment variable: UCX_TYPO"])
    assert {finding.severity for finding in findings} == {"note"}
    assert len(findings) == 4


def test_host_is_read_from_the_system(tmp_path: FilePath) -> None:
    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("sys/class/net/ib0/flags", "0x1003\n")
    write("sys/class/net/ib0/mtu", "4092\n")
    write("sys/class/net/ib0/speed", "400000\n")
    write("sys/class/net/lo/flags", "0x9\n")
    write("sys/class/net/down0/flags", "0x1002\n")
    write("sys/class/net/down0/speed", "-1\n")
    write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    write("sys/class/infiniband/mlx5_0/ports/2/state", "1: DOWN\n")
    write("proc/sys/kernel/yama/ptrace_scope", "2\n")
    write("proc/self/status", "CapEff:\t0000000000080000\nNoNewPrivs:\t1\nSeccomp:\t2\n")
    host = read_host(tmp_path)
    assert {item.name: item.up for item in host.interfaces} == {
        "down0": False,
        "ib0": True,
        "lo": True,
    }
    by_name = {item.name: item for item in host.interfaces}
    assert by_name["ib0"].speed_gbit_per_s == 400.0
    assert by_name["ib0"].mtu == 4092
    assert by_name["lo"].loopback
    assert by_name["down0"].speed_gbit_per_s is None
    assert host.rdma_devices == (RdmaDevice(name="mlx5_0", port_states=("ACTIVE", "DOWN")),)
    assert (host.yama_ptrace_scope, host.seccomp_mode) == (2, 2)
    assert host.cap_sys_ptrace
    assert host.no_new_privs
    assert host.shm_bytes is None


def test_host_of_an_empty_system_is_read(tmp_path: FilePath) -> None:
    host = read_host(tmp_path)
    assert host.interfaces == ()
    assert host.yama_ptrace_scope is None
    assert host.seccomp_mode is None
