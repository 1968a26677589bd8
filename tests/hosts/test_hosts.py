"""Ranks on several hosts, over TCP. Hosts are network namespaces: see `network`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hosts.network import Network, await_files, network, run

PROGRAM = Path(__file__).with_name("program.py")
START_SECONDS = 60.0

pytestmark = pytest.mark.hosts


def results(net: Network, directory: Path, ranks: list[int], seconds: float) -> list[Any]:
    names = [f"{rank}.json" for rank in ranks]
    await_files(net, directory, names, seconds)
    return [json.loads((directory / name).read_text()) for name in names]


def test_a_failure_leaves_neither_hosts_nor_processes(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), network(2) as net:
        net.link(0, 1, "front", 1)
        command = ["sh", "-c", "echo there; sleep 600 & wait"]
        pid = net.start(0, command, tmp_path / "output")
        while not (tmp_path / "output").read_text():
            assert Path(f"/proc/{pid}").exists()
        raise ZeroDivisionError
    assert not Path(f"/proc/{pid}").exists()
    left = run("ip", "netns", "list")
    assert not any(name in left for name in net.names)


def test_link_that_is_cut_in_mid_transfer_ends_calls_and_works_again_later(
    tmp_path: Path,
) -> None:
    with network(2) as net:
        link = net.link(0, 1, "front", 1)
        net.torchrun(PROGRAM, "cut", directory=tmp_path, num_hosts=2)
        await_files(net, tmp_path, ["0.flowing", "1.flowing"], START_SECONDS)
        link.cut()
        await_files(net, tmp_path, ["0.ended", "1.ended"], 40)
        link.restore()
        (tmp_path / "restored").touch()
        for result in results(net, tmp_path, [0, 1], 40):
            for routes in (result["routes"], result["again"]):
                assert routes == {
                    "small": "eager",
                    "a MiB": "write network",
                    "64 MiB": "write network",
                }
            name, _, seconds = result["error"]
            assert name in ("TransferTimeout", "PeerLostError")
            assert seconds < 6
            assert result["closing"] < 8


@pytest.mark.parametrize("victim", [0, 1], ids=["host of the store", "other host"])
def test_killed_host_is_noticed_by_all_who_wait(tmp_path: Path, victim: int) -> None:
    with network(2) as net:
        net.link(0, 1, "front", 1)
        (tmp_path / "victim").write_text(str(victim))
        net.torchrun(PROGRAM, "killed", directory=tmp_path, num_hosts=2)
        await_files(net, tmp_path, ["0.flowing", "1.flowing"], START_SECONDS)
        net.kill(victim)
        (tmp_path / "killed").touch()
        (result,) = results(net, tmp_path, [1 - victim], 40)
        assert result["found"] == {
            name: ["PeerLostError", victim] for name in ("stream", "irecv", "isend", "recv", "send")
        }
        assert result["took"] < 5
        assert result["closing"] < 5


@pytest.mark.soak
def test_others_go_on_when_one_of_three_hosts_is_killed(tmp_path: Path) -> None:
    with network(3) as net:
        net.switch("front", 1)
        (tmp_path / "victim").write_text("1")
        net.torchrun(PROGRAM, "killed", directory=tmp_path, num_hosts=3)
        await_files(net, tmp_path, ["0.flowing", "1.flowing"], START_SECONDS)
        net.kill(1)
        (tmp_path / "killed").touch()
        first, third = results(net, tmp_path, [0, 2], 60)
        assert set(map(tuple, first["found"].values())) == {("PeerLostError", 1)}
        assert third["closing"] < 5


def test_of_several_interfaces_one_that_leads_there_is_taken_or_the_users(tmp_path: Path) -> None:
    with network(3) as net:
        net.link(0, 1, "front", 1)
        net.link(0, 1, "back", 2)
        # Both have one more, at the same address, and neither leads to the other.
        for host in (0, 1):
            net.trap(host, 2, "docker0")
        net.torchrun(PROGRAM, "interfaces", directory=tmp_path, num_hosts=2)
        sent: dict[str, dict[str, int]] = {}
        for chosen in ("", "front", "back"):
            before = {name: net.sent_nbytes(0, name) for name in ("front", "back", "docker0")}
            (tmp_path / f"go-{chosen}").touch()
            done = [f"{rank}.done-{chosen}" for rank in (0, 1)]
            await_files(net, tmp_path, done, START_SECONDS)
            sent[chosen] = {
                name: net.sent_nbytes(0, name) - nbytes for name, nbytes in before.items()
            }
        assert all(figures["docker0"] < 1 << 20 for figures in sent.values())
        total = 64 << 20
        assert sent[""]["front"] + sent[""]["back"] > total
        for chosen, other in (("front", "back"), ("back", "front")):
            assert sent[chosen][chosen] > total
            assert sent[chosen][other] < 1 << 20
        results(net, tmp_path, [0, 1], 30)


@pytest.mark.parametrize("add", [Network.double, Network.island], ids=["to itself", "nowhere"])
def test_interface_that_leads_astray_is_an_error_that_says_how_to_choose(
    tmp_path: Path, add: Callable[[Network, int, int, str], None]
) -> None:
    with network(3) as net:
        net.link(0, 1, "front", 1)
        for host in (0, 1):
            add(net, host, 2, "astray")
        net.torchrun(PROGRAM, "ambiguous", directory=tmp_path, num_hosts=2)
        for result in results(net, tmp_path, [0, 1], START_SECONDS):
            assert result["found"].split(":")[0] in ("PeerLostError", "TransferTimeout")
            assert "UCX_NET_DEVICES" in result["found"]
            assert set(result["routes"]) == {"front", "^astray"}
