"""The p2p examples, run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_send_recv_prints_what_each_rank_received() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(ROOT / "examples" / "send_recv.py"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1: received [[0, 1, 2], [3, 4, 5]]" in done.stdout
    assert "rank 1: received [4096, 4096] of torch.float64, 134,217,728 bytes" in done.stdout
    assert "rank 0: rank 1 says the mean is " in done.stdout
