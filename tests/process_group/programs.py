"""What the ranks of the process-group tests run."""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import ErrorType
from torch.distributed.device_mesh import init_device_mesh

import torch_nixl
from process_group.groups import default_group
from torch_nixl.process_group.group import NixlProcessGroup
from torch_nixl.testing import Rank


def value(rank: int, count: int = 2) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * rank


def everything(rank: Rank, backend: str, count: int) -> list[torch.Tensor]:
    """Every operation of torch.distributed once; what each rank has in the end."""
    with default_group(rank, backend):
        return operations(rank.rank, rank.world_size, None, count)


def operations(
    me: int, size: int, group: dist.ProcessGroup | None, count: int
) -> list[torch.Tensor]:
    """Every operation of torch.distributed, by the ranks of the group."""
    got: list[torch.Tensor] = []
    mine = value(me, count)
    right, left = (me + 1) % size, (me - 1) % size

    for tag in (0, 7):
        inbox = torch.zeros(count)
        works = [
            dist.irecv(inbox, group_src=left, group=group, tag=tag),
            dist.isend(mine, group_dst=right, group=group, tag=tag),
        ]
        for work in works:
            assert work is not None
            work.wait()
        got.append(inbox)
    inbox = torch.zeros(count)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, group=group, group_peer=right),
            dist.P2POp(dist.irecv, inbox, group=group, group_peer=left),
        ]
    ):
        work.wait()
    got.append(inbox)
    if me == 0:
        for _ in range(size - 1):
            inbox = torch.zeros(count)
            source = dist.recv(inbox, group=group)
            place = source if group is None else dist.get_group_rank(group, source)
            assert torch.equal(inbox, value(place, count))
    else:
        dist.send(mine, group_dst=0, group=group)

    last = size - 1
    for asynchronous in (False, True):
        options: dict[str, Any] = {"group": group, "async_op": asynchronous}

        def finish(work: dist.Work | None) -> None:
            if work is not None:
                work.wait()

        one = mine.clone()
        finish(dist.broadcast(one, group_src=last, **options))
        got.append(one)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            one = mine.clone()
            finish(dist.all_reduce(one, op, **options))
            got.append(one)
        one = mine.clone()
        finish(dist.reduce(one, group_dst=last, **options))
        if me == last:
            got.append(one)
        many = [torch.zeros(count) for _ in range(size)]
        finish(dist.all_gather(many, mine, **options))
        got += many
        one = torch.zeros(size * count)
        finish(dist.all_gather_into_tensor(one, mine, **options))
        got.append(one)
        many = [torch.zeros(count) for _ in range(size)]
        finish(dist.gather(mine, many if me == last else None, group_dst=last, **options))
        got += many
        one = torch.zeros(count)
        shares = [value(rank, count) * 2 for rank in range(size)]
        finish(dist.scatter(one, shares if me == last else None, group_src=last, **options))
        got.append(one)
        one = torch.zeros(count)
        finish(dist.reduce_scatter(one, [share + me for share in shares], **options))
        got.append(one)
        one = torch.zeros(count)
        finish(dist.reduce_scatter_tensor(one, torch.cat(shares) + me, **options))
        got.append(one)
        one = torch.zeros(size * count)
        finish(dist.all_to_all_single(one, torch.cat(shares) + me, **options))
        got.append(one)
        # Rank r sends s + 1 pieces of its own to rank s.
        out = torch.zeros(size * (me + 1))
        uneven = torch.cat([torch.full((to + 1,), float(10 * me + to)) for to in range(size)])
        splits = [to + 1 for to in range(size)]
        finish(dist.all_to_all_single(out, uneven, [me + 1] * size, splits, **options))
        got.append(out)
        many = [torch.zeros(count) for _ in range(size)]
        finish(dist.all_to_all(many, [share + me for share in shares], **options))
        got += many
        finish(dist.barrier(**options))

    with dist._coalescing_manager(group=group):
        ones = [mine.clone(), mine.clone() + 1]
        for one in ones:
            dist.all_reduce(one, group=group)
    got += ones
    with dist._coalescing_manager(group=group, async_ops=True) as together:
        ones = [torch.zeros(size * count) for _ in range(2)]
        for index, one in enumerate(ones):
            dist.all_gather_into_tensor(one, mine + index, group=group)
    together.wait()
    got += ones
    with dist._coalescing_manager(group=group):
        ones = [torch.zeros(count) for _ in range(2)]
        for one in ones:
            dist.reduce_scatter_tensor(one, torch.cat(shares) + me, group=group)
    return got + ones


