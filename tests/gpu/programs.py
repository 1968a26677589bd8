"""What two ranks run on one GPU, or on two. On a CPU the same programs run with little of a point:
that shows that they are sound, so that a machine with a GPU need not find out."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

import torch_nixl
from torch_nixl.collectives import all_reduce_tensor, barrier
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import Rank

PRODUCER_SECONDS = 0.2
HOST_SECONDS = 0.005
"""Longest that a call which is not to block may take."""

COUNT = 1 << 20
BANDWIDTH_BYTES = 256 << 20
REPEATS = 10


@dataclass(frozen=True)
class Gpu:
    """A rank's device."""

    device: torch.device

    @classmethod
    def of(cls, rank: int, kind: str) -> Gpu:
        if kind == "cpu":
            return cls(torch.device("cpu"))
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return cls(device)

    @property
    def is_real(self) -> bool:
        return self.device.type == "cuda"

    @property
    def num_turns(self) -> int:
        return 20 if self.is_real else 3

    def busy(self, seconds: float) -> None:
        """Keep the current stream busy; on a CPU, the host."""
        if self.is_real:
            # Cycles of a clock of 1 to 2 GHz: at least so long, at most twice.
            torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]
        else:
            time.sleep(seconds / 10)

    @contextlib.contextmanager
    def new_stream(self) -> Iterator[None]:
        if self.is_real:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                yield
        else:
            yield

    def finish(self) -> None:
        """Wait for the current stream, at the end of a check."""
        if self.is_real:
            torch.cuda.current_stream().synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time of some repeats, the first left out."""
        found = []
        for _ in range(REPEATS + 1):
            self.finish()
            started = time.perf_counter()
            work()
            self.finish()
            found.append(time.perf_counter() - started)
        return statistics.median(found[1:])


@contextlib.contextmanager
def communicator(rank: Rank) -> Iterator[Communicator]:
    with Communicator(rank.store(), rank.rank, rank.world_size, timeout=60.0) as made:
        # Contact, and whatever is done only once.
        made.isend(torch.ones(1), 1 - rank.rank, tag=99)
        made.recv(1 - rank.rank, tag=99)
        yield made


class Stopwatch:
    """Adds up how long calls kept the host that are not to."""

    def __init__(self) -> None:
        self.longest = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.longest = max(self.longest, time.perf_counter() - started)


def ordering(rank: Rank, kind: str) -> float:
    """A slow producer before the send, a consumer right after `wait`; return what the host lost."""
    gpu = Gpu.of(rank.rank, kind)
    watch = Stopwatch()
    with communicator(rank) as comm:
        other = 1 - rank.rank
        for strided in (False, True):
            tensor = torch.zeros(COUNT, 2, device=gpu.device)
            tensor = tensor[:, 0] if strided else tensor[:, 0].contiguous()
            # Loads the kernels and registers the memory; only then the host's time counts.
            for counted in (False, True):
                tensor.zero_()
                with gpu.new_stream() if counted else contextlib.nullcontext():
                    gpu.busy(PRODUCER_SECONDS)
                    if rank.rank == 0:
                        tensor.fill_(7)
                    with watch.running() if counted else contextlib.nullcontext():
                        if rank.rank == 0:
                            work = comm.isend(tensor, other)
                        else:
                            work = comm.irecv(other, out=tensor)
                        if gpu.is_real:
                            work.wait()
                    if not gpu.is_real:
                        work.wait()
                    # Changes what was sent, or uses what was received.
                    tensor.add_(1)
                    total = tensor.sum()
                    gpu.finish()
                    work.synchronize()
                expected = 8.0 * COUNT
                assert float(total) == expected, f"{float(total)} instead of {expected}"
        return watch.longest


def busy_target(rank: Rank, kind: str) -> bool:
    """A receive into a buffer that a queued kernel still reads."""
    gpu = Gpu.of(rank.rank, kind)
    with communicator(rank) as comm:
        if rank.rank == 0:
            comm.send(torch.full((COUNT,), 5.0, device=gpu.device), 1)
            return True
        out = torch.full((COUNT,), 3.0, device=gpu.device)
        gpu.busy(PRODUCER_SECONDS)
        before = out.sum()
        work = comm.irecv(0, out=out)
        work.wait()
        after = out.sum()
        work.synchronize()
        assert float(before) == 3.0 * COUNT
        assert float(after) == 5.0 * COUNT
        return True


def lifetime(rank: Rank, kind: str) -> bool:
    """Works and tensors dropped right after `wait`, with memory of their size allocated anew."""
    gpu = Gpu.of(rank.rank, kind)
    with communicator(rank) as comm:
        other = 1 - rank.rank
        totals = []
        for turn in range(gpu.num_turns):
            if rank.rank == 0:
                tensor = torch.full((COUNT,), float(turn), device=gpu.device)
                comm.isend(tensor, other).wait()
                tensor.fill_(-1.0)
                del tensor
            else:
                out = torch.empty(COUNT, device=gpu.device)
                comm.irecv(other, out=out).wait()
                totals.append(out.sum())
                del out
            torch.full((COUNT,), -2.0, device=gpu.device)
        gpu.finish()
        expected = [turn * float(COUNT) for turn in range(gpu.num_turns)] if rank.rank else []
        assert [float(total) for total in totals] == expected
        return True


def failure(rank: Rank, kind: str) -> str:
    """A receive that nobody sends for: NaN, a stream that goes on, and refusals from then on."""
    gpu = Gpu.of(rank.rank, kind)
    with communicator(rank) as comm:
        store = rank.store()
        if rank.rank == 0:
            store.wait(["failed"])
            return ""
        out = torch.zeros(COUNT, device=gpu.device)
        try:
            return _fail(gpu, comm, out)
        finally:
            store.set("failed", "")


def _fail(gpu: Gpu, comm: Communicator, out: torch.Tensor) -> str:
    work = comm.irecv(0, out=out, timeout=0.3)
    if gpu.is_real:
        work.wait()
        seen = out.isnan().all()
        gpu.finish()
        assert bool(seen), "garbage was taken for data"
    try:
        work.wait()
    except torch_nixl.TransferTimeout as error:
        if not gpu.is_real:
            return str(error)
    else:
        raise AssertionError("the failure does not show")
    try:
        comm.irecv(0, out=out)
    except torch_nixl.PoisonedError as error:
        return str(error)
    raise AssertionError("a poisoned Communicator took a call")


def cross(rank: Rank, kind: str) -> bool:
    """Both ranks wait on streams for each other, send on others, and allocate meanwhile."""
    gpu = Gpu.of(rank.rank, kind)
    with communicator(rank) as comm:
        other = 1 - rank.rank
        for turn in range(gpu.num_turns):
            out = torch.empty(COUNT, device=gpu.device)
            tensor = torch.full((COUNT,), float(turn), device=gpu.device)
            receive = comm.irecv(other, out=out)
            send = comm.isend(tensor, other)
            with gpu.new_stream():
                receive.wait()
                total = out.sum()
                # More than is cached, now and then: the allocator asks the driver while the
                # stream waits.
                more = torch.empty((turn + 1) * COUNT, device=gpu.device)
                gpu.finish()
                del more
            send.synchronize()
            assert float(total) == turn * float(COUNT)
        return True


def landing(rank: Rank, kind: str) -> bool:
    """Messages of unknown shape land on the device, while one of its streams waits."""
    gpu = Gpu.of(rank.rank, kind)
    with communicator(rank) as comm:
        other = 1 - rank.rank
        if rank.rank == 0:
            comm.send(torch.full((COUNT,), 2.0, device=gpu.device), other, tag=1)
            comm.send(torch.ones(10, device=gpu.device), other, tag=2)
            comm.send(torch.ones(10), other, tag=3)
            return True
        out = torch.empty(10, device=gpu.device)
        blocked = comm.irecv(other, out=out, tag=2)
        if gpu.is_real:
            blocked.wait()
        with gpu.new_stream():
            received = comm.recv(other, tag=1)
            host = comm.recv(other, tag=3, device=gpu.device)
            assert received.device == host.device == gpu.device
            assert float(received.sum()) == 2.0 * COUNT
            assert float(host.sum()) == 10.0
        blocked.synchronize()
        return True


def collective(rank: Rank, kind: str) -> bool:
    """A slow producer before an all-reduce and a channel's step; consumers right after `wait`."""
    gpu = Gpu.of(rank.rank, kind)
    with communicator(rank) as comm:
        tensor = torch.zeros(COUNT, device=gpu.device)
        like = torch.zeros(COUNT, device=gpu.device)
        with comm.channel(1 - rank.rank, like=like) as channel:
            for turn in range(1, 4):
                with gpu.new_stream():
                    gpu.busy(PRODUCER_SECONDS / 10)
                    tensor.fill_(rank.rank + turn)
                    work = all_reduce_tensor(tensor, group=comm, async_op=True)
                    assert work is not None
                    work.wait()
                    total = tensor.sum()
                    if rank.rank == 0:
                        like.fill_(turn)
                    step = channel.isend() if rank.rank == 0 else channel.irecv()
                    step.wait()
                    moved = like.sum()
                    gpu.finish()
                    step.synchronize()
                assert float(total) == (2.0 * turn + 1) * COUNT
                assert float(moved) == float(turn) * COUNT
            # Neither closes before the other has ended its last step.
            barrier(group=comm)
        return True


