"""Code in README and docs: all of it is Python, and what is a program runs under torchrun."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
BLOCKS = [(page, code) for page in PAGES for code in FENCE.findall((ROOT / page).read_text())]
NAMES = [f"{page}-{index}" for index, (page, _) in enumerate(BLOCKS)]
PROGRAMS = [code for page, code in BLOCKS if page != "README.md" and "RANK" in code]


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=NAMES)
def test_a_block_is_python_and_imports_what_there_is(page: str, code: str) -> None:
    tree = compile(
        code, page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_nixl"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{page}: {node.module}.{alias.name}"


def test_programs_run_one_after_another_on_two_ranks(tmp_path: Path) -> None:
    assert len(PROGRAMS) >= 2
    program = tmp_path / "programs.py"
    program.write_text(
        "import json, pathlib\n"
        f"for code in json.loads(pathlib.Path({str(tmp_path / 'blocks.json')!r}).read_text()):\n"
        "    exec(compile(code, 'block', 'exec'), {'__name__': '__main__'})\n"
        "print('all have run', flush=True)\n"
    )
    (tmp_path / "blocks.json").write_text(json.dumps(PROGRAMS))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node=2", str(program)),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all have run") == 2
    assert "tensor([[0., 1., 2.]" in done.stdout, "the quick start's output"
