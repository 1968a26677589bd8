"""The examples, run as their first lines say."""

from __future__ import annotations

import re

from examples.running import torchrun


def test_send_weights_moves_a_real_model() -> None:
    printed = torchrun("send_weights.py")
    assert "272 tensors, 269,030,016 bytes" in printed
    assert re.search(r"[0-9.]+ GB/s over (cma|tcp), all checksums equal", printed)
