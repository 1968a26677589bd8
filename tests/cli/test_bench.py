"""`torch-nixl bench` as its users run it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torch_nixl.bench.report import OURS, Report

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
COMMAND = [sys.executable, "-m", "torch_nixl.cli.main", "bench"]


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env={**ENVIRONMENT, **environment},
        check=False,
    )


def words(text: str) -> str:
    """What a box around an error wraps, in one line."""
    return " ".join(text.replace("│", " ").split())


def test_p2p_starts_its_own_ranks_and_writes_figures_and_a_plot(tmp_path: Path) -> None:
    figures, plot = tmp_path / "p2p.json", tmp_path / "p2p.svg"
    finished = bench(
        *("p2p", "--sizes", "8,64k", "--rounds", "1", "--pin"),
        *("--only", "trip", "--only", "channel", "--only", "isend", "--only", "call"),
        *("--json", str(figures), "--plot", str(plot)),
    )
    assert finished.returncode == 0, finished.stderr
    assert "Gloo" in finished.stdout
    lines = finished.stderr.splitlines()
    assert re.fullmatch(r"p2p: 7 measurements, about \d+ s on idle cores", lines[0])
    assert lines[1] == "p2p:   0% half a round trip, 8 B"
    report = Report.load(figures)
    found = {(one.what, one.nbytes): set(one.seconds) for one in report.measurements}
    assert found == {
        ("half a round trip", 8): {OURS, "Gloo", "raw NIXL"},
        ("half a round trip", 64 << 10): {OURS, "Gloo", "raw NIXL"},
        ("step of a channel", 64 << 10): {OURS, "Gloo", "send and recv"},
        ("step of a channel, 64 tensors", 64 << 10): {OURS, "Gloo", "send and recv"},
        ("isend, one of many", 8): {OURS, "Gloo"},
        ("call of send", 8): {OURS},
        ("call of recv, message there", 8): {OURS},
    }
    for one in report.measurements:
        assert all(0 < second < 10 for rounds in one.seconds.values() for second in rounds)
        assert all(len(rounds) == 1 for rounds in one.seconds.values())
        for name, tails in one.p99.items():
            assert all(
                tail >= middle for tail, middle in zip(tails, one.seconds[name], strict=True)
            )
    assert plot.read_text().startswith("<?xml")
    compared = bench("compare", str(figures), str(figures))
    assert compared.returncode == 0, compared.stderr
    assert "same" in compared.stdout


def test_connect_says_that_dynamo_is_missing(tmp_path: Path) -> None:
    figures = tmp_path / "connect.json"
    finished = bench(
        *("connect", "--sizes", "4k", "--rounds", "1", "--json", str(figures)),
    )
    assert finished.returncode == 0, finished.stderr
    report = Report.load(figures)
    assert [one.what for one in report.measurements] == ["read, its reader", "read, its owner"]
    assert all(set(one.seconds) == {OURS, "raw NIXL"} for one in report.measurements)
    assert "without dynamo: not installed here" in finished.stdout


def test_three_ranks_of_another_launcher(tmp_path: Path) -> None:
    figures = tmp_path / "collectives.json"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [*COMMAND, "collectives", "--sizes", "8", "--rounds", "1", "--json", str(figures)],
            env={**ENVIRONMENT, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=110) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    assert "all_reduce" in said[0][0]
    assert said[1] == said[2] == ("", "")
    report = Report.load(figures)
    assert report.ranks == 3
    assert [one.what for one in report.measurements][-1] == "barrier"
    assert len(report.measurements) == 9


def test_kv_pages_are_handed_over(tmp_path: Path) -> None:
    figures = tmp_path / "kv.json"
    finished = bench("kv", "--sizes", "1k,200k", "--rounds", "1", "--json", str(figures))
    assert finished.returncode == 0, finished.stderr
    found = Report.load(figures).measurements
    assert [one.nbytes for one in found] == [64 << 10, 192 << 10]  # whole pages
    assert all(set(one.seconds) == {OURS, "raw NIXL", "raw NIXL, one piece"} for one in found)


def test_metrics_are_measured_on_against_off(tmp_path: Path) -> None:
    figures = tmp_path / "metrics.json"
    finished = bench("metrics", "--sizes", "8", "--rounds", "1", "--json", str(figures))
    assert finished.returncode == 0, finished.stderr
    report = Report.load(figures)
    assert {one.what for one in report.measurements} == {
        "nothing on",
        "trace on",
        "metrics on",
        "spans on",
    }
    assert all(set(one.seconds) == {OURS, "off"} for one in report.measurements)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["p2p", "--sizes", "8,x"], "is no size"),
        (["p2p", "--sizes", "0"], "at least one byte"),
        (["p2p", "--plot", "x.gif"], ".png, .svg, .html"),
        (["p2p", "--json", "/nowhere/x.json"], "there is no directory /nowhere"),
        (["p2p", "--ranks", "1"], "Invalid value for '--ranks'"),
        (["connect", "--dynamo", "/nowhere/python"], "/nowhere/python is no program"),
        (["compare", "missing.json", "missing.json"], "missing.json is no report"),
    ],
)
def test_wrong_arguments_end_in_a_sentence(arguments: list[str], sentence: str) -> None:
    finished = bench(*arguments)
    assert finished.returncode == 2
    assert sentence in words(finished.stderr)
    assert "Traceback" not in finished.stderr


def test_what_only_ranks_find_out_ends_in_a_sentence() -> None:
    finished = bench("p2p", "--only", "nonsense", "--sizes", "8")
    assert finished.returncode == 1
    assert "rank 0: nothing in p2p has nonsense in its name" in finished.stderr
    assert "failed with status 1, and the run ended with it" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_one_rank_of_a_launcher_is_too_few() -> None:
    finished = bench("p2p", RANK="0", WORLD_SIZE="1")
    assert finished.returncode == 1
    assert "takes two ranks or more" in finished.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        finished = bench("p2p", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert finished.returncode == 1
    assert f"port {port} is taken" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_rank_of_another_launcher_that_is_killed_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [*COMMAND, "p2p", "--rounds", "1000", "--sizes", "8"],
            env={**ENVIRONMENT, **common, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert ranks[0].stderr is not None
    while "half a round trip" not in (line := ranks[0].stderr.readline()):
        assert line
    ranks[1].kill()
    _, said = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=30)
    assert ranks[0].returncode == 1
    assert said.splitlines()[-1].startswith("torch-nixl bench: rank 0: ")
    assert "another rank has ended" in said or "the peer is lost" in said
    assert "Traceback" not in said


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("killed", ["a rank", "the command"])
def test_nobody_is_left_when_one_is_killed(killed: str) -> None:
    command = subprocess.Popen(
        [*COMMAND, "p2p", "--rounds", "1000", "--sizes", "8"],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stderr is not None
    # The ranks have met and measure.
    assert "measurements, about" in command.stderr.readline()
    assert "half a round trip" in command.stderr.readline()
    ranks = children(command.pid)
    assert len(ranks) == 2
    os.kill(command.pid if killed == "the command" else ranks[1], signal.SIGKILL)
    _, said = command.communicate(timeout=30)
    if killed == "a rank":
        assert command.returncode == 1
        assert "rank 1 was ended by SIGKILL" in said
        assert "Traceback" not in said
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)
