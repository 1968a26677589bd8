"""Device streams over NIXL between processes, with a fake device on each side."""

from __future__ import annotations

import pytest

from p2p import stream_programs
from torch_nixl.testing import RankPool, RanksFailed, run_ranks

TLS = pytest.mark.parametrize("tls", ["", "tcp,self"], ids=["cma", "tcp"])


@TLS
def test_kernels_and_messages_of_two_ranks_keep_their_order(rank_pool: RankPool, tls: str) -> None:
    env = {"UCX_TLS": tls} if tls else {}
    assert rank_pool.run(stream_programs.pipeline, world_size=2, env=env) == [0, 0]


@TLS
def test_steps_of_channels_keep_their_order(rank_pool: RankPool, tls: str) -> None:
    env = {"UCX_TLS": tls} if tls else {}
    assert rank_pool.run(stream_programs.channel, world_size=2, env=env) == [[0], [0]]


def test_killed_peer_leaves_nan_to_the_stream_that_waits(rank_pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        rank_pool.run(stream_programs.killed_sender, world_size=2)
    assert list(caught.value.failures) == [1], caught.value


def test_process_ends_while_a_stream_waits() -> None:
    assert run_ranks(stream_programs.exit_while_a_stream_waits, 2, timeout=40.0) == [True, True]
