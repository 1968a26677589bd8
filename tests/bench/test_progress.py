"""What a terminal shows while a benchmark runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from torch_nixl.cli import bench


@pytest.mark.parametrize(("rank", "is_shown"), [(0, True), (1, False)])
def test_a_terminal_sees_what_runs_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, rank: int, is_shown: bool
) -> None:
    screen = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")

    def console(*, stderr: bool) -> Console:
        assert stderr
        return Console(file=screen, force_terminal=True, width=120)

    monkeypatch.setattr(bench, "Console", console)
    with bench._listener("p2p", rank) as listener:
        if rank == 0:  # The others aren't asked to.
            listener.begin(17, 31.0)
        for done in range(4 if rank == 0 else 0):
            listener.step(done, 7, "half a round trip, 8 B")
    text = screen.getvalue()
    assert ("p2p: half a round trip, 8 B" in text) == is_shown
    assert ("left:" in text) == is_shown
    assert ("p2p: 17 measurements, about 30 s on idle cores" in text) == is_shown