def bandwidth(rank: Rank, kind: str, nbytes: int = BANDWIDTH_BYTES) -> dict[str, float]:
    """GB/s (10^9) from rank 0's device to rank 1's, and of what it competes with."""
    gpu = Gpu.of(rank.rank, kind)
    tensor = torch.ones(nbytes // 4, device=gpu.device)
    out = torch.empty_like(tensor)
    found: dict[str, float] = {}
    with communicator(rank) as comm:
        other = 1 - rank.rank

        def move() -> None:
            if rank.rank == 0:
                comm.send(tensor, other)
                comm.recv(other, tag=1)
            else:
                comm.recv(other, out=out)
                comm.send(torch.ones(1), other, tag=1)

        found["torch_nixl"] = nbytes / gpu.seconds(move) / 1e9
    found["torch copy"] = nbytes / gpu.seconds(lambda: out.copy_(tensor)) / 1e9
    if gpu.is_real and dist.is_nccl_available() and torch.cuda.device_count() > 1:
        found["NCCL send/recv"] = nbytes / _nccl(rank, gpu, tensor, out) / 1e9
    return found


def _nccl(rank: Rank, gpu: Gpu, tensor: torch.Tensor, out: torch.Tensor) -> float:
    """NCCL refuses two ranks on one device: only with two."""
    store = dist.PrefixStore("nccl", rank.store())
    dist.init_process_group("nccl", store=store, rank=rank.rank, world_size=2)
    try:
        if rank.rank == 0:
            return gpu.seconds(lambda: dist.send(tensor, 1))
        return gpu.seconds(lambda: dist.recv(out, 0))
    finally:
        dist.destroy_process_group()


def describe(rank: Rank, kind: str) -> str:
    """How streams wait here, and what the card is called."""
    gpu = Gpu.of(rank.rank, kind)
    if not gpu.is_real:
        return f"no GPU, {threading.active_count()} threads"
    from torch_nixl.engine.streams import accelerator

    return f"{torch.cuda.get_device_name(gpu.device)}: {accelerator('cuda', gpu.device.index)!r}"


CHECKS: dict[str, Callable[[Rank, str], float | str]] = {
    "ordering": ordering,
    "busy_target": busy_target,
    "lifetime": lifetime,
    "failure": failure,
    "cross": cross,
    "landing": landing,
    "collective": collective,
}
