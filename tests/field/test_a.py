"""Field reports, group A: strides, views and offsets. Here: descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from connect.pairs import DEADLINE, Pair

from torch_nixl import connect
from torch_nixl.testing import Rank, run_ranks


def received(pair: Pair, source: Any) -> torch.Tensor:
    """Read `source` into fresh, contiguous memory of its shape."""
    like = torch.as_tensor(source)
    target = torch.zeros(like.shape, dtype=like.dtype)
    pair.move(source, target)
    return target


def test_a1_column_slice(pair: Pair) -> None:
    x = torch.arange(4).view(2, 2)
    assert received(pair, x[:, 1]).tolist() == [1, 3]
    assert received(pair, x[:, 0]).tolist() == [0, 2]


def test_a2_a_target_that_is_transposed(pair: Pair) -> None:
    destination = torch.zeros(4, 4)
    exposed = pair.writable(destination.t())
    pair.write(torch.arange(16.0), exposed.metadata()).wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert torch.equal(destination.t().reshape(-1), torch.arange(16.0))


def test_a3_column_major_matrix(pair: Pair) -> None:
    q = torch.linalg.qr(torch.rand(4, 4))[0].t().contiguous().t()
    assert not q.is_contiguous()
    assert torch.equal(received(pair, q), q)


def test_a5_slices_of_one_buffer_into_slices_of_another(pair: Pair) -> None:
    x, y = torch.arange(100.0).view(10, 10), torch.full((10, 10), -1.0)
    pair.move([x[:, 0:3], x[:, 5:9]], [y[:, 0:3], y[:, 5:9]])
    expected = torch.full((10, 10), -1.0)
    expected[:, 0:3], expected[:, 5:9] = x[:, 0:3], x[:, 5:9]
    assert torch.equal(y, expected)


def test_a8_transposed_numpy_array(pair: Pair) -> None:
    array = np.arange(10).reshape(2, 5).T
    assert np.array_equal(received(pair, array).numpy(), array)
    assert torch.equal(received(pair, torch.from_numpy(array)), torch.from_numpy(array))


def chunks(rank: Rank) -> list[Any]:
    """Move the two halves of a tensor from rank 1 to rank 0, and return them."""
    store = rank.store()
    x = torch.arange(64.0).view(8, 8)
    found: list[Any] = []
    with connect.Connector() as connector:
        for index, part in enumerate(torch.chunk(x, 2, dim=1)):
            if rank.rank == 1:
                exposed = connect.ReadableOperation(
                    connector.connection(), connect.Descriptor(part)
                )
                connect.publish(store, f"chunk{index}", exposed)
                exposed.wait(DEADLINE)
            else:
                told = connect.fetch(store, f"chunk{index}", timeout=DEADLINE)
                target = torch.zeros(8, 4)
                connect.ReadOperation(
                    connector.connection(), told, connect.Descriptor(target)
                ).wait(DEADLINE)
                found.append(target.tolist())
    return found


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_a10_chunks_over_every_path(transports: str) -> None:
    found = run_ranks(chunks, 2, env={"UCX_TLS": transports}, timeout=60.0)[0]
    x = torch.arange(64.0).view(8, 8)
    assert found == [part.tolist() for part in torch.chunk(x, 2, dim=1)]


def test_a10_chunks_within_one_process(pair: Pair) -> None:
    x = torch.arange(64.0).view(8, 8)
    for part in torch.chunk(x, 2, dim=1):
        assert torch.equal(received(pair, part), part)


def test_a11_metadata_of_a_slice_is_the_slices(pair: Pair) -> None:
    x = torch.arange(40.0).view(8, 5)
    with pair.readable(x[2:5]) as exposed:
        told = exposed.metadata().descriptors[0]
        assert (told.ptr, told.size) == (x[2:5].data_ptr(), 60)
    assert torch.equal(received(pair, x[2:5]), x[2:5])
