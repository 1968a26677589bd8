"""What README and docs name exists, and the figures that they quote are those of the code."""

from __future__ import annotations

import importlib
import re
import shlex
from typing import Any

import pytest
import typer.main
from examples.running import ROOT
from prometheus_client import CollectorRegistry

from torch_nixl import metrics
from torch_nixl.cli.app import app
from torch_nixl.cli.doctor import DEFAULT_PORT
from torch_nixl.engine.assist import ASSIST_BYTES
from torch_nixl.engine.connection import DEFAULT_TIMEOUT
from torch_nixl.engine.nixl_environment import TUNED_ENVIRONMENT
from torch_nixl.engine.progress import HOT_SECONDS
from torch_nixl.engine.rounds import IDLE_SECONDS, WAIT_SECONDS
from torch_nixl.p2p.protocol import EAGER_NBYTES, PACK_SPAN_NBYTES, SPLIT_NBYTES

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
CODE = re.compile(r"^```\w*\n(.*?)^```|`([^`\n]+)`", re.DOTALL | re.MULTILINE)


def said(pattern: str) -> list[tuple[str, str]]:
    """Whatever stands in code and has this pattern, with its page."""
    return sorted(
        {
            (page, found)
            for page, text in TEXTS.items()
            for block, inline in CODE.findall(text)
            for found in re.findall(pattern, block or inline, re.MULTILINE)
        }
    )


def test_commands_have_the_options_that_are_named() -> None:
    command = typer.main.get_command(app)
    commands = said(r"(?:^|\$ )torch-nixl ([^#\n]*)")
    assert len(commands) > 10
    for page, text in commands:
        words = shlex.split(text.partition("|")[0] if "|" in text else text)
        found: Any = command
        while (below := getattr(found, "commands", {})) and words and words[0][0] != "-":
            assert words[0] in below, f"{page}: torch-nixl {text}"
            found = below[words.pop(0)]
        options = {option for one in found.params for option in one.opts}
        named = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert named <= options, f"{page}: torch-nixl {text}"


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = said(r"(?:^|\$ )make ([\w-]+)")
    assert len(named) > 8
    assert not [(page, target) for page, target in named if target not in targets]


def test_files_exist() -> None:
    named = said(r"(?<![\w/.])((?:examples|benchmarks|tests|docs|torch_nixl)/[\w/.-]+\.\w+)")
    assert len(named) > 15
    assert not [(page, path) for page, path in named if not (ROOT / path).exists()]


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    helpers = {"smollm2.py"}
    programs = {path.name for path in ROOT.glob("examples/*.py")} - helpers
    assert not [program for program in programs if program not in tests]


@pytest.mark.parametrize("page", TEXTS)
def test_names_of_the_package_exist(page: str) -> None:
    for _, name in (one for one in said(r"\b(torch_nixl(?:\.[A-Za-z]\w*)+)") if one[0] == page):
        first, *rest = name.split(".")
        found, path = importlib.import_module(first), first
        for part in rest:
            path = f"{path}.{part}"
            if not hasattr(found, part):
                try:
                    importlib.import_module(path)
                except ModuleNotFoundError:
                    # Loggers are named like attributes, and are none.
                    assert re.search(rf'getLogger\("{re.escape(name)}"', SOURCES), f"{page}: {name}"
                    break
            found = getattr(found, part)


SOURCES = "".join(path.read_text() for path in ROOT.glob("torch_nixl/**/*.py"))


def test_figures_are_those_of_the_code() -> None:
    tuning = TEXTS["docs/tuning.md"]
    for name, (value, _) in TUNED_ENVIRONMENT.items():
        [row] = [line for line in tuning.splitlines() if f"`{name}`" in line]
        assert f"| `{value}`" in row
    assert (HOT_SECONDS, WAIT_SECONDS, IDLE_SECONDS) == (0.002, 0.0005, 0.010)
    assert "polls for 2 ms, then with growing sleeps of at most 0.5 ms" in tuning
    assert "polls every 10 ms" in tuning
    assert (EAGER_NBYTES, SPLIT_NBYTES, PACK_SPAN_NBYTES) == (64 << 10, 1 << 20, 16 << 10)
    for text in ("Up to 64 KiB a message travels in its frame; from 1 MiB on both", "from 16 KiB"):
        assert text in tuning
    assert ASSIST_BYTES == 16 << 20
    for page in ("docs/architecture.md", "docs/connect.md", "CHANGELOG.md"):
        assert "from 16 MiB on" in (ROOT / page).read_text(), page
    assert "| up to 64 KiB | in the frame" in TEXTS["docs/p2p.md"]
    assert DEFAULT_TIMEOUT == 300
    assert "| `timeout=` | 300 s |" in tuning
    assert f"connect HOST:{DEFAULT_PORT}" in TEXTS["README.md"]


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    [section] = re.findall(r"^## How fast\n(.*?)^## ", TEXTS["README.md"], re.DOTALL | re.MULTILINE)
    figures = re.findall(r"\d+\.\d+", section)
    assert len(figures) > 5
    measured = TEXTS["benchmarks/README.md"]
    for figure in figures:
        # A row may have it with one digit more.
        assert re.search(rf"(?<![\d.]){re.escape(figure)}|{nearby(figure)}", measured), figure


def nearby(figure: str) -> str:
    """A pattern of what rounds to a figure, with one digit more."""
    step = 10.0 ** -len(figure.partition(".")[2])
    digits = len(figure.partition(".")[2]) + 1
    least = float(figure) - step / 2
    values = (f"{least + step / 10 * number:.{digits}f}" for number in range(11))
    return "|".join(re.escape(value) for value in values)


def rows(page: str) -> set[str]:
    """The names that stand in code at the beginning of a row of a table."""
    found: set[str] = set()
    for line in TEXTS[page].splitlines():
        if line.startswith("| `"):
            found.update(re.findall(r"`(\w+)`", line.split("|")[1]))
    return found


def test_metrics_are_those_of_the_table() -> None:
    collector = metrics.Collector(CollectorRegistry())
    exported = {
        f"{one.name}_total" if one.type == "counter" else one.name for one in collector.collect()
    }
    listed = {name for name in rows("docs/observability.md") if name != "torch_nixl_"}
    assert {name.removeprefix("torch_nixl_") for name in exported} == listed
