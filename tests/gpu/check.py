"""Checks device streams with two ranks, which share one GPU if there is only one.

    PYTHONPATH=tests python tests/gpu/check.py          takes under five minutes
    PYTHONPATH=tests python tests/gpu/check.py --cpu    runs the programs without a GPU

Prints what held and what did not, how long the host was kept by calls that are not to block, and
bandwidths, each with what it competes with in the same run. Ends with status 1 if something failed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from gpu.programs import CHECKS, HOST_SECONDS, bandwidth, describe
from torch_nixl.testing import RankPool, RanksFailed

TIMEOUT = 35.0
"""For each check: seven of them, and the bandwidth, stay under five minutes."""


def main(
    pool: RankPool, kind: str, say: Callable[[str], object], *, nbytes: int | None = None
) -> bool:
    """Run all checks; return whether all held."""
    well = True
    say(str(pool.run(describe, args=(kind,), world_size=2, timeout=TIMEOUT)[0]))
    for name, check in CHECKS.items():
        started = time.perf_counter()
        try:
            results = pool.run(check, args=(kind,), world_size=2, timeout=TIMEOUT)
        except RanksFailed as error:
            well = False
            say(f"{name}: FAILED\n{error}")
            continue
        text = f"{name}: ok, {time.perf_counter() - started:.1f} s"
        if name == "ordering":
            longest = max(float(result) for result in results)
            text += f", the host was kept for {longest * 1e3:.2f} ms at most"
            if kind != "cpu" and longest > HOST_SECONDS:
                well = False
                text += f": FAILED, more than {HOST_SECONDS * 1e3:.0f} ms"
        say(text)
    args = (kind,) if nbytes is None else (kind, nbytes)
    found = pool.run(bandwidth, args=args, world_size=2, timeout=2 * TIMEOUT)[1]
    for name, figure in found.items():
        say(f"{name}: {figure:.1f} GB/s")
    return well


if __name__ == "__main__":
    on_cpu = "--cpu" in sys.argv[1:]
    if not on_cpu and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --cpu runs the programs without one")
    with RankPool(2) as ranks:
        held = main(ranks, "cpu" if on_cpu else "cuda", lambda text: sys.stdout.write(text + "\n"))
    sys.exit(not held)
