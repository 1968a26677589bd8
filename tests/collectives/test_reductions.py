"""Reductions: sizes, operations, dtypes and rounding, on the loopback adapter."""

# ruff: noqa: B023 - what is begun in a loop's turn ends in it

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.conftest import World, together
from torch_nixl import collectives as c

SIZES = [1, 2, 3, 4]
# Empty, one element, fewer than ranks, in a frame, larger than a frame.
COUNTS = [0, 1, 3, 1000, 50_001]


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) % 89 + 7 * rank).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_reductions_of_every_size(world: World, reducing: str, size: int) -> None:
    ranks = world(size)
    for count in COUNTS:
        total = sum((values(rank, count) for rank in range(size)), torch.zeros(count))
        tensors = [values(rank, count) for rank in range(size)]
        together(ranks, lambda g: c.all_reduce_tensor(tensors[g.rank], group=g, async_op=True))
        assert all(torch.equal(one, total) for one in tensors), count
        for dst in range(size):
            tensors = [values(rank, count) for rank in range(size)]
            together(ranks, lambda g: c.reduce_tensor(tensors[g.rank], dst, group=g, async_op=True))
            for rank, one in enumerate(tensors):
                assert torch.equal(one, total if rank == dst else values(rank, count)), count
        wholes = [
            torch.cat([values(rank, count) + part for part in range(size)]) for rank in range(size)
        ]
        outs = [torch.zeros(count) for _ in ranks]
        together(
            ranks,
            lambda g: c.reduce_scatter_tensor(outs[g.rank], wholes[g.rank], group=g, async_op=True),
        )
        assert all(torch.equal(one, total + size * rank) for rank, one in enumerate(outs)), count


