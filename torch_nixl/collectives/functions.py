"""The collectives as programs call them: arguments are checked here, once.

Every function takes `group` (a Communicator, a process group, or None for the default
Communicator), `async_op` (return a `CollectiveWork` at once instead of waiting) and `timeout`
(seconds; `math.inf` for no limit; the Communicator's by default). Ranks are ranks of the group.
Wrong arguments are TypeError or ValueError, and count as no call. What a collective can end with
is said at `CollectiveWork.wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from torch_nixl.collectives import algorithms, choice, reducing
from torch_nixl.collectives.arguments import (
    Flat,
    check_alike,
    check_apart,
    checked_target,
    equal_parts,
    flat_source,
    flat_target,
    packed_segment,
    shapes,
    source_segment,
    split,
    target_segment,
)
from torch_nixl.collectives.operation import Steps
from torch_nixl.collectives.port import Port
from torch_nixl.collectives.protocol import sign
from torch_nixl.collectives.reduction import ReduceOp, reduction
from torch_nixl.collectives.running import loaded, run
from torch_nixl.collectives.segments import Segment, tensor_of
from torch_nixl.collectives.work import CollectiveWork
from torch_nixl.p2p.default import find
from torch_nixl.p2p.protocol import check_rank

if TYPE_CHECKING:
    from torch_nixl.p2p.default import Group

_SUM: Final = dist.ReduceOp.SUM


def broadcast_tensor(
    tensor: torch.Tensor,
    src: int,
    *,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> CollectiveWork | None:
    """Copy a tensor from one rank to all.

    Args:
        tensor: Any strides; sent by rank `src`, overwritten in place elsewhere.
        src: The rank that has it.
        group: Whose ranks: see the module.
        async_op: Whether to return at once.
        timeout: Seconds.
    """
    communicator = find(group)
    src = check_rank(src, communicator.world_size, "src")
    sends = communicator.rank == src
    flat = flat_source(tensor) if sends else flat_target(tensor)
    signature = sign("broadcast", f"{shapes([tensor])}, src={src}")

    def steps(port: Port) -> Steps:
        yield from algorithms.broadcast(port, flat.data, src)
        if not sends:
            flat.finish()

    return run(communicator, signature, steps, [flat.data], [tensor], async_op, timeout)


def scatter_tensor(
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor] | None,
    src: int,
    *,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> CollectiveWork | None:
    """Copy from one rank to each rank a tensor of its own.

    Args:
        out: Overwritten in place; of the same shape on all ranks.
        inputs: One tensor for each rank, on rank `src`; None or empty elsewhere.
        src: The rank that has them.
        group: Whose ranks: see the module.
        async_op: Whether to return at once.
        timeout: Seconds.
    """
    communicator = find(group)
    src = check_rank(src, communicator.world_size, "src")
    flat = flat_target(out)
    parts: list[Segment] = []
    if communicator.rank == src:
        check_alike(communicator, inputs, "inputs", like=out)
        parts = [source_segment(one, out, "inputs") for one in inputs or ()]
    elif inputs:
        raise ValueError(f"inputs: expected on rank {src} only")
    check_apart([flat.data], parts, same=(0, src) if parts else None)
    signature = sign("scatter", f"{shapes([out])}, src={src}")

    def steps(port: Port) -> Steps:
        yield from algorithms.scatter(port, flat.data, parts, src)
        flat.finish()

    moved = [flat.data, *map(tensor_of, parts)]
    return run(communicator, signature, steps, moved, [out], async_op, timeout)


def gather_tensor(
    tensor: torch.Tensor,
    outs: Sequence[torch.Tensor] | None,
    dst: int,
    *,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> CollectiveWork | None:
    """Copy a tensor from each rank to one rank.

    Args:
        tensor: Of the same shape on all ranks.
        outs: One tensor for each rank, on rank `dst`, overwritten in place; None or empty
            elsewhere.
        dst: The rank that gets them.
        group: Whose ranks: see the module.
        async_op: Whether to return at once.
        timeout: Seconds.
    """
    communicator = find(group)
    dst = check_rank(dst, communicator.world_size, "dst")
    targets: list[Flat] = []
    if communicator.rank == dst:
        check_alike(communicator, outs, "outs", like=tensor)
        targets = [flat_target(one, "outs") for one in outs or ()]
    elif outs:
        raise ValueError(f"outs: expected on rank {dst} only")
    data = flat_source(tensor).data
    check_apart([one.data for one in targets], [data], same=(dst, 0) if targets else None)
    moved = [data, *(one.data for one in targets)]
    signature = sign("gather", f"{shapes([tensor])}, dst={dst}")

    def steps(port: Port) -> Steps:
        yield from algorithms.gather(port, data, [one.data for one in targets], dst)
        for one in targets:
            one.finish()

    return run(communicator, signature, steps, moved, list(outs or ()), async_op, timeout)


def all_gather_tensor(
    out: torch.Tensor | Sequence[torch.Tensor],
    tensor: torch.Tensor,
    *,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> CollectiveWork | None:
    """Copy a tensor from each rank to all.

    Args:
        out: One tensor that takes all, in the order of ranks: `tensor`'s elements times the number
            of ranks. Or one for each rank, the same list on all ranks, whose shapes may differ.
        tensor: May be this rank's part of `out` itself.
        group: Whose ranks: see the module.
        async_op: Whether to return at once.
        timeout: Seconds.
    """
    communicator = find(group)
    rank = communicator.rank
    whole: list[Flat]
    if isinstance(out, torch.Tensor):
        flat = flat_target(out)
        parts = equal_parts(communicator, flat.data, tensor, "out")
        whole = [flat]
        signature = sign("all_gather", shapes([tensor]))
        outputs = [out]
    else:
        check_alike(communicator, out, "out", like=tensor, uneven=True)
        whole = [flat_target(one) for one in out]
        parts = [one.data for one in whole]
        signature = sign("all_gather", shapes(out))
        outputs = list(out)
    data = flat_source(tensor).data
    check_apart(parts, [data], same=(rank, 0))

    def steps(port: Port) -> Steps:
        yield from algorithms.all_gather(port, parts, data)
        for one in whole:
            one.finish()

    return run(communicator, signature, steps, [data, *parts], outputs, async_op, timeout)


def all_to_all_tensor(
    out: torch.Tensor | Sequence[torch.Tensor],
    tensor: torch.Tensor | Sequence[torch.Tensor],
    *,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> CollectiveWork | None:
    """Copy from each rank to each rank a part of its own.

    Args:
        out: Overwritten in place: a tensor that is cut along its first dimension, or one tensor
            for each rank.
        tensor: What is sent, likewise.
        out_splits: Rows that come from each rank; equally many by default. Only where `out` is one
            tensor.
        in_splits: Rows that go to each rank, likewise.
        group: Whose ranks: see the module.
        async_op: Whether to return at once.
        timeout: Seconds.
    """
    communicator = find(group)
    whole, parts = split(communicator, out, out_splits, "out")
    _, inputs = split(communicator, tensor, in_splits, "tensor", source=True)
    dtypes = {one.dtype for one in (*parts, *inputs)}
    if len(dtypes) > 1:
        raise TypeError(f"expected one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    check_apart(parts, inputs)
    own, kept = inputs[communicator.rank].numel(), parts[communicator.rank].numel()
    if own != kept:
        raise ValueError(f"this rank sends itself {own} elements, but expects {kept}")
    signature = sign("all_to_all", str(dtypes.pop()))

    def steps(port: Port) -> Steps:
        yield from algorithms.all_to_all(port, parts, inputs)
        for one in whole:
            one.finish()

    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    moved = [*inputs, *parts]
    return run(communicator, signature, steps, moved, outputs, async_op, timeout)


def reduce_tensor(
    tensor: torch.Tensor,
    dst: int,
    *,
    op: ReduceOp = _SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> CollectiveWork | None:
    """Reduce a tensor of each rank into one rank's.

    Args:
        tensor: Overwritten in place on rank `dst`, unchanged elsewhere.
        dst: The rank that gets the result.
        op: One of `torch.distributed.ReduceOp`.
        group: Whose ranks: see the module.
        async_op: Whether to return at once.
        timeout: Seconds.
    """
    communicator = find(group)
    dst = check_rank(dst, communicator.world_size, "dst")
    how = reduction(op, tensor.dtype)
    gets = communicator.rank == dst
    flat = flat_target(tensor) if gets else flat_source(tensor)
    # What was copied is nobody's else, and may be overwritten.
    changes = gets or flat.data.data_ptr() != tensor.data_ptr()
    signature = sign("reduce", f"{shapes([tensor])}, op={how}, dst={dst}")

    def steps(port: Port) -> Steps:
        out = flat.data if changes else None
        yield from loaded([flat], reducing.reduce(port, out, flat.data, dst, how))
        if gets:
            flat.finish()

    return run(
        communicator, signature, steps, [flat.data], [tensor] if gets else [], async_op, timeout
    )


def all_reduce_tensor(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    *,
    op: ReduceOp = _SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> CollectiveWork | None:
    """Reduce a tensor of each rank into all ranks'. The result has the same bits on all.

    Args:
        tensor: Overwritten in place. Of several in a list, small ones share messages.
        op: One of `torch.distributed.ReduceOp`.
        group: Whose ranks: see the module.
        async_op: Whether to return at once.
        timeout: Seconds.
    """
    communicator = find(group)
    tensors = [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)
    hows = [reduction(op, one.dtype) for one in tensors]
    flats, parts = [], list[Segment]()
    for one in tensors:
        if len(tensors) > 1 and choice.reduces_at_once(one.nbytes, communicator.world_size):
            parts.append(packed_segment(one))
        else:
            flats.append(flat_target(one, "tensor"))
            parts.append(flats[-1].data)
    operation = hows[0] if hows else op
    signature = sign("all_reduce", f"{shapes(tensors)}, op={operation}")

    def steps(port: Port) -> Steps:
        if len(flats) == len(parts) == 1:
            running = reducing.all_reduce(port, flats[0].data, hows[0])
        else:
            running = reducing.all_reduce_coalesced(port, parts, hows)
        yield from loaded(flats, running)
        for one in flats:
            one.finish()

    moved = [tensor_of(one) for one in parts]
    return run(communicator, signature, steps, moved, tensors, async_op, timeout)


def reduce_scatter_tensor(
    out: torch.Tensor,
    tensor: torch.Tensor | Sequence[torch.Tensor],
    *,
    op: ReduceOp = _SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> CollectiveWork | None:
    """Reduce tensors of each rank, and give each rank a part of the result.

    Args:
        out: This rank's part; overwritten in place.
        tensor: All parts, in the order of ranks: `out`'s elements times the number of ranks. Or
            one for each rank, whose shapes may differ, the same on all ranks.
        op: One of `torch.distributed.ReduceOp`.
        group: Whose ranks: see the module.
        async_op: Whether to return at once.
        timeout: Seconds.
    """
    communicator = find(group)
    rank = communicator.rank
    how = reduction(op, out.dtype)
    target = checked_target(out)
    if isinstance(tensor, torch.Tensor):
        parts = equal_parts(communicator, source_segment(tensor, out), out, "tensor")
        signature = sign("reduce_scatter", f"{shapes([out])}, op={how}")
        inputs = [tensor]
    else:
        check_alike(communicator, tensor, "tensor", like=out, uneven=True)
        parts = [source_segment(one, out) for one in tensor]
        signature = sign("reduce_scatter", f"{shapes(tensor)}, op={how}")
        inputs = list(tensor)
    segment, flat = target_segment(target, inputs)
    check_apart([segment], parts, same=(0, rank))

    def steps(port: Port) -> Steps:
        yield from reducing.reduce_scatter(port, segment, parts, how)
        if flat is not None:
            flat.finish()

    moved = [tensor_of(one) for one in (segment, *parts)]
    return run(communicator, signature, steps, moved, [out], async_op, timeout)


def barrier(
    *, group: Group = None, async_op: bool = False, timeout: float | None = None
) -> CollectiveWork | None:
    """Wait until all ranks have called it."""
    return run(find(group), _BARRIER, _barrier, [], [], async_op, timeout)


_BARRIER: Final = sign("barrier", "")
_TOKEN: Final = torch.zeros(1, dtype=torch.uint8)


def _barrier(port: Port) -> Steps:
    return algorithms.barrier(port, _TOKEN)
