"""What the doctor reads from /sys and /proc, from trees that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_nixl.cli.doctor.hardware import read_gpus
from torch_nixl.cli.doctor.host import ipv4_addresses, read_host, read_versions
from torch_nixl.cli.doctor.sysfs import pci_chain


class Tree:
    """Files below a root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / target)

    def pci(self, place: str, node: int, **files: str) -> None:
        """Add a PCI function at a place such as ``pci0000:00/0000:00:01.0/0000:01:00.0``."""
        folder = f"sys/devices/{place}"
        self.write(f"{folder}/numa_node", f"{node}\n")
        for name, text in files.items():
            # `class` is no name for an argument.
            self.write(f"{folder}/{name.rstrip('_')}", f"{text}\n")
        self.link(f"sys/bus/pci/devices/{place.rpartition('/')[2]}", folder)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_host_is_read_from_the_system(tree: Tree) -> None:
    tree.write("sys/class/net/ib0/flags", "0x1003\n")
    tree.write("sys/class/net/ib0/mtu", "4092\n")
    tree.write("sys/class/net/ib0/speed", "400000\n")
    tree.write("sys/class/net/lo/flags", "0x9\n")
    tree.write("sys/class/net/down0/flags", "0x1002\n")
    tree.write("sys/class/net/down0/speed", "-1\n")
    tree.write("sys/class/net/docker0/flags", "0x1003\n")
    tree.write("sys/class/net/docker0/bridge/bridge_id", "8000.0242\n")
    tree.write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    tree.write("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    tree.write("sys/class/infiniband/mlx5_0/ports/2/state", "1: DOWN\n")
    tree.write("sys/module/nvidia_peermem/version", "1\n")
    tree.write("proc/sys/net/core/rmem_max", "212992\n")
    tree.write("proc/sys/net/core/wmem_max", "4194304\n")
    tree.write("proc/sys/kernel/yama/ptrace_scope", "2\n")
    tree.write("proc/self/status", "CapEff:\t0000000000080000\nNoNewPrivs:\t1\nSeccomp:\t2\n")
    tree.write("proc/self/uid_map", "         0       1000          1\n")
    tree.write("proc/self/attr/current", "docker-default (enforce)\n")
    host = read_host(tree.root)
    by_name = {item.name: item for item in host.interfaces}
    assert {name: item.up for name, item in by_name.items()} == {
        "docker0": True,
        "down0": False,
        "ib0": True,
        "lo": True,
    }
    assert by_name["ib0"].speed_gbit_per_s == 400.0
    assert by_name["ib0"].mtu == 4092
    assert by_name["lo"].loopback
    assert by_name["down0"].speed_gbit_per_s is None
    assert [name for name, item in by_name.items() if item.bridge] == ["docker0"]
    [device] = host.rdma_devices
    assert device.port_states == ("ACTIVE", "DOWN")
    assert device.speeds_gbit_per_s == (400.0, None)
    assert (host.yama_ptrace_scope, host.seccomp_mode) == (2, 2)
    assert host.cap_sys_ptrace
    assert host.no_new_privs
    assert host.shm_bytes is None
    assert host.socket_buffer_bytes == 212992
    assert host.in_user_namespace
    assert host.confined_by == "docker-default (enforce)"
    assert host.gpu_direct


@pytest.mark.parametrize("label", ["unconfined\n", "kernel\0", "u:r:unconfined_t:s0\n", ""])
def test_free_process_is_not_confined(tree: Tree, label: str) -> None:
    tree.write("proc/self/attr/current", label)
    tree.write("proc/self/uid_map", "         0          0 4294967295\n")
    host = read_host(tree.root)
    assert host.confined_by is None
    assert not host.in_user_namespace


def test_host_of_an_empty_system_is_read(tree: Tree) -> None:
    host = read_host(tree.root)
    assert not host.interfaces
    assert not host.rdma_devices
    assert not host.gpus
    assert not host.distances
    assert host.yama_ptrace_scope is None
    assert host.seccomp_mode is None
    assert host.socket_buffer_bytes is None


def test_distance_is_what_gpu_and_card_share(tree: Tree) -> None:
    near = "pci0000:00/0000:00:01.0/0000:01:00.0"
    tree.pci(f"{near}/0000:02:00.0/0000:03:00.0", 0, vendor="0x10de", class_="0x030200")
    tree.pci(f"{near}/0000:02:01.0/0000:04:00.0", 0, vendor="0x15b3", class_="0x020000")
    tree.pci("pci0000:00/0000:00:02.0/0000:05:00.0", 0, vendor="0x8086", class_="0x020000")
    tree.pci("pci0000:20/0000:20:01.0/0000:21:00.0", 0, vendor="0x8086", class_="0x020000")
    tree.pci("pci0000:80/0000:80:01.0/0000:81:00.0", 1, vendor="0x15b3", class_="0x020700")
    tree.pci("pci0000:90/0000:90:01.0/0000:91:00.0", -1, vendor="0x8086", class_="0x020000")
    for name, place in {
        "switched": f"{near}/0000:02:01.0/0000:04:00.0",
        "bridged": "pci0000:00/0000:00:02.0/0000:05:00.0",
        "numa": "pci0000:20/0000:20:01.0/0000:21:00.0",
        "placeless": "pci0000:90/0000:90:01.0/0000:91:00.0",
    }.items():
        tree.write(f"sys/class/net/{name}/flags", "0x1003\n")
        tree.link(f"sys/class/net/{name}/device", f"sys/devices/{place}")
    tree.write("sys/class/net/lo/flags", "0x9\n")
    tree.write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    tree.link(
        "sys/class/infiniband/mlx5_0/device",
        "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0",
    )
    host = read_host(tree.root)
    assert [gpu.pci for gpu in host.gpus] == ["0000:03:00.0"]
    assert {line.nic: line.across for line in host.distances} == {
        "switched": "switch",
        "bridged": "host bridge",
        "numa": "NUMA node",
        "mlx5_0": "system",
        "placeless": "unknown",
    }
    assert host.rdma_devices[0].numa_node == 1


def test_device_on_a_bus_of_its_own_hangs_on_the_pci_function_above(tree: Tree) -> None:
    tree.pci("pci0000:00/0000:00:03.0", 0, vendor="0x1af4", class_="0x020000")
    tree.write("sys/devices/pci0000:00/0000:00:03.0/virtio2/uevent")
    tree.write("sys/class/net/eth0/flags", "0x1003\n")
    tree.link("sys/class/net/eth0/device", "sys/devices/pci0000:00/0000:00:03.0/virtio2")
    [interface] = read_host(tree.root).interfaces
    assert interface.pci == "0000:00:03.0"
    assert interface.numa_node == 0
    assert pci_chain(tree.root / "sys/class/net/eth0/none") == ()


def test_gpus_are_told_from_other_devices(tree: Tree) -> None:
    root = "pci0000:00"
    tree.pci(f"{root}/0000:00:01.0", 0, vendor="0x10de", class_="0x030000")
    tree.pci(f"{root}/0000:00:02.0", 0, vendor="0x10de", class_="0x068000")  # an NVSwitch
    tree.pci(f"{root}/0000:00:03.0", 0, vendor="0x1002", class_="0x120000")
    tree.pci(f"{root}/0000:00:04.0", 0, vendor="0x8086", class_="0x030000")  # a screen's
    tree.pci(f"{root}/0000:00:05.0", 0, vendor="0x1af4", class_="0x038000")
    tree.write("sys/bus/pci/drivers/nvidia/uevent")
    tree.link(f"sys/devices/{root}/0000:00:01.0/driver", "sys/bus/pci/drivers/nvidia")
    gpus = read_gpus(tree.root)
    assert [(gpu.pci, gpu.vendor, gpu.driver) for gpu in gpus] == [
        ("0000:00:01.0", "NVIDIA", "nvidia"),
        ("0000:00:03.0", "AMD", None),
    ]


def test_addresses_are_those_of_the_interface() -> None:
    assert ipv4_addresses("lo") == ("127.0.0.1",)
    assert ipv4_addresses("no-such-interface-and-a-long-name") == ()


def test_torchs_cuda_is_known_without_importing_it(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.write("torch/__init__.py", "raise ImportError('not to be imported')\n")
    tree.write("torch/version.py", "from typing import Optional\ncuda: Optional[str] = '12.8'\n")
    monkeypatch.syspath_prepend(tree.root)
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    assert read_versions().torch_cuda == "12.8"
    tree.write("torch/version.py", "cuda: Optional[str] = None\ncuda_archs = '12.8'\n")
    assert read_versions().torch_cuda is None
