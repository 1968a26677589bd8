"""c10d's operations in terms of ours: names, options and argument lists, no algorithms."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed.distributed_c10d import AllgatherOptions

from torch_nixl import collectives
from torch_nixl.engine.streams import device_of
from torch_nixl.errors import ClosedError
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.process_group.others import Other
from torch_nixl.process_group.sparse import all_reduce_sparse
from torch_nixl.process_group.work import GroupWork, Pending, Together

P = ParamSpec("P")
_profiling = torch.autograd._profiler_enabled

# What C++ Backends call what groups have newer names for.
_NAMES_OF_OTHERS = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


class Options(Protocol):
    """What all of c10d's options have."""

    timeout: Any
    asyncOp: bool  # noqa: N815 - c10d's name


def _operation(
    name: str,
) -> Callable[
    [Callable[Concatenate[Operations, P], GroupWork]],
    Callable[Concatenate[Operations, P], dist.Work],
]:
    """Have a method refuse a destroyed group, pass on other devices' tensors, show in profiles.

    Args:
        name: What profiles call it, after ``nixl:``.
    """

    def decorate(
        method: Callable[Concatenate[Operations, P], GroupWork],
    ) -> Callable[Concatenate[Operations, P], dist.Work]:
        theirs = _NAMES_OF_OTHERS.get(method.__name__, method.__name__)

        def call(self: Operations, /, *args: P.args, **kwargs: P.kwargs) -> dist.Work:
            if self._destroyed:
                raise ClosedError(self._destroyed)
            tensor = _first_tensor(args)
            if tensor is not None:
                other = self._other_for(tensor)
                if other is not None:
                    return _delegate(other, theirs, args)
            # A range costs more than many an operation.
            if _profiling():
                with record_function(f"nixl:{name}"):
                    work = method(self, *args, **kwargs)
            else:
                work = method(self, *args, **kwargs)
            if self._coalesced is not None:
                self._coalesced.append(work)
            return work

        functools.update_wrapper(call, method)
        return call

    return decorate


def _first_tensor(args: Sequence[object]) -> torch.Tensor | None:
    """The first tensor in the first two arguments, however deep in lists."""
    for arg in args[:2]:
        while isinstance(arg, (list, tuple)):
            arg = arg[0] if arg else None
        if isinstance(arg, torch.Tensor):
            return arg
    return None


def _delegate(other: Other, name: str, args: Sequence[Any]) -> dist.Work:
    """Call another backend. It knows no coalesced forms of the newer operations."""
    single = _NAMES_OF_OTHERS.get(name.removesuffix("_coalesced"))
    if single is None:
        begun: dist.Work = getattr(other, name)(*args)
        return begun
    outputs, inputs, *rest = args
    works: list[dist.Work] = [
        getattr(other, single)(output, one, *rest)
        for output, one in zip(outputs, inputs, strict=True)
    ]
    for work in works[:-1]:
        work.wait()
    return works[-1]


