"""What the ranks of the process-group tests run on fake devices."""

from __future__ import annotations

import datetime
import threading

import torch
import torch.distributed as dist

import torch_nixl
from process_group.groups import default_group
from torch_nixl.testing import FakeDevice, Rank

COUNT = 50_000
SECONDS = 30.0


def everything(rank: Rank) -> list[str]:
    """Operations on what a slow kernel is yet to make; those whose result a stream found wrong."""
    device = FakeDevice()
    wrong: list[str] = []
    with default_group(rank):
        for count in (10, COUNT):
            _operations(device, rank.rank, rank.world_size, count, wrong)
    return wrong


def _operations(device: FakeDevice, me: int, size: int, count: int, wrong: list[str]) -> None:
    slow = threading.Event()
    stream = device.new_stream()
    stream.launch(lambda: slow.wait(SECONDS))

    def made(value: float, parts: int = 1) -> torch.Tensor:
        tensor = device.zeros(count * parts)
        stream.launch(lambda: tensor.fill_(value))
        return tensor

    def check(name: str, tensor: torch.Tensor, *values: float) -> None:
        want = torch.tensor(values).repeat_interleave(count)

        def compare() -> None:
            if not torch.equal(tensor, want):
                wrong.append(f"{name} of {count}: {tensor[:1]}, {tensor[-1:]}")

        stream.launch(compare)

    # Every call returns though nothing has run; a host that waited would never get on.
    with device.stream(stream):
        tensor = made(me + 1.0)
        dist.all_reduce(tensor)
        check("all_reduce", tensor, 3.0)
        dist.all_reduce(tensor)
        check("all_reduce of its result", tensor, 6.0)
        tensor = made(float(me))
        dist.broadcast(tensor, 1)
        check("broadcast", tensor, 1.0)
        out = device.zeros(size * count)
        dist.all_gather_into_tensor(out, made(float(me)))
        check("all_gather", out, 0.0, 1.0)
        out = device.zeros(count)
        work = dist.reduce_scatter_tensor(out, made(me + 1.0, size), async_op=True)
        assert work is not None
        work.wait()
        check("reduce_scatter", out, 3.0)
        out = device.zeros(size * count)
        dist.all_to_all_single(out, made(float(me), size))
        check("all_to_all", out, 0.0, 1.0)
        outs = [device.zeros(count) for _ in range(size)] if me == 0 else None
        dist.gather(made(me + 1.0), outs, 0)
        for index, one in enumerate(outs or ()):
            check("gather", one, index + 1.0)
        out = device.zeros(count)
        both = [
            dist.P2POp(dist.isend, made(float(me)), 1 - me),
            dist.P2POp(dist.irecv, out, 1 - me),
        ]
        for each in dist.batch_isend_irecv(both):
            each.wait()
        check("sent and received", out, 1.0 - me)
        tensor = made(2.0)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        future = work.get_future()
    assert not work.is_completed()
    slow.set()
    stream.synchronize(SECONDS)
    future.wait()
    if not bool((tensor == 4).all()):
        wrong.append(f"future of {count}")


def failure(rank: Rank) -> bool:
    """Rank 1 does not come: rank 0's stream goes on with NaN, and the next call raises."""
    device = FakeDevice()
    with default_group(rank) as group:
        dist.barrier()
        if rank.rank == 0:
            tensor = device.zeros(COUNT)
            opts = dist.AllreduceOptions()
            opts.timeout = datetime.timedelta(seconds=0.3)
            group.allreduce([tensor], opts).wait()
            seen: list[bool] = []
            device.default_stream.launch(lambda: seen.append(bool(tensor.isnan().all())))
            device.default_stream.synchronize(SECONDS)
            assert seen == [True]
            try:
                dist.all_reduce(tensor)
            except torch_nixl.PoisonedError:
                return True
            raise AssertionError("a poisoned group took a call")
    return True
