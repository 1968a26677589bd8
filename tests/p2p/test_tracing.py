"""`torch_nixl.trace`: what moved when, in a file that Perfetto reads."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_nixl
from p2p import programs
from p2p.conftest import World
from torch_nixl import Communicator, TransferTimeout, tracing
from torch_nixl.engine import observers
from torch_nixl.testing import RankPool

LARGE = torch.arange(1 << 18, dtype=torch.float32)


def exchange(a: Communicator, b: Communicator) -> None:
    works = [b.irecv(0), b.irecv(0, tag=1)]
    a.send(torch.zeros(2), 1, tag=1)
    send = a.isend(LARGE, 1)
    for work in works:
        work.wait()
    send.wait()


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    everything = json.loads(path.read_text())["traceEvents"]
    return [one for one in everything if one["ph"] == phase]


def test_operations_are_bars_and_small_messages_marks(world: World, tmp_path: Path) -> None:
    a, b = world()
    exchange(a, b)
    path = tmp_path / "trace.json"
    with torch_nixl.trace(path):
        exchange(a, b)
    bars = events(path, "X")
    sends = [bar for bar in bars if bar["name"] == "send"]
    receives = [bar for bar in bars if bar["name"] == "receive" and bar["args"]["nbytes"] > 100]
    assert [one["args"]["nbytes"] for one in (*sends, *receives)] == [LARGE.nbytes] * 2
    assert sends[0]["args"]["route"] in ("read", "split")
    assert all(bar["dur"] > 0 for bar in bars)
    marks = [mark["name"] for mark in events(path, "i")]
    assert sorted(marks) == ["message received", "message sent"]
    rows = {one["tid"]: one["args"]["name"] for one in events(path, "M") if "tid" in one}
    assert rows[sends[0]["tid"]] == b.connection.name
    assert rows[receives[0]["tid"]] == a.connection.name
    assert not observers.ends
    assert not observers.messages


def test_bars_of_one_row_never_overlap(world: World, tmp_path: Path) -> None:
    a, b = world()
    path = tmp_path / "trace.json"
    with torch_nixl.trace(path):
        receives = [b.irecv(0) for _ in range(5)]
        sends = [a.isend(LARGE, 1) for _ in range(5)]
        for work in (*receives, *sends):
            work.wait()
    ends: dict[int, float] = {}
    bars = sorted(events(path, "X"), key=lambda bar: float(bar["ts"]))
    assert len(bars) == 10
    for bar in bars:
        assert bar["ts"] >= ends.get(bar["tid"], 0.0) - 0.002
        ends[bar["tid"]] = bar["ts"] + bar["dur"]


def test_a_failure_says_why(world: World, tmp_path: Path) -> None:
    _, b = world()
    path = tmp_path / "trace.json"
    with torch_nixl.trace(path), pytest.raises(TransferTimeout):
        b.irecv(None, timeout=0.01).wait()
    [bar] = events(path, "X")
    assert bar["args"]["error"].startswith("TransferTimeout: ")


def test_traces_of_several_processes_become_one(world: World, tmp_path: Path) -> None:
    a, b = world()
    parts = [tmp_path / "0.json", tmp_path / "1.json"]
    for part in parts:
        with torch_nixl.trace(part):
            exchange(a, b)
    merged = tmp_path / "both.json"
    torch_nixl.merge_traces(merged, parts)
    assert len(events(merged, "X")) == sum(len(events(part, "X")) for part in parts)
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no\.json is not a trace"):
        torch_nixl.merge_traces(merged, [tmp_path / "no.json"])


def test_a_rank_that_takes_no_part_costs_nobody_its_own_events(
    world: World, tmp_path: Path
) -> None:
    a, b = world()
    traced = torch_nixl.trace(tmp_path / "t.json", group=a, timeout=0.05)
    with pytest.raises(TransferTimeout), traced:
        exchange(a, b)
    assert events(tmp_path / "t.0.json", "X")
    assert not (tmp_path / "t.json").exists()


def send_five(communicator: Communicator, tag: int) -> None:
    for _ in range(5):
        communicator.send(LARGE, 1, tag=tag)


def test_no_event_is_lost_while_several_threads_work(world: World, tmp_path: Path) -> None:
    a, b = world()
    path = tmp_path / "t.json"
    with torch_nixl.trace(path):
        threads = [threading.Thread(target=send_five, args=(a, tag)) for tag in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            for tag in range(3):
                b.recv(0, tag=tag)
        for thread in threads:
            thread.join(20)
    assert len([bar for bar in events(path, "X") if bar["name"] == "send"]) == 15


def test_what_found_no_room_is_counted(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tracing, "MAX_EVENTS", 3)
    a, b = world()
    path = tmp_path / "t.json"
    with torch_nixl.trace(path) as traced:
        for _ in range(4):
            exchange(a, b)
    # Four times a message sent and received, a send and a receive of what is large; and a receive
    # that had to wait for its message is an operation, too.
    num_bars, num_marks = len(events(path, "X")), len(events(path, "i"))
    assert num_bars in (2, 3)
    assert num_marks in (2, 3)
    assert traced.dropped >= 2 * (4 * 2 - 3)
    [label] = [one for one in events(path, "M") if one["name"] == "process_labels"]
    assert f"{traced.dropped} before them are missing" in label["args"]["labels"]
    assert f"{traced.dropped} before them found no room" in caplog.text


def test_marks_are_kept_within_their_limit_while_the_trace_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MAX_EVENTS", 10)
    a, b = world()
    with torch_nixl.trace(tmp_path / "t.json") as traced:
        kept = traced._recorder._messages._kept
        for _ in range(100):
            a.send(torch.zeros(2), 1)
            b.recv(0)
        deadline = time.monotonic() + 20
        while len(kept) > 10 * 4:
            assert time.monotonic() < deadline
            b.iprobe(0)
        assert len(kept) >= 5 * 4


def test_a_message_that_waits_for_its_receive_is_marked_when_it_has_come(
    world: World, tmp_path: Path
) -> None:
    a, b = world()
    exchange(a, b)
    path = tmp_path / "t.json"
    with torch_nixl.trace(path):
        before = time.time() * 1e6
        a.send(torch.zeros(2), 1)
        deadline = time.monotonic() + 20
        while b.iprobe(0) is None:
            assert time.monotonic() < deadline
        after = time.time() * 1e6
        b.recv(0)
    for mark in events(path, "i"):
        assert before - 1 <= mark["ts"] <= after + 1


def test_a_trace_keeps_no_tensor_alive(world: World, tmp_path: Path) -> None:
    a, b = world()
    with torch_nixl.trace(tmp_path / "t.json"):
        tensor = LARGE.clone()
        work = a.isend(tensor, 1)
        received = b.recv(0)
        work.wait()
        assert work.wait_released(20)
        gone = [weakref.ref(tensor), weakref.ref(received)]
        del tensor, received, work
        deadline = time.monotonic() + 20
        while any(one() is not None for one in gone):
            assert time.monotonic() < deadline
            b.iprobe(0)
            gc.collect()


def test_what_is_no_regular_file_is_written_to_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    tracing.write_trace(pipe, [{"ph": "X"}])
    reader.join(20)
    assert json.loads(read[0])["traceEvents"] == [{"ph": "X"}]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_one_and_nothing_is_left_of_what_failed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for _ in range(2):
        tracing.write_trace(tmp_path / "link", [])
        assert (tmp_path / "link").is_symlink()
        assert json.loads((tmp_path / "file").read_text())["traceEvents"] == []
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TypeError):
        tracing.write_trace(tmp_path / "file", [{"ph": object()}])
    with pytest.raises(OSError, match="directory"):
        tracing.write_trace(tmp_path, [])
    assert sorted(tmp_path.iterdir()) == before


def test_ranks_make_one_trace(rank_pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    rank_pool.run(programs.traced, args=(str(path),), world_size=2, timeout=60)
    processes = {one["pid"]: one["args"]["name"] for one in events(path, "M") if "tid" not in one}
    assert sorted(processes.values()) == ["rank 0", "rank 1"]
    assert {bar["name"] for bar in events(path, "X")} >= {"send", "receive"}
