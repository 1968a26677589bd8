"""A child's crash, exception or hang is a result; and CMA is really tried.

Each program runs in an interpreter of its own: forking is for processes with one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_HEADER = """
import json, os, signal, sys, time
from torch_nixl.cli.doctor.children import first_failure, run_together
"""


def _run(program: str) -> object:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", _HEADER + program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert finished.stderr == ""
    return json.loads(finished.stdout)


def test_value_and_output_come_back() -> None:
    program = """
def speak():
    os.write(1, b"from C\\n")
    print("from Python", file=sys.stderr, flush=True)
    return {"answer": 42}
[outcome] = run_together([speak], 30)
print(json.dumps([outcome.value, outcome.failure, outcome.output]))
"""
    assert _run(program) == [{"answer": 42}, None, "from C\nfrom Python\n"]


def test_exception_is_named_in_one_line() -> None:
    program = """
from torch_nixl.errors import BackendError
def fail():
    raise KeyError("a key")
def fail_as_we_do():
    raise BackendError("a plugin is missing")
print(json.dumps([outcome.failure for outcome in run_together([fail, fail_as_we_do], 30)]))
"""
    assert _run(program) == ["KeyError: 'a key'", "a plugin is missing"]


def test_crash_is_named_by_its_signal() -> None:
    program = """
[outcome] = run_together([lambda: os.kill(os.getpid(), signal.SIGSEGV)], 30)
print(json.dumps(outcome.failure))
"""
    assert _run(program) == "the process was killed by SIGSEGV"


def test_hang_is_killed_at_the_deadline() -> None:
    program = """
start = time.monotonic()
[outcome] = run_together([lambda: signal.pause()], 0.2)
with open(f"/proc/self/task/{os.getpid()}/children") as file:
    children = file.read()
print(json.dumps([outcome.failure, time.monotonic() - start < 20, children]))
"""
    assert _run(program) == ["no answer within 0.2 s", True, ""]


def test_failure_ends_the_wait_for_the_others_and_is_the_one_reported() -> None:
    program = """
def fail():
    raise ValueError("the cause")
start = time.monotonic()
outcomes = run_together([lambda: signal.pause(), fail], 1000)
print(json.dumps([first_failure(outcomes), time.monotonic() - start < 30]))
"""
    assert _run(program) == ["ValueError: the cause", True]


def test_exit_of_a_child_runs_none_of_the_parents_exit_handlers() -> None:
    program = """
import atexit
atexit.register(os.write, 1, b'"once"')
run_together([lambda: None, lambda: sys.exit(3)], 30)
"""
    assert _run(program) == "once"


_CMA = """
from torch_nixl.cli.doctor.cma import try_cma
{before}
print(try_cma(20).model_dump_json())
"""


def test_cma_is_tried_between_siblings() -> None:
    trial = _run(_CMA.format(before=""))
    assert isinstance(trial, dict)
    assert trial["works"] is (trial["error"] is None)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_denied_cma_is_named_by_its_errno() -> None:
    # A process that changed its user can't be read by others of that user, nor by its siblings.
    trial = _run(_CMA.format(before="os.setgid(65534); os.setuid(65534)"))
    assert trial == {
        "works": False,
        "needs_consent": False,
        "error": "EPERM",
        "own_error": None,
        "dumpable": False,
    }


_FORBID = """
import ctypes, platform
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
                ("k", ctypes.c_uint32)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction))]
number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
# Load the call's number; EPERM if it is process_vm_readv's; else allow.
rules = (Instruction * 4)((0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50001),
                          (0x06, 0, 0, 0x7FFF0000))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(4, rules)), 0, 0) == 0, ctypes.get_errno()
"""


def test_filter_of_system_calls_is_told_from_other_denials() -> None:
    trial = _run(_CMA.format(before=_FORBID))
    assert isinstance(trial, dict)
    assert (trial["works"], trial["error"], trial["own_error"]) == (False, "EPERM", "EPERM")


def test_gpus_that_torch_cannot_use_are_a_result() -> None:
    program = """
import types
from torch_nixl.cli.doctor.gpus import try_gpus
def fail(*_, **__):
    raise RuntimeError("No CUDA GPUs are available\\nand more")
cuda = types.SimpleNamespace(is_available=lambda: False)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, empty=fail)
print(json.dumps(try_gpus(20).failure))
"""
    assert _run(program) == "No CUDA GPUs are available"


def test_gpus_that_torch_sees_have_name_and_place() -> None:
    program = """
import types
from torch_nixl.cli.doctor.gpus import try_gpus
facts = types.SimpleNamespace(
    name="H200", total_memory=5, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
cuda = types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda index: facts)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
print(try_gpus(20).model_dump_json())
"""
    assert _run(program) == {
        "devices": [{"name": "H200", "pci": "0000:1b:00.0", "memory_bytes": 5}],
        "failure": None,
    }


def test_streams_of_devices_are_described_and_a_crash_of_theirs_is_a_result() -> None:
    program = """
import types
from torch_nixl.cli.doctor.gpus import try_streams
found = []
for describe in (lambda: ("cuda:0: streams wait",), os.abort):
    module = types.SimpleNamespace(describe_devices=describe)
    sys.modules["torch_nixl.engine.device_streams"] = module
    found.append(try_streams(20))
print(json.dumps(found))
"""
    assert _run(program) == [
        ["cuda:0: streams wait"],
        ["devices: the process was killed by SIGABRT"],
    ]
