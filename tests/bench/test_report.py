"""What a benchmark run says, stores, and how two of them compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from torch_nixl.bench import plot as plots
from torch_nixl.bench.report import (
    OURS,
    Measurement,
    Report,
    changes,
    compare,
    differences,
    percentile,
    this_machine,
)
from torch_nixl.bench.sizes import parse_size, size_name, time_name
from torch_nixl.bench.table import show, show_changes


def report(ours: list[float], gloo: list[float], nbytes: int = 1 << 20) -> Report:
    measurement = Measurement(what="ping", nbytes=nbytes, seconds={OURS: ours, "Gloo": gloo})
    return Report(
        suite="p2p", ranks=2, device="cpu", machine=this_machine(), measurements=[measurement]
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict", "ratio"),
    [
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], "win", 0.5),
        ([3.0, 3.0, 3.0], [2.0, 2.0, 2.0], "loss", 1.5),
        ([1.0, 1.9, 3.0], [2.0, 2.0, 2.0], "even", 0.95),
        ([1.0], [4.0], "win", 0.25),
    ],
)
def test_a_verdict_needs_the_quartiles(
    ours: list[float], theirs: list[float], verdict: str, ratio: float
) -> None:
    found = compare("x", ours, theirs)
    assert (found.verdict, found.ratio) == (verdict, ratio)
    assert found.low <= found.ratio <= found.high


def test_noise_that_meets_both_of_a_round_cancels() -> None:
    found = compare("x", [1.0, 10.0, 1.0], [2.0, 20.0, 2.0])
    assert (found.low, found.ratio, found.high) == (0.5, 0.5, 0.5)


def test_a_report_is_stored_and_read(tmp_path: Path) -> None:
    made = report([1.0, 2.0], [3.0, 4.0])
    made.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == made
    (tmp_path / "r.json").write_text(json.dumps({"suite": "p2p"}))
    with pytest.raises(ValueError, match="ranks"):
        Report.load(tmp_path / "r.json")


def test_only_what_is_clearly_slower_is_called_so() -> None:
    before = report([1.0, 1.1, 1.2], [1.0] * 3)
    [slower] = changes(before, report([2.0, 2.1, 2.2], [1.0] * 3))
    [faster] = changes(report([2.0, 2.1, 2.2], [1.0] * 3), before)
    [same] = changes(before, report([1.1, 1.15, 9.0], [1.0] * 3))
    assert [slower.verdict, faster.verdict, same.verdict] == ["slower", "faster", "same"]
    assert (slower.before, slower.after) == (1.1, 2.1)
    with pytest.raises(ValueError, match="in common"):
        changes(before, report([1.0], [1.0], nbytes=8))


def test_a_run_of_few_rounds_says_nothing_of_slower() -> None:
    [change] = changes(report([1.0] * 2, [1.0] * 2), report([9.0] * 2, [1.0] * 2))
    assert (change.verdict, change.after) == ("same", 9.0)


def test_what_the_rivals_did_tells_of_the_machine() -> None:
    [change] = changes(report([1.0] * 3, [2.0] * 3), report([3.0] * 3, [6.0] * 3))
    assert (change.verdict, change.rivals) == ("slower", 3.0)


@pytest.mark.parametrize(("name", "value"), [("suite", "kv"), ("ranks", 4), ("device", "cuda")])
def test_runs_of_different_things_are_not_compared(name: str, value: object) -> None:
    before = report([1.0] * 3, [1.0] * 3)
    with pytest.raises(ValueError, match=f"differ in {name}"):
        changes(before, before.model_copy(update={name: value}))


def test_what_weakens_a_comparison_is_said() -> None:
    before = report([1.0] * 3, [1.0] * 3)
    assert differences(before, before) == []
    machine = before.machine.model_copy(update={"cores": 1000})
    extra = Measurement(what="more", nbytes=8, seconds={OURS: [1.0] * 3})
    after = before.model_copy(
        update={"machine": machine, "measurements": [*before.measurements, extra]}
    )
    said = differences(before, after)
    assert said == [
        f"cores: {before.machine.cores} before, 1000 after",
        "measured only after: 1, such as more",
    ]


@pytest.mark.parametrize(
    "seconds",
    [
        {"Gloo": [1.0]},
        {OURS: [1.0], "Gloo": [1.0, 2.0]},
        {OURS: []},
        {OURS: [0.0]},
        {OURS: [float("nan")]},
    ],
)
def test_figures_that_cannot_be_are_refused(seconds: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="x: expected"):
        Measurement(what="x", nbytes=8, seconds=seconds)


def test_percentiles() -> None:
    figures = [float(number) for number in range(100, 0, -1)]
    assert [percentile(figures, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]


def test_a_tail_is_shown_beside_the_median_and_a_missing_rival_below() -> None:
    measured = Measurement(
        what="call", nbytes=0, seconds={OURS: [1e-5] * 3}, p99={OURS: [2e-5, 3e-5, 4e-5]}
    )
    made = report([1.0], [1.0]).model_copy(
        update={"measurements": [measured], "missing": {"dynamo": "not [here]"}}
    )
    console = Console(width=160, record=True, force_terminal=False)
    show(made, console)
    text = console.export_text()
    assert "10 us, p99 30 us" in text
    assert "without dynamo: not [here]" in text


def test_tables_show_wins_and_losses() -> None:
    console = Console(width=160, record=True, force_terminal=False)
    show(report([0.001] * 3, [0.002] * 3), console)
    show(report([2e-5] * 3, [1e-5] * 3, nbytes=8), console)
    show_changes(changes(report([1.0] * 3, [1.0] * 3), report([2.0] * 3, [1.0] * 3)), console)
    text = console.export_text()
    assert "1.05 GB/s" in text
    assert "0.50 (0.50-0.50) win" in text
    assert "20 us" in text
    assert "2.00 (2.00-2.00) loss" in text
    assert "slower" in text


def test_nothing_is_cut_off_where_the_terminal_is_narrow() -> None:
    console = Console(width=60, record=True, force_terminal=False)
    show(report([0.001] * 3, [0.002] * 3), console)
    text = console.export_text()
    assert "…" not in text
    assert "win" in text


@pytest.mark.parametrize("suffix", plots.SUFFIXES)
def test_plots_are_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plot{suffix}"
    plots.plot(report([0.001] * 3, [0.002] * 3), path)
    begins = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doctype html>"}
    data = path.read_bytes()
    assert data.startswith(begins[suffix])
    if suffix != ".png":
        assert b"Gloo" in data or b"<svg" in data


def test_no_plot_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.html"):
        plots.check_path(tmp_path / "plot.gif")


def test_what_has_no_size_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.plot(report([1.0], [1.0], nbytes=0), tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8", 8), ("64k", 65536), ("1MiB", 1 << 20), ("0.5 KiB", 512), ("2g", 2 << 30), ("3B", 3)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_size(size_name(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "x", "1x", "k", "-1", "1..2", "0", "0.1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_times_have_units() -> None:
    assert [time_name(value) for value in (2.0, 0.0125, 1.74e-5)] == ["2 s", "12.5 ms", "17.4 us"]
