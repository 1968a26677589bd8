"""Each problem that the doctor knows comes with the line that mends it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

import pytest

from torch_nixl.cli import doctor
from torch_nixl.cli.doctor.advice import advise
from torch_nixl.cli.doctor.report import (
    Backend,
    CmaTrial,
    Finding,
    GpuTrial,
    Host,
    Interface,
    Path,
    RdmaDevice,
    UcxDevice,
    UcxModule,
    Versions,
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
VERSIONS = Versions(
    torch_nixl="0.1.0",
    python="3.11",
    torch="2.13.0",
    torch_cuda="13.0",
    nixl="1.5.1",
    nixl_wheel="nixl-cu13 1.5.1",
    platform="Linux",
)
CMA_WORKS = CmaTrial(works=True)
UCX_WORKS = Backend(name="UCX", works=True, seconds=0.1)
BY_CMA = Path(works=True, kind="cma", read_lane="cma/memory", write_lane="cma/memory")
BY_TCP = Path(works=True, kind="tcp", read_lane="tcp/lo", write_lane="tcp/lo")
ACTIVE_NIC = RdmaDevice(name="mlx5_0", port_states=("ACTIVE",))


def get_advice(
    host: Host = HEALTHY,
    *,
    cma: CmaTrial = CMA_WORKS,
    backends: Sequence[Backend] = (UCX_WORKS,),
    devices: Sequence[UcxDevice] = (UcxDevice(transport="tcp", device="lo"),),
    modules: Sequence[UcxModule] = (),
    torch_gpus: GpuTrial | None = None,
    streams: Sequence[str] = (),
    versions: Versions = VERSIONS,
    path: Path = BY_CMA,
    host_failure: str | None = None,
    nixl_failure: str | None = None,
    complaints: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    return advise(
        host=host,
        cma=cma,
        backends=backends,
        devices=devices,
        modules=modules,
        torch_gpus=torch_gpus,
        streams=streams,
        versions=versions,
        path=path,
        host_failure=host_failure,
        nixl_failure=nixl_failure,
        ucx_complaints=complaints,
        environment=environment or {},
    )


def changed(**changes: object) -> Host:
    return HEALTHY.model_copy(update=changes)


def test_healthy_machine_has_no_findings() -> None:
    assert get_advice() == ()


def test_missing_nixl_is_to_be_installed() -> None:
    failure = "NIXL can't be imported (No module named 'nixl')."
    broken = Path(works=False, failure=failure)
    [finding] = get_advice(path=broken, nixl_failure=failure, backends=())
    assert finding.severity == "error"
    assert "pip install nixl" in finding.mend


def test_crashing_nixl_is_to_be_reinstalled() -> None:
    failure = "a process ended while importing NIXL (killed by SIGILL)"
    broken = Path(works=False, failure=failure)
    [finding] = get_advice(path=broken, nixl_failure=failure, backends=())
    assert "SIGILL" in finding.problem
    assert "--force-reinstall" in finding.mend


def test_ucx_that_the_environment_breaks_names_the_variable() -> None:
    broken = Backend(name="UCX", works=False, detail="no such transport", seconds=0.1)
    environment = {"UCX_TLS": "bogus", "UCX_OTHER": "1"}
    [finding] = get_advice(
        backends=[broken], path=Path(works=False, failure="x"), environment=environment
    )
    assert finding.severity == "error"
    assert finding.mend.startswith("unset UCX_TLS (now UCX_TLS=bogus)")


def test_pair_that_moves_nothing_is_an_error() -> None:
    [finding] = get_advice(path=Path(works=False, failure="no answer within 45 s"))
    assert finding.severity == "error"
    assert "no answer within 45 s" in finding.problem


@pytest.mark.parametrize(
    ("error", "host", "mend"),
    [
        ("ENOSYS", HEALTHY, "CONFIG_CROSS_MEMORY_ATTACH"),
        ("EPERM", changed(yama_ptrace_scope=2), "sysctl kernel.yama.ptrace_scope=1"),
        ("EPERM", changed(yama_ptrace_scope=3), "until the next boot"),
        ("EPERM", changed(yama_ptrace_scope=None, seccomp_mode=2), "--cap-add=SYS_PTRACE"),
        ("EPERM", changed(confined_by="docker-default (enforce)"), "allow ptrace in that profile"),
        ("EPERM", changed(in_user_namespace=True), "in one user namespace"),
        ("EPERM", HEALTHY, "same user"),
    ],
)
def test_denied_cma_is_a_warning_with_the_cause_mended(error: str, host: Host, mend: str) -> None:
    [finding] = get_advice(host, cma=CmaTrial(works=False, error=error), path=BY_TCP)
    assert finding.severity == "warning"
    assert error in finding.problem
    assert mend in finding.mend


def test_cause_of_a_denial_is_told_from_what_was_tried() -> None:
    # Yama stands in the way, too; but what forbids even one's own memory comes before it.
    host = changed(yama_ptrace_scope=2, seccomp_mode=2)
    filtered = CmaTrial(works=False, error="EPERM", own_error="EPERM", dumpable=True)
    [finding] = get_advice(host, cma=filtered, path=BY_TCP)
    assert "seccomp filter forbids the call" in finding.problem
    assert "--cap-add=SYS_PTRACE" in finding.mend
    protected = CmaTrial(works=False, error="EPERM", dumpable=False)
    [finding] = get_advice(cma=protected, path=BY_TCP)
    assert "it changed its user" in finding.problem
    assert "getcap" in finding.mend


def test_system_that_cannot_be_read_is_a_warning() -> None:
    [finding] = get_advice(host_failure="no answer within 10 s")
    assert (finding.name, finding.severity) == ("SYSTEM_UNREADABLE", "warning")
    assert "no answer within 10 s" in finding.problem


def test_tcp_where_cma_would_work_names_ucx_tls() -> None:
    [finding] = get_advice(path=BY_TCP, environment={"UCX_TLS": "tcp,self"})
    assert finding.severity == "warning"
    assert "add cma to UCX_TLS" in finding.mend


def test_rdma_that_ucx_does_not_see_is_a_warning() -> None:
    [finding] = get_advice(changed(rdma_devices=(ACTIVE_NIC,)))
    assert "mlx5_0" in finding.problem
    assert "/dev/infiniband" in finding.mend


def test_rdma_that_ucx_uses_is_fine() -> None:
    used = UcxDevice(transport="rc_mlx5", device="mlx5_0:1")
    assert get_advice(changed(rdma_devices=(ACTIVE_NIC,)), devices=[used]) == ()


def test_rdma_port_that_is_down_is_a_warning() -> None:
    down = RdmaDevice(name="mlx5_0", port_states=("DOWN",))
    [finding] = get_advice(changed(rdma_devices=(down,)))
    assert "ibstat" in finding.mend


def test_pinning_limit_matters_only_with_rdma() -> None:
    assert get_advice(changed(memlock_bytes=65536)) == ()
    used = UcxDevice(transport="rc_mlx5", device="mlx5_0:1")
    host = changed(memlock_bytes=65536, rdma_devices=(ACTIVE_NIC,))
    [finding] = get_advice(host, devices=[used])
    assert "ulimit -l unlimited" in finding.mend


def test_unreadable_home_comes_first() -> None:
    findings = get_advice(
        changed(home="/nowhere", home_readable=False, shm_bytes=None), complaints=["odd"]
    )
    assert [finding.severity for finding in findings] == ["error", "note", "note"]
    assert "/nowhere" in findings[0].problem


def test_small_things_are_notes() -> None:
    host = changed(shm_bytes=64 << 20, load=20.0, interfaces=HEALTHY.interfaces[1:])
    findings = get_advice(host, complaints=["unused environment variable: UCX_TYPO"])
    assert {finding.severity for finding in findings} == {"note"}
    assert len(findings) == 4


def test_reads_far_below_a_copys_speed_are_a_note_unless_cores_are_busy() -> None:
    def of(read: float, load: float = 0.0, path: Path = BY_CMA) -> list[str]:
        path = path.model_copy(update={"read_gb_per_s": read, "copy_gb_per_s": 10.0})
        return [finding.name for finding in get_advice(changed(load=load), path=path)]

    assert of(2.0) == ["BELOW_COPY_SPEED"]
    assert of(6.0) == []
    assert of(2.0, load=20.0) == ["CORES_BUSY"]
    assert "BELOW_COPY_SPEED" not in of(2.0, path=BY_TCP)


def test_each_finding_is_in_the_troubleshooting_guide() -> None:
    names: set[str] = set()
    for source in FilePath(doctor.__file__).parent.glob("*.py"):
        names.update(re.findall(r'\bname="([A-Z_]+)"', source.read_text()))
    assert len(names) > 30
    guide = FilePath(__file__).parents[2] / "docs/troubleshooting.md"
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", guide.read_text(), re.MULTILINE))
    assert names - documented == set()
