"""Every collective against what torch computes from all ranks' tensors, on the loopback adapter."""

# ruff: noqa: B023 - what is begun in a loop's turn ends in it

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch

from collectives.conftest import World, together
from torch_nixl import collectives as c
from torch_nixl.collectives import choice
from torch_nixl.p2p.communicator import Communicator

SIZES = [1, 2, 3, 4]
# Empty, one element, fewer than ranks, in a frame, larger than a frame.
COUNTS = [0, 1, 3, 1000, 50_001]


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) % 89 + 7 * rank).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_copies_the_roots_tensor(world: World, size: int) -> None:
    ranks = world(size)
    for count in COUNTS:
        for src in range(size):
            tensors = [values(rank, count) for rank in range(size)]
            together(
                ranks, lambda g: c.broadcast_tensor(tensors[g.rank], src, group=g, async_op=True)
            )
            assert all(torch.equal(one, values(src, count)) for one in tensors), (count, src)


@pytest.mark.parametrize("size", [3, 5, 6, 8])
def test_broadcast_down_a_tree(world: World, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(choice, "FLAT_RANKS", 2)
    ranks = world(size)
    for count in (3, 50_000):
        for src in (0, size - 1):
            tensors = [values(rank, count) for rank in range(size)]
            together(
                ranks, lambda g: c.broadcast_tensor(tensors[g.rank], src, group=g, async_op=True)
            )
            assert all(torch.equal(one, values(src, count)) for one in tensors)


def test_scattered_tensors_cost_no_tables_of_their_elements(world: World) -> None:
    ranks = world(2)
    together(ranks, lambda g: c.barrier(group=g, async_op=True))
    strided = [torch.full((1 << 10, 1 << 9), float(rank)).t() for rank in range(2)]
    tracemalloc.start()
    try:
        together(ranks, lambda g: c.all_reduce_tensor(strided[g.rank], group=g, async_op=True))
        together(ranks, lambda g: c.broadcast_tensor(strided[g.rank], 1, group=g, async_op=True))
        work = ranks[0].isend(strided[0], 1)
        ranks[1].recv(0, out=strided[1])
        work.wait()
        # torch's own memory isn't counted; spans, 16 bytes for each element, are.
        assert tracemalloc.get_traced_memory()[1] < strided[0].nbytes / 2
    finally:
        tracemalloc.stop()
    assert all(bool((one == 1).all()) for one in strided)


@pytest.mark.parametrize("size", SIZES)
def test_scatter_and_gather_are_each_others_reverse(world: World, size: int) -> None:
    ranks = world(size)
    for count in COUNTS:
        for root in range(size):
            outs = [torch.zeros(count) for _ in ranks]
            parts = [values(rank, count) for rank in range(size)]

            def scatter(g: Communicator) -> c.CollectiveWork | None:
                inputs = parts if g.rank == root else None
                return c.scatter_tensor(outs[g.rank], inputs, root, group=g, async_op=True)

            together(ranks, scatter)
            assert all(torch.equal(a, b) for a, b in zip(outs, parts, strict=True))
            back = [torch.zeros(count) for _ in ranks]

            def gather(g: Communicator) -> c.CollectiveWork | None:
                targets = back if g.rank == root else None
                return c.gather_tensor(outs[g.rank], targets, root, group=g, async_op=True)

            together(ranks, gather)
            assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_into_one_tensor_a_list_and_in_place(world: World, size: int) -> None:
    ranks = world(size)
    for count in COUNTS:
        expected = torch.cat([values(rank, count) for rank in range(size)])
        outs = [torch.zeros(size * count) for _ in ranks]
        together(
            ranks,
            lambda g: c.all_gather_tensor(
                outs[g.rank], values(g.rank, count), group=g, async_op=True
            ),
        )
        assert all(torch.equal(one, expected) for one in outs)
        # This rank's part of the output is the input.
        for rank, out in enumerate(outs):
            out.zero_()[rank * count : (rank + 1) * count] = values(rank, count)
        together(
            ranks,
            lambda g: c.all_gather_tensor(
                outs[g.rank],
                outs[g.rank][g.rank * count : (g.rank + 1) * count],
                group=g,
                async_op=True,
            ),
        )
        assert all(torch.equal(one, expected) for one in outs)
    # Uneven parts.
    lists = [[torch.zeros(rank + 2, 2) for rank in range(size)] for _ in ranks]
    together(
        ranks,
        lambda g: c.all_gather_tensor(
            lists[g.rank], torch.full((g.rank + 2, 2), float(g.rank)), group=g, async_op=True
        ),
    )
    for parts in lists:
        assert all(bool((part == rank).all()) for rank, part in enumerate(parts))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_even_uneven_and_lists(world: World, size: int) -> None:
    ranks = world(size)
    for count in (0, 3, 20_000):
        outs = [torch.zeros(size * count, 2) for _ in ranks]
        together(
            ranks,
            lambda g: c.all_to_all_tensor(
                outs[g.rank],
                torch.cat([torch.full((count, 2), 10.0 * g.rank + dst) for dst in range(size)]),
                group=g,
                async_op=True,
            ),
        )
        for rank, out in enumerate(outs):
            for src, part in enumerate(torch.split(out, count) if count else ()):
                assert bool((part == 10 * src + rank).all())
    # Rank r sends (r + dst) % 3 rows to dst: nothing to some.
    rows = [[(src + dst) % 3 for dst in range(size)] for src in range(size)]
    got = [torch.zeros(sum(row[rank] for row in rows), 2) for rank in range(size)]
    together(
        ranks,
        lambda g: c.all_to_all_tensor(
            got[g.rank],
            torch.full((sum(rows[g.rank]), 2), float(g.rank)),
            out_splits=[row[g.rank] for row in rows],
            in_splits=rows[g.rank],
            group=g,
            async_op=True,
        ),
    )
    for rank, out in enumerate(got):
        expected = [float(src) for src in range(size) for _ in range(rows[src][rank])]
        assert out[:, 0].tolist() == expected
    # A list with a shape for each pair.
    lists = [[torch.zeros(src + 1) for src in range(size)] for _ in ranks]
    together(
        ranks,
        lambda g: c.all_to_all_tensor(
            lists[g.rank],
            [torch.full((g.rank + 1,), float(g.rank)) for _ in range(size)],
            group=g,
            async_op=True,
        ),
    )
    for parts in lists:
        assert all(bool((part == src).all()) for src, part in enumerate(parts))


def test_ranks_and_splits_are_integers_of_any_kind(world: World) -> None:
    ranks = world(2)
    tensors = [torch.full((3,), float(rank)) for rank in range(2)]
    root = cast("int", np.int64(1))
    together(ranks, lambda g: c.broadcast_tensor(tensors[g.rank], root, group=g, async_op=True))
    assert bool((tensors[0] == 1).all())
    # Rank r sends r + 1 rows to each, and receives 1 from rank 0 and 2 from rank 1.
    kinds: list[Callable[[list[int]], object]] = [np.array, torch.tensor, tuple]
    for kind in kinds:
        outs = [torch.zeros(3) for _ in ranks]
        together(
            ranks,
            lambda g: c.all_to_all_tensor(
                outs[g.rank],
                torch.full((2 * g.rank + 2,), g.rank + 1.0),
                out_splits=cast("Sequence[int]", kind([1, 2])),
                in_splits=cast("Sequence[int]", kind([g.rank + 1] * 2)),
                group=g,
                async_op=True,
            ),
        )
        assert [one.tolist() for one in outs] == [[1.0, 2.0, 2.0]] * 2
        # None at all means equal shares.
        even = torch.zeros(2)
        together(
            ranks,
            lambda g: c.all_to_all_tensor(
                even if g.rank else torch.zeros(2),
                torch.full((2,), float(g.rank)),
                out_splits=cast("Sequence[int]", kind([])),
                group=g,
                async_op=True,
            ),
        )
        assert even.tolist() == [0.0, 1.0]


def test_memory_that_is_not_contiguous(world: World, reducing: str) -> None:
    ranks = world(2)
    wholes = [torch.full((30, 7), float(rank + 1)) for rank in range(2)]
    together(ranks, lambda g: c.all_reduce_tensor(wholes[g.rank][:, 2], group=g, async_op=True))
    together(ranks, lambda g: c.broadcast_tensor(wholes[g.rank][:, 4], 1, group=g, async_op=True))
    for rank, whole in enumerate(wholes):
        expected = torch.full((30, 7), float(rank + 1))
        expected[:, 2] = 3
        expected[:, 4] = 2
        assert torch.equal(whole, expected)
    outs = [torch.zeros(5, 8).t() for _ in ranks]
    together(
        ranks,
        lambda g: c.all_gather_tensor(
            outs[g.rank], torch.full((5, 4), float(g.rank)).t(), group=g, async_op=True
        ),
    )
    assert all(torch.equal(one, torch.cat([torch.zeros(4, 5), torch.ones(4, 5)])) for one in outs)


def with_gaps(values: torch.Tensor) -> torch.Tensor:
    """The same values in every other element, column by column."""
    made = torch.zeros(*reversed(values.shape), 2, dtype=values.dtype)[..., 0].t()
    return made.copy_(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_parts_with_gaps_that_end_anywhere(
    world: World, reducing: str, size: int, dtype: torch.dtype
) -> None:
    ranks = world(size)
    # Each part ends in the middle of a row.
    wholes = [values(rank, 75 * size, dtype).view(3, 25 * size) for rank in range(size)]
    total = sum((one.double() for one in wholes), torch.zeros(3, 25 * size).double()).to(dtype)
    for gaps in ((True, False), (False, True), (True, True)):
        outs = [torch.zeros(25, 3, dtype=dtype) for _ in ranks]
        inputs = [one.clone() for one in wholes]
        outs = [with_gaps(one) for one in outs] if gaps[0] else outs
        inputs = [with_gaps(one) for one in inputs] if gaps[1] else inputs
        together(
            ranks,
            lambda g: c.reduce_scatter_tensor(outs[g.rank], inputs[g.rank], group=g, async_op=True),
        )
        for rank, out in enumerate(outs):
            assert out.reshape(-1).tolist() == total.view(-1).tolist()[rank * 75 :][:75], gaps
        assert all(a.tolist() == b.tolist() for a, b in zip(inputs, wholes, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_lists_with_gaps_here_and_there(world: World, reducing: str, size: int) -> None:
    ranks = world(size)
    shapes = [(3, 1 + 40 * rank) for rank in range(size)]
    lists = [
        [torch.full(shape, float(rank + part)) for part, shape in enumerate(shapes)]
        for rank in range(size)
    ]
    mixed = [
        [with_gaps(one) if (rank + part) % 2 else one for part, one in enumerate(lists[rank])]
        for rank in range(size)
    ]
    outs = [with_gaps(torch.zeros(shape)) for shape in shapes]
    together(
        ranks,
        lambda g: c.reduce_scatter_tensor(outs[g.rank], mixed[g.rank], group=g, async_op=True),
    )
    for part, out in enumerate(outs):
        assert torch.equal(out, torch.full(shapes[part], float(sum(range(size)) + size * part)))
    many = [
        [with_gaps(torch.full((2, 3), rank + i + 1.0)) for i in range(9)] for rank in range(size)
    ]
    together(ranks, lambda g: c.all_reduce_tensor(many[g.rank], group=g, async_op=True))
    for tensors in many:
        for i, one in enumerate(tensors):
            assert bool((one == sum(range(size)) + size * (i + 1)).all())
    for count in (5, 30_000):
        for root in range(size):
            scattered = [with_gaps(torch.zeros(2, count)) for _ in ranks]
            given = [with_gaps(values(rank, 2 * count).view(2, count)) for rank in range(size)]
            given[0] = given[0].contiguous()

            def scatter(g: Communicator) -> c.CollectiveWork | None:
                inputs = given if g.rank == root else None
                return c.scatter_tensor(scattered[g.rank], inputs, root, group=g, async_op=True)

            together(ranks, scatter)
            assert all(torch.equal(a, b) for a, b in zip(scattered, given, strict=True))
            reduced = [with_gaps(values(rank, 2 * count).view(2, count)) for rank in range(size)]
            before = [one.clone() for one in reduced]
            together(
                ranks, lambda g: c.reduce_tensor(reduced[g.rank], root, group=g, async_op=True)
            )
            for rank, one in enumerate(reduced):
                assert torch.equal(one, sum(before) if rank == root else before[rank])  # type: ignore[arg-type]


def test_output_in_the_gaps_of_the_input_gets_what_was_there(world: World, reducing: str) -> None:
    ranks = world(2)
    memories = [torch.arange(4 * 80.0).view(4, 80) + rank for rank in range(2)]
    expected = [
        (2 * memories[0][:, :40] + 1).reshape(-1)[80 * rank : 80 * (rank + 1)] for rank in range(2)
    ]
    together(
        ranks,
        lambda g: c.reduce_scatter_tensor(
            memories[g.rank][2], memories[g.rank][:, :40], group=g, async_op=True
        ),
    )
    assert all(torch.equal(memories[rank][2], expected[rank]) for rank in range(2))


def test_gradients_and_0_d_tensors_are_plain_data(world: World) -> None:
    ranks = world(2)
    tensors = [torch.tensor(float(rank), requires_grad=True) for rank in range(2)]
    together(ranks, lambda g: c.all_reduce_tensor(tensors[g.rank], group=g, async_op=True))
    assert [one.item() for one in tensors] == [1.0, 1.0]


@pytest.mark.parametrize("size", SIZES)
def test_barrier_ends_when_all_have_begun_it(world: World, size: int) -> None:
    ranks = world(size)
    works = [c.barrier(group=rank, async_op=True) for rank in ranks[:-1]]
    for rank in ranks:
        rank.connection.progress.wait_until(lambda: False, 0.0)
    assert not any(work is not None and work.is_completed() for work in works)
    works.append(c.barrier(group=ranks[-1], async_op=True))
    for work in works:
        assert work is not None
        work.wait(20)
        assert work.is_success()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda g: c.broadcast_tensor(torch.ones(2), 2, group=g), ValueError, "src=2"),
        (lambda g: c.reduce_tensor(torch.ones(2), -1, group=g), ValueError, "dst=-1"),
        (lambda g: c.broadcast_tensor(torch.ones(2).to_sparse(), 0, group=g), ValueError, "sparse"),
        (lambda g: c.all_reduce_tensor(torch.ones(1).expand(4), group=g), ValueError, "share"),
        (
            lambda g: c.all_reduce_tensor(torch.ones(2).to(torch.float8_e4m3fn), group=g),
            TypeError,
            "sum is not defined for torch.float8_e4m3fn",
        ),
        (
            lambda g: c.all_reduce_tensor(torch.ones(2), op="mean", group=g),  # type: ignore[arg-type]
            TypeError,
            "mean",
        ),
        (lambda g: c.all_gather_tensor(torch.ones(3), torch.ones(2), group=g), ValueError, "3 el"),
        (
            lambda g: c.all_gather_tensor(torch.ones(4), torch.ones(2).int(), group=g),
            TypeError,
            "float32",
        ),
        (lambda g: c.all_gather_tensor([torch.ones(2)], torch.ones(2), group=g), ValueError, "2 t"),
        (lambda g: c.scatter_tensor(torch.ones(2), None, 0, group=g), ValueError, "2 tensors"),
        (
            lambda g: c.gather_tensor(torch.ones(2), [torch.ones(2)] * 2, 1, group=g),
            ValueError,
            "rank 1 only",
        ),
        (lambda g: c.all_to_all_tensor(torch.ones(3), torch.ones(4), group=g), ValueError, "3 row"),
        (
            lambda g: c.all_to_all_tensor(torch.ones(4), torch.ones(4), in_splits=[1, 2], group=g),
            ValueError,
            "add up to its 4 rows",
        ),
        (
            lambda g: c.all_to_all_tensor(torch.ones(4), torch.ones(4), in_splits=[1, 3], group=g),
            ValueError,
            "sends itself 1",
        ),
        (lambda g: c.barrier(group=g, timeout=-1), ValueError, "timeout=-1"),
        (lambda g: c.broadcast_tensor(torch.ones(2), True, group=g), ValueError, "src=True"),
        (
            lambda g: c.broadcast_tensor(torch.ones(2), cast("int", 1.0), group=g),
            ValueError,
            r"src=1\.0",
        ),
        (
            lambda g: c.all_to_all_tensor(
                torch.ones(2), torch.ones(2), in_splits=[True, True], group=g
            ),
            ValueError,
            r"splits \[True, True\]",
        ),
    ],
)
def test_wrong_arguments_are_refused_and_count_as_no_call(
    world: World, call: object, error: type[Exception], match: str
) -> None:
    ranks = world(2)
    with pytest.raises(error, match=match):
        call(ranks[0])  # type: ignore[operator]
    together(ranks, lambda g: c.barrier(group=g, async_op=True))


def test_output_over_the_input_is_refused(world: World) -> None:
    (only,) = world(1)
    data = torch.ones(8)
    calls: list[Callable[[], object]] = [
        lambda: c.all_to_all_tensor(data, data, group=only),
        lambda: c.all_gather_tensor([data[:4]], data[2:6], group=only),
        lambda: c.reduce_scatter_tensor(data[:4], [data[1:5]], group=only),
        lambda: c.scatter_tensor(data[:4], [data[1:5]], 0, group=only),
        lambda: c.gather_tensor(data[:4], [data[3:7]], 0, group=only),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="shares memory"):
            call()
