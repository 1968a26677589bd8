"""`torch-nixl bench metrics` with what the issues ask of it: 2 % at the most.

python benchmarks/metrics.py [--json FILE]
"""

from __future__ import annotations

from rows import bench, parser, rows, show

from torch_nixl.bench.metrics import OFF

LARGEST = 1.02
ROUNDS = 61

if __name__ == "__main__":
    options = parser(__doc__ or "").parse_args()
    # Sizes below those at which `rows` compares bandwidths.
    report = bench("metrics", "--rounds", str(ROUNDS), "--sizes", "8,64k,1m")
    limits = {(one.what, one.nbytes, OFF): LARGEST for one in report.measurements}
    show("metrics, traces and spans: on against off", list(rows(report, limits)), options.json)
