"""One rank of a benchmark: what it measures with the others, and how rounds alternate."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

import torch_nixl
from torch_nixl.bench.launch import STORE, end_with_parent
from torch_nixl.bench.report import Measurement, Report, percentile, this_machine
from torch_nixl.bench.sizes import size_name

ROUND_SECONDS = 0.1
"""About how long a contestant runs in each round."""

MAX_COUNT = 1000
MIN_COUNT = 3

SLOW_BYTES_PER_SECOND = 1.5e9
"""About what the slowest contestants reach, to tell how long what is large will take."""

MIN_TAIL_COUNT = 100
"""Runs in a round from which its 99th percentile says something."""

TIMEOUT = datetime.timedelta(seconds=120)
"""After which a rank that waits for the others gives up."""

Contestant = Callable[[int], Sequence[float]]
"""Does a thing so many times; returns the seconds that each took, or their mean alone.

All ranks call it with the same count. The slowest rank's figure counts: one whose time doesn't
count returns ``[0.0]``.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        sizes: Bytes of the messages.
        rounds: How often all contestants take their turns.
        device: Where tensors lie.
        without: Names of rivals to leave out.
        only: Words; a case counts if its name has one of them. All cases if empty.
        pin: Keep each rank on one core.
        dynamo: A Python that has dynamo's nixl_connect; by default this one, if it has.
        full: Measure all that the suite has; else what fits in half a minute, where it has so much
            that this makes a difference. What `only` names is looked for in all of it.
    """

    sizes: tuple[int, ...]
    rounds: int = 7
    device: str = "cpu"
    without: frozenset[str] = frozenset()
    only: tuple[str, ...] = ()
    pin: bool = False
    dynamo: str = ""
    full: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure, at one size.

    Attributes:
        what: What it is.
        nbytes: The size; 0 where nothing is moved.
        make: Makes, when its turn has come, the contestants by their names: `OURS` and rivals.
            All ranks do so at the same time.
        share: By what the measured time is divided: 2 for a round trip of which half counts.
        contestants: About how many there are, to tell how long it will take.
    """

    what: str
    nbytes: int
    make: Callable[[], Mapping[str, Contestant]]
    share: float = 1.0
    contestants: int = 3


