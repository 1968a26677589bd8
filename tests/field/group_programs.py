"""What the ranks of the field reports on groups run."""

from __future__ import annotations

import datetime
import socket
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process_group.groups import default_group

import torch_nixl
from torch_nixl.process_group.group import NixlProcessGroup
from torch_nixl.testing import Rank


class Custom:
    """A class of the user's own."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


# H: groups, ranks, objects, stores.


def h1_by_global_and_by_group_rank(rank: Rank) -> None:
    """Ranks 1 and 2 of three, told by their numbers in the world and in the group."""
    with default_group(rank):
        group = dist.new_group([1, 2])
        if rank.rank == 0:
            return
        assert isinstance(group, NixlProcessGroup)
        here = rank.rank - 1
        mine, got = torch.tensor([float(rank.rank)]), torch.zeros(1)
        by_world = {"dst": 3 - rank.rank}, {"src": 3 - rank.rank}
        by_group = {"group_dst": 1 - here}, {"group_src": 1 - here}
        for to, of in (by_world, by_group):
            if here == 0:
                dist.send(mine, group=group, **to)
                dist.recv(got.zero_(), group=group, **of)
            else:
                dist.recv(got.zero_(), group=group, **of)
                dist.send(mine, group=group, **to)
            assert float(got) == 3 - rank.rank
            receive = dist.irecv(got.zero_(), group=group, **of)
            send = dist.isend(mine, group=group, **to)
            assert receive is not None and send is not None
            receive.wait()
            send.wait()
            assert float(got) == 3 - rank.rank
        for peer in ({"peer": 3 - rank.rank}, {"group_peer": 1 - here}):
            operations = [
                dist.P2POp(dist.isend, mine, group=group, **peer),
                dist.P2POp(dist.irecv, got.zero_(), group=group, **peer),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert float(got) == 3 - rank.rank
        if here == 0:
            assert dist.recv(got.zero_(), group=group) == 2
        else:
            dist.send(mine, dst=1, group=group)


def h2_h4_roots_by_global_and_by_group_rank(rank: Rank) -> None:
    """Every collective with a root, on ranks 1 and 2 of three; objects, too."""
    with default_group(rank):
        group = dist.new_group([1, 2])
        if rank.rank == 0:
            return
        sources: list[tuple[int, dict[str, Any]]] = [(1, {"src": 1}), (2, {"group_src": 1})]
        for root, named in sources:
            one = torch.tensor(float(rank.rank))
            dist.broadcast(one, group=group, **named)
            assert float(one) == root
            share = torch.zeros(1)
            shares = [torch.full((1,), 10.0 * root + i) for i in range(2)]
            dist.scatter(share, shares if rank.rank == root else None, group=group, **named)
            assert float(share) == 10 * root + rank.rank - 1
            objects: list[Any] = [None]
            things = [f"{root}-{i}" for i in range(2)] if rank.rank == root else None
            dist.scatter_object_list(objects, things, group=group, **named)
            assert objects == [f"{root}-{rank.rank - 1}"]
            told = [root if rank.rank == root else None]
            dist.broadcast_object_list(told, group=group, **named)
            assert told == [root]
        targets: list[tuple[int, dict[str, Any]]] = [(1, {"dst": 1}), (2, {"group_dst": 1})]
        for root, named in targets:
            one = torch.tensor(float(rank.rank))
            dist.reduce(one, group=group, **named)
            assert rank.rank != root or float(one) == 3
            parts = [torch.zeros(()) for _ in range(2)] if rank.rank == root else None
            dist.gather(torch.tensor(float(rank.rank)), parts, group=group, **named)
            assert parts is None or [float(part) for part in parts] == [1, 2]
            gathered: list[Any] | None = [None, None] if rank.rank == root else None
            dist.gather_object(rank.rank, gathered, group=group, **named)
            assert gathered in (None, [1, 2])


def h5_objects(rank: Rank) -> None:
    """Nested dicts of tensors, a class, None and 10 MB of bytes."""
    thing = {"tensors": [{"a": torch.arange(5), "b": torch.ones(2, 3)}], "custom": Custom(7)}
    large = bytes(10_000_000)
    with default_group(rank):
        if rank.rank == 0:
            dist.send_object_list([thing, None, large], dst=1)
        else:
            got: list[Any] = [None, None, None]
            dist.recv_object_list(got, src=0)
            assert torch.equal(got[0]["tensors"][0]["a"], torch.arange(5))
            assert got[0]["tensors"][0]["b"].device.type == "cpu"
            assert got[0]["custom"] == Custom(7)
            assert got[1:] == [None, large]


# A: strides and views.


def a3_a5_strided_sends(rank: Rank) -> None:
    """A column-major matrix into a plain one; slices of columns in one batch."""
    torch.manual_seed(0)
    matrix = torch.linalg.qr(torch.rand(4, 4))[0].t().contiguous().t()
    whole = torch.arange(100.0).view(10, 10)
    with default_group(rank):
        if rank.rank == 0:
            dist.send(matrix, 1)
            operations = [
                dist.P2POp(dist.isend, whole[:, 0:3], 1, tag=1),
                dist.P2POp(dist.isend, whole[:, 5:9], 1, tag=2),
            ]
        else:
            got = torch.empty(4, 4)
            dist.recv(got, 0)
            assert torch.equal(got, matrix)
            into = torch.full((10, 10), -1.0)
            operations = [
                dist.P2POp(dist.irecv, into[:, 0:3], 0, tag=1),
                dist.P2POp(dist.irecv, into[:, 5:9], 0, tag=2),
            ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if rank.rank == 1:
            expected = torch.full((10, 10), -1.0)
            expected[:, 0:3], expected[:, 5:9] = whole[:, 0:3], whole[:, 5:9]
            assert torch.equal(into, expected)


def a6_column_in_collectives(rank: Rank) -> None:
    """A column is broadcast, reduced and scattered into; its neighbour stays."""
    with default_group(rank):
        for call in ("broadcast", "reduce", "all_reduce", "scatter"):
            square = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank.rank
            column = square[:, 0]
            if call == "broadcast":
                dist.broadcast(column, 1)
                expected = [11.0, 13.0]
            elif call == "reduce":
                dist.reduce(column, 0)
                expected = [12.0, 16.0] if rank.rank == 0 else [11.0, 13.0]
            elif call == "all_reduce":
                dist.all_reduce(column)
                expected = [12.0, 16.0]
            else:
                shares = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
                columns = [shares[:, 0], shares[:, 1]]
                dist.scatter(column, columns if rank.rank == 0 else None, 0)
                expected = [5.0 + rank.rank, 7.0 + rank.rank]
            assert square[:, 0].tolist() == expected, call
            assert square[:, 1].tolist() == [2.0 + 10 * rank.rank, 4.0 + 10 * rank.rank], call


def a8_transposed_gather(rank: Rank) -> None:
    """A tensor made from a transposed NumPy array arrives in its order."""
    tensor = torch.from_numpy(np.arange(10).reshape(2, 5).T) + 100 * rank.rank
    assert not torch.from_numpy(np.arange(10).reshape(2, 5).T).is_contiguous()
    with default_group(rank):
        parts = [torch.zeros(5, 2, dtype=torch.int64) for _ in range(2)]
        dist.gather(tensor.t().contiguous().t(), parts if rank.rank == 1 else None, 1)
        if rank.rank == 1:
            assert torch.equal(parts[0], tensor - 100)
            assert torch.equal(parts[1], tensor)
        # No barrier: rank 0 has sent, and closes at once.


def _await_all(rank: Rank, name: str) -> None:
    """Wait until every process has come here, of whichever world it is."""
    (rank.directory / f"{name}{rank.rank}").touch()
    deadline = time.monotonic() + 30
    while not all((rank.directory / f"{name}{one}").exists() for one in range(rank.world_size)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def h12_two_worlds_at_once(rank: Rank) -> list[float]:
    """Four ranks, two worlds of two, each on a port of its own choice."""
    first = rank.rank - rank.rank % 2
    port = rank.directory / f"port{first}"
    master = rank.rank == first
    if master:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        deadline = time.monotonic() + 30
        while not port.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, False)
    dist.init_process_group("nixl", store=store, rank=rank.rank - first, world_size=2)
    _await_all(rank, "made")
    total = torch.full((100_000,), float(rank.rank))
    dist.all_reduce(total)
    _await_all(rank, "reduced")
    dist.destroy_process_group()
    with torch_nixl.init(store=store, rank=rank.rank - first, world_size=2) as communicator:
        other = first + 1 - rank.rank
        work = communicator.isend(torch.full((100_000,), float(rank.rank)), other)
        received = communicator.recv(other)
        work.wait()
    if not master:
        store.set("done", "")
    else:
        store.wait(["done"], datetime.timedelta(seconds=30))
    return [float(total[-1]), float(received[-1])]


def h12_port_is_taken(rank: Rank) -> None:
    """An error that names the port; then all works on another one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        with pytest.raises(RuntimeError, match=rf"(?s){port}.*in use|in use.*{port}"):
            dist.init_process_group("nixl", init_method=address, rank=0, world_size=1)
        assert not dist.is_initialized()
    with default_group(rank):
        value = torch.ones(3)
        dist.all_reduce(value)
        assert float(value.sum()) == 3


