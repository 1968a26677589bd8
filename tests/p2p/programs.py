"""What the ranks of the NIXL tests run: sent by name to processes of their own."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from stopping import stop_process

import torch_nixl
from torch_nixl.p2p import protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import Rank

LARGE = 4 * protocol.EAGER_NBYTES
HUGE = 4 * protocol.SPLIT_NBYTES


def make(rank: Rank, timeout: float = 30.0) -> Communicator:
    return Communicator(rank.store(), rank.rank, rank.world_size, timeout=timeout)


def pattern(source: int, target: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * source + 100 * target


def all_to_all(rank: Rank) -> str:
    """Every rank sends to every rank, itself included, at several sizes and in two orders."""
    with make(rank) as communicator:
        routes = set()
        for count in (1, 5000, LARGE, HUGE):
            receives = [communicator.irecv(source, tag=count) for source in range(rank.world_size)]
            sends = [
                communicator.isend(pattern(rank.rank, target, count), target, tag=count)
                for target in reversed(range(rank.world_size))
            ]
            for source, work in enumerate(receives):
                received = work.result()
                assert received is not None
                assert torch.equal(received, pattern(source, rank.rank, count)), (source, count)
                assert work.source_rank() == source
                routes.add(work.statistics().route)
            for work in sends:
                work.wait()
        strided = torch.zeros(300, 7)
        ring = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
        receive = communicator.irecv(ring[1], out=strided[:, 2])
        communicator.send(pattern(rank.rank, 0, 300), ring[0])
        receive.wait()
        assert torch.equal(strided[:, 2], pattern(ring[1], 0, 300))
        assert int(strided.count_nonzero()) <= 300
        total = sum(int(communicator.recv().sum()) for _ in range(_ping(communicator)))
        assert total == sum(range(rank.world_size))
    return ",".join(sorted(routes))


def trees(rank: Rank) -> str:
    """Every rank sends trees to every rank, itself included, in place and not; and objects."""
    world, me = rank.world_size, rank.rank
    with make(rank) as communicator:
        routes = set()
        for count in (3, 30_000, LARGE):
            outs = [_tree(source, world, count) for source in range(world)]
            receives = [
                communicator.irecv_tree(source, out=outs[source], tag=count)
                if source % 2
                else communicator.irecv_tree(source, tag=count)
                for source in range(world)
            ]
            sends = [
                communicator.isend_tree(_tree(me, target, count), target, tag=count)
                for target in reversed(range(world))
            ]
            for source, work in enumerate(receives):
                received = work.result()
                assert (received is outs[source]) is bool(source % 2)
                _check_tree(received, _tree(source, me, count))
                assert work.source_rank() == source
                routes.add(work.statistics().route)
            for send in sends:
                send.wait()
        for size in (3, 300_000):
            following = (me + 1) % world
            sent = communicator.isend_object({me, size, "x" * size}, following)
            assert communicator.recv_object((me - 1) % world) == {
                (me - 1) % world,
                size,
                "x" * size,
            }
            sent.wait()
    return ",".join(sorted(routes))


def _tree(source: int, target: int, count: int) -> dict[str, Any]:
    first = pattern(source, target, count)
    return {
        "first": first,
        "layers": [{"weight": first[: count // 3] + index, "step": index} for index in range(20)],
        "tied": first,
        "strided": pattern(source, target, 3 * count)[::3],
        "names": (None, "rank", source, True, 0.5, first[:2].to(torch.bfloat16)),
    }


def _check_tree(received: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(received, expected)
    elif isinstance(expected, dict):
        assert received.keys() == expected.keys()
        for key, value in expected.items():
            _check_tree(received[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(received) is type(expected)
        for one, other in zip(received, expected, strict=True):
            _check_tree(one, other)
    else:
        assert received == expected


def ring_of_trees(rank: Rank) -> str:
    """Large trees with both sides waiting, round a ring, in place; then a mismatch."""
    following, previous = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
    with make(rank) as communicator:
        routes = set()
        out = {str(index): torch.zeros(LARGE + index) for index in range(12)}
        for turn in range(4):
            sent = {key: torch.full_like(value, turn + rank.rank) for key, value in out.items()}
            receive = communicator.irecv_tree(previous, out=out)
            if rank.rank % 2:
                receive.wait()
            communicator.send_tree(sent, following)
            receive.wait()
            assert all(bool((value == turn + previous).all()) for value in out.values())
            routes.add(receive.statistics().route)
        send = communicator.isend_tree({"0": torch.zeros(HUGE)}, following)
        for operation in (lambda: communicator.recv_tree(previous, out=out), send.wait):
            try:
                operation()
            except torch_nixl.MismatchError:
                continue
            else:
                raise AssertionError("not refused")
        assert all(bool((value == turn + previous).all()) for value in out.values())
    return ",".join(sorted(routes))


def tree_to_the_killed(rank: Rank) -> str:
    """Rank 1 dies while rank 0 sends it a tree, and receives one from it."""
    communicator = make(rank)
    if rank.rank == 1:
        communicator.send_tree([1], 0)
        communicator.recv_tree(0)
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.recv_tree(1)
    out = {"a": torch.zeros(HUGE), "b": torch.zeros(HUGE)}
    works = [communicator.irecv_tree(1, out=out), communicator.isend_tree(out, 1, tag=7)]
    communicator.send_tree([1], 1)
    lost = 0
    for work in works:
        try:
            work.wait()
        except torch_nixl.PeerLostError:
            lost += 1
    assert lost == 2
    assert all(work.wait_released(5) for work in works)
    communicator.close()
    return "noticed"


def _ping(communicator: Communicator) -> int:
    for target in range(communicator.world_size):
        communicator.isend(torch.tensor(communicator.rank), target)
    return communicator.world_size


def ring_of_halves(rank: Rank) -> str:
    """Large messages with both sides waiting, round a ring."""
    with make(rank) as communicator:
        routes = set()
        out = torch.empty(HUGE)
        for turn in range(4):
            sent = torch.full((HUGE,), float(turn + rank.rank))
            receive = communicator.irecv((rank.rank - 1) % rank.world_size, out=out)
            if rank.rank % 2:
                receive.wait()
            communicator.send(sent, (rank.rank + 1) % rank.world_size)
            receive.wait()
            expected = turn + (rank.rank - 1) % rank.world_size
            assert bool((out == expected).all())
            routes.add(receive.statistics().route)
    return ",".join(sorted(routes))


def beside_gloo(rank: Rank) -> list[float]:
    """The functions of the package, on the default process group and on a part of it."""
    dist.init_process_group("gloo", store=rank.store(), rank=rank.rank, world_size=rank.world_size)
    torch_nixl.init()
    value = torch.tensor([float(rank.rank)])
    dist.all_reduce(value)
    last = rank.world_size - 1
    group = dist.new_group([0, last])
    if rank.rank == 0:
        torch_nixl.send_tree({"a": value}, last, group=group)
        torch_nixl.isend_object({"b": 1}, last, group=group).wait()
        torch_nixl.send_tensor(value, last)
        torch_nixl.send_tensor(value * 2, last, group=group)
        works = torch_nixl.batch_isend_irecv([dist.P2POp(dist.isend, value * 3, last)])
        for work in works:
            work.wait()
    elif rank.rank == last:
        tree = torch_nixl.irecv_tree(0, group=group).result()
        assert torch.equal(tree["a"], value)
        assert torch_nixl.recv_object(0, group=group) == {"b": 1}
        received = torch.cat(
            [
                torch_nixl.recv_tensor(0),
                torch_nixl.recv_tensor(0, group=group),
                torch_nixl.recv_tensor(0),
            ]
        )
        value = received
    dist.barrier()
    torch_nixl.shutdown()
    dist.destroy_process_group()
    return value.tolist()


def again_and_again(rank: Rank) -> int:
    """Five times over one store."""
    store = rank.store()
    other = 1 - rank.rank
    for turn in range(5):
        communicator = torch_nixl.init(store=store, rank=rank.rank, world_size=2, timeout=20)
        work = torch_nixl.isend_tensor(torch.full((LARGE,), float(turn)), other)
        assert float(torch_nixl.recv_tensor(other)[-1]) == turn
        work.wait()
        assert torch_nixl.get_communicator() is communicator
        torch_nixl.shutdown()
    # What the other leaves behind is not there while it is still closing.
    (rank.directory / f"closed{rank.rank}").touch()
    deadline = time.monotonic() + 20
    while not (rank.directory / f"closed{other}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return store.num_keys()


def killed(rank: Rank) -> str:
    """Rank 1 dies while rank 0 waits in several ways."""
    communicator = make(rank)
    other = 1 - rank.rank
    if rank.rank == 1:
        communicator.send(torch.tensor(1), 0)
        communicator.recv(0)
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.recv(1)
    works = [
        communicator.irecv(1),
        communicator.irecv(),
        communicator.isend(torch.zeros(HUGE), 1, tag=7),
    ]
    communicator.send(torch.tensor(1), 1)
    started = time.monotonic()
    seen = []
    for work in works:
        try:
            work.wait()
        except torch_nixl.PeerLostError as error:
            seen.append(f"rank {other}" in str(error) or "no other rank" in str(error))
    seconds = time.monotonic() - started
    assert seen == [True] * 3
    assert seconds < 5, f"{seconds} s until the loss was noticed"
    assert all(work.wait_released(5) for work in works)
    communicator.close()
    (rank.directory / "verdict").write_text("noticed")
    return "noticed"


def aborts(rank: Rank) -> bool:
    """Rank 0 aborts; rank 1's waiters return too."""
    communicator = make(rank)
    other = 1 - rank.rank
    communicator.send(torch.tensor(1), other)
    communicator.recv(other)
    work = communicator.irecv(other, tag=5)
    if rank.rank == 0:
        communicator.recv(1)  # The other side has had our message, too.
        communicator.abort()
        expected: type[Exception] = torch_nixl.ClosedError
    else:
        communicator.send(torch.tensor(1), other)
        expected = torch_nixl.PeerLostError
    try:
        work.wait(10)
    except expected:
        communicator.abort()
        return True
    return False


