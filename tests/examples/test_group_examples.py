"""The examples of the process group, run as their first lines say."""

from __future__ import annotations

import re

import pytest
from examples.running import torchrun


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("ddp.py", r"loss more than halved: True; same weights on 2 ranks: True\n"),
        ("pipeline.py", r"loss fell from [0-9.]+ to [0-9.]+ over 2 stages\n"),
        ("fsdp2.py", r"loss more than halved: True; loaded what was saved: True\n"),
    ],
)
def test_example_prints_what_it_should(example: str, printed: str) -> None:
    assert re.fullmatch(printed, torchrun(example))