# No ABC: the class of torch that it is joined with has a metaclass of its own.
class Operations:
    """Everything that moves tensors in a process group."""

    _communicator: Communicator
    _coalesced: list[GroupWork] | None
    _destroyed: str

    @abstractmethod
    def _other_for(self, tensor: torch.Tensor) -> Other | None:
        """The backend that moves a tensor in this one's stead; None for this one.

        Raises:
            ValueError: The group serves no such device.
        """

    def _run(
        self,
        collective: Callable[..., Pending | None],
        *args: Any,
        opts: Options,
        outputs: Sequence[torch.Tensor],
        **options: Any,
    ) -> GroupWork:
        tensor = _first_tensor(args)
        pending = collective(
            *args,
            group=self._communicator,
            # Streams wait for device tensors, where blocking calls would have the host wait.
            async_op=opts.asyncOp or (tensor is not None and device_of(tensor) is not None),
            timeout=_seconds(opts),
            **options,
        )
        return GroupWork(pending, outputs)

    # Between two ranks. All ranks here are the group's own.

    @_operation("send")
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> GroupWork:
        return GroupWork(self._communicator.isend(tensors[0], dst, tag=tag), tensors)

    @_operation("recv")
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> GroupWork:
        return GroupWork(self._communicator.irecv(src, out=tensors[0], tag=tag), tensors)

    @_operation("recv")
    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> GroupWork:
        return GroupWork(self._communicator.irecv(None, out=tensors[0], tag=tag), tensors)

    # From one rank, or to one.

    @_operation("broadcast")
    def broadcast(
        self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions | None = None
    ) -> GroupWork:
        opts = opts or dist.BroadcastOptions()
        return self._run(
            collectives.broadcast_tensor, tensors[0], opts.rootRank, opts=opts, outputs=tensors
        )

    @_operation("reduce")
    def reduce(
        self, tensors: list[torch.Tensor], opts: dist.ReduceOptions | None = None
    ) -> GroupWork:
        opts = opts or dist.ReduceOptions()
        return self._run(
            collectives.reduce_tensor,
            tensors[0],
            opts.rootRank,
            op=opts.reduceOp,
            opts=opts,
            outputs=tensors,
        )

    @_operation("gather")
    def gather(
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensors: list[torch.Tensor],
        opts: dist.GatherOptions | None = None,
    ) -> GroupWork:
        opts = opts or dist.GatherOptions()
        outputs = output_tensors[0] if output_tensors else None
        return self._run(
            collectives.gather_tensor,
            input_tensors[0],
            outputs,
            opts.rootRank,
            opts=opts,
            outputs=outputs or [],
        )

    @_operation("scatter")
    def scatter(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[list[torch.Tensor]],
        opts: dist.ScatterOptions | None = None,
    ) -> GroupWork:
        opts = opts or dist.ScatterOptions()
        inputs = input_tensors[0] if input_tensors else None
        return self._run(
            collectives.scatter_tensor,
            output_tensors[0],
            inputs,
            opts.rootRank,
            opts=opts,
            outputs=output_tensors,
        )

    # From all ranks to all.

    @_operation("all_reduce")
    def allreduce(
        self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions | None = None
    ) -> GroupWork:
        opts = opts or dist.AllreduceOptions()
        if tensors[0].is_sparse:
            all_reduce_sparse(tensors[0], opts.reduceOp, self._communicator, _seconds(opts))
            return GroupWork(None, tensors)
        return self._run(
            collectives.all_reduce_tensor,
            tensors[0],
            op=opts.reduceOp,
            opts=opts,
            outputs=tensors,
        )

    @_operation("all_reduce")
    def allreduce_coalesced(
        self, tensors: list[torch.Tensor], opts: dist.AllreduceCoalescedOptions | None = None
    ) -> GroupWork:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._run(
            collectives.all_reduce_tensor, tensors, op=opts.reduceOp, opts=opts, outputs=tensors
        )

    @_operation("all_gather")
    def allgather(
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensors: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> GroupWork:
        return self._all_gather(output_tensors[0], input_tensors[0], opts, output_tensors[0])

    @_operation("all_gather")
    def allgather_coalesced(
        self,
        output_lists: list[list[torch.Tensor]],
        input_list: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> GroupWork:
        works = []
        for index, one in enumerate(input_list):
            outputs = [of_rank[index] for of_rank in output_lists]
            works.append(self._all_gather(outputs, one, opts, outputs))
        return _together(works, [one for of_rank in output_lists for one in of_rank])

    @_operation("all_gather")
    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - c10d's name
        opts: AllgatherOptions | None = None,
    ) -> GroupWork:
        return self._all_gather(output, input, opts, [output])

    @_operation("all_gather")
    def all_gather_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: AllgatherOptions | None = None,
    ) -> GroupWork:
        works = [
            self._all_gather(output, one, opts, [output])
            for output, one in zip(outputs, inputs, strict=True)
        ]
        return _together(works, outputs)

    def _all_gather(
        self,
        output: torch.Tensor | list[torch.Tensor],
        tensor: torch.Tensor,
        opts: AllgatherOptions | None,
        outputs: list[torch.Tensor],
    ) -> GroupWork:
        opts = opts or AllgatherOptions()
        return self._run(collectives.all_gather_tensor, output, tensor, opts=opts, outputs=outputs)

    @_operation("reduce_scatter")
    def reduce_scatter(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[list[torch.Tensor]],
        opts: dist.ReduceScatterOptions | None = None,
    ) -> GroupWork:
        return self._reduce_scatter(output_tensors[0], input_tensors[0], opts)

    @_operation("reduce_scatter")
    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - c10d's name
        opts: dist.ReduceScatterOptions | None = None,
    ) -> GroupWork:
        return self._reduce_scatter(output, input, opts)

    @_operation("reduce_scatter")
    def reduce_scatter_single_coalesced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: dist.ReduceScatterOptions | None = None,
    ) -> GroupWork:
        works = [
            self._reduce_scatter(output, one, opts)
            for output, one in zip(outputs, inputs, strict=True)
        ]
        return _together(works, outputs)

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor | list[torch.Tensor],
        opts: dist.ReduceScatterOptions | None,
    ) -> GroupWork:
        opts = opts or dist.ReduceScatterOptions()
        return self._run(
            collectives.reduce_scatter_tensor,
            output,
            tensor,
            op=opts.reduceOp,
            opts=opts,
            outputs=[output],
        )

    @_operation("all_to_all")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - c10d's name
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: dist.AllToAllOptions | None = None,
    ) -> GroupWork:
        return self._run(
            collectives.all_to_all_tensor,
            output,
            input,
            out_splits=output_split_sizes,
            in_splits=input_split_sizes,
            opts=opts or dist.AllToAllOptions(),
            outputs=[output],
        )

    @_operation("all_to_all")
    def alltoall(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[torch.Tensor],
        opts: dist.AllToAllOptions | None = None,
    ) -> GroupWork:
        return self._run(
            collectives.all_to_all_tensor,
            output_tensors,
            input_tensors,
            opts=opts or dist.AllToAllOptions(),
            outputs=output_tensors,
        )

    @_operation("barrier")
    def barrier(self, opts: dist.BarrierOptions | None = None) -> GroupWork:
        return self._run(collectives.barrier, opts=opts or dist.BarrierOptions(), outputs=[])

    # Names that torch had for some of these before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _together(works: Sequence[GroupWork], outputs: Sequence[torch.Tensor]) -> GroupWork:
    return GroupWork(Together(works), outputs)


def _seconds(opts: Options) -> float | None:
    """The timeout in options; None where the caller named none."""
    seconds: float = opts.timeout.total_seconds()
    return seconds if seconds > 0 else None
