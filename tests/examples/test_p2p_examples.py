"""The p2p examples, run as their first lines say."""

from __future__ import annotations

import re

from examples.running import torchrun


def test_send_recv_prints_what_each_rank_received() -> None:
    printed = torchrun("send_recv.py")
    assert "rank 1: received [[0, 1, 2], [3, 4, 5]]" in printed
    assert "rank 1: received [4096, 4096] of torch.float64, 134,217,728 bytes" in printed
    assert "rank 0: rank 1 says the mean is " in printed


def test_training_loop_has_the_loss_of_one_process_and_learns() -> None:
    found = re.search(r"loss from (\S+) to (\S+), as in one process", torchrun("training_loop.py"))
    assert found is not None
    assert float(found[2]) < 0.5 * float(found[1])


def test_channel_prints_the_sum_of_every_step() -> None:
    printed = torchrun("channel.py")
    for step in range(6):
        assert f"rank 1: step {step}, sum {8 * 512 * 512 * step}" in printed
