"""What a run measured: values, how they compare, and how they are stored."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from torch_nixl import __version__

OURS = "torch_nixl"
"""The name under which our own figures stand."""

Verdict = Literal["win", "loss", "even"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Comparison(_Value):
    """Our time as a share of a rival's, over the rounds of one run.

    Attributes:
        rival: Its name.
        ratio: Median over the rounds; below 1 we are faster.
        low: First quartile.
        high: Third quartile.
        verdict: A win or a loss only if the quartiles agree.
    """

    rival: str
    ratio: float
    low: float
    high: float
    verdict: Verdict


class Measurement(_Value):
    """One thing that was measured, at one size.

    Attributes:
        what: What was done.
        nbytes: The message's size; 0 where nothing was moved.
        seconds: For each contestant the time that it took once, one for each round: the median of
            the round, on the slowest rank. Rounds of contestants alternate, so that noise meets
            all of them.
        p99: The same of the 99th percentile of each round, for contestants that ran often enough.
    """

    what: str
    nbytes: int
    seconds: dict[str, list[float]]
    p99: dict[str, list[float]] = {}

    @model_validator(mode="after")
    def _check(self) -> Measurement:
        numbers = {len(rounds) for rounds in (*self.seconds.values(), *self.p99.values())}
        if OURS not in self.seconds or len(numbers) != 1 or 0 in numbers:
            raise ValueError(f"{self.what}: expected {OURS}, and as many rounds of each")
        if any(not 0 < second < float("inf") for one in self.seconds.values() for second in one):
            raise ValueError(f"{self.what}: expected positive times")
        return self

    def median(self, name: str) -> float:
        """Seconds of a contestant."""
        return statistics.median(self.seconds[name])

    def tail(self, name: str) -> float | None:
        """Seconds below which a contestant stayed in 99 of 100 runs, if it ran often enough."""
        return statistics.median(self.p99[name]) if name in self.p99 else None

    def bandwidth(self, name: str) -> float:
        """GB/s of a contestant, in units of 10^9."""
        return self.nbytes / self.median(name) / 1e9

    def comparisons(self) -> list[Comparison]:
        """Ours against each rival, round by round."""
        return [
            compare(name, self.seconds[OURS], theirs)
            for name, theirs in self.seconds.items()
            if name != OURS
        ]


class Machine(_Value):
    """Where and when a run took place."""

    cores: int
    arch: str
    load: float
    python: str
    torch: str
    nixl: str
    torch_nixl: str
    time: str


class Report(_Value):
    """Everything that one run measured.

    Attributes:
        suite: Which suite ran.
        ranks: On how many ranks.
        device: Where tensors lay.
        machine: Rank 0's.
        measurements: Each pair of `what` and `nbytes` once.
        missing: Rivals that took no part though nobody left them out, with the reason.
    """

    suite: str
    ranks: int
    device: str
    machine: Machine
    measurements: list[Measurement]
    missing: dict[str, str] = {}

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what `save` wrote.

        Raises:
            OSError: The file can't be read.
            ValueError: It holds something else.
        """
        return cls.model_validate_json(path.read_text())


def compare(name: str, ours: list[float], theirs: list[float]) -> Comparison:
    """Compare two contestants whose rounds alternated, each round with its neighbour."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, high = _quartiles(ratios)
    verdict: Verdict = "win" if high < 1 else "loss" if low > 1 else "even"
    return Comparison(
        rival=name, ratio=statistics.median(ratios), low=low, high=high, verdict=verdict
    )


def this_machine() -> Machine:
    """What this process runs on."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    return Machine(
        cores=len(os.sched_getaffinity(0)),
        arch=platform.machine(),
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        torch=installed("torch"),
        nixl=installed("nixl"),
        torch_nixl=__version__,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


class Change(_Value):
    """How one figure of ours differs between two runs.

    Attributes:
        what: What was measured.
        nbytes: At which size.
        before: Seconds in the first run.
        after: Seconds in the second.
        rivals: By what factor the rivals changed, the median of them: what the machine did to all.
            None if no rival took part in both runs.
        verdict: ``"slower"`` or ``"faster"`` only if both runs have three rounds or more and
            their quartiles don't overlap.
    """

    what: str
    nbytes: int
    before: float
    after: float
    rivals: float | None
    verdict: Literal["slower", "faster", "same"]


def changes(before: Report, after: Report) -> list[Change]:
    """Compare our own figures in two runs.

    Raises:
        ValueError: They measured different things, or have nothing in common.
    """
    for name in ("suite", "ranks", "device"):
        first, second = getattr(before, name), getattr(after, name)
        if first != second:
            raise ValueError(f"the two reports differ in {name}: {first} and {second}")
    old = {(one.what, one.nbytes): one for one in before.measurements}
    found = [
        _change(old[one.what, one.nbytes], one)
        for one in after.measurements
        if (one.what, one.nbytes) in old
    ]
    if not found:
        raise ValueError("the two reports have no measurement in common")
    return found


def differences(before: Report, after: Report) -> list[str]:
    """What makes a comparison of two runs weaker, in sentences."""
    found = []
    for name in ("cores", "arch", "python", "torch", "nixl"):
        first, second = getattr(before.machine, name), getattr(after.machine, name)
        if first != second:
            found.append(f"{name}: {first} before, {second} after")
    names = [{(one.what, one.nbytes) for one in report.measurements} for report in (before, after)]
    for word, only in (("before", names[0] - names[1]), ("after", names[1] - names[0])):
        if only:
            found.append(f"measured only {word}: {len(only)}, such as {min(only)[0]}")
    return found


def _change(before: Measurement, after: Measurement) -> Change:
    earlier, later = before.seconds[OURS], after.seconds[OURS]
    verdict: Literal["slower", "faster", "same"] = "same"
    if min(len(earlier), len(later)) >= 3:
        if _quartiles(later)[0] > _quartiles(earlier)[1]:
            verdict = "slower"
        elif _quartiles(later)[1] < _quartiles(earlier)[0]:
            verdict = "faster"
    rivals = [
        after.median(name) / before.median(name)
        for name in after.seconds
        if name != OURS and name in before.seconds
    ]
    return Change(
        what=after.what,
        nbytes=after.nbytes,
        before=before.median(OURS),
        after=after.median(OURS),
        rivals=statistics.median(rivals) if rivals else None,
        verdict=verdict,
    )


def percentile(seconds: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _quartiles(seconds: list[float]) -> tuple[float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high
