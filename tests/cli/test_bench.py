"""`torch-nixl bench` as its users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_nixl.bench.report import OURS, Report


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_nixl.cli.main", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        check=False,
    )


def test_p2p_starts_its_own_ranks_and_writes_figures_and_a_plot(tmp_path: Path) -> None:
    figures, plot = tmp_path / "p2p.json", tmp_path / "p2p.svg"
    finished = bench(
        *("p2p", "--sizes", "8,256k", "--rounds", "2"),
        *("--json", str(figures), "--plot", str(plot)),
    )
    assert finished.returncode == 0, finished.stderr
    assert "Gloo" in finished.stdout
    report = Report.load(figures)
    assert [one.nbytes for one in report.measurements] == [8, 256 << 10]
    for one in report.measurements:
        assert set(one.seconds) == {OURS, "Gloo", "raw NIXL"}
        assert all(0 < second < 10 for rounds in one.seconds.values() for second in rounds)
        assert all(len(rounds) == 2 for rounds in one.seconds.values())
    assert plot.read_text().startswith("<?xml")
    compared = bench("compare", str(figures), str(figures))
    assert compared.returncode == 0, compared.stderr
    assert "same" in compared.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["p2p", "--sizes", "8,x"], "is no size"),
        (["p2p", "--plot", "x.gif"], ".png, .svg, .html"),
        (["compare", "missing.json", "missing.json"], "missing.json is no report"),
    ],
)
def test_wrong_arguments_end_in_a_sentence(arguments: list[str], sentence: str) -> None:
    finished = bench(*arguments)
    assert finished.returncode == 2
    assert sentence in " ".join(finished.stderr.split())
    assert "Traceback" not in finished.stderr
