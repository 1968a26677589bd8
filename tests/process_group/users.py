"""Programs of PyTorch's own libraries, which don't know whose group they run on.

Each returns what it computed, so that two backends can be compared.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as functional
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from process_group.groups import default_group
from torch_nixl.testing import Rank

Results = list[torch.Tensor]


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 32, generator=generator), torch.randn(16, 8, generator=generator)


def _train(model: nn.Module, rank: int, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        inputs, targets = _batch(step, rank)
        torch.autograd.backward(functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def _in_bfloat16(
    state: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket in half its size. torch's own hook takes only devices that it knows."""
    small = bucket.buffer().bfloat16().div_(state.size())
    future = dist.all_reduce(small, group=state, async_op=True).get_future()
    reduced: torch.futures.Future[torch.Tensor] = future.then(
        lambda done: bucket.buffer().copy_(done.value()[0])
    )
    return reduced


# DDP compares annotations with types, and these are strings.
_in_bfloat16.__annotations__.clear()


def ddp(rank: Rank, backend: str) -> Results:
    """Data parallel, gradients reduced as they are, then in bfloat16 by a hook."""
    results: Results = []
    with default_group(rank, backend):
        for hook in (None, _in_bfloat16):
            # A small bucket: several reductions overlap with the backward pass.
            model = DistributedDataParallel(_model(rank.rank), bucket_cap_mb=0.01)
            if hook is not None:
                model.register_comm_hook(dist.group.WORLD, hook)
            _train(model, rank.rank)
            with model.no_sync():
                model(_batch(9, rank.rank)[0]).sum().backward()
            model(_batch(10, rank.rank)[0]).sum().backward()
            results += [one.detach() for one in model.parameters()]
            results += [one.grad for one in model.parameters() if one.grad is not None]
    return results


def fsdp2(rank: Rank, backend: str) -> Results:
    """Parameters, gradients and optimizer state sharded over all ranks."""
    with default_group(rank, backend):
        mesh = init_device_mesh("cpu", (rank.world_size,))
        model = _model()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        _train(model, rank.rank)
        return [_full(one) for one in model.parameters()]


def _full(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


def dtensor(rank: Rank, backend: str) -> Results:
    """Layouts changed into one another; then a layer split by columns and one by rows."""
    with default_group(rank, backend):
        mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("tp",))
        whole = torch.arange(70.0).reshape(10, 7)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        summed = DTensor.from_local(whole * (rank.rank + 1), mesh, [Partial()])
        results = [
            columns.to_local(),
            columns.redistribute(mesh, [Replicate()]).to_local(),
            summed.redistribute(mesh, [Shard(0)]).to_local(),
            _full(summed),
            _full(rows @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])),
        ]
        plain = _model()
        split = parallelize_module(
            copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        inputs, targets = _batch(0, 0)
        outputs = split(inputs)
        torch.autograd.backward(functional.mse_loss(outputs, targets))
        assert torch.allclose(outputs, plain(inputs), atol=1e-5)
        results.append(outputs.detach())
        for one in split.parameters():
            assert one.grad is not None
            results.append(_full(one.grad) if isinstance(one.grad, DTensor) else one.grad)
        return results


def pipelining(rank: Rank, backend: str) -> Results:
    """A model in stages, with microbatches: one stage on each rank, then two."""
    with default_group(rank, backend):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
        inputs, targets = torch.randn(8, 32), torch.randn(8, 32)
        results: Results = []
        device = torch.device("cpu")
        for num_stages in (2, 4):
            mine = copy.deepcopy(layers)[:num_stages][rank.rank :: rank.world_size]
            stages = [
                PipelineStage(module, rank.rank + 2 * index, num_stages, device)
                for index, module in enumerate(mine)
            ]
            schedule: Schedule1F1B | ScheduleInterleaved1F1B
            if num_stages == 2:
                schedule = Schedule1F1B(stages[0], 4, loss_fn=functional.mse_loss)
            else:
                schedule = ScheduleInterleaved1F1B(list(stages), 4, loss_fn=functional.mse_loss)
            for _ in range(2):
                if rank.rank == 0:
                    schedule.step(inputs)
                else:
                    losses: Results = []
                    schedule.step(target=targets, losses=losses)
                    results += losses
            for module in mine:
                results += [one.grad for one in module.parameters() if one.grad is not None]
        return [one.detach() for one in results]


def checkpoint(rank: Rank, backend: str) -> Results:
    """A sharded model saved and loaded into another one."""
    with default_group(rank, backend):
        mesh = init_device_mesh("cpu", (rank.world_size,))
        saved, loaded = _model(1), _model(2)
        for model in (saved, loaded):
            fully_shard(model, mesh=mesh)
        where = str(rank.directory / "checkpoint")
        dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=where)
        state = {"model": get_model_state_dict(loaded)}
        dcp.load(state, checkpoint_id=where)
        results = [_full(one) for one in loaded.parameters()]
        for one, original in zip(results, _model(1).parameters(), strict=True):
            assert torch.equal(one, original)
        return results


def experts(rank: Rank, backend: str) -> Results:
    """Tokens sent to the ranks of their experts and back, with gradients."""
    with default_group(rank, backend) as group:
        generator = torch.Generator().manual_seed(rank.rank)
        tokens = torch.randn(37 + 20 * rank.rank, 16, generator=generator, requires_grad=True)
        choice = torch.randint(0, rank.world_size, (len(tokens),), generator=generator)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=rank.world_size)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts)
        there, back = counts.tolist(), others.tolist()
        arrived = all_to_all_single_autograd(tokens[order], back, there, group)
        torch.manual_seed(rank.rank)
        expert = nn.Linear(16, 16)
        returned = all_to_all_single_autograd(expert(arrived), there, back, group)
        torch.autograd.backward(returned.square().sum())
        assert tokens.grad is not None
        assert expert.weight.grad is not None
        return [arrived.detach(), returned.detach(), tokens.grad, expert.weight.grad]
