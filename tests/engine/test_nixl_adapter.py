"""What concerns NIXL alone: setting it up, tuning it, mapping its errors, and letting it go."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from torch_nixl._testing.sides import Side, never, pair, spans, until
from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind, Region
from torch_nixl.engine.nixl import TUNED_ENVIRONMENT, NixlAdapter, tuned_environment
from torch_nixl.errors import (
    BackendError,
    ClosedError,
    MetadataError,
    PeerLostError,
    RegistrationError,
)
from torch_nixl.testing import NixlHarness, nixl_harness

WRITE = Direction.WRITE
DRAM = MemoryKind.DRAM


@pytest.fixture
def harness() -> Iterator[NixlHarness]:
    with nixl_harness() as harness:
        yield harness


def run_python(source: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source],
        # Agents of this process have tuned its environment already.
        env={k: v for k, v in os.environ.items() if k not in TUNED_ENVIRONMENT} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_nixl_adapter_is_an_adapter(harness: NixlHarness) -> None:
    adapter: Adapter = harness.adapter("a")
    assert adapter.name == "a"
    assert adapter.capabilities.backends == ("UCX",)
    assert adapter.capabilities.free_device_ids == {DRAM}
    assert adapter.capabilities.version[0].isdigit()
    assert "over UCX" in repr(adapter)
    adapter.close()
    assert "closed" in repr(adapter)


@pytest.mark.parametrize(
    ("name", "backends", "progress_thread", "said"),
    [
        ("", ("UCX",), None, "name"),
        ("a", (), None, "backend"),
        ("a", ("UCX",), 0.0, "positive seconds"),
        ("a", ("UCX",), -1.0, "positive seconds"),
    ],
)
def test_wrong_arguments_are_value_errors(
    name: str, backends: tuple[str, ...], progress_thread: float | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        NixlAdapter(name, backends=backends, progress_thread=progress_thread)


def test_missing_nixl_says_how_to_install_it() -> None:
    said = run_python(
        "import sys; sys.modules['nixl'] = None\n"
        "from torch_nixl.engine.nixl import NixlAdapter\n"
        "from torch_nixl.errors import BackendError\n"
        "try: NixlAdapter('a')\n"
        "except BackendError as exc: print(exc, '|', type(exc.__cause__).__name__)\n"
    )
    assert "pip install nixl" in said
    assert said.strip().endswith("ModuleNotFoundError")


def test_environment_is_tuned_by_the_first_agent_and_never_against_the_user() -> None:
    said = run_python(
        "import logging, os\n"
        "from torch_nixl.engine.nixl import NixlAdapter, tuned_environment\n"
        "print('UCX_TCP_RCVBUF' in os.environ)\n"
        "print(tuned_environment())\n"
        "NixlAdapter('a').close()\n"
        "print(os.environ['UCX_TCP_SNDBUF'], os.environ['UCX_TCP_RCVBUF'])\n"
        "print(tuned_environment())\n"
        "print(logging.raiseExceptions)\n",
        UCX_TCP_SNDBUF="1m",
    ).splitlines()
    assert said[0] == "False"
    assert said[1] == said[3]
    assert "('UCX_TCP_SNDBUF', '1m', 'user')" in said[1]
    assert "('UCX_TCP_RCVBUF', '4m', 'torch_nixl')" in said[1]
    assert said[2] == "1m 4m"
    assert said[4] == "True", "importing nixl turns it off; the adapter turns it on again"


def test_tuned_environment_has_a_reason_for_everything() -> None:
    assert [name for name, _, _ in tuned_environment()] == list(TUNED_ENVIRONMENT)
    assert all(why for _, why in TUNED_ENVIRONMENT.values())


def test_unknown_plugin_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"NOPE.*Plugins of this NIXL: .*UCX") as info:
        NixlAdapter("a", backends=("NOPE",))
    assert type(info.value.__cause__).__name__ == "nixlNotFoundError"


@pytest.mark.parametrize(
    ("name", "value"), [("UCX_TLS", "sm"), ("UCX_NET_DEVICES", "no_such_device")]
)
def test_ucx_that_can_not_work_names_the_variable_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BackendError, match=f"{name}={value}.*must include tcp") as info:
        NixlAdapter("a")
    assert info.value.__cause__ is not None


def test_failed_set_up_leaves_nothing_open() -> None:
    NixlAdapter("warm").close()
    before = open_files()
    with pytest.raises(BackendError):
        NixlAdapter("a", backends=("UCX", "NOPE"))
    assert open_files() == before


def test_close_destroys_the_agent_whatever_is_still_held(harness: NixlHarness) -> None:
    Side(harness, "warm").adapter.close()
    before = open_files()
    a, b = pair(harness)
    a.adapter.notify("b", b"owes a flush")
    held: list[object] = [a.transfer(WRITE, a.span(0, 64), b.span(0, 64), "b")]
    held.append(a.adapter.prepare_list(DRAM, a.span(0, 64), None))
    running = a.transfer(WRITE, a.span(0, 64), b.span(0, 64), "b")
    assert not a.adapter.post(running)
    a.adapter.close()
    b.adapter.close()
    assert open_files() == before


def test_close_stops_a_transfer_over_tcp(
    harness: NixlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    size = 256 << 20
    a, b = Side(harness, "a", nbytes=size), Side(harness, "b", nbytes=size)
    a.know(b)
    a.adapter.notify("b", b"hello")
    until(lambda: b.inbox, a, b)
    a.buffer[:] = 1
    transfer = a.transfer(WRITE, a.span(0, size), b.span(0, size), "b")
    assert not a.adapter.post(transfer)
    for _ in range(3):
        assert not a.adapter.poll(transfer)
        b.step()
    a.adapter.close()
    a.buffer[:] = 2
    never(lambda: b.buffer[-1] or (b.buffer[:: 1 << 16] == 2).any(), b)


def test_tcp_needs_the_target_where_one_host_does_not(
    harness: NixlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    a, b = pair(harness)
    transfer = a.transfer(WRITE, a.span(0, 64), b.span(0, 64), "b")
    assert not a.adapter.post(transfer)
    never(lambda: a.adapter.poll(transfer), a)
    a.finish(transfer, b)


def test_closing_while_other_threads_call_ends_them_with_closed_error(
    harness: NixlHarness,
) -> None:
    a, b = pair(harness)
    ended: list[str] = []
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait(10)
        try:
            while True:
                transfer = a.transfer(WRITE, a.span(0, 4096), b.span(0, 4096), "b")
                a.adapter.post(transfer)
                while not a.adapter.poll(transfer):
                    a.adapter.drain()
                a.adapter.release(transfer)
        except ClosedError:
            ended.append(f"worker {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    barrier.wait(10)
    start = time.monotonic()
    never(lambda: time.monotonic() > start + 0.3, b)
    a.adapter.close()
    for thread in threads:
        thread.join(20)
    assert sorted(ended) == ["worker 0", "worker 1", "worker 2"]


def test_handles_freed_by_close_stay_safe_to_touch(harness: NixlHarness) -> None:
    a, b = pair(harness)
    transfer = a.transfer(WRITE, a.span(0, 64), b.span(0, 64), "b")
    a.run(transfer, b)
    a.adapter.close()
    for _ in range(2):
        with pytest.raises(ClosedError):
            a.adapter.poll(transfer)
        with pytest.raises(ClosedError):
            a.adapter.release(transfer)


def test_progress_thread_answers_first_contact_alone(harness: NixlHarness) -> None:
    a = Side(harness, "a")
    before = native_threads()
    passive = NixlAdapter("passive", progress_thread=0.005)
    try:
        assert native_threads() > before
        a.adapter.add_remote(passive.metadata([], connection=True))
        a.adapter.notify("passive", b"hi")
        # Only the sender makes progress from Python until its message must have gone.
        never(lambda: False, a)
        assert passive.drain() == [("a", b"hi")]
    finally:
        passive.close()
    assert native_threads() == before


def test_errors_carry_what_nixl_raised(harness: NixlHarness) -> None:
    a, b = pair(harness)
    with pytest.raises(RegistrationError, match="4096 bytes of VRAM memory") as refused:
        a.adapter.register(Region(MemoryKind.VRAM, a.region.address, 4096, 0))
    with pytest.raises(RegistrationError, match="FILE") as no_backend:
        a.adapter.register(Region(MemoryKind.FILE, 0, 4096, 0))
    with pytest.raises(MetadataError, match="'stranger'") as unknown:
        a.adapter.notify("stranger", b"x")
    with pytest.raises(MetadataError, match="3 bytes") as garbage:
        a.adapter.add_remote(b"abc")
    b.adapter.close()
    with pytest.raises(PeerLostError, match="'b'") as lost:
        until(lambda: a.adapter.notify("b", b"x"), a)
    for info in (refused, no_backend, unknown, garbage, lost):
        assert type(info.value.__cause__).__name__.startswith("nixl")


def test_changed_key_poisons_the_name_for_good(harness: NixlHarness) -> None:
    a, b = pair(harness)
    good = b.adapter.metadata([b.registration], connection=True)
    region = b.region.address.to_bytes(8, "little") + b.region.nbytes.to_bytes(8, "little")
    key = good.index(region) + 24
    altered = good[: key + 8] + bytes([good[key + 8] ^ 1]) + good[key + 9 :]
    with pytest.raises(MetadataError):
        a.adapter.add_remote(altered)
    with pytest.raises(MetadataError):
        a.adapter.add_remote(good)
    a.adapter.remove_remote("b")
    with pytest.raises(MetadataError, match="unusable in this process"):
        a.adapter.add_remote(good)


def test_metadata_of_an_unknown_release_are_not_inspected(
    harness: NixlHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.1.0")
    a = harness.adapter("a")
    with pytest.raises(MetadataError, match=r"NIXL 99\.1\.0"):
        a.inspect(a.metadata([], connection=True))


def test_files_are_memory_too(tmp_path: Path) -> None:
    data = np.arange(8192, dtype=np.uint8)
    adapter = NixlAdapter("a", backends=("UCX", "POSIX"))
    try:
        assert adapter.capabilities.free_device_ids == frozenset()
        with (tmp_path / "spill").open("w+b") as file:
            file.truncate(8192)
            memory = adapter.register(Region(DRAM, data.ctypes.data, 8192, 0))
            disk = adapter.register(Region(MemoryKind.FILE, 0, 8192, file.fileno()))
            with pytest.raises(ValueError, match="one kind"):
                adapter.metadata([memory, disk], connection=True)
            transfer = adapter.prepare(
                WRITE,
                DRAM,
                spans((data.ctypes.data, 4096, 0)),
                MemoryKind.FILE,
                spans((4096, 4096, file.fileno())),
                "a",
            )
            if not adapter.post(transfer):
                until(lambda: adapter.poll(transfer))
            adapter.release(transfer)
            file.seek(0)
            assert file.read() == bytes(4096) + data[:4096].tobytes()
    finally:
        adapter.close()


def test_an_empty_drain_costs_little_more_than_nixls_own_call(harness: NixlHarness) -> None:
    adapter = harness.adapter("a")
    assert isinstance(adapter, NixlAdapter)
    own = adapter._agent.get_notifs
    rounds = 1000
    bare = min(timeit.repeat(lambda: own({}, []), number=rounds, repeat=30)) / rounds
    ours = min(timeit.repeat(adapter.drain, number=rounds, repeat=30)) / rounds
    assert ours - bare < 1.5e-6
