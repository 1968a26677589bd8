"""The README's example, as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

from examples.running import ROOT, torchrun


def test_the_first_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    [command, printed] = re.findall(r"```\n\$ (.*?)\n(.*?)```", text, re.DOTALL)[0]
    assert command == "torchrun --nproc-per-node=2 move.py"
    program = tmp_path / "move.py"
    program.write_text(code)
    assert torchrun(program) == printed
