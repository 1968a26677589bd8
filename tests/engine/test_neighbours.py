"""Memories that follow each other in one registration on both sides move as one span."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from torch_nixl.engine import performance
from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import Memory, address_memory, tensor_memory

DEADLINE = 20.0
BLOCK = 256


@contextmanager
def counted(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Note how many spans each transfer of an adapter has."""
    counts: list[int] = []
    prepare = adapter.prepare

    def noted(direction: Direction, kind: MemoryKind, local: Any, *rest: Any) -> Any:
        counts.append(len(local))
        return prepare(direction, kind, local, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "prepare", noted)
        yield counts


def move(
    direction: Direction,
    one: Connection,
    ours: list[Memory],
    two: Connection,
    theirs: list[Memory],
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """Move and return how many spans that took."""
    with counted(one.adapter, monkeypatch) as counts:
        exposed = two.expose(direction, theirs)
        one.claim(exposed.offer(), ours).wait(DEADLINE)
        exposed.wait(DEADLINE)
    return sum(counts)


def blocks(tensor: torch.Tensor, order: list[int]) -> list[Memory]:
    return [tensor_memory(tensor[at * BLOCK : (at + 1) * BLOCK]) for at in order]


@pytest.fixture
def pair(adapter_factory: Callable[[str], Adapter]) -> Iterator[tuple[Connection, Connection]]:
    with Connection(adapter_factory("one")) as one, Connection(adapter_factory("two")) as two:
        yield one, two


def fresh(count: int, seed: int = 0) -> torch.Tensor:
    content = np.random.default_rng(seed).integers(1, 256, count * BLOCK, np.uint8)
    return torch.from_numpy(content).clone()


@pytest.mark.parametrize("direction", list(Direction))
def test_5000_neighbours_are_one_span_and_no_warning(
    pair: tuple[Connection, Connection],
    direction: Direction,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    performance.forget()
    mine, other = fresh(5000, 1), fresh(5000, 2)
    expected = (other if direction is Direction.READ else mine).clone()
    every = list(range(5000))
    count = move(
        direction, pair[0], blocks(mine, every), pair[1], blocks(other, every), monkeypatch
    )
    assert count == 1
    assert torch.equal(mine, expected)
    assert torch.equal(other, expected)
    assert not [record for record in caplog.records if "pieces" in record.message]


def test_any_order_arrives_where_it_belongs(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of neighbours on one side, on both, in reverse, and some that end in one tensor."""
    random = np.random.default_rng(7)
    for seed in range(12):
        sources = [fresh(40, seed), fresh(40, seed + 100)]
        targets = [torch.zeros(40 * BLOCK, dtype=torch.uint8) for _ in range(2)]
        order = np.arange(80)
        for _ in range(seed):  # The more, the fewer neighbours are left.
            low, high = sorted(random.integers(0, 81, 2).tolist())
            order[low:high] = order[low:high][::-1].copy()
        froms = order.tolist()
        tos = (order if seed % 2 else np.roll(np.arange(80), seed)).tolist()
        expected = torch.zeros(80, BLOCK, dtype=torch.uint8)
        expected[tos] = torch.cat(sources).view(80, BLOCK)[froms]
        steps = list(zip(froms, tos, strict=True))
        runs = 1 + sum(
            (b[0] - a[0], b[1] - a[1]) != (1, 1) or b[0] == 40 or b[1] == 40
            for a, b in itertools.pairwise(steps)
        )
        theirs = [blocks(sources[at // 40], [at % 40])[0] for at in froms]
        ours = [blocks(targets[at // 40], [at % 40])[0] for at in tos]
        count = move(Direction.READ, pair[0], ours, pair[1], theirs, monkeypatch)
        assert count == runs
        assert torch.equal(torch.cat(targets).view(80, BLOCK), expected)


def test_neighbours_in_two_registrations_stay_two_spans(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They adjoin, but a span that crosses two regions is in none."""
    apart, whole = fresh(2, 3), torch.zeros(2 * BLOCK, dtype=torch.uint8)
    halves = [
        address_memory(apart.data_ptr() + at, BLOCK, kind=MemoryKind.DRAM, owner=apart)
        for at in (0, BLOCK)
    ]
    one, two = pair
    assert move(Direction.READ, one, blocks(whole, [0, 1]), two, halves, monkeypatch) == 2
    assert torch.equal(whole, apart)
    whole.zero_()
    assert move(Direction.WRITE, one, halves, two, blocks(whole, [0, 1]), monkeypatch) == 2
    assert torch.equal(whole, apart)


@pytest.mark.parametrize(("kind", "device_id"), [(MemoryKind.DRAM, 0), (MemoryKind.VRAM, 1)])
def test_where_regions_share_a_device_id_neighbours_stay_apart(
    kind: MemoryKind, device_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = LoopbackFabric(free_device_ids=() if kind is MemoryKind.DRAM else (MemoryKind.DRAM,))
    source, target = fresh(4, 4), torch.zeros(4 * BLOCK, dtype=torch.uint8)

    def quarters(tensor: torch.Tensor) -> list[Memory]:
        return [
            address_memory(
                tensor.data_ptr() + at * BLOCK,
                BLOCK,
                kind=kind,
                device_id=device_id,
                owner=tensor,
            )
            for at in range(4)
        ]

    with Connection(fabric.adapter("one")) as one, Connection(fabric.adapter("two")) as two:
        count = move(Direction.READ, one, quarters(target), two, quarters(source), monkeypatch)
    assert count == 4
    assert torch.equal(source, target)
