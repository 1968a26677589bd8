"""One rank of a benchmark: what it measures with the others, and how rounds alternate."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import torch_nixl
from torch_nixl.bench.report import Measurement, Report, this_machine

ROUND_SECONDS = 0.15
"""About how long a contestant runs in each round."""

MAX_COUNT = 2000
MIN_COUNT = 3


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        sizes: Bytes of the messages.
        rounds: How often all contestants take their turns.
        device: Where tensors lie.
        rivals: Names of those to leave out.
        only: Parts of a suite to run; all if empty.
    """

    sizes: tuple[int, ...]
    rounds: int = 7
    device: str = "cpu"
    without: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure, at one size.

    Attributes:
        what: What it is.
        nbytes: The size.
        contestants: For each name what to do once. All ranks do the same, in the same order.
        share: By what the measured time is divided: 2 for a round trip of which half counts.
    """

    what: str
    nbytes: int
    contestants: Mapping[str, Callable[[], object]]
    share: float = 1.0


class Session:
    """This rank among the others.

    Attributes:
        rank: From 0.
        world_size: How many there are.
        communicator: Ours.
        device: Where this rank's tensors lie.
    """

    def __init__(self, options: Options, communicator: torch_nixl.Communicator) -> None:
        self.options = options
        self.communicator = communicator
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self._nccl: dist.ProcessGroup | None = None

    def rivals(self) -> dict[str, dist.ProcessGroup]:
        """The process groups that can move what lies on this session's device."""
        groups: dict[str, dist.ProcessGroup] = {}
        world = dist.group.WORLD
        assert world is not None
        if self.device.type == "cpu":
            groups["Gloo"] = world
        elif dist.is_nccl_available():
            if self._nccl is None:
                self._nccl = dist.new_group(backend="nccl")
            groups["NCCL"] = self._nccl
        return {name: group for name, group in groups.items() if name not in self.options.without}

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def finish(self) -> None:
        """Wait until this rank's device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def measure(self, case: Case) -> Measurement:
        """Let contestants take turns; every rank calls this with the same case."""
        counts = {name: self._count(run) for name, run in case.contestants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in case.contestants}
        for _ in range(self.options.rounds):
            for name, run in case.contestants.items():
                self.barrier()
                seconds[name].append(self._time(run, counts[name]) / case.share)
        return Measurement(what=case.what, nbytes=case.nbytes, seconds=seconds)

    def _time(self, run: Callable[[], object], count: int) -> float:
        each = []
        for _ in range(count):
            started = time.perf_counter()
            run()
            self.finish()
            each.append(time.perf_counter() - started)
        return statistics.median(each)

    def _count(self, run: Callable[[], object]) -> int:
        """How often to do it in a round: the same number on all ranks."""
        self.barrier()
        once = min(self._time(run, 1) for _ in range(3))
        count = torch.tensor([max(MIN_COUNT, min(MAX_COUNT, int(ROUND_SECONDS / once)))])
        dist.broadcast(count, 0)
        return int(count)


Suite = Callable[[Session], Iterator[Case]]


@contextmanager
def open_session(options: Options) -> Iterator[Session]:
    """Be one of the ranks that torchrun started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    try:
        with torch_nixl.init() as communicator:
            yield Session(options, communicator)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def run_suite(
    name: str, suite: Suite, options: Options, announce: Callable[[str], None]
) -> Report | None:
    """Measure a suite's cases; rank 0 gets the report.

    Args:
        name: The suite's.
        suite: Makes the cases.
        options: What to measure.
        announce: Is told, on rank 0, what is measured next.
    """
    machine = this_machine()
    measurements: list[Measurement] = []
    with open_session(options) as session:
        for case in suite(session):
            if session.rank == 0:
                announce(f"{case.what}, {size_name(case.nbytes)}")
            measurements.append(session.measure(case))
        ranks = session.world_size
        is_first = session.rank == 0
    if not is_first:
        return None
    return Report(
        suite=name,
        ranks=ranks,
        device=options.device,
        machine=machine,
        measurements=measurements,
    )


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """The arguments of `python -m` that run `torch-nixl` with these arguments on several ranks."""
    return [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "torch_nixl.cli.main",
        *arguments,
    ]


def size_name(nbytes: int) -> str:
    """Bytes for people: ``"64 KiB"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


def parse_size(text: str) -> int:
    """The reverse of `size_name`; spaces, case and the ``iB`` may be missing.

    Raises:
        ValueError: It is no size.
    """
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    number = text.strip().lower().removesuffix("ib")
    unit = number[-1:] if number[-1:].isalpha() else ""
    number = number.removesuffix(unit).strip()
    if unit not in units or not number.replace(".", "", 1).isdigit():
        raise ValueError(f"{text!r} is no size: expected one like 8, 64k or 16MiB")
    return int(float(number) * units[unit])