# D: hangs.


def d4_completion_without_wait(rank: Rank) -> None:
    """`is_completed` turns true though nobody waits."""
    with default_group(rank):
        dist.barrier()
        if rank.rank == 1:
            dist.send(torch.ones(1_000_000), 0)
            dist.barrier()
            return
        work = dist.irecv(torch.empty(1_000_000), 1)
        assert work is not None
        deadline = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < deadline, "never completed"
            time.sleep(0.001)
        dist.barrier()


def d5_d6_sends_before_receives(rank: Rank) -> float:
    """Both send 64 MiB first; how long the call took."""
    other = 1 - rank.rank
    with default_group(rank):
        dist.barrier()
        mine, got = torch.full((1 << 24,), float(rank.rank)), torch.empty(1 << 24)
        longest = 0.0
        for _ in range(3):
            began = time.monotonic()
            send = dist.isend(mine, other)
            longest = max(longest, time.monotonic() - began)
            receive = dist.irecv(got.fill_(-1), other)
            assert send is not None and receive is not None
            receive.wait()
            send.wait()
            assert float(got.min()) == float(got.max()) == other
        return longest


def d8_unmatched_operation_in_a_batch(rank: Rank) -> None:
    """One of two receives has its message late; the other ends at once."""
    with default_group(rank):
        dist.barrier()
        if rank.rank == 0:
            dist.send(torch.ones(2), 1, tag=1)
            dist.recv(torch.empty(1), 1)
            dist.send(torch.ones(2), 1, tag=2)
            return
        first, second = torch.zeros(2), torch.zeros(2)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, first, 0, tag=1),
                dist.P2POp(dist.irecv, second, 0, tag=2),
            ]
        )
        works[0].wait()
        assert not works[1].is_completed()
        dist.send(torch.ones(1), 0)
        works[1].wait()
        assert float(second[0]) == 1