def test_reduce_scatter_of_an_uneven_list_into_a_part_of_it(world: World, reducing: str) -> None:
    ranks = world(3)
    lists = [[torch.full((part + 1,), float(rank)) for part in range(3)] for rank in range(3)]
    together(
        ranks,
        lambda g: c.reduce_scatter_tensor(
            lists[g.rank][g.rank], lists[g.rank], group=g, async_op=True
        ),
    )
    assert [lists[rank][rank].tolist() for rank in range(3)] == [[3.0], [3.0] * 2, [3.0] * 3]


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
BITS = [*INTEGERS, *UNSIGNED, torch.bool]
ALL = [*FLOATS, *BITS, *COMPLEX]
DEFINED = {
    "SUM": ALL,
    "AVG": [*FLOATS, *COMPLEX],
    "PRODUCT": ALL,
    "MIN": [*FLOATS, *INTEGERS, torch.bool],
    "MAX": [*FLOATS, *INTEGERS, torch.bool],
    "BAND": BITS,
    "BOR": BITS,
    "BXOR": BITS,
}
REFERENCE: dict[str, Callable[..., Any]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": min,
    "MAX": max,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


def reference(op: str, dtype: torch.dtype, tensors: list[torch.Tensor]) -> torch.Tensor:
    """What Python computes, element by element, wrapped as the dtype does."""
    results = []
    for column in zip(*(one.tolist() for one in tensors), strict=True):
        value = functools.reduce(REFERENCE[op], column)
        if op == "AVG":
            value = value / len(column)
        results.append(bool(value) if dtype is torch.bool else value)
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return torch.tensor(results, dtype=dtype)
    bits = 8 * dtype.itemsize
    low = -(1 << bits - 1) if dtype in INTEGERS[1:] else 0
    return torch.tensor([(one - low) % (1 << bits) + low for one in results], dtype=dtype)


@pytest.mark.parametrize("op", sorted(DEFINED))
def test_operation_on_every_dtype_it_is_defined_for(world: World, reducing: str, op: str) -> None:
    ranks = world(3)
    kind = getattr(dist.ReduceOp, op)
    for dtype in ALL:
        tensors = [
            values(rank, 40).remainder(2 if dtype is torch.bool else 90).to(dtype)
            for rank in range(3)
        ]
        if dtype not in DEFINED[op]:
            with pytest.raises(TypeError, match=f"not defined for {dtype}"):
                c.all_reduce_tensor(tensors[0], op=kind, group=ranks[0])
            continue
        expected = reference(op, dtype, tensors)
        together(
            ranks, lambda g: c.all_reduce_tensor(tensors[g.rank], op=kind, group=g, async_op=True)
        )
        for one in tensors:
            # Views: torch compares no unsigned ones.
            assert one.tolist() == expected.tolist(), dtype


def test_premultiplied_sum(world: World, reducing: str) -> None:
    ranks = world(3)
    op = dist._make_nccl_premul_sum(0.5)
    for dtype in (torch.bfloat16, torch.float32, torch.complex64):
        tensors = [torch.full((40,), float(rank + 1), dtype=dtype) for rank in range(3)]
        together(
            ranks, lambda g: c.all_reduce_tensor(tensors[g.rank], op=op, group=g, async_op=True)
        )
        assert all(bool((one == 3).all()) for one in tensors)
    with pytest.raises(TypeError, match=r"premul_sum is not defined for torch\.int64"):
        c.all_reduce_tensor(torch.ones(2, dtype=torch.int64), op=op, group=ranks[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_once(world: World, reducing: str, dtype: torch.dtype) -> None:
    ranks = world(4)
    tensors = [
        torch.rand(200, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(4)
    ]
    exact = torch.stack([one.float() for one in tensors]).sum(0)
    lossy = (tensors[0] + tensors[1]) + tensors[2] + tensors[3]
    together(ranks, lambda g: c.all_reduce_tensor(tensors[g.rank], group=g, async_op=True))
    assert all(torch.equal(one, exact.to(dtype)) for one in tensors)
    assert not torch.equal(tensors[0], lossy)


def _random(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype in FLOATS or dtype in COMPLEX:
        # Of different sizes, so that every order of rounding has bits of its own.
        exact = torch.complex128 if dtype in COMPLEX else torch.float64
        return (torch.randn(500, generator=generator, dtype=exact) * 10.0**rank).to(dtype)
    most = 2 if dtype is torch.bool else 100
    return torch.randint(0, most, (500,), generator=generator).to(dtype)


@pytest.mark.parametrize("op", [*sorted(DEFINED), "PREMUL_SUM"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_result_has_the_same_bits_on_all_ranks(
    world: World, reducing: str, size: int, op: str
) -> None:
    ranks = world(size)
    premultiplied = op == "PREMUL_SUM"
    kind = dist._make_nccl_premul_sum(1 / 3) if premultiplied else getattr(dist.ReduceOp, op)
    for dtype in DEFINED["AVG" if premultiplied else op]:
        tensors = [_random(rank, dtype) for rank in range(size)]
        together(
            ranks, lambda g: c.all_reduce_tensor(tensors[g.rank], op=kind, group=g, async_op=True)
        )
        first = tensors[0].view(torch.uint8)
        assert all(torch.equal(one.view(torch.uint8), first) for one in tensors), dtype


def test_all_reduce_of_a_list_packs_small_ones(world: World) -> None:
    a, b = ranks = world(2)
    lists = [
        [
            *(torch.full((2, 3), float(rank + i)) for i in range(20)),
            torch.full((100_000,), float(rank)),
            torch.tensor(rank, dtype=torch.int64),
        ]
        for rank in range(2)
    ]
    before = a.statistics().sent
    together(ranks, lambda g: c.all_reduce_tensor(lists[g.rank], group=g, async_op=True))
    for tensors in lists:
        assert all(bool((one == 2 * i + 1).all()) for i, one in enumerate(tensors[:20]))
        assert bool((tensors[20] == 1).all())
        assert int(tensors[21]) == 1
    assert a.statistics().sent - before < 10
    together([a, b], lambda g: c.all_reduce_tensor([], group=g, async_op=True))
