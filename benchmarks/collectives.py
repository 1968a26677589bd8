"""`torch-nixl bench collectives` on 2 and 4 ranks with what the issues ask of it.

    python benchmarks/collectives.py [--json FILE] [--ranks 2 4] [--only NAME ...] [--pin]

Ranks on one host, each a process with one thread for torch. A figure is the time of one call, the
slowest rank's. Sizes are those of one rank's tensor.
"""

from __future__ import annotations

from rows import Row, bench, parser, rows, show

from torch_nixl.bench.report import Report

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


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    made.add_argument("--only", nargs="+", default=[], metavar="NAME")
    made.add_argument(
        "--pin", action="store_true", help="keep each rank on a core of its own, as far as they go"
    )
    options = made.parse_args()
    arguments = ["--sizes", f"{SMALL},{MIDDLE},{LARGE}", "--rounds", "15"]
    arguments += ["--pin"] if options.pin else []
    arguments += [part for name in options.only for part in ("--only", name)]
    found: list[Row] = []
    for ranks in options.ranks:
        report = bench("collectives", "--ranks", str(ranks), *arguments)
        found += rows(report, limits(report), prefix=f"{ranks} ranks: ")
    show("collectives", found, options.json)


if __name__ == "__main__":
    main()