def flood(rank: Rank, count: int) -> tuple[int, int]:
    """Rank 0 sends many small messages to rank 1, which sleeps. Memory that both came to use."""
    with make(rank, timeout=100.0) as communicator:
        other = 1 - rank.rank
        tensor = torch.tensor([1.0, 2.0])
        communicator.isend(tensor, other)
        communicator.recv(other)
        before = _resident()
        if rank.rank == 0:
            works = [communicator.isend(tensor, other, tag=1) for _ in range(count)]
            used = _resident() - before
            (rank.directory / "sent").touch()
            for work in works:
                work.wait()
            return used, communicator.statistics().queued
        while not (rank.directory / "sent").exists():
            time.sleep(0.05)
        used = _resident() - before
        out = torch.zeros(2)
        for _ in range(count):
            communicator.recv(other, tag=1, out=out)
        assert communicator.iprobe(other, tag=1) is None
        return used, int(out[1])


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def stopped(rank: Rank) -> bool:
    """Rank 0 stops rank 1, times out, and lets it go on."""
    with make(rank) as communicator:
        if rank.rank == 1:
            communicator.send(torch.tensor(os.getpid()), 0)
            assert int(communicator.recv(0, tag=1)) == 5
            # What timed out at the sender is withdrawn, unless it was matched before that came.
            received = communicator.recv(0, tag=2)
            if float(received[-1]) == 1.0:
                received = communicator.recv(0, tag=2)
            return bool((received == 2.0).all())
        pid = int(communicator.recv(1))
        communicator.send(torch.tensor(5), 1, tag=1)
        stop_process(pid)
        try:
            started = time.monotonic()
            work = communicator.isend(torch.ones(HUGE), 1, tag=2, timeout=0.3)
            receive = communicator.irecv(1, timeout=0.3)
            for one in (work, receive):
                try:
                    one.wait()
                except torch_nixl.TransferTimeout:
                    continue
                return False
            assert time.monotonic() - started < 2
            assert not work.wait_released(0.1)
            assert receive.wait_released(0.1)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert work.wait_released(10)
        communicator.send(torch.full((HUGE,), 2.0), 1, tag=2)
    return True


