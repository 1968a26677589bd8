"""Run PyTorch's own tests of its backends against "nixl", and say what became of each.

    python tests/upstream/run.py            # all
    python tests/upstream/run.py NAME...    # some

A test that asks for Gloo is run as if this were Gloo: the group is on "nixl" all the same.
"""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_nixl.testing import RankPool, RanksFailed
from upstream import cases

RANKS = 4
"""Tests of several subgroups need four."""

TIMEOUT = 90.0

_WORDS = "asserts the words of Gloo's error"

NOT_OURS = {
    "test_barrier_timeout_full_group": _WORDS,
    "test_barrier_timeout_global": _WORDS,
    "test_barrier_timeout_group": _WORDS,
    "test_monitored_barrier_gloo_rank_0_timeout": _WORDS,
}
"""Tests that can't say anything about "nixl", with the reason."""

FOREIGN = {
    "rank_to_GPU": "needs GPUs",
    "doesn't have NCCL built in": "needs NCCL",
    "'torchvision' is not defined": "needs torchvision",
    "monitored_barrier is only implemented for GLOO": "torch lets only Gloo's groups call it",
}
"""Ends of tests that fail for want of something else, and what that is."""

# Has a branch for each of torch's own backends, and no other.
_NO_BRANCH = "UnboundLocalError"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one test.

    Attributes:
        name: The test's.
        outcome: ``"passed"``, ``"failed"`` or ``"not applicable"``.
        reason: Why, if it has not passed.
    """

    name: str
    outcome: str
    reason: str


def run(chosen: Sequence[str] = ()) -> Iterator[Result]:
    """Run tests, all by default, in their order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    }
    with (
        RankPool(RANKS, env={"BACKEND": "nixl", **environment}) as ours,
        RankPool(RANKS, env={"BACKEND": "gloo", **environment}) as as_gloo,
    ):
        for name in chosen or ours.run(cases.names)[0]:
            if name in NOT_OURS:
                yield Result(name, "not applicable", NOT_OURS[name])
                continue
            outcome, reason = _one(ours, name)
            if (outcome == "skipped" and "gloo" in reason.lower()) or _NO_BRANCH in reason:
                outcome, reason = _one(as_gloo, name)
            if outcome == "failed":
                for sign, want in FOREIGN.items():
                    if sign in reason:
                        outcome, reason = "skipped", want
            yield Result(name, "not applicable" if outcome == "skipped" else outcome, reason)


def _one(pool: RankPool, name: str) -> tuple[str, str]:
    try:
        results = pool.run(cases.run, args=(name,), timeout=TIMEOUT)
    except RanksFailed as failure:
        return "failed", str(failure)
    for wanted in ("failed", "skipped"):
        reasons = dict.fromkeys(reason for outcome, reason in results if outcome == wanted)
        if reasons:
            return wanted, "\n".join(reasons)
    return "passed", ""


def main(chosen: Sequence[str]) -> int:
    """Print a line for each test, and the counts."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for result in run(chosen):
        counts[result.outcome] += 1
        last = result.reason.strip().splitlines()[-1] if result.reason else ""
        print(f"{result.outcome:15} {result.name}  {last}", flush=True)
        if result.outcome == "failed" and chosen:
            print(result.reason)
        if result.outcome == "not applicable":
            reasons[last] += 1
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    for reason, count in reasons.most_common():
        print(f"  {count:4} {reason}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