def operators(rank: Rank, backend: str) -> list[torch.Tensor]:
    """Reductions by all of torch's operations that both backends have, and where they have them."""
    me = rank.rank
    got = []
    with default_group(rank, backend):
        whole = torch.arange(300) % 89 + 5 * me
        for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            for dtype in (torch.uint8, torch.int32, torch.int64):
                one = whole.to(dtype)
                dist.all_reduce(one, getattr(dist.ReduceOp, name))
                got.append(one)
        for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            for dtype in (torch.float32, torch.float64):
                one = whole.to(dtype)
                dist.all_reduce(one, getattr(dist.ReduceOp, name))
                got.append(one)
    return got


def premultiplied(rank: Rank) -> list[float]:
    """What NCCL has and Gloo hasn't; through every call that reduces."""
    op = dist._make_nccl_premul_sum(0.5)
    with default_group(rank):
        one, two = torch.full((4,), rank.rank + 1.0), torch.full((4,), rank.rank + 1.0)
        dist.all_reduce(one, op)
        dist.reduce(two, 0, op)
        share = torch.zeros(2)
        dist.reduce_scatter_tensor(share, torch.full((4,), rank.rank + 1.0), op)
        return [float(one[-1]), float(two[-1]), float(share[-1])]


def init_string(rank: Rank, backend: str) -> tuple[str, list[str], float]:
    """Make a group by a string that names devices, and use it on the host."""
    with default_group(rank, backend) as group:
        one = torch.ones(3)
        dist.all_reduce(one)
        dist.barrier()
        part = dist.new_group([0, 1])
        dist.all_reduce(one, group=part)
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, rank.rank)
        assert objects == [0, 1]
        assert isinstance(group, NixlProcessGroup)
        with pytest.raises(ValueError, match=r"no backend for tensors on meta: .* by nixl"):
            dist.all_reduce(torch.ones(1, device="meta"))
        with pytest.raises(RuntimeError, match="no backend for tensors on xpu"):
            group._get_backend(torch.device("xpu"))
        kinds = sorted(one.type for one in group._device_types)
        host = group._get_backend(torch.device("cpu")).name()
    for device in ("cpu", "meta"):
        with pytest.raises(torch_nixl.ClosedError, match="was destroyed"):
            group.allreduce([torch.ones(1, device=device)])
    with pytest.raises(torch_nixl.ClosedError, match="was destroyed"):
        group.barrier()
    return host, kinds, float(one[0])


def beside_gloo(rank: Rank) -> list[torch.Tensor]:
    """Groups on "nixl" in a world on Gloo: all ranks, and all but the first."""
    with default_group(rank, "gloo"):
        whole = dist.new_group(backend="nixl")
        part = dist.new_group(list(range(1, rank.world_size)), backend="nixl")
        assert dist.get_backend(whole) == "nixl"
        got = operations(rank.rank, rank.world_size, whole, 5)
        if rank.rank:
            assert isinstance(part, NixlProcessGroup)
            got += operations(rank.rank - 1, rank.world_size - 1, part, 5)
            dist.destroy_process_group(part)
        one = torch.ones(1)
        dist.all_reduce(one)
        return [*got, one]


def splitting(rank: Rank) -> list[float]:
    """A group taken apart without the rest."""
    with default_group(rank) as group:
        assert isinstance(group, NixlProcessGroup)
        # Another than the group's own, and long enough for a rank that is only now starting NIXL.
        seconds = datetime.timedelta(seconds=25)
        part = group.split_group([2, 1], timeout=seconds, group_name="part", group_desc="two")
        if rank.rank not in (1, 2):
            assert part is None
            return []
        assert part is not None
        assert (part.rank(), part.size()) == (2 - rank.rank, 2)
        assert (part.group_name, part.group_desc) == ("part", "two")
        assert part.default_timeout == seconds
        one = torch.tensor([float(rank.rank)])
        part.allreduce([one]).wait()
        part.shutdown()
        return [float(one)]


