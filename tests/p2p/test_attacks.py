"""Attacks: ranks that are killed or stopped at every stage, many rounds, altered frames."""

from __future__ import annotations

import itertools
import random
import signal
from typing import Any

import pytest
import torch

from p2p import attack_programs as programs
from p2p.conftest import World
from torch_nixl.errors import TransferTimeout
from torch_nixl.p2p import protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.work import Work
from torch_nixl.testing import RankPool, run_ranks

LARGE = 4 * protocol.EAGER_NBYTES
PATHS = pytest.mark.parametrize("transports", ["all", "tcp,self"], ids=["cma", "tcp"])


@pytest.mark.parametrize(
    ("transports", "stages"),
    [
        ("all", programs.STAGES),
        ("tcp,self", ("transfer",)),
        pytest.param("tcp,self", programs.STAGES, marks=pytest.mark.soak),
    ],
    ids=["cma", "tcp in mid-transfer", "tcp"],
)
def test_rank_is_killed_or_stopped(transports: str, stages: tuple[str, ...]) -> None:
    signs = (int(signal.SIGKILL), int(signal.SIGSTOP))
    environment = {"UCX_TLS": transports}
    wrong = run_ranks(programs.scenarios, 1, args=(signs, 1, stages), env=environment, timeout=110)
    assert wrong == [{}], "\n".join(f"{name}: {told}" for name, told in wrong[0].items())


@pytest.mark.soak
@PATHS
@pytest.mark.parametrize("hooks", [True, False], ids=["cached", "without UCX's cache"])
def test_rank_is_hit_in_mid_transfer_twenty_times(transports: str, hooks: bool) -> None:
    signs = (int(signal.SIGKILL), int(signal.SIGSTOP))
    environment = {"UCX_TLS": transports}
    if not hooks:
        environment |= {"UCX_MEM_EVENTS": "n", "UCX_MEM_MMAP_HOOK_MODE": "none"}
    wrong = run_ranks(
        programs.scenarios, 1, args=(signs, 20, ("transfer",)), env=environment, timeout=900
    )
    assert wrong == [{}], "\n".join(f"{name}: {told}" for name, told in wrong[0].items())


def test_rank_is_killed_and_started_again_five_times_over_one_store() -> None:
    ((keys, told),) = run_ranks(programs.restarts, 1, args=(5,), timeout=100)
    assert told == ""
    growth = {later - earlier for earlier, later in itertools.pairwise(keys)}
    # The killed one's address, the nonce, and how many have closed.
    assert max(growth) <= 3, "what a turn leaves of which one rank was killed"


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_many_rounds_cost_neither_files_nor_memory(rank_pool: RankPool, count: int) -> None:
    for files, memory in rank_pool.run(
        programs.rounds, args=(count,), world_size=2, timeout=60 + count / 20
    ):
        assert files <= 2
        assert memory < 32 << 20, f"{memory >> 20} MiB"


def record(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes]]:
    """Every frame that a rank sends from now on."""
    frames: list[tuple[int, bytes]] = []
    exchange = communicator._exchange
    send = exchange.send

    def note(peer: Any, kind: int, body: bytes) -> None:
        frames.append((kind, bytes(body)))
        send(peer, kind, body)

    for owner in (exchange, exchange.inbox, exchange.outbox):
        monkeypatch.setattr(owner, "send" if owner is exchange else "_send", note)
    return frames


def altered(body: bytes, rng: random.Random) -> bytes:
    """The same bytes, but for a few; some cut, some longer. The first four say whose it is."""
    data = bytearray(body)
    for _ in range(rng.randrange(1, 4)):
        way = rng.randrange(6)
        if way == 0 and len(data) > 4:
            at = rng.randrange(4, len(data))
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1 and len(data) > 4:
            at = rng.randrange(4, len(data))
            data[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), rng.randbytes(8)])
        elif way == 2 and len(data) >= 12:
            data[4:12] = rng.randrange(60).to_bytes(8, "little")  # The number of a message.
        elif way == 3:
            del data[rng.randrange(4, len(data) + 1) :]
        elif way == 4:
            data += rng.randbytes(rng.randrange(1, 20))
    return bytes(data)