def d10_tags_in_reverse(rank: Rank) -> None:
    """Three tagged sends, received and waited for in another order."""
    with default_group(rank):
        works = []
        got = [torch.zeros(1000) for _ in range(3)]
        for tag in range(3):
            if rank.rank == 0:
                works.append(dist.isend(torch.full((1000,), float(tag)), 1, tag=tag))
            else:
                works.append(dist.irecv(got[2 - tag], 0, tag=2 - tag))
        for work in reversed(works):
            assert work is not None
            work.wait()
        assert rank.rank == 0 or [float(one[-1]) for one in got] == [0, 1, 2]


def d23_destroy_while_a_rank_is_away(rank: Rank) -> float:
    """The last rank takes no part any more; the others abort. How long that took."""
    with default_group(rank) as group:
        assert isinstance(group, NixlProcessGroup)
        dist.barrier()
        store = rank.store()
        if rank.rank == 2:
            store.wait(["aborted0", "aborted1"], datetime.timedelta(seconds=20))
            return 0.0
        work = dist.all_reduce(torch.ones(3), async_op=True)
        began = time.monotonic()
        group.abort()
        seconds = time.monotonic() - began
        assert work is not None
        with pytest.raises(torch_nixl.TorchNixlError):
            work.wait()
        store.set(f"aborted{rank.rank}", "1")
        return seconds
