"""Groups whose ranks die, stop or never call; groups that are made, left and forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from process_group import fates
from torch_nixl.testing import RankPool, RanksFailed

TESTS = Path(__file__).parents[1]


def test_killed_rank_is_named_to_all_others(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_pool.run(fates.killed, args=("all_reduce",), world_size=3, timeout=60)
    assert list(caught.value.failures) == [2], caught.value


def test_killed_rank_is_named_through_libraries(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_pool.run(fates.killed_below_libraries, world_size=2, timeout=60)
    assert list(caught.value.failures) == [1], caught.value


def test_stopped_rank_meets_the_timeout_and_learns_of_it(rank_pool: RankPool) -> None:
    texts = rank_pool.run(fates.stopped, world_size=3, timeout=60)
    for text in texts[:2]:
        assert text.startswith("TransferTimeout: ")
        assert "rank 2" in text and "all_reduce" in text
    assert "rank 2" in texts[2] or "rank 0" in texts[2] or "rank 1" in texts[2]


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "all_gather", "all_to_all", "gather"])
def test_rank_that_never_calls_is_named_with_the_collective(rank_pool: RankPool, name: str) -> None:
    texts = rank_pool.run(fates.absent, args=(name,), world_size=3, timeout=60)
    assert not texts[2]
    for text in texts[:2]:
        assert "rank 2" in text, text
        assert name in text or "barrier" in text, text


def test_ranks_that_call_different_things_are_told_of_both(rank_pool: RankPool) -> None:
    for text in rank_pool.run(fates.different, world_size=2, timeout=60):
        assert "[4]" in text and "[5]" in text


def _assert_nothing_leaks(leaks: list[dict[str, int]], kibibytes: int) -> None:
    for rank in leaks:
        assert rank.pop("KiB") < kibibytes
        assert max(rank.values()) <= 0, rank


def test_groups_leave_nothing_behind(rank_pool: RankPool) -> None:
    leaks = rank_pool.run(fates.many_groups, args=(60, False), world_size=2, timeout=100)
    _assert_nothing_leaks(leaks, 2048)


@pytest.mark.soak
def test_300_groups_leave_nothing_behind(rank_pool: RankPool) -> None:
    leaks = rank_pool.run(fates.many_groups, args=(300, False), world_size=2, timeout=300)
    _assert_nothing_leaks(leaks, 4096)


@pytest.mark.parametrize("how", ["mixed", "pending", "raises"])
def test_exit_without_destroy_is_clean(tmp_path: Path, how: str) -> None:
    store = tmp_path / "store"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "FATES": str(tmp_path),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    program = (
        # Runs last: backends of Gloo that outlive the interpreter abort it now and then.
        "import atexit\n"
        "def check():\n"
        "    from torch_nixl.process_group.group import _living\n"
        "    left = [one for group in _living.values() for one in group._others]\n"
        "    left and print(left)\n"
        "atexit.register(check)\n"
        "import sys, torch.distributed as dist, process_group.fates as fates\n"
        "real = dist.init_process_group\n"
        "rank = int(sys.argv[1])\n"
        f"store = dist.FileStore({str(store)!r}, 2)\n"
        "dist.init_process_group = lambda *args, **named: "
        "real(*args, store=store, rank=rank, world_size=2, **named)\n"
        f"fates.main({how!r})\n"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, (out, err)) in enumerate(zip(ranks, printed, strict=True)):
        if how == "raises" and number == 1:
            assert rank.returncode == 1
            assert "the user's own" in err
            continue
        assert (rank.returncode, out, err) == (0, "", ""), (rank.returncode, out, err)
        assert (tmp_path / str(number)).exists()