def splitting_mixed(rank: Rank) -> list[float]:
    """A group that Gloo serves in part: so is what is split off."""
    with default_group(rank, "cpu:gloo,cuda:nixl") as group:
        assert isinstance(group, NixlProcessGroup)
        part = group.split_group([0, 1], group_name="part")
        assert part is not None
        assert part._get_backend(torch.device("cpu")).name() == "gloo"
        assert part._get_backend(torch.device("cuda")).name() == "nixl"
        with pytest.raises(ValueError, match="no backend for tensors on xpu"):
            group.split_group([0, 1], group_name="other", device_types=[torch.device("xpu")])
        one = torch.tensor([float(rank.rank)])
        part.allreduce([one]).wait()
        part.shutdown()
        return [float(one)]


def split_by_torch(rank: Rank) -> list[float]:
    """`dist.split_group`, which asks for an accelerator on this host: it is told of one."""
    with default_group(rank) as group, pytest.MonkeyPatch.context() as patch:
        group.bound_device_id = torch.device("cuda:0")
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
        part = dist.split_group(group, [[0], [1, 2]], timeout=datetime.timedelta(seconds=9))
        assert isinstance(part, NixlProcessGroup)
        one = torch.tensor([float(rank.rank + 1)])
        dist.all_reduce(one, group=part)
        assert part.size() == (1 if rank.rank == 0 else 2)
        return [float(one)]


def mesh(rank: Rank) -> list[float]:
    """Two dimensions: a group for each row and each column."""
    with default_group(rank):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        got = []
        for name in ("row", "column"):
            group = grid.get_group(name)
            assert isinstance(group, NixlProcessGroup)
            one = torch.tensor(float(rank.rank))
            dist.all_reduce(one, group=group)
            got.append(float(one))
        return got


def objects(rank: Rank) -> None:
    """Python objects, through all that moves them."""
    size = rank.world_size
    with default_group(rank):
        thing = {
            "rank": rank.rank,
            "nested": [torch.full((3,), float(rank.rank)), None, b"x" * 999],
        }
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, thing)
        assert [one["rank"] for one in everyone] == list(range(size))
        assert torch.equal(everyone[-1]["nested"][0], torch.full((3,), float(size - 1)))
        gathered: list[Any] | None = [None] * size if rank.rank == 0 else None
        dist.gather_object(thing, gathered, dst=0)
        assert gathered is None or gathered[1]["rank"] == 1
        told: list[Any] = [{"from": 1}] if rank.rank == 1 else [None]
        dist.broadcast_object_list(told, src=1)
        assert told == [{"from": 1}]
        share: list[Any] = [None]
        dist.scatter_object_list(share, list(range(size)) if rank.rank == 0 else None, src=0)
        assert share == [rank.rank]


def functionals(rank: Rank, compiler: str | None) -> list[torch.Tensor]:
    """Functional collectives, as they are or compiled."""
    with default_group(rank) as group:
        size = rank.world_size

        def step(one: torch.Tensor) -> tuple[torch.Tensor, ...]:
            total = functional.all_reduce(one * 2, "sum", group)
            everyone = functional.all_gather_tensor(total + one, 0, group)
            share = functional.reduce_scatter_tensor(everyone, "sum", 0, group)
            swapped = functional.all_to_all_single(everyone, None, None, group)
            told = functional.broadcast(one + 1, 1, group)
            twice = one * 2
            dist.all_reduce(twice)
            return total + 0, everyone + 0, share + 0, swapped + 0, told + 0, twice + 1

        one = value(rank.rank, 4)
        if compiler is not None:
            torch._dynamo.reset()
            step = torch.compile(step, backend=compiler, fullgraph=True)
        got = [*step(one)]
        both = functional.all_gather_into_tensor_coalesced([one, one[:2]], group)
        got += [both[0] + 0, both[1] + 0]
        assert torch.equal(got[-1].view(size, 2), torch.stack([value(r) for r in range(size)]))
        return got


