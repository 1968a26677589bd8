"""`import torch_nixl` costs and changes nothing, and NIXL is missed only by what needs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import torch_nixl
from torch_nixl import errors

# Each program runs in a fresh interpreter: this one has imported too much already.
_DEADLINE_S = 60

_OBSERVE = """
import json, os, sys, threading
before = dict(os.environ)
modules = set(sys.modules)
import torch_nixl
report = {
    "new": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    "environment_unchanged": dict(os.environ) == before,
    "threads": threading.active_count(),
    "native_threads": len(os.listdir("/proc/self/task")),
}
os.write(int(sys.argv[1]), json.dumps(report).encode())
"""

_WITHOUT_NIXL = """
import sys
sys.modules["nixl"] = None  # what an `import nixl` then raises is what a missing package raises
import torch_nixl
from torch_nixl.engine.nixl import NixlAdapter
try:
    NixlAdapter("agent")
except torch_nixl.BackendError as exc:
    print(exc)
    print(type(exc.__cause__).__name__)
"""


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=True,
    )


def test_import_is_silent_and_changes_nothing() -> None:
    finished = subprocess.run(
        ["sh", "-c", 'exec 3>&1 >/dev/null; exec "$0" "$@"', sys.executable, "-c", _OBSERVE, "3"],
        capture_output=True,
        timeout=_DEADLINE_S,
        check=True,
    )
    report = json.loads(finished.stdout)
    assert finished.stderr == b""
    assert "torch_nixl" in report["new"]
    assert not {"nixl", "nixl_cu12", "nixl_cu13", "torch", "numpy"} & set(report["new"])
    assert report["environment_unchanged"]
    assert report["threads"] == 1
    assert report["native_threads"] == 1


def test_import_prints_nothing() -> None:
    finished = _run("import torch_nixl")
    assert (finished.stdout, finished.stderr) == ("", "")


def test_missing_nixl_is_named_only_when_it_is_needed() -> None:
    finished = _run(_WITHOUT_NIXL)
    message, cause = finished.stdout.splitlines()
    assert "pip install nixl" in message
    assert cause in {"ImportError", "ModuleNotFoundError"}


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_a_missing_dependency_is_named_with_what_brings_it(package: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
import torch_nixl
try:
    torch_nixl.connect if {package!r} == "numpy" else torch_nixl.send_tensor
except ModuleNotFoundError as exc:
    print(exc)
"""
    assert _run(program).stdout == (
        f"torch_nixl needs {package}, which is not installed: pip install {package}\n"
    )


def test_an_older_python_is_told_what_is_needed() -> None:
    pretends = "import sys; sys.version_info, sys.version = (3, 9, 18, 'final', 0), '3.9.18 (main)'"
    wants = "try:\n    import torch_nixl\nexcept ImportError as error:\n    print(error)"
    told = _run(f"{pretends}\n{wants}").stdout
    assert told == "torch_nixl needs Python 3.10 or newer; this is 3.9.18\n"


def test_engine_modules_import_without_nixl() -> None:
    program = (
        "import sys; sys.modules['nixl'] = None; "
        "import torch_nixl.engine.adapter, torch_nixl.engine.nixl"
    )
    _run(program)


def test_every_public_name_loads() -> None:
    for name in torch_nixl.__all__:
        assert getattr(torch_nixl, name) is not None
    assert torch_nixl.PeerLostError is errors.PeerLostError


def test_public_names_are_listed_once_and_all_errors_are_public() -> None:
    assert len(set(torch_nixl.__all__)) == len(torch_nixl.__all__)
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.TorchNixlError)
    }
    assert tree <= set(torch_nixl.__all__)
    assert set(torch_nixl.__all__) <= set(dir(torch_nixl))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torch_nixl.no_such_name


def test_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert torch_nixl.__version__ == version("torch-nixl")
