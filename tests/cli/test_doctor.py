"""`torch-nixl doctor` as its users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from torch_nixl.cli.doctor.examine import run_trials
from torch_nixl.cli.doctor.render import render
from torch_nixl.cli.doctor.report import Finding, Report

_DEADLINE_S = 100


def _doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("UCX_")}
    return subprocess.run(
        [sys.executable, "-m", "torch_nixl.cli.main", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        env=clean | environment,
        check=False,
    )


def _examine(**environment: str) -> tuple[Report, int]:
    """Return the report and the exit status; fails if stdout holds anything but the document."""
    finished = _doctor("--json", **environment)
    assert finished.stderr == ""
    return Report.model_validate_json(finished.stdout, strict=False), finished.returncode


@pytest.fixture(scope="module")
def healthy() -> tuple[Report, int]:
    return _examine(UCX_TCP_SNDBUF="2m", NIXL_ODD="1", TORCH_NIXL_SECRET="hush")


def test_tensors_can_move_here(healthy: tuple[Report, int]) -> None:
    report, status = healthy
    assert status == 0
    assert report.can_move
    assert report.path.works
    assert report.path.failure is None
    assert not [finding for finding in report.findings if finding.severity == "error"]


def test_path_is_the_one_that_cma_allows_and_is_measured(healthy: tuple[Report, int]) -> None:
    report, _ = healthy
    assert report.path.kind == ("cma" if report.cma.works else "tcp")
    assert report.path.read_lane is not None
    assert report.path.write_lane is not None
    assert (report.path.control_lane or "").startswith("tcp/")
    path = report.path
    for figure in (path.read_gb_per_s, path.write_gb_per_s, path.copy_gb_per_s):
        assert figure is not None
        assert figure > 0
    assert report.path.round_trip_p50_us is not None
    assert report.path.round_trip_p99_us is not None
    assert 0 < report.path.round_trip_p50_us <= report.path.round_trip_p99_us


def test_versions_and_backends_are_those_installed(healthy: tuple[Report, int]) -> None:
    report, _ = healthy
    assert report.versions.torch
    assert report.versions.nixl
    assert (report.versions.nixl_wheel or "").startswith("nixl-")
    assert report.versions.ucx
    works = {backend.name for backend in report.backends if backend.works}
    assert "UCX" in works
    assert all(backend.detail for backend in report.backends if not backend.works)
    assert any(device.transport == "tcp" for device in report.ucx_devices)


def test_environment_tells_who_set_what(healthy: tuple[Report, int]) -> None:
    report, _ = healthy
    settings = {setting.name: (setting.value, setting.source) for setting in report.environment}
    assert settings["UCX_TCP_SNDBUF"] == ("2m", "user")
    assert settings["UCX_TCP_RX_SEG_SIZE"][1] == "torch_nixl"
    assert settings["NIXL_ODD"] == ("1", "user")
    assert "hush" not in report.model_dump_json()
    assert "TUNING_LOWERED" in {finding.name for finding in report.findings}


def test_modules_of_ucx_are_there_and_why_not_loaded(healthy: tuple[Report, int]) -> None:
    report, _ = healthy
    modules = {module.name: module for module in report.ucx_modules}
    assert modules.keys() == {"uct_cuda", "uct_ib"}
    assert all(module.present for module in modules.values())
    assert all(bool(module.detail) is not module.loaded for module in modules.values())


def test_report_can_be_read_by_a_person(healthy: tuple[Report, int]) -> None:
    report, _ = healthy
    finding = Finding(name="ODD", severity="warning", problem="[odd] thing", mend="unset [it]")
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115 - as long as the console lives
    with console.file:
        streams = ("cuda:0: wait() blocks the host: not supported",)
        update = {"findings": (finding,), "streams": streams}
        render(report.model_copy(update=update), console)
    text = console.export_text()
    assert "Tensors can move here" in text
    assert ("GB/s: a copy within one process" in text) == (report.path.kind == "cma")
    assert "[odd] thing" in text
    assert "wait() blocks the host: not supported" in text
    assert "mend: unset [it]" in text


def test_ucx_tls_without_cma_is_reported_as_tcp() -> None:
    report, status = _examine(UCX_TLS="tcp,self")
    assert status == 0
    assert report.path.kind == "tcp"
    if report.cma.works:
        [finding] = [item for item in report.findings if item.severity == "warning"]
        assert "add cma to UCX_TLS" in finding.mend


def test_broken_ucx_tls_is_an_error_with_its_mend() -> None:
    finished = _doctor(UCX_TLS="bogus")
    assert finished.returncode == 1
    assert "Tensors can't move here" in finished.stdout
    assert "'bogus' is not available" in finished.stdout
    assert "mend: unset UCX_TLS (now UCX_TLS=bogus)" in finished.stdout
    assert "Traceback" not in finished.stdout + finished.stderr


def _fake_nixl(folder: Path, source: str) -> str:
    """Return a PYTHONPATH on which another `nixl` comes first."""
    (folder / "nixl.py").write_text(source)
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize(
    ("source", "problem", "mend"),
    [
        ("raise ImportError('no wheel fits')", "no wheel fits", "pip install nixl"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV", "--force-reinstall"),
    ],
)
def test_nixl_that_cannot_be_imported_is_a_finding(
    tmp_path: Path, source: str, problem: str, mend: str
) -> None:
    report, status = _examine(PYTHONPATH=_fake_nixl(tmp_path, source))
    assert status == 1
    assert not report.can_move
    assert report.cma.error != "not tried"
    [finding] = [item for item in report.findings if item.severity == "error"]
    assert problem in finding.problem
    assert mend in finding.mend


def test_nixl_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _fake_nixl(tmp_path, "import signal; signal.pause()")
    monkeypatch.setenv("PYTHONPATH", fake)
    steps: list[str] = []
    trials = run_trials(steps.append, timeout=8)
    assert trials.path is None
    assert "while importing NIXL (not done within 8 s" in (trials.nixl_failure or "")
    assert steps == ["trying cross memory attach", "importing NIXL"]


def test_missing_extra_is_named_in_one_sentence() -> None:
    program = (
        "import sys; sys.modules['typer'] = None\nfrom torch_nixl.cli.main import run\nrun()\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert "pip install 'torch-nixl[cli]'" in finished.stderr


def test_version_is_printed() -> None:
    from torch_nixl import __version__

    finished = subprocess.run(
        [sys.executable, "-m", "torch_nixl.cli.main", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert finished.stdout == f"torch-nixl {__version__}\n"