def futures(rank: Rank) -> list[float]:
    """What async operations return."""
    with default_group(rank):
        one = torch.ones(3)
        work = dist.all_reduce(one, async_op=True)
        assert work is not None
        then = work.get_future().then(lambda done: done.value()[0] * 10)
        assert float(then.wait()[0]) == 10 * rank.world_size
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is one
        inbox = torch.zeros(2)
        other = 1 - rank.rank
        receive = dist.irecv(inbox, other)
        assert receive is not None
        got = receive.get_future()
        dist.send(value(rank.rank), other)
        assert torch.equal(got.wait()[0], value(other))
        assert receive.source_rank() == other
        return [float(each) for each in one]


def sparse_sum(rank: Rank) -> None:
    """Gradients of an embedding: few rows, others on each rank; then DDP's own."""
    me = rank.rank
    with default_group(rank) as group:
        dense = torch.zeros(6, 3)
        dense[me], dense[5] = 1.0 + me, 10.0
        mine = dense.to_sparse(1)
        dist.all_reduce(mine)
        expected = torch.zeros(6, 3)
        expected[0], expected[1], expected[5] = 1.0, 2.0, 20.0
        assert torch.equal(mine.to_dense(), expected)
        nothing = torch.zeros(4, 4).to_sparse()
        dist.all_reduce(nothing)
        assert nothing._nnz() == 0
        with pytest.raises(ValueError, match="only COO's sum"):
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        with pytest.raises(
            torch_nixl.MismatchError, match=r"\[4, 2\].*\[5, 2\]|\[5, 2\].*\[4, 2\]"
        ):
            dist.all_reduce(torch.zeros(4 + me, 2).to_sparse())
        torch.manual_seed(0)
        table = torch.nn.Embedding(8, 4, sparse=True)
        model = torch.nn.parallel.DistributedDataParallel(table, process_group=group)
        torch.autograd.backward(model(torch.tensor([me, 7])).sum())
        assert table.weight.grad is not None
        rows = table.weight.grad.to_dense()[:, 0].tolist()
        assert rows == [0.5, 0.5, 0, 0, 0, 0, 0, 1.0]


def inference_tensors(rank: Rank) -> None:
    """Made in inference mode, and written to by whichever thread comes to it."""
    with default_group(rank):
        other = 1 - rank.rank
        with torch.inference_mode():
            made = [torch.full((2, count), rank.rank + 1.0) for count in (4, 100_000)]
            halves = [one.bfloat16() for one in made]
            works = [dist.all_reduce(one, async_op=True) for one in halves]
            works.append(dist.irecv(made[0][:, 1], other, tag=1))
            works.append(dist.irecv(made[1][:, ::2], other, tag=2))
            dist.send(made[0][:, 0].clone(), other, tag=1)
            dist.send(made[1][:, 1::2].clone(), other, tag=2)
            for work in works:
                assert work is not None
                # Nobody waits: another thread does it all.
                deadline = time.monotonic() + 20
                while not work.is_completed() and time.monotonic() < deadline:
                    time.sleep(0.001)
                work.wait()
        assert all(bool((one == 3).all()) for one in halves)
        assert made[0][0].tolist() == [rank.rank + 1.0, other + 1.0] + [rank.rank + 1.0] * 2
        assert made[1][1, :3].tolist() == [other + 1.0, rank.rank + 1.0, other + 1.0]
        # In no such mode any more.
        dist.broadcast(halves[1], 0)
        dist.all_reduce(made[0][:, :1])
        assert made[0][:, 0].tolist() == [3.0, 3.0]


