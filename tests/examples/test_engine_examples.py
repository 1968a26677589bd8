"""The examples, run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(example: str, *args: str, ranks: int = 2, timeout: float = 100.0) -> str:
    """Run an example under torchrun and return what it printed."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(ROOT / "examples" / example),
            *args,
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_send_weights_moves_a_real_model() -> None:
    printed = torchrun("send_weights.py")
    assert "272 tensors, 269,030,016 bytes" in printed
    assert re.search(r"[0-9.]+ GB/s over (cma|tcp), all checksums equal", printed)
