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
    assert trial == {"works": False, "needs_consent": False, "error": "EPERM"}
