"""Credit: what it is taken for, what may come beyond it, and peers that keep to neither."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace as Entry
from typing import Any

import pytest
import torch

from p2p.conftest import World
from torch_nixl.errors import MetadataError, TransferTimeout
from torch_nixl.p2p import protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.description import describe
from torch_nixl.p2p.peer import Peer
from torch_nixl.p2p.protocol import CREDIT_FRAMES, HEAD, Outcome
from torch_nixl.p2p.wants import Wants
from torch_nixl.p2p.work import Work

LARGE = 4 * protocol.EAGER_NBYTES
DEADLINE = 10.0


def acquainted(world: World, size: int = 2) -> list[Communicator]:
    ranks = world(size)
    for one in ranks[1:]:
        ranks[0].send(torch.ones(1), one.rank, tag=7)
        one.recv(0, tag=7)
    return ranks


def peer_of(one: Communicator, rank: int) -> Peer:
    return one._exchange.peers[rank]


def strain(sender: Communicator, receiver: Communicator) -> None:
    """Use all credit up with messages that nobody receives."""
    other = receiver.rank
    while sender.isend(torch.ones(1), other, tag=9).is_completed():
        pass
    at = peer_of(receiver, sender.rank).debt
    assert wait_for(receiver, lambda: at.frames == CREDIT_FRAMES)


def wait_for(one: Communicator, condition: Any) -> bool:
    return one.connection.progress.wait_until(condition, time.monotonic() + DEADLINE)


@pytest.mark.parametrize("count", [1, LARGE])
def test_tag_that_is_no_integer_is_refused_and_takes_no_credit(world: World, count: int) -> None:
    a, b = acquainted(world)
    credit = peer_of(a, 1).allowance.frames
    for wrong in (1.0, "1", None):
        calls = (
            lambda tag: a.isend(torch.ones(count), 1, tag=tag),
            lambda tag: a.isend_tree([torch.ones(count)], 1, tag=tag),
            lambda tag: a.isend_object(1, 1, tag=tag),
            lambda tag: b.irecv(0, tag=tag),
            lambda tag: b.irecv_tree(0, tag=tag),
            lambda tag: b.irecv_object(0, tag=tag),
            lambda tag: b.probe(0, tag=tag),
            lambda tag: b.iprobe(0, tag=tag),
            lambda tag: a.channel(1, like=torch.ones(1), tag=tag),
        )
        for call in calls:
            with pytest.raises(TypeError, match="expected an integer"):
                call(wrong)
    assert peer_of(a, 1).allowance.frames == credit
    assert a.statistics().outstanding == b.statistics().outstanding == 0


def test_ranks_and_tags_may_be_integers_of_any_kind(world: World) -> None:
    a, b = acquainted(world)
    two = torch.tensor(2)
    work = b.irecv(torch.tensor(0), tag=two)  # type: ignore[arg-type]
    a.send(two, torch.tensor(1), tag=two)  # type: ignore[arg-type]
    assert int(work.result(DEADLINE) or 0) == 2
    assert type(work.source_rank()) is int


@pytest.mark.parametrize("count", [1, LARGE])
def test_message_that_can_not_be_packed_takes_no_credit(
    world: World, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = acquainted(world)
    before = peer_of(a, 1).allowance.frames, peer_of(a, 1).allowance.nbytes

    def fail(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("torch_nixl.p2p.outbox.join", fail)
        patch.setattr(Peer, "place", fail)
        with pytest.raises(MemoryError):
            a.isend(torch.ones(count), 1)
    assert (peer_of(a, 1).allowance.frames, peer_of(a, 1).allowance.nbytes) == before
    assert a.statistics().outstanding == 0
    work = a.isend(torch.ones(count), 1)
    assert b.recv(0).shape == (count,)
    work.wait(DEADLINE)


def test_receives_that_come_and_go_leave_no_leave_to_send(world: World) -> None:
    a, b = acquainted(world)
    strain(a, b)
    for _ in range(3 * CREDIT_FRAMES):
        with pytest.raises(TransferTimeout):
            b.recv(0, tag=5, timeout=0)
        assert peer_of(b, 0).wants.num_open <= CREDIT_FRAMES
    assert wait_for(b, lambda: not peer_of(b, 0).wants.num_open)
    assert not peer_of(a, 1).wanted
    work = a.isend(torch.ones(1), 1, tag=5)
    assert not work.is_completed()
    # And the next that waits is served.
    assert float(b.recv(0, tag=5)) == 1.0
    work.wait(DEADLINE)


def test_receives_of_many_tags_are_all_served_beyond_credit(world: World) -> None:
    a, b = acquainted(world)
    strain(a, b)
    count = CREDIT_FRAMES + 50
    for tag in range(1000, 1000 + count):
        assert b.iprobe(0, tag=tag) is None  # Each leaves a WANT behind.
    receives = [b.irecv(0, tag=tag) for tag in range(2000, 2000 + count)]
    assert peer_of(b, 0).wants.num_open <= CREDIT_FRAMES
    works = [a.isend(torch.tensor(tag), 1, tag=tag) for tag in range(2000, 2000 + count)]
    assert [int(work.result(DEADLINE) or 0) for work in receives] == [*range(2000, 2000 + count)]
    for work in works:
        work.wait(DEADLINE)


def test_any_source_receives_ask_each_rank_once(world: World) -> None:
    a, b, c = acquainted(world, 3)
    for one in (b, c):
        strain(one, a)
    for turn in range(20):
        receive = a.irecv(tag=5)
        assert peer_of(a, 1).wants.num_open <= 1
        assert peer_of(a, 2).wants.num_open <= 1
        (b if turn % 2 else c).isend(torch.tensor(turn), 0, tag=5)
        assert int(receive.result(DEADLINE) or 0) == turn


@pytest.mark.parametrize("source", [0, None])
def test_message_behind_used_up_credit_shows_to_who_polls(world: World, source: int | None) -> None:
    a, b = acquainted(world)
    strain(a, b)
    work = a.isend(torch.ones(1), 1, tag=1)
    assert wait_for(b, lambda: b.iprobe(source, tag=1) is not None)
    assert peer_of(b, 0).wants.num_open == 0
    b.recv(source, tag=1)
    work.wait(DEADLINE)
    for _ in range(100):
        b.iprobe(source, tag=2)
    assert peer_of(b, 0).wants.num_open == 1


def test_probe_is_served_though_a_receive_of_its_tag_gives_up(world: World) -> None:
    a, b = acquainted(world)
    strain(a, b)
    looks = 0
    peek = b._exchange.prober.peek

    def interrupt(source: int | None, tag: int) -> Any:
        nonlocal looks
        looks += 1
        if looks == 3:
            with pytest.raises(TransferTimeout):
                b.recv(0, tag=1, timeout=0)
            a.isend(torch.ones(1), 1, tag=1)
        return peek(source, tag)

    b._exchange.prober.peek = interrupt  # type: ignore[method-assign]
    assert b.probe(0, tag=1, timeout=DEADLINE).shape == (1,)


def test_send_that_is_given_up_lets_those_behind_it_go(world: World) -> None:
    a, b = acquainted(world)
    works: list[Work] = []
    while not works or works[-1].is_completed():
        works.append(a.isend(torch.ones(10_000), 1, tag=9))
    small = a.isend(torch.ones(1), 1, tag=8)
    assert not small.is_completed()
    works[-1].cancel()
    assert wait_for(a, small.is_completed)
    small.wait(DEADLINE)
    assert float(b.recv(0, tag=8)) == 1.0


def send_raw(liar: Communicator, flags: int, tag: int, number: int, tensor: torch.Tensor) -> None:
    exchange = liar._exchange
    head = HEAD.pack(exchange.context, flags, tag, number)
    body = head + describe(tensor).packed + bytes(tensor.nbytes)
    exchange.send(exchange.peers[0], protocol.EAGER, body)


@pytest.mark.parametrize("flags", [0, protocol.CREDITED])
def test_messages_beyond_credit_are_refused(world: World, flags: int) -> None:
    a, b = acquainted(world)
    tensor = torch.zeros(8192)
    for number in range(10**6, 10**6 + 1000):
        send_raw(b, flags, 5, number, tensor)
    debt = peer_of(a, 1).debt
    b.isend(torch.ones(1), 0, tag=6)
    assert a.recv(1, tag=6, timeout=DEADLINE).shape == (1,)
    held = a.statistics().unexpected * tensor.nbytes
    assert held <= (protocol.credit_nbytes(2) if flags else 0)
    assert debt.nbytes <= protocol.credit_nbytes(2)
    # And who asks for one gets one.
    if not flags:
        peer_of(a, 1).debt.frames = CREDIT_FRAMES
        receive = a.irecv(1, tag=5)
        for number in range(3):
            send_raw(b, 0, 5, number, tensor)
        assert receive.result(DEADLINE) is not None
        assert a.iprobe(1, tag=5) is None


def test_offers_beyond_credit_are_refused(world: World) -> None:
    a, b = acquainted(world)
    peer = peer_of(b, 0)
    peer.allowance.take(0)
    peer.allowance = protocol.Allowance(10**6, 10**12)
    works = [b.isend(torch.ones(LARGE), 0, tag=5) for _ in range(CREDIT_FRAMES + 20)]
    refused = works[CREDIT_FRAMES:]
    assert wait_for(b, lambda: all(work.is_completed() for work in refused))
    assert all("beyond its credit" in str(work.exception()) for work in refused)
    assert a.statistics().unexpected <= CREDIT_FRAMES
    assert not any(work.is_completed() for work in works[:100])


def test_no_rank_may_want_more_than_credit_allows(world: World) -> None:
    a, b = acquainted(world)
    handle = a._exchange.outbox.on_want
    for tag in range(CREDIT_FRAMES):
        handle(peer_of(a, 1), protocol.pack_want(b._exchange.context, tag))
    with pytest.raises(MetadataError, match="wants over"):
        handle(peer_of(a, 1), protocol.pack_want(b._exchange.context, 0))
    told = protocol.pack_unwant(b._exchange.context, 0, protocol.Unwanted.FORGOTTEN)
    with pytest.raises(MetadataError, match="forgets a WANT"):
        a._exchange.outbox.on_unwant(peer_of(a, 1), told)


def test_wants_end_once() -> None:
    wants = Wants()
    wants.add(3)
    wants.add(3)
    wants.withdraw(3)
    assert (wants.staying(3), wants.num_open) == (1, 2)
    assert wants.end(3)
    assert wants.end(3)
    assert not wants.end(3)
    assert (wants.staying(3), wants.num_open) == (0, 0)
    assert wants.withdrawn(3)
    assert not wants.withdrawn(3)
    assert wants.tags() == []


def test_refusals_of_one_rank_touch_no_other_and_fill_no_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = acquainted(world, 3)
    receive = a.irecv(2, tag=3)
    c.send(torch.ones(1), 0, tag=3)
    receive.wait(DEADLINE)
    gone = a.isend(torch.ones(2), 2, tag=4)
    c.recv(0, tag=4)
    exchange = b._exchange
    with caplog.at_level(logging.WARNING, "torch_nixl.p2p"):
        for number in range(1000):
            lie = protocol.pack_end(exchange.context, number, Outcome.FAILED, "a lie")
            exchange.send(exchange.peers[0], protocol.DONE, lie)
        assert wait_for(a, lambda: a.statistics().refused == 1000)
    assert 0 < len(caplog.records) <= 16
    receive.wait(DEADLINE)
    assert receive.is_success()
    gone.wait(DEADLINE)
    assert len(peer_of(a, 1).refused) <= 256
    assert not peer_of(a, 2).refused


def test_batch_that_is_refused_leaves_no_receive_behind(world: World) -> None:
    a, b = acquainted(world)
    out = torch.zeros(2)
    good = Entry(op="irecv", tensor=out, peer=1, tag=0)
    for bad in (
        Entry(op="isend", tensor=torch.zeros(2).to_sparse(), peer=1, tag=0),
        Entry(op="isend", tensor=torch.zeros(2), peer=5, tag=0),
        Entry(op="isend", tensor=torch.zeros(2), peer=1, tag=1.5),
        Entry(op="irecv", tensor=torch.zeros(1).expand(2), peer=1, tag=0),
    ):
        with pytest.raises((TypeError, ValueError)):
            a.batch_isend_irecv([good, bad])
        assert a.statistics().outstanding == 0
    b.send(torch.ones(2), 0)
    assert a.recv(1, timeout=DEADLINE).tolist() == [1.0, 1.0]
    assert out.tolist() == [0.0, 0.0]