class Session:
    """This rank among the others.

    Attributes:
        options: What is measured.
        rank: From 0.
        world_size: How many there are.
        device: Where this rank's tensors lie.
        stack: What is closed at the end.
        missing: Rivals that take no part although they were not left out, with the reason.
    """

    def __init__(self, options: Options, stack: ExitStack) -> None:
        self.options = options
        self.stack = stack
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = torch.device(options.device)
        self.missing: dict[str, str] = {}
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError("no CUDA device here: --device cpu measures host memory")
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self._communicator: torch_nixl.Communicator | None = None
        self._groups: dict[str, dist.ProcessGroup] | None = None

    @property
    def communicator(self) -> torch_nixl.Communicator:
        """Ours, made at the first use, which is to come at the same time on all ranks."""
        if self._communicator is None:
            self._communicator = self.stack.enter_context(torch_nixl.init(timeout=TIMEOUT))
        return self._communicator

    def rivals(self) -> dict[str, dist.ProcessGroup]:
        """The process groups that can move what lies on this session's device."""
        if self._groups is None:
            self._groups = self._make_rivals()
        return self._groups

    def _make_rivals(self) -> dict[str, dist.ProcessGroup]:
        name = "Gloo" if self.device.type == "cpu" else "NCCL"
        if not self.takes_part(name):
            return {}
        if name == "Gloo":
            world = dist.group.WORLD
            assert world is not None
            return {name: world}
        if not dist.is_nccl_available():
            self.missing[name] = "this torch is built without it"
            return {}
        if self.world_size > torch.cuda.device_count() and STORE in os.environ:
            self.missing[name] = "it wants a GPU for each rank"
            return {}
        return {name: dist.new_group(backend="nccl")}

    def takes_part(self, name: str) -> bool:
        """Whether a rival was not left out."""
        return name not in self.options.without

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def exchange(self, value: Any) -> list[Any]:
        """Hand a value to all ranks, pickled, and return what each handed over. A barrier, too."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def wait_while(self, poll: Callable[[], object], pause: float = 0.0) -> None:
        """Poll until all ranks have come to their next barrier, of which this is one."""
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(self.barrier)
            while not others.done():
                poll()
                if pause:
                    time.sleep(pause)
            others.result()

    def timed(self, run: Callable[[], object]) -> Contestant:
        """A contestant that does `run` again and again, each time to the end."""

        def contestant(count: int) -> list[float]:
            each = []
            for _ in range(count):
                started = time.perf_counter()
                run()
                self._finish()
                each.append(time.perf_counter() - started)
            return each

        return contestant

    def pinged(self, send: Callable[[], object], receive: Callable[[], object]) -> Contestant:
        """A round trip between the first two ranks. Further ones don't take part."""

        def first() -> None:
            send()
            receive()

        def second() -> None:
            receive()
            send()

        if self.rank > 1:
            return lambda count: [0.0]
        return self.timed(second if self.rank else first)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def measure(self, case: Case, tick: Callable[[], None] = lambda: None) -> Measurement:
        """Let contestants take turns; every rank calls this with the same case.

        Every second round goes backwards, so that nobody always finds the caches as the same one
        left them.

        Args:
            case: What to measure.
            tick: Called after each round.
        """
        contestants = case.make()
        counts = {name: self._count(run) for name, run in contestants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        p99: dict[str, list[float]] = {name: [] for name in contestants}
        names = list(contestants)
        for _ in range(self.options.rounds):
            for name in names:
                run = contestants[name]
                self.barrier()
                count = counts[name]
                started = time.perf_counter()
                taken = run(count)
                wall = time.perf_counter() - started
                middle, tail, wall, length = self._slowest(
                    statistics.median(taken), percentile(taken, 0.99), wall, len(taken)
                )
                seconds[name].append(middle / case.share)
                if length < MIN_TAIL_COUNT:
                    p99.pop(name, None)
                if name in p99:
                    p99[name].append(tail / case.share)
                # On busy cores some runs take a thousand times as long as most.
                counts[name] = min(count, _fitting(count, wall))
            names.reverse()
            tick()
        return Measurement(what=case.what, nbytes=case.nbytes, seconds=seconds, p99=p99)

    def _slowest(self, *figures: float) -> list[float]:
        """The largest of each figure over all ranks."""
        tensor = torch.tensor(figures, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        largest: list[float] = tensor.tolist()
        return largest

    def _count(self, run: Contestant) -> int:
        """How often to do it in a round: the same number on all ranks."""
        self.barrier()
        run(1)
        count = MIN_COUNT
        while True:
            started = time.perf_counter()
            run(count)
            [wall] = self._slowest(time.perf_counter() - started)
            if wall > ROUND_SECONDS / 10 or count * 5 > MAX_COUNT:
                return _fitting(count, wall)
            count *= 5


def _fitting(count: int, wall: float) -> int:
    """How many runs fit in a round if `count` took `wall` seconds."""
    return max(MIN_COUNT, min(MAX_COUNT, int(count * ROUND_SECONDS / wall)))


Suite = Callable[[Session], list[Case]]


class Listener(Protocol):
    """Hears, on rank 0, how far a suite is."""

    def begin(self, count: int, seconds: float) -> None:
        """It will measure so many things, and take about so long on idle cores."""
        ...

    def step(self, done: int, total: int, what: str) -> None:
        """So many rounds are done, of so many, and this is measured now."""
        ...


def expected_seconds(cases: Sequence[Case], rounds: int) -> float:
    """About how long cases take on idle cores: to find out how often a thing fits counts, too."""
    return sum(
        case.contestants
        * (rounds + 1)
        * max(ROUND_SECONDS, MIN_COUNT * case.share * case.nbytes / SLOW_BYTES_PER_SECOND)
        for case in cases
    )


@contextmanager
def open_session(options: Options) -> Iterator[Session]:
    """Be one of the ranks that `start_ranks`, torchrun or another launcher started.

    Raises:
        RuntimeError: The ranks didn't find each other, or one was lost.
    """
    end_with_parent()
    if options.pin:
        cores = sorted(os.sched_getaffinity(0))
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        os.sched_setaffinity(0, {cores[local % len(cores)]})
    torch.set_num_threads(1)
    store = os.environ.get(STORE)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}" if store else "env://",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=TIMEOUT,
    )
    try:
        with ExitStack() as stack:
            session = Session(options, stack)
            yield session
            session.barrier()
    finally:
        dist.destroy_process_group()


def run_suite(name: str, suite: Suite, options: Options, listener: Listener) -> Report | None:
    """Measure a suite's cases; rank 0 gets the report.

    Args:
        name: The suite's.
        suite: Makes the cases.
        options: What to measure.
        listener: Hears, on rank 0, how far it is.

    Raises:
        ValueError: `options` leave nothing to measure.
        RuntimeError: The ranks didn't find each other, a rank was lost, or a thing is missing.
    """
    machine = this_machine()
    measurements: list[Measurement] = []
    with open_session(options) as session:
        cases = [
            case
            for case in suite(session)
            if not options.only or any(word in case.what for word in options.only)
        ]
        if not cases:
            raise ValueError(f"nothing in {name} has {' or '.join(options.only)} in its name")
        is_first = session.rank == 0
        total = len(cases) * options.rounds
        if is_first:
            listener.begin(len(cases), expected_seconds(cases, options.rounds))
        for number, case in enumerate(cases):
            done = number * options.rounds
            what = f"{case.what}, {size_name(case.nbytes)}" if case.nbytes else case.what

            def tick(what: str = what) -> None:
                nonlocal done
                if is_first:
                    listener.step(done, total, what)
                done += 1

            tick()
            measurements.append(session.measure(case, tick))
        world_size = session.world_size
        missing = session.missing
    if not is_first:
        return None
    return Report(
        suite=name,
        ranks=world_size,
        device=options.device,
        machine=machine,
        measurements=measurements,
        missing=missing,
    )
