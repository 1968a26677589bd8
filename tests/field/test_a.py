"""Field reports, group A: strides, views and offsets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from connect.pairs import DEADLINE, Pair

from field.two import LARGE, Two, two_ranks
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


# Between ranks.


@pytest.mark.parametrize("rows", [2, LARGE])
def test_a1_p2p_column_slice(two: Two, rows: int) -> None:
    x = torch.arange(2 * rows).view(rows, 2)
    assert two.move(x[:, 1])[:2].tolist() == [1, 3]
    assert two.move(x[:, 0])[-2:].tolist() == [2 * rows - 4, 2 * rows - 2]


@pytest.mark.parametrize("rows", [4, 500])
def test_a2_p2p_a_target_that_is_transposed(two: Two, rows: int) -> None:
    sent = torch.arange(float(rows * rows)).view(rows, rows)
    target = torch.zeros(rows, rows)
    two.move(sent, target.t())
    assert torch.equal(target, sent.t())


@pytest.mark.parametrize("rows", [4, 500])
def test_a3_p2p_column_major_matrix(two: Two, rows: int) -> None:
    q = torch.linalg.qr(torch.rand(rows, rows))[0].t().contiguous().t()
    assert not q.is_contiguous()
    assert torch.equal(two.move(q, torch.empty(rows, rows)), q)
    assert torch.equal(two.move(q), q)


@pytest.mark.parametrize("rows", [10, 20_000])
def test_a5_p2p_slices_of_one_buffer_into_slices_of_another(two: Two, rows: int) -> None:
    x, y = torch.arange(10.0 * rows).view(rows, 10), torch.full((rows, 10), -1.0)
    columns = (slice(0, 3), slice(5, 9))
    works = []
    for name, side, peer, buffer in (("irecv", two.b, 0, y), ("isend", two.a, 1, x)):
        batch = [
            SimpleNamespace(op=name, tensor=buffer[:, part], peer=peer, tag=tag)
            for tag, part in enumerate(columns)
        ]
        # Not in one order on both sides: the tags tell which is which.
        works += side.batch_isend_irecv(batch if name == "irecv" else batch[::-1])
    for work in works:
        work.wait(DEADLINE)
    expected = torch.full((rows, 10), -1.0)
    for part in columns:
        expected[:, part] = x[:, part]
    assert torch.equal(y, expected)


def test_a8_p2p_transposed_numpy_array(two: Two) -> None:
    sent = torch.from_numpy(np.arange(10).reshape(2, 5).T)
    assert torch.equal(two.move(sent), sent)


@pytest.mark.parametrize("rows", [800, 8], ids=["packed", "in pieces"])
@pytest.mark.parametrize("path", ["cma", "tcp", "own rank"])
def test_a10_p2p_chunks_over_every_path(
    path: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    x = torch.arange(640_000.0).view(rows, -1)
    y = torch.zeros_like(x)
    with two_ranks() as two:
        receiver = two.a if path == "own rank" else two.b
        for part, out in zip(torch.chunk(x, 2, dim=1), torch.chunk(y, 2, dim=1), strict=True):
            for target in (None, out):
                receive = receiver.irecv(0, out=target)
                work = two.a.isend(part, receiver.rank)
                received = receive.result(DEADLINE)
                work.wait(DEADLINE)
                assert received is not None
                assert torch.equal(received, part)
                assert receive.statistics().path == (path if path != "own rank" else "")
            if path != "own rank":
                packed = [one.statistics().packed for one in (work, receive)]
                assert packed == [rows == 800] * 2
    assert torch.equal(y, x)


@pytest.mark.parametrize("columns", [5, LARGE])
def test_a11_p2p_what_is_told_of_a_slice_is_the_slices(two: Two, columns: int) -> None:
    x = torch.arange(8.0 * columns).view(8, columns)
    work = two.a.isend(x[2:5], 1)
    told = two.b.probe(0)
    assert (told.shape, told.nbytes) == ((3, columns), 12 * columns)
    assert torch.equal(two.b.recv(0), x[2:5])
    work.wait(DEADLINE)
