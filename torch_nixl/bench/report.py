"""What a run measured: values, how they compare, and how they are stored."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

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
        nbytes: The message's size.
        seconds: For each contestant the time that it took once, one for each round. Rounds of
            contestants alternate, so that noise meets all of them.
    """

    what: str
    nbytes: int
    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Seconds of a contestant."""
        return statistics.median(self.seconds[name])

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
    """Everything that one run measured."""

    suite: str
    ranks: int
    device: str
    machine: Machine
    measurements: list[Measurement]

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
    if len(ratios) == 1:
        low = high = ratios[0]
    else:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
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
        verdict: ``"slower"`` or ``"faster"`` only if the quartiles of the two runs don't overlap.
    """

    what: str
    nbytes: int
    before: float
    after: float
    verdict: Literal["slower", "faster", "same"]


def changes(before: Report, after: Report) -> list[Change]:
    """Compare our own figures in two runs.

    Raises:
        ValueError: They have nothing in common.
    """
    old = {(one.what, one.nbytes): one.seconds[OURS] for one in before.measurements}
    found = []
    for one in after.measurements:
        earlier = old.get((one.what, one.nbytes))
        if earlier is None:
            continue
        later = one.seconds[OURS]
        verdict: Literal["slower", "faster", "same"] = "same"
        if _quartiles(later)[0] > _quartiles(earlier)[1]:
            verdict = "slower"
        elif _quartiles(later)[1] < _quartiles(earlier)[0]:
            verdict = "faster"
        found.append(
            Change(
                what=one.what,
                nbytes=one.nbytes,
                before=statistics.median(earlier),
                after=statistics.median(later),
                verdict=verdict,
            )
        )
    if not found:
        raise ValueError("the two reports have no measurement in common")
    return found


def _quartiles(seconds: list[float]) -> tuple[float, float]:
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high
