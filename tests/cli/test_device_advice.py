"""What the doctor says of GPUs, RDMA devices and network interfaces."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cli.test_advice import ACTIVE_NIC, HEALTHY, VERSIONS, changed, get_advice
from torch_nixl.cli.doctor.network_advice import to_nbytes
from torch_nixl.cli.doctor.report import (
    Across,
    Distance,
    Finding,
    Gpu,
    GpuTrial,
    Host,
    Interface,
    TorchGpu,
    UcxDevice,
    UcxModule,
)

GPU = Gpu(pci="0000:03:00.0", vendor="NVIDIA", driver="nvidia", numa_node=0)
WITH_GPU = changed(gpus=(GPU,))
SEEN = GpuTrial(devices=(TorchGpu(name="H200", pci=GPU.pci, memory_bytes=141 << 30),))
CUDA_LOADED = UcxModule(name="uct_cuda", present=True, loaded=True)
RDMA_USED = UcxDevice(transport="rc_mlx5", device="mlx5_0:1")


def _with_nic(across: Across, gpu_direct: bool = True) -> Host:
    line = Distance(gpu=GPU.pci, nic="mlx5_0", across=across)
    changes = {"gpus": (GPU,), "rdma_devices": (ACTIVE_NIC,), "distances": (line,)}
    return HEALTHY.model_copy(update={**changes, "gpu_direct": gpu_direct})


def _of_gpu(
    host: Host = WITH_GPU, environment: Mapping[str, str] | None = None
) -> tuple[Finding, ...]:
    return get_advice(
        host,
        torch_gpus=SEEN,
        modules=[CUDA_LOADED],
        devices=[RDMA_USED],
        environment=environment,
    )


def test_gpu_that_all_is_well_with_has_no_findings() -> None:
    assert _of_gpu() == ()
    assert _of_gpu(_with_nic("switch")) == ()


@pytest.mark.parametrize(("loaded", "expected"), [("nixl-cu12 1.5.1", True), ("nixl", False)])
def test_wheel_of_another_cuda_than_torchs_is_a_warning(loaded: str, expected: bool) -> None:
    findings = get_advice(versions=VERSIONS.model_copy(update={"nixl_wheel": loaded}))
    assert [finding.name for finding in findings] == ["CUDA_WHEEL_DIFFERS"] * expected
    if expected:
        assert "pip install nixl-cu13" in findings[0].mend


def test_torch_without_cuda_where_there_are_gpus_is_a_note() -> None:
    versions = VERSIONS.model_copy(update={"torch_cuda": None})
    [finding] = get_advice(WITH_GPU, versions=versions)
    assert (finding.name, finding.severity) == ("TORCH_WITHOUT_CUDA", "note")
    assert get_advice(versions=versions) == ()


def test_gpu_that_torch_cannot_use_is_a_warning_with_the_cause() -> None:
    [finding] = get_advice(WITH_GPU, torch_gpus=GpuTrial(failure="no answer within 30 s"))
    assert finding.name == "GPU_UNUSABLE"
    assert "no answer within 30 s" in finding.problem
    assert "--gpus all" in finding.mend


@pytest.mark.parametrize(
    ("present", "environment", "mend"),
    [
        (False, {}, "--force-reinstall"),
        (True, {}, "make that library visible"),
        (True, {"UCX_TLS": "tcp"}, "add cuda to UCX_TLS (now tcp)"),
    ],
)
def test_cuda_module_that_is_not_loaded_stages_through_the_host(
    present: bool, environment: dict[str, str], mend: str
) -> None:
    module = UcxModule(name="uct_cuda", present=present, loaded=False, detail="it needs libx")
    [finding] = get_advice(WITH_GPU, torch_gpus=SEEN, modules=[module], environment=environment)
    assert (finding.name, finding.severity) == ("HOST_STAGING", "warning")
    assert "it needs libx" in finding.problem
    assert mend in finding.mend
    # Without a GPU there is nothing to stage.
    assert get_advice(modules=[module]) == ()


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_a_warning_where_there_is_a_gpu(name: str) -> None:
    setting = {name: "max_split_size_mb:64, expandable_segments:True"}
    [finding] = _of_gpu(environment=setting)
    assert finding.name == "EXPANDABLE_SEGMENTS"
    assert _of_gpu(environment={name: "expandable_segments:False"}) == ()
    assert get_advice(environment=setting) == ()


def test_streams_that_cannot_wait_are_a_note() -> None:
    fine = "cuda:0: streams wait for transfers, by cuda.bindings"
    [finding] = get_advice(streams=[fine, "cuda:1: wait() blocks the host: no driver"])
    assert (finding.name, finding.severity) == ("STREAMS_BLOCK", "note")
    assert "cuda:1" in finding.problem


def test_gpu_far_from_every_card_is_a_note() -> None:
    [finding] = _of_gpu(_with_nic("system"))
    assert finding.name == "GPU_FAR_FROM_NIC"
    assert GPU.pci in finding.problem
    assert _of_gpu(_with_nic("unknown")) == ()


def test_missing_peer_memory_module_is_a_note() -> None:
    [finding] = _of_gpu(_with_nic("switch", gpu_direct=False))
    assert finding.name == "GPU_DIRECT_MISSING"
    assert "modprobe nvidia_peermem" in finding.mend


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("eth0", []),
        ("eth0,lo", []),
        ("all", []),
        ("eth*", []),
        ("^docker0,eth9", ["NET_DEVICE_UNKNOWN"]),
        ("eth9", ["NET_DEVICE_UNKNOWN"]),
        ("mlx5_0:1", []),
        ("mlx5_7:1", ["NET_DEVICE_UNKNOWN"]),
        ("eth1", ["NET_DEVICE_DOWN"]),
        ("lo", ["NET_DEVICE_LOOPBACK"]),
    ],
)
def test_choice_of_devices_is_compared_with_what_there_is(choice: str, names: list[str]) -> None:
    down = Interface(name="eth1", up=False, loopback=False, mtu=1500, speed_gbit_per_s=None)
    host = changed(interfaces=(*HEALTHY.interfaces, down), rdma_devices=(ACTIVE_NIC,))
    findings = get_advice(host, devices=[RDMA_USED], environment={"UCX_NET_DEVICES": choice})
    assert [finding.name for finding in findings] == names
    for finding in findings:
        assert choice in finding.problem


def test_bridge_that_ucx_may_choose_is_a_note() -> None:
    bridge = Interface(
        name="docker0", up=True, loopback=False, mtu=1500, speed_gbit_per_s=None, bridge=True
    )
    host = changed(interfaces=(*HEALTHY.interfaces, bridge))
    [finding] = get_advice(host)
    assert finding.name == "BRIDGE_UP"
    assert "UCX_NET_DEVICES=eth0" in finding.mend
    assert get_advice(host, environment={"UCX_NET_DEVICES": "^docker0"}) == ()


def test_small_packets_on_a_fast_link_are_a_note() -> None:
    fast = HEALTHY.interfaces[0].model_copy(update={"speed_gbit_per_s": 100.0})
    [finding] = get_advice(changed(interfaces=(fast,)))
    assert finding.name == "MTU_SMALL"
    assert "ip link set eth0 mtu 9000" in finding.mend
    large = fast.model_copy(update={"mtu": 9000})
    assert get_advice(changed(interfaces=(large,))) == ()


def test_settings_below_the_tuned_ones_are_named() -> None:
    [finding] = get_advice(environment={"UCX_TCP_RCVBUF": "128k"})
    assert finding.name == "TUNING_LOWERED"
    assert get_advice(environment={"UCX_TCP_RCVBUF": "8m"}) == ()
    assert get_advice(environment={"UCX_TCP_RCVBUF": "auto"}) == ()
    findings = get_advice(environment={"UCX_TCP_RX_SEG_SIZE": "8k"})
    assert [finding.name for finding in findings] == ["SEGMENTS_DIFFER", "TUNING_LOWERED"]


def test_sizes_are_read_as_ucx_reads_them() -> None:
    texts = {"4m": 4 << 20, "256K": 256 << 10, "1GB": 1 << 30, "17": 17, "auto": None, "": None}
    assert {text: to_nbytes(text) for text in texts} == texts
