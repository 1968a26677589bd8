"""The p2p examples, run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_example(name: str) -> str:
    """Run an example on two ranks; return what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_send_recv_prints_what_each_rank_received() -> None:
    printed = run_example("send_recv.py")
    assert "rank 1: received [[0, 1, 2], [3, 4, 5]]" in printed
    assert "rank 1: received [4096, 4096] of torch.float64, 134,217,728 bytes" in printed
    assert "rank 0: rank 1 says the mean is " in printed


def test_training_loop_has_the_loss_of_one_process_and_learns() -> None:
    found = re.search(
        r"loss from (\S+) to (\S+), as in one process", run_example("training_loop.py")
    )
    assert found is not None
    assert float(found[2]) < 0.5 * float(found[1])


def test_channel_prints_the_sum_of_every_step() -> None:
    printed = run_example("channel.py")
    for step in range(6):
        assert f"rank 1: step {step}, sum {8 * 512 * 512 * step}" in printed
