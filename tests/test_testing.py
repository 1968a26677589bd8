"""The rank spawner: results, failures, hangs, and nothing left behind."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest
import torch

from torch_nixl.testing import Rank, RankPool, RanksFailed, loopback_pair, run_ranks


def describe(rank: Rank, word: str) -> tuple[int, int, str, str | None, torch.Tensor]:
    return rank.rank, rank.world_size, word, os.environ.get("GREETING"), torch.ones(3)


def meet(rank: Rank) -> str:
    store = rank.store()
    store.set(f"rank {rank.rank}", str(os.getpid()))
    return str(store.get(f"rank {(rank.rank + 1) % rank.world_size}"), "utf-8")


def fail_on_one(rank: Rank) -> None:
    sys.stdout.write(f"rank {rank.rank} was here\n")
    if rank.rank == 1:
        raise ValueError("no more of this")


def fail_while_the_other_waits(rank: Rank) -> None:
    if rank.rank == 0:
        raise ValueError("the first to fail")
    wait_forever()


def wait_forever() -> None:
    while True:
        time.sleep(0.01)


def hang(rank: Rank) -> None:
    wait_forever()


def leave(rank: Rank, how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(4)
    os.kill(os.getpid(), signal.SIGKILL)


def return_what_can_not_be_sent(rank: Rank) -> object:
    return lambda: None


def leave_a_file(rank: Rank) -> list[str]:
    before = sorted(path.name for path in rank.directory.iterdir())
    if rank.world_size == 1:
        (rank.directory / "mine").write_text("x")
    return [str(rank.directory), *before]


def variables(rank: Rank) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ONLY_NOW", "ALWAYS")
    return {name: os.environ[name] for name in names if name in os.environ}


def own_pid(rank: Rank) -> int:
    return os.getpid()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(describe, 2, args=("hi",), env={"GREETING": "hello"})
    assert [result[:4] for result in results] == [(0, 2, "hi", "hello"), (1, 2, "hi", "hello")]
    assert all(torch.equal(result[4], torch.ones(3)) for result in results)


def test_ranks_of_a_run_share_a_store(rank_pool: RankPool) -> None:
    pids = rank_pool.run(own_pid, world_size=3)
    assert rank_pool.run(meet, world_size=3) == [str(pids[1]), str(pids[2]), str(pids[0])]
    # The next run's store knows nothing of this one: the same keys are free again.
    assert rank_pool.run(meet, world_size=3) == [str(pids[1]), str(pids[2]), str(pids[0])]


def test_failing_rank_shows_its_traceback_and_output(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as info:
        rank_pool.run(fail_on_one, world_size=2)
    assert list(info.value.failures) == [1]
    text = str(info.value)
    assert 'raise ValueError("no more of this")' in text
    assert "in fail_on_one" in text
    assert "rank 1 was here" in text


def test_rank_that_waits_for_a_failed_one_is_ended_long_before_the_deadline(
    rank_pool: RankPool,
) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="after rank 0 had failed") as info:
        rank_pool.run(fail_while_the_other_waits, world_size=2, timeout=60)
    assert time.monotonic() - start < 40
    assert "the first to fail" in info.value.failures[0]
    assert "wait_forever" in info.value.failures[1]


def test_hang_shows_every_stack_and_leaves_no_process(rank_pool: RankPool) -> None:
    pids = rank_pool.run(own_pid, world_size=2)
    with pytest.raises(RanksFailed, match=r"still ran after 0\.5 s") as info:
        rank_pool.run(hang, world_size=2, timeout=0.5)
    assert sorted(info.value.failures) == [0, 1]
    for text in info.value.failures.values():
        assert "in wait_forever" in text
        assert "_end_with_parent" in text, "the stacks of other threads too"
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "exited with code 3"),
        ("kill", "killed by SIGKILL"),
        ("sys.exit", "SystemExit: 4"),
    ],
)
def test_rank_that_leaves_is_reported(rank_pool: RankPool, how: str, said: str) -> None:
    with pytest.raises(RanksFailed, match=said):
        rank_pool.run(leave, args=(how,), world_size=1)


def test_result_that_can_not_be_sent_is_a_failure(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"[Pp]ickle"):
        rank_pool.run(return_what_can_not_be_sent, world_size=1)


def test_pool_keeps_processes_and_replaces_those_that_died(rank_pool: RankPool) -> None:
    first = rank_pool.run(own_pid, world_size=2)
    assert rank_pool.run(own_pid, world_size=2) == first
    os.kill(first[0], signal.SIGKILL)
    os.waitid(os.P_PID, first[0], os.WEXITED | os.WNOWAIT)
    second = rank_pool.run(own_pid, world_size=2)
    assert second[0] != first[0]
    assert second[1] == first[1]


def test_each_run_has_an_empty_directory_that_goes_away(rank_pool: RankPool) -> None:
    (first,) = rank_pool.run(leave_a_file, world_size=1)
    (second,) = rank_pool.run(leave_a_file, world_size=1)
    assert first[1:] == second[1:] == []
    assert first != second
    assert not Path(first[0]).exists()


def test_environment_of_a_run_ends_with_it() -> None:
    with RankPool(1, env={"ALWAYS": "yes"}) as pool:
        (during,) = pool.run(variables, env={"ONLY_NOW": "1"})
        (after,) = pool.run(variables)
    usual = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "ALWAYS": "yes"}
    assert during == {**usual, "ONLY_NOW": "1"}
    assert after == usual


def test_closed_pool_leaves_nothing() -> None:
    pool = RankPool(1)
    (pid,) = pool.run(own_pid)
    pool.close()
    pool.close()
    assert gone(pid)
    with pytest.raises(ValueError, match="closed"):
        pool.run(own_pid)


def test_ranks_end_when_their_parent_is_killed(rank_pool: RankPool) -> None:
    (pid,) = rank_pool.run(start_a_pool_and_die, world_size=1, timeout=90)
    deadline = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        os.sched_yield()


def start_a_pool_and_die(rank: Rank) -> int:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # A killed pool leaves its directory: let it lie where this run's is removed.
        tempfile.tempdir = str(rank.directory)
        pool = RankPool(1)
        (pid,) = pool.run(own_pid)
        os.write(writing, str(pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    return int(os.read(reading, 20))


def test_functions_that_can_not_be_sent_are_refused_before_anything_starts() -> None:
    with RankPool(1) as pool:
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"[Pp]ickle"):
            pool.run(lambda rank: None)
        stray = types.FunctionType(own_pid.__code__, {"__name__": "__main__"})
        with pytest.raises(ValueError, match="__main__"):
            pool.run(stray)
        assert pool.pids == {}


@pytest.mark.parametrize("world_size", [0, 3])
def test_world_size_must_fit_the_pool(world_size: int) -> None:
    with RankPool(2) as pool, pytest.raises(ValueError, match="2 ranks"):
        pool.run(own_pid, world_size=world_size)


def test_loopback_pair_can_talk() -> None:
    _, a, b = loopback_pair("left", "right")
    a.notify("right", b"hi")
    arrived: list[tuple[str, bytes]] = []
    for _ in range(3):
        a.drain()
        arrived += b.drain()
    assert arrived == [("left", b"hi")]
