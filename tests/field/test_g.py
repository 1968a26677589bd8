"""Field reports, group G: empty, scalar and unusual dtypes."""

from __future__ import annotations

import pytest
import torch
from connect.pairs import DEADLINE, Pair, pattern

from field.two import LARGE, Two

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.complex32, torch.complex64, torch.complex128),
]


def test_g1_a_tensor_without_elements(pair: Pair) -> None:
    pair.move(torch.empty(1, 0, 2), torch.empty(1, 0, 2))


def test_g2_normal_memory_after_empty_memory(pair: Pair) -> None:
    before = pair.owner.statistics().registrations
    pair.move(torch.empty(0), torch.empty(0))
    assert pair.owner.statistics().registrations == before, "memory of no bytes was registered"
    source, target = torch.rand(100), torch.zeros(100)
    pair.move(source, target)
    assert torch.equal(source, target)
    pair.move([torch.empty(0), source], [torch.empty(0), target.zero_()])
    assert torch.equal(source, target)


def test_g4_empty_memory_takes_no_special_case(pair: Pair) -> None:
    for size in (0, 1, 0):
        exposed = pair.writable(bytearray(size))
        pair.write(bytes(size), exposed.metadata()).wait(DEADLINE)
        exposed.wait(DEADLINE)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(), (7, 3)], ids=["scalar", "matrix"])
def test_g6_every_dtype(pair: Pair, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    content = pattern(nbytes)
    source = torch.from_numpy(content % 2 if dtype is torch.bool else content)
    target = torch.empty(shape, dtype=dtype)
    pair.move(source.view(dtype).view(shape), target)
    assert torch.equal(target.reshape(-1).view(torch.uint8), source)


def test_g8_complex_views(pair: Pair) -> None:
    source = torch.randn(5, dtype=torch.complex64)
    target = torch.zeros(5)
    pair.move(source.imag, target)
    assert torch.equal(source.imag, target)
    with pytest.raises(ValueError, match="resolve_conj"):
        pair.readable(source.conj())
    with pytest.raises(ValueError, match="resolve_neg"):
        pair.readable(source.conj().imag)


# Between ranks.


def test_g1_p2p_a_tensor_without_elements(two: Two) -> None:
    assert two.move(torch.empty(1, 0, 2)).shape == (1, 0, 2)
    two.move(torch.empty(1, 0, 2), torch.empty(1, 0, 2))


def test_g2_p2p_normal_messages_after_empty_ones(two: Two) -> None:
    for count in (0, 100, 0, LARGE):
        sent = torch.rand(count)
        assert torch.equal(two.move(sent, torch.zeros(count)), sent)


def test_g2_p2p_empty_tensors_among_others(two: Two) -> None:
    for count in (3, LARGE):
        sent = [torch.empty(0), torch.rand(count), torch.empty(2, 0), torch.rand(3)]
        work = two.a.isend_tree(sent, 1)
        received = two.b.recv_tree(0)
        work.wait(DEADLINE)
        assert [one.shape for one in received] == [one.shape for one in sent]
        assert all(torch.equal(*pair) for pair in zip(received, sent, strict=True))


def test_g4_p2p_empty_messages_take_no_special_case(two: Two) -> None:
    for size in (0, 1, 0):
        assert two.move(torch.ones(size)).tolist() == [1.0] * size


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(), (7, 3), (LARGE,)], ids=["scalar", "matrix", "large"])
def test_g6_p2p_every_dtype(two: Two, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    content = pattern(torch.empty(shape, dtype=dtype).nbytes)
    source = torch.from_numpy(content % 2 if dtype is torch.bool else content)
    received = two.move(source.view(dtype).view(shape))
    assert (received.dtype, received.shape) == (dtype, shape)
    assert torch.equal(received.reshape(-1).view(torch.uint8), source)


# One element is in one piece whatever its stride.
@pytest.mark.parametrize("count", [1, 5, LARGE])
def test_g8_p2p_complex_views(two: Two, count: int) -> None:
    source = torch.randn(count, dtype=torch.complex64)
    assert torch.equal(two.move(source.conj()), source.conj().resolve_conj())
    assert torch.equal(two.move(source.imag), source.imag)
    assert torch.equal(two.move(source.conj().imag), source.conj().imag)