def storm(rank: Rank, seed: int, count: int) -> int:
    """Every rank sends messages of random size and tag to all; each arrives as it was sent."""
    world, me = rank.world_size, rank.rank
    rng = random.Random(seed * 100 + me)
    # In order for each source and tag, in any order otherwise.
    streams: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source in range(world):
        for index, (target, tag, nbytes) in enumerate(_plan(seed, source, world, count)):
            if target == me:
                streams.setdefault((source, tag), []).append((index, nbytes))
    with make(rank, timeout=60.0) as communicator:
        sends = [
            communicator.isend(_payload(me, index, nbytes), target, tag=tag)
            for index, (target, tag, nbytes) in enumerate(_plan(seed, me, world, count))
        ]
        receives = []
        while streams:
            source, tag = rng.choice(list(streams))
            index, nbytes = streams[source, tag].pop(0)
            if not streams[source, tag]:
                del streams[source, tag]
            out = torch.empty(nbytes, dtype=torch.uint8) if rng.random() < 0.5 else None
            work = communicator.irecv(source, tag=tag, out=out)
            receives.append((work, source, index, nbytes))
            if rng.random() < 0.3:
                work.wait()
        for work, source, index, nbytes in receives:
            received = work.result()
            assert received is not None
            assert torch.equal(received, _payload(source, index, nbytes)), (source, index, nbytes)
        for work in sends:
            work.wait()
    return len(receives)


def _plan(seed: int, source: int, world: int, count: int) -> list[tuple[int, int, int]]:
    """Target, tag and size of each message that a rank sends."""
    rng = random.Random(seed * 1000 + source)
    sizes = (0, 8, 1000, protocol.EAGER_NBYTES, protocol.EAGER_NBYTES + 1, 300_000, 3_000_000)
    return [(rng.randrange(world), rng.randrange(3), rng.choice(sizes)) for _ in range(count)]


def _payload(source: int, index: int, nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) + 7 * index + 31 * source).to(torch.uint8)


def traced(rank: Rank, path: str) -> None:
    """Both ranks write one trace of one large message."""
    with make(rank) as communicator, torch_nixl.trace(path, group=communicator):
        if rank.rank == 0:
            communicator.send(torch.zeros(1 << 18), 1)
        else:
            communicator.recv(0)
