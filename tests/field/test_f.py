"""Field reports, group F: tags, shapes, dtypes and sizes of messages."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

import torch_nixl
from field.two import DEADLINE, LARGE, Two
from torch_nixl.p2p.tensors import MismatchError

SIZES = pytest.mark.parametrize("columns", [4, LARGE], ids=["small", "large"])


@SIZES
def test_f1_a_buffer_of_another_shape(two: Two, columns: int) -> None:
    sent = torch.arange(2.0 * columns).view(2, columns)
    shapes = [(2, columns - 1), (3, columns), (2 * columns,), (columns, 2)]
    for shape in shapes:
        work = two.a.isend(sent, 1)
        out = torch.full(shape, -1.0)
        with pytest.raises(MismatchError) as caught:
            two.b.recv(0, out=out)
        assert bool((out == -1.0).all())
        # A small one has left before it is refused: then its Work says so later.
        told = two.a.connection.progress.wait_until(lambda: work.exception() is not None, None)  # noqa: B023 - called in this turn
        assert told
        with pytest.raises(MismatchError) as theirs:
            work.wait(DEADLINE)
        for error in (caught.value, theirs.value):
            for named in ((2, columns), shape):
                assert ", ".join(map(str, named)) in str(error)
        good = two.move(sent, torch.zeros(2, columns))
        assert torch.equal(good, sent)


@pytest.mark.parametrize("count", [1, LARGE], ids=["small", "large"])
def test_f3_receives_in_another_order_than_sends(two: Two, count: int) -> None:
    works = [two.a.isend(torch.ones(count), 1, tag=1), two.a.isend(torch.zeros(count), 1, tag=2)]
    second, first = two.b.irecv(0, tag=2), two.b.irecv(0, tag=1)
    for work, value in ((second, 0.0), (first, 1.0)):
        received = work.result(DEADLINE)
        assert received is not None
        assert bool((received == value).all())
    for work in works:
        work.wait(DEADLINE)


def test_f4_blocking_calls_in_opposite_order_of_tags(two: Two) -> None:
    two.a.send(torch.tensor([1.0]), 1, tag=0)
    two.a.send(torch.tensor([2.0]), 1, tag=1)
    assert two.b.recv(0, tag=1).tolist() == [2.0]
    assert two.b.recv(0, tag=0).tolist() == [1.0]


@pytest.mark.parametrize("count", [10, LARGE], ids=["small", "large"])
def test_f6_tensors_of_one_shape_by_tag_in_another_order(two: Two, count: int) -> None:
    sent = {f"key{index}": torch.full((count,), float(index)) for index in range(6)}
    works = [two.a.isend(one, 1, tag=tag) for tag, one in enumerate(sent.values())]
    tags = list(range(6))
    random.Random(6).shuffle(tags)
    for tag in tags:
        assert torch.equal(two.b.recv(0, tag=tag), sent[f"key{tag}"])
    for work in works:
        work.wait(DEADLINE)


@pytest.mark.parametrize("kind", ["tensor", "tree", "object"])
def test_f6_the_functions_of_the_package_hand_the_tag_on(two: Two, kind: str) -> None:
    send, isend, recv, irecv = (
        getattr(torch_nixl, f"{form}_{kind}") for form in ("send", "isend", "recv", "irecv")
    )
    for tag in (1, 2):
        send(torch.tensor(tag), 1, tag=tag, group=two.a)
    for tag in (3, 4):
        isend(torch.tensor(tag), 1, tag=tag, group=two.a).wait(DEADLINE)
    for tag in (4, 2):
        assert int(recv(0, tag=tag, group=two.b, timeout=DEADLINE)) == tag
    for tag in (3, 1):
        assert int(irecv(0, tag=tag, group=two.b).result(DEADLINE)) == tag


def test_f6_a_batch_hands_the_tags_on(two: Two) -> None:
    outs = {tag: torch.zeros(()) for tag in (3, 1, 2)}
    sends = [
        SimpleNamespace(op="isend", tensor=torch.tensor(1.0 * tag), peer=1, tag=tag, group=two.a)
        for tag in (1, 2, 3)
    ]
    receives = [
        SimpleNamespace(op="irecv", tensor=out, peer=0, tag=tag, group=two.b)
        for tag, out in outs.items()
    ]
    works = torch_nixl.batch_isend_irecv(sends) + torch_nixl.batch_isend_irecv(receives)
    for work in works:
        work.wait(DEADLINE)
    assert {tag: int(out) for tag, out in outs.items()} == {1: 1, 2: 2, 3: 3}


def test_f8_the_receiver_need_not_know_the_shape(two: Two) -> None:
    rng = random.Random(8)
    for _ in range(50):
        shape = [rng.randrange(1, 30) for _ in range(rng.randrange(5))]
        dtype = rng.choice([torch.float32, torch.int8, torch.bfloat16])
        sent = (torch.rand(shape) * 100).to(dtype)
        received = two.move(sent)
        assert (received.shape, received.dtype) == (sent.shape, dtype)
        assert torch.equal(received, sent)
