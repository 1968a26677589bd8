"""One warning per process and cause where something is slower than it could be."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_nixl
from torch_nixl.engine import path, performance
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.performance import Cause
from torch_nixl.engine.registry import Registry
from torch_nixl.testing import LoopbackFabric, loopback_pair

MEMORY = ctypes.create_string_buffer(8)
HERE = (os.getpid(), ctypes.addressof(MEMORY))


@pytest.fixture(autouse=True)
def warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[pytest.LogCaptureFixture]:
    performance.forget()
    monkeypatch.delenv(performance.SWITCH, raising=False)
    caplog.set_level(logging.WARNING, "torch_nixl.performance")
    yield caplog
    performance.forget()


def test_tcp_by_choice_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert [path.same_host_path(*HERE) for _ in range(3)] == [path.TCP] * 3
    [text] = warnings.messages
    assert "UCX_TLS=tcp,self" in text
    assert "unset UCX_TLS" in text
    assert performance.SWITCH in text


def test_cma_is_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert path.same_host_path(*HERE) == path.CMA
    assert warnings.messages == []


def test_a_kernel_that_forbids_cma_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    def refuse(pid: int, address: int, nbytes: int) -> bytes:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(path, "copy_from", refuse)
    assert path.same_host_path(*HERE) == path.TCP
    [text] = warnings.messages
    assert "EPERM" in text
    assert "--cap-add=SYS_PTRACE" in text


def test_a_process_that_has_just_died_is_no_reason_to_warn(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    def gone(pid: int, address: int, nbytes: int) -> bytes:
        raise OSError(errno.ESRCH, "no")

    monkeypatch.setattr(path, "copy_from", gone)
    assert path.same_host_path(*HERE) == path.TCP
    assert warnings.messages == []


def test_the_switch_silences_it(
    monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(performance.SWITCH, "0")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    path.same_host_path(*HERE)
    assert warnings.messages == []


def test_registering_anew_at_every_call_is_warned_of(warnings: pytest.LogCaptureFixture) -> None:
    registry = Registry(LoopbackFabric().adapter("a"))
    same = tensor_memory(torch.zeros(8))
    for _ in range(performance.MANY_REGISTRATIONS):
        registry.release(registry.acquire(same))
    assert warnings.messages == []
    performance.look_at_registrations(performance.MANY_REGISTRATIONS, 500)
    assert warnings.messages == []
    other = Registry(LoopbackFabric().adapter("b"))
    for _ in range(performance.MANY_REGISTRATIONS):
        other.release(other.acquire(tensor_memory(torch.zeros(8))))
    [text] = warnings.messages
    assert f"{performance.MANY_REGISTRATIONS} stretches" in text


def test_many_small_pieces_are_warned_of(warnings: pytest.LogCaptureFixture) -> None:
    _, one, two = loopback_pair()
    with Connection(one) as a, Connection(two) as b:
        sizes = {"few": 16, "many": 2 * performance.MANY_SPANS}
        for count in sizes.values():
            source, target = torch.ones(count, 64), torch.zeros(count, 64)
            ours, theirs = tensor_memory(target[:, :32]), tensor_memory(source[:, :32])
            exposed = b.expose(Direction.READ, [theirs])
            operation = a.claim(exposed.offer(), [ours])
            operation.wait(20)
            exposed.wait(20)
            assert int(target.sum()) == count * 32
    [text] = warnings.messages
    assert f"in {sizes['many']} pieces" in text


def test_device_memory_without_its_module_is_warned_of(
    warnings: pytest.LogCaptureFixture,
) -> None:
    performance.look_at_device_memory("libc.so")
    assert warnings.messages == []
    performance.look_at_device_memory("libuct_no_such_device")
    [text] = warnings.messages
    assert "libuct_no_such_device" in text


def test_a_program_that_says_nothing_of_logging_still_sees_it() -> None:
    code = (
        "from torch_nixl.engine.performance import Cause, warn\n"
        "warn(Cause.CMA_DENIED, reason='EPERM'); warn(Cause.CMA_DENIED, reason='EPERM')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stderr.count("EPERM") == 1


def test_every_cause_and_every_error_is_in_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    names = [cause.name for cause in Cause]
    names += [name for name in torch_nixl.__all__ if name.endswith(("Error", "Timeout"))]
    names += ["TransferCancelled", "LeaseExpired"]
    assert len(names) > 12
    assert [name for name in names if f"`{name}`" not in text and name not in text] == []
