"""`torch-nixl bench connect` against a dynamo that lives in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torch_nixl.bench.connect import DYNAMO
from torch_nixl.bench.report import OURS, Report


def test_dynamo_takes_part_as_a_rival(dynamo_python: str, tmp_path: Path) -> None:
    figures = tmp_path / "connect.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "torch_nixl.cli.main", "bench", "connect"),
            *("--sizes", "4k", "--rounds", "1", "--without", "raw NIXL"),
            *("--dynamo", dynamo_python, "--json", str(figures)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=100,
        check=True,
    )
    report = Report.load(figures)
    assert [set(one.seconds) for one in report.measurements] == [{OURS, DYNAMO}] * 2
    assert not report.missing
