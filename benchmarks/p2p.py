"""`torch-nixl bench p2p` with what the issues ask of it.

    python benchmarks/p2p.py [--json FILE]

Two ranks on one host; half a round trip. The raw rival is NIXL's own bindings, polled by the
thread that waits: a notification where ours is eager, a one-sided READ above.
"""

from __future__ import annotations

from rows import Row, Rows, bench, parser, rows, show

from torch_nixl.bench.raw import NAME as RAW
from torch_nixl.bench.report import OURS, Report
from torch_nixl.bench.sizes import size_name

SIZES = (8, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
TRIP = "half a round trip"

GLOO = {8: 0.3, 8 << 10: 0.6, 64 << 10: 0.6, 1 << 20: 0.4, 16 << 20: 2.0, 256 << 20: 2.0}
BARE = {8: 2.0, 8 << 10: 2.0, 64 << 10: 2.0, 1 << 20: 2.0, 16 << 20: 1.4, 256 << 20: 1.4}
CHANNEL_SIZES = (64 << 10, 1 << 20)
CALL_MICROSECONDS = 10.0
TAIL = 10.0
ROUNDS = "7"


def limits(report: Report) -> dict[tuple[str, int, str], float]:
    """From 16 MiB on bandwidths are compared: there more is better."""
    found = {(TRIP, nbytes, "Gloo"): limit for nbytes, limit in GLOO.items()}
    found |= {(TRIP, nbytes, RAW): limit for nbytes, limit in BARE.items()}
    for one in report.measurements:
        if one.what.startswith("step of a channel") and one.nbytes in CHANNEL_SIZES:
            found |= {(one.what, one.nbytes, "send and recv"): 1.0}
            found |= {(one.what, one.nbytes, "Gloo"): 0.6}
        elif one.what.startswith("tree"):
            found |= {(one.what, one.nbytes, "one tensor"): 0.9}
        elif one.what.startswith("isend"):
            found |= {(one.what, one.nbytes, "Gloo"): 1 / 3}
    return found


def more(report: Report) -> Rows:
    """Rows without a rival: calls, and the 99th percentile against our own median."""
    for one in report.measurements:
        what, ours = f"{one.what}, {size_name(one.nbytes)}", one.median(OURS) * 1e6
        tail = one.tail(OURS)
        if one.what.startswith("call"):
            yield Row(what, ours, "us", CALL_MICROSECONDS, note="NIXL's part included")
        elif one.what == TRIP and tail is not None:
            yield Row(f"{what}, p99", tail * 1e6, "us", TAIL, ours, note="rival: our own p50")


if __name__ == "__main__":
    options = parser(__doc__ or "").parse_args()
    measured = bench("p2p", "--full", "--rounds", ROUNDS, "--sizes", ",".join(map(str, SIZES)))
    found = [*rows(measured, limits(measured)), *more(measured)]
    show("p2p, 2 ranks", found, options.json)
