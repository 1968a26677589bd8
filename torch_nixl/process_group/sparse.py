"""The one collective on sparse tensors that c10d's own backends have: a sum, as of gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torch_nixl import collectives
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.tensors import MismatchError


def all_reduce_sparse(
    tensor: torch.Tensor,
    op: dist.ReduceOp,
    communicator: Communicator,
    timeout: float | None,
) -> None:
    """Sum sparse tensors of all ranks into each. Blocks also where the caller asked for a Work.

    Args:
        tensor: Of the COO layout, overwritten in place; of the same shape on all ranks.
        op: ``SUM``.
        communicator: The ranks.
        timeout: Seconds for each of its steps; None for the Communicator's.

    Raises:
        ValueError: Another operation or layout.
        MismatchError: Shapes differ between ranks.
        TransferError: As for every collective.
    """
    if getattr(op, "op", op) != dist.ReduceOp.SUM or tensor.layout is not torch.sparse_coo:
        raise ValueError(f"all_reduce: of {tensor.layout} tensors only COO's sum is defined")
    own = tensor.detach().coalesce()
    size = communicator.world_size
    shape = [own.indices().shape[1], *own.shape]
    shapes = [torch.empty(len(shape), dtype=torch.int64) for _ in range(size)]
    collectives.all_gather_tensor(
        shapes, torch.tensor(shape), group=communicator, async_op=False, timeout=timeout
    )
    for rank, other in enumerate(shapes):
        if other[1:].tolist() != shape[1:]:
            raise MismatchError(
                f"all_reduce: sparse tensors of {shape[1:]} on rank {communicator.rank} and of "
                f"{other[1:].tolist()} on rank {rank}"
            )
    counts = [int(one[0]) for one in shapes]
    parts = []
    for each in (own.indices(), own.values().movedim(0, -1)):
        every = [each.new_empty((*each.shape[:-1], count)) for count in counts]
        collectives.all_gather_tensor(
            every, each, group=communicator, async_op=False, timeout=timeout
        )
        parts.append(torch.cat(every, dim=-1))
    indices, values = parts
    # Checked: other ranks' indices say where to add.
    total = torch.sparse_coo_tensor(
        indices, values.movedim(-1, 0), own.shape, check_invariants=True
    ).coalesce()
    with torch.no_grad():
        # A detached one would have indices of its own.
        tensor.copy_(total)
