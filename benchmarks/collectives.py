"""`torch-nixl bench collectives` on 2 and 4 ranks with what the issues ask of it.

    python benchmarks/collectives.py [--json FILE] [--ranks 2 4] [--only NAME ...] [--pin]

Ranks on one host, each a process with one thread for torch. A figure is the time of one call, the
slowest rank's. Sizes are those of one rank's tensor. The last rows are the time that `dist.isend`
takes to return, on a process group "nixl".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from rows import Row, be_a_rank, bench, from_ranks, parser, row, rows, show

from torch_nixl.bench.launch import is_rank
from torch_nixl.bench.report import OURS, Report
from torch_nixl.bench.session import Case, Contestant, Session

SMALL, MIDDLE, LARGE = 8, 1 << 20, 64 << 20
TWO_RANKS = {
    "broadcast": 0.5,
    "all_gather": 0.5,
    "all_to_all": 0.5,
    "gather": 0.5,
    "all_reduce": 0.7,
    "reduce_scatter": 0.7,
}
"""Largest ratio of times on 2 ranks from 1 MiB on."""
MORE_RANKS = 1.05
"""The same where there are more ranks than cores."""
POSTING_US = 15.0
"""Longest that `dist.isend` may take to return."""
BURST = 16
"""Messages that are sent before the first is waited for."""


def limits(report: Report) -> dict[tuple[str, int, str], float]:
    """From 16 MiB on bandwidths are compared: the limits' reciprocals."""
    found: dict[tuple[str, int, str], float] = {}
    for name, limit in TWO_RANKS.items():
        largest = limit if report.ranks == 2 else MORE_RANKS
        found[name, MIDDLE, "Gloo"] = largest
        found[name, LARGE, "Gloo"] = 1 / largest
    if report.ranks == 2:
        found["barrier", 0, "Gloo"] = 0.5
        found["all_reduce", SMALL, "Gloo"] = 0.6
    return found


def posting(session: Session) -> Iterator[Row]:
    """The call of `dist.isend` alone, whoever moves the bytes."""
    small = torch.zeros(SMALL // 4)
    groups = {OURS: dist.new_group(backend="nixl"), **session.rivals()}

    def contestant(group: dist.ProcessGroup) -> Contestant:
        def post(count: int) -> list[float]:
            seconds = []
            for _ in range(-(-count // BURST)):
                if session.rank:
                    for _ in range(BURST):
                        dist.recv(small, 0, group=group)
                    continue
                works = []
                for _ in range(BURST):
                    started = time.perf_counter()
                    works.append(dist.isend(small, 1, group=group))
                    seconds.append(time.perf_counter() - started)
                for work in works:
                    assert work is not None
                    work.wait()
            return seconds or [0.0]

        return post

    contestants = {name: contestant(group) for name, group in groups.items()}
    measured = session.measure(Case("call of dist.isend", SMALL, lambda: contestants))
    yield Row("call of dist.isend, 8 B, p50", measured.median(OURS) * 1e6, "us", POSTING_US)
    yield row(measured, "Gloo", None)


def main() -> None:
    if is_rank():
        be_a_rank(posting)
        return
    made = parser(__doc__ or "")
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    made.add_argument("--only", nargs="+", default=[], metavar="NAME")
    made.add_argument(
        "--pin", action="store_true", help="keep each rank on a core of its own, as far as they go"
    )
    options = made.parse_args()
    arguments = ["--sizes", f"{SMALL},{MIDDLE},{LARGE}", "--rounds", "15"]
    arguments += ["--pin"] if options.pin else []
    names = [name for name in options.only if name != "isend"]
    arguments += [part for name in names for part in ("--only", name)]
    found: list[Row] = []
    for ranks in options.ranks if names or not options.only else ():
        report = bench("collectives", "--ranks", str(ranks), *arguments)
        found += rows(report, limits(report), prefix=f"{ranks} ranks: ")
    if not options.only or "isend" in options.only:
        found += from_ranks(sys.argv[0])
    show("collectives", found, options.json)


if __name__ == "__main__":
    main()
