"""Ranges of tensors with gaps."""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_nixl.collectives.segments import Range, may_meet

SHAPES = [(7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (3, 1, 2, 2)]


def with_gaps(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with gaps, its dimensions in another order; and all of the memory it lies in."""
    memory = torch.arange(2 * torch.Size(shape).numel()).view(*reversed(shape), 2)
    return memory[..., 0].permute(*reversed(range(len(shape)))), memory


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_is_that_of_the_flat_tensor(shape: tuple[int, ...]) -> None:
    tensor, memory = with_gaps(shape)
    values, rest = tensor.reshape(-1).clone(), memory[..., 1].clone()
    numel = tensor.numel()
    whole = Range(tensor, 0, numel)
    assert (whole.numel(), whole.nbytes, whole.dtype) == (numel, 8 * numel, torch.int64)
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        part = whole[start:stop]
        assert part.numel() == stop - start
        out = torch.zeros(stop - start, dtype=torch.int64)
        part.load(out)
        assert torch.equal(out, values[start:stop])
        part.store(-out)
        expected = values.clone()
        expected[start:stop] *= -1
        assert torch.equal(tensor.reshape(-1), expected)
        part.store(out)
        assert len(list(part.blocks())) <= 2 * len(shape)
    assert torch.equal(memory[..., 1], rest)


def test_range_of_a_range_and_beyond_its_end() -> None:
    tensor, _ = with_gaps((3, 4))
    part = Range(tensor, 0, 12)[2:9][3:100]
    assert (part.start, part.stop) == (5, 9)
    assert part[7:].numel() == 0


def test_tensors_that_may_share_elements() -> None:
    memory = torch.zeros(4, 6)
    assert may_meet(memory[:, 0], memory[:, 1])
    assert may_meet(memory[1], memory[:, 2:4])
    assert not may_meet(memory[:2], memory[2:, 1])
    assert not may_meet(memory[:0], memory)