@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_altered_frames_harm_nobody_else(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    bad, good, other = world(3, timeout=5.0)
    frames = record(bad, monkeypatch)
    for one in (good, other):
        bad.send(torch.tensor(1), one.rank)
        one.recv(0)
    good.send(torch.tensor(1), 2)
    other.recv(1)
    works = []
    # Kept: what a frame names again later must still be mapped, as nothing checks that for us.
    kept = []
    for count in (10, LARGE, LARGE * 20):
        tensors = [torch.ones(count) for _ in range(3)]
        works += [bad.isend(tensors[0], 1), good.irecv(0)]
        works += [good.isend(torch.ones(count), 0), bad.irecv(1, out=tensors[1])]
        works += [bad.isend(tensors[2].view(2, -1)[:, : count // 4], 1), good.irecv(0)]
        kept.append(tensors)
    for work in works:
        work.wait(10)
    kept.append([torch.ones(LARGE)])
    with pytest.raises(TransferTimeout):
        bad.isend(kept[-1][0], 1, tag=77, timeout=0.05).wait()
    kinds = {kind for kind, _ in frames}
    answer = protocol.PUSH if path == "tcp" else protocol.DONE
    assert {protocol.EAGER, protocol.OFFER, answer, protocol.CANCEL} <= kinds
    rng = random.Random(seed)
    taken: list[Work] = []
    peer = bad._exchange.peers[1]
    context = protocol.CONTEXT.pack(bad._exchange.context)
    pending = [good.irecv(0, tag=tag, timeout=3) for tag in (50, 51)]
    held = [good.isend(torch.ones(LARGE), 0, tag=52, timeout=3) for _ in range(3)]
    for turn in range(100_000 if seed == 3 else 1500):
        if rng.random() < 0.2:
            kind, body = rng.randrange(32, 43), context + rng.randbytes(rng.randrange(80))
        else:
            kind, body = rng.choice(frames)
            body = altered(body, rng)
        if kind != protocol.LEAVE:
            bad._exchange.send(peer, kind, body)
        if turn % 50 == 0:
            here = [tag for tag in (0, 77) if good.iprobe(0, tag=tag) is not None]
            taken += [good.irecv(0, tag=tag, timeout=3) for tag in here]
            works = [
                good.isend(torch.full((LARGE,), float(turn)), 2),
                other.isend(torch.tensor(turn), 1),
            ]
            assert float(other.recv(1)[-1]) == turn
            assert int(good.recv(2)) == turn
            for work in works:
                work.wait()
    for work in (*pending, *held, *taken):
        try:
            work.wait()
        except (RuntimeError, ValueError):
            continue  # What was forged may have failed it; that it ends is what counts.
    assert not good.connection.closed
    assert not bad.connection.closed
    assert good.connection.statistics().frames_refused > 100
    good.send(torch.tensor(5), 2)
    assert int(other.recv(1)) == 5


def test_a_rank_can_refuse_only_what_was_sent_to_it(world: World) -> None:
    bad, good, other = world(3)
    for one in (good, other):
        bad.send(torch.tensor(1), one.rank)
        one.recv(0)
    works = [good.isend(torch.ones(count), 2) for count in (3, LARGE)]
    works += [other.isend(torch.ones(3), 1), good.irecv(2)]
    works += [good.isend(torch.ones(3), 1), good.irecv(1)]
    for number in range(100):
        body = protocol.pack_end(bad._exchange.context, number, protocol.Outcome.FAILED, "forged")
        bad._exchange.send(bad._exchange.peers[1], protocol.DONE, body)
    bad.send(torch.tensor(2), 1)
    good.recv(0)
    other.recv(1)
    other.recv(1)
    for work in works:
        work.wait(10)
        assert work.is_success()


def test_wrong_ranks_are_refused_before_anything_moves(world: World) -> None:
    a, _ = world()
    for wrong in (-1, 2, 1 << 40, "1", None, 1.0):
        with pytest.raises((ValueError, TypeError), match="dst"):
            a.send(torch.ones(1), wrong)  # type: ignore[arg-type]
        with pytest.raises((ValueError, TypeError), match="dst"):
            a.isend(torch.ones(LARGE), wrong)  # type: ignore[arg-type]
        if wrong is not None:
            with pytest.raises((ValueError, TypeError), match="src"):
                a.irecv(wrong)  # type: ignore[arg-type]
    assert a.statistics().outstanding == 0
