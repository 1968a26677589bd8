"""The p2p examples, run as their first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(example: str) -> str:
    """Run an example on two ranks; return what they print."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(ROOT / "examples" / example),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_send_recv_prints_what_each_rank_received() -> None:
    printed = run("send_recv.py")
    assert "rank 1: received [[0, 1, 2], [3, 4, 5]]" in printed
    assert "rank 1: received [4096, 4096] of torch.float64, 134,217,728 bytes" in printed
    assert "rank 0: rank 1 says the mean is " in printed


def test_channel_prints_the_sum_of_every_step() -> None:
    printed = run("channel.py")
    for step in range(6):
        assert f"rank 1: step {step}, sum {8 * 512 * 512 * step}" in printed
