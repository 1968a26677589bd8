"""The examples run, and say what they did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (["examples/connect_read.py"], ["owner:  COMPLETE", "last 1048575"]),
        (["examples/connect_write.py"], ["wrote 53 bytes", "11.0], and b'bytes'"]),
        ([*TORCHRUN, "examples/store_exchange.py"], ["bytes of rank 0", "bytes of rank 1"]),
    ],
    ids=["read", "write", "store"],
)
def test_example(program: list[str], says: list[str]) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    finished = subprocess.run(
        [sys.executable, *program],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    for text in says:
        assert text in finished.stdout
