"""The command `torch-nixl` where packages are missing."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("package", "arguments", "mend"),
    [
        ("typer", ["doctor"], "pip install 'torch-nixl[cli]'"),
        ("rich", ["--help"], "pip install 'torch-nixl[cli]'"),
        ("torch", ["bench", "p2p"], "pip install torch-nixl"),
    ],
)
def test_a_missing_package_is_named_with_what_brings_it(
    package: str, arguments: list[str], mend: str
) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = {arguments!r}\n"
        "from torch_nixl.cli.main import run; run()"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr == (
        f"torch-nixl: this needs the package {package}, which is not installed: {mend}\n"
    )
