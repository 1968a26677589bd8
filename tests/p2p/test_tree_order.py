"""Which bytes of a tree go where: tensors that share memory, and trees of very many."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from p2p.conftest import World
from torch_nixl.p2p import protocol
from torch_nixl.p2p.bundles import MAX_APART, TreeSource, choose_num_apart
from torch_nixl.p2p.manifest import Packed
from torch_nixl.p2p.tensors import MismatchError

LARGE = 4 * protocol.EAGER_NBYTES
DEADLINE = 20.0


def shared(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A base, and a tree of parts of it."""
    base = torch.zeros(2 * LARGE)
    matrix = base.view(-1, 64)
    trees: dict[str, dict[str, torch.Tensor]] = {
        "small, large": {"a": base[:10], "b": base},
        "large, small": {"a": base, "b": base[:10]},
        "small, large, small": {"a": base[5:15], "b": base, "c": base[10:20]},
        "large, small, large": {"a": base[:LARGE], "b": base[LARGE - 5 : LARGE + 5], "c": base},
        "two large, one small": {"a": base[:LARGE], "b": base[LARGE // 2 :], "c": base[-10:]},
        "columns, large, row": {"a": matrix[:, 3], "b": matrix[:, :32], "c": matrix[5]},
        "row, columns": {"a": matrix[7], "b": matrix[:, 16:]},
        "strangers": {"a": torch.zeros(3), "b": base[:10], "c": base[10:], "d": torch.zeros(LARGE)},
    }
    return base, trees[name]


@pytest.mark.parametrize(
    "name",
    [
        "small, large",
        "large, small",
        "small, large, small",
        "large, small, large",
        "two large, one small",
        "columns, large, row",
        "row, columns",
        "strangers",
    ],
)
def test_shared_bytes_are_the_last_tensors(world: World, path: str, name: str) -> None:
    a, b = world()
    base, out = shared(name)
    expected_base, expected = shared(name)
    sent = {key: torch.full(value.shape, float(n)) for n, (key, value) in enumerate(out.items(), 1)}
    for key, value in expected.items():
        value.copy_(sent[key])
    work = a.isend_tree(sent, 1)
    b.recv_tree(0, out=out)
    work.wait()
    assert torch.equal(base, expected_base)
    assert all(torch.equal(out[key], expected[key]) for key in out)


def test_what_shares_nothing_lands_where_it_belongs(world: World) -> None:
    a, b = world()
    _, out = shared("strangers")
    receive = b.irecv_tree(0, out=out)
    a.send_tree({key: torch.ones_like(value) for key, value in out.items()}, 1)
    receive.wait(DEADLINE)
    assert not receive.statistics().packed


@pytest.mark.parametrize("count", [MAX_APART, MAX_APART + 1])
def test_one_tensor_too_many_copies_one_tensor_more(count: int) -> None:
    base = torch.zeros(protocol.PACK_SPAN_NBYTES // 4)
    packed = Packed([base] * count, "tree")
    source = TreeSource(packed, choose_num_apart(packed.descriptions))
    copied = source.memories[: len(source.memories) - source.num_apart]
    assert source.num_apart == MAX_APART
    assert sum(one.nbytes for one in copied) == (count - MAX_APART) * base.nbytes


def test_tree_of_very_many_equal_tensors_arrives(world: World, path: str) -> None:
    a, b = world(timeout=60.0)
    rows = torch.arange(1100.0)[:, None].expand(1100, protocol.PACK_SPAN_NBYTES // 4).contiguous()
    out = torch.zeros_like(rows)
    work = a.isend_tree(list(rows), 1)
    b.recv_tree(0, out=list(out))
    work.wait()
    assert torch.equal(out, rows)


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), "x" * 100_000], ids=["int", "negative", "text"]
)
def test_scalar_that_is_too_long_to_show_is_refused_like_others(world: World, value: Any) -> None:
    a, b = world()
    for tree in ({"a": value}, {"a": {value: 1}}):
        a.send_tree(tree, 1)
        with pytest.raises(MismatchError, match="expected") as caught:
            b.recv_tree(0, out={"a": torch.zeros(1)})
        assert len(str(caught.value)) < 1000
    a.send_tree((1,), 1)
    with pytest.raises(MismatchError, match="can't be replaced"):
        b.recv_tree(0, out=(value,))


def test_rank_gets_of_itself_what_another_would_get(world: World) -> None:
    (alone,) = world(1)
    value = torch.arange(6.0).reshape(2, 3).t()
    alone.send(value, 0)
    alone.send_tree({"a": value}, 0)
    for received in (alone.recv(0), alone.recv_tree(0)["a"]):
        assert torch.equal(received, value)
        assert received.is_contiguous()


loaded: list[str] = []


class Loud:
    """Says in which thread it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return load, ()


def load() -> None:
    loaded.append(threading.current_thread().name)
    raise KeyError("broken")


@pytest.mark.parametrize("local", [False, True])
def test_future_of_an_object_unpickles_nothing(world: World, local: bool) -> None:
    loaded.clear()
    a, b = world()
    work = b.irecv_object(1 if local else 0)
    future = work.get_future()
    (b if local else a).send_object(Loud(), 1)
    assert b.connection.progress.wait_until(future.done, time.monotonic() + DEADLINE)
    assert future.value() == []
    assert loaded == []
    with pytest.raises(KeyError, match="broken"):
        work.result()
    assert loaded == [threading.current_thread().name]


def test_future_of_an_object_that_never_comes_fails(world: World) -> None:
    _, b = world()
    future = b.irecv_object(0, timeout=0.05).get_future()
    with pytest.raises(RuntimeError, match=r"TransferTimeout: .*timed out"):
        future.wait()