def profiled(rank: Rank) -> tuple[int, int]:
    """Ranges show while a profiler runs; how many there are."""
    with default_group(rank):
        one = torch.ones(3)
        with pytest.MonkeyPatch.context() as patch:
            # Called by none while no profiler runs.
            patch.setattr("torch_nixl.process_group.operations.record_function", None)
            dist.all_reduce(one)
        with torch.profiler.profile() as profile:
            dist.all_reduce(one)
            dist.all_reduce(one)
            if rank.rank == 0:
                dist.send(one, 1)
            else:
                dist.recv(one, 0)
        names = [event.name for event in profile.events() or []]
        return names.count("nixl:all_reduce"), names.count(f"nixl:{('send', 'recv')[rank.rank]}")


def in_detail(rank: Rank) -> list[torch.Tensor]:
    """torch's own checks turned up."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return everything(rank, "nixl", 3)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def barrier_with_names(rank: Rank, wait_all_ranks: bool) -> str:
    """Ranks 1 and 2 don't come to the second barrier; all come to the third."""
    with default_group(rank) as group:
        assert isinstance(group, NixlProcessGroup)
        group.monitored_barrier()
        text = ""
        if rank.rank not in (1, 2):
            seconds = datetime.timedelta(seconds=0.5)
            with pytest.raises(torch_nixl.TransferTimeout) as caught:
                group.monitored_barrier(seconds, wait_all_ranks)
            text = str(caught.value)
        else:
            group._num_barriers += 1
        group.monitored_barrier()
        return text


def aborts(rank: Rank) -> float:
    """A thread that waits is freed at once by another's abort."""
    with default_group(rank):
        group = dist.new_group()
        assert isinstance(group, NixlProcessGroup)
        dist.barrier(group=group)
        work = group.recv([torch.zeros(2)], 1 - rank.rank, 99)
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                work.wait()
            except torch_nixl.TorchNixlError as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        dist.barrier()
        group.abort()
        thread.join(10)
        assert len(ended) == 1
        assert isinstance(ended[0], (torch_nixl.ClosedError, torch_nixl.PeerLostError))
        with pytest.raises(torch_nixl.ClosedError, match="was aborted"):
            group.send([torch.zeros(2)], 1 - rank.rank, 0)
        with pytest.raises(torch_nixl.ClosedError, match="was aborted"):
            group.barrier()
        group.abort()
        group.shutdown()
        one = torch.ones(1)
        dist.all_reduce(one)
        return float(one)


def timeouts(rank: Rank) -> bool:
    """The group's timeout, changed; and one for a single wait."""
    with default_group(rank) as group:
        assert isinstance(group, NixlProcessGroup)
        dist.barrier()
        group.set_timeout(datetime.timedelta(seconds=0.2))
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 0.2
        inbox = torch.zeros(1)
        with pytest.raises(torch_nixl.TransferTimeout, match=f"rank {1 - rank.rank}"):
            dist.recv(inbox, 1 - rank.rank)
        view = group._get_backend(torch.device("cpu"))
        assert view.get_error() is ErrorType.SUCCESS
        group.set_timeout(datetime.timedelta(seconds=30))
        work = dist.irecv(inbox, 1 - rank.rank, tag=5)
        assert work is not None
        with pytest.raises(torch_nixl.TransferTimeout):
            work.wait(datetime.timedelta(seconds=0.2))
        dist.barrier()
        if rank.rank == 0:
            last = dist.all_reduce(torch.ones(1), async_op=True)
            assert last is not None
            with pytest.raises(torch_nixl.TransferTimeout):
                last.wait(datetime.timedelta(seconds=0.2))
            dist.send(inbox, 1, tag=9)
        else:
            dist.recv(inbox, 0, tag=9)  # Told of the failure before.
        return view.get_error() is ErrorType.TIMEOUT


def again(rank: Rank, times: int) -> int:
    """Init, destroy, init over one store; the keys that are left."""
    for turn in range(times):
        with default_group(rank):
            one = torch.tensor([float(turn)])
            dist.all_reduce(one)
            assert float(one) == turn * rank.world_size
            group = dist.new_group()
            dist.all_reduce(one, group=group)
    # What another rank leaves behind is not there while it is still closing.
    (rank.directory / f"closed{rank.rank}").touch()
    deadline = time.monotonic() + 20
    while len(list(rank.directory.glob("closed*"))) < rank.world_size:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return rank.store().num_keys()
