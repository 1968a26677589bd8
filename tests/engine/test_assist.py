"""Large claims between processes of one host: the owner moves the second half."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from engine.assisted import NBYTES, START, Two, filled, in_flight, meet

from torch_nixl._testing.rank_worker import Rank
from torch_nixl.engine import assist, assisting, remotes, transfer, wire
from torch_nixl.engine.active import ActiveOperation
from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import address_memory, tensor_memory
from torch_nixl.engine.offer import Offer
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.remotes import Remote
from torch_nixl.errors import (
    ClosedError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.testing import RankPool, RanksFailed

READ, WRITE = Direction.READ, Direction.WRITE
QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assist, "ASSIST_BYTES", 4096)


def several(seed: int) -> list[torch.Tensor]:
    """A list whose middle lies in a view in pieces, with an empty tensor in it."""
    wide = filled(1000 * 300, seed).view(1000, 300)
    return [filled(70_001, seed + 1), wide[:, 3:200], torch.empty(0, dtype=torch.uint8), wide[0:9]]


LAYOUTS: dict[str, Callable[[int], list[torch.Tensor]]] = {
    "one": lambda seed: [filled(NBYTES, seed)],
    "odd": lambda seed: [filled(NBYTES + 4095, seed)],
    "several": several,
    "in pieces": lambda seed: [filled(2 * NBYTES, seed).view(-1, 4096)[:, :2048]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", [READ, WRITE], ids=["read", "write"])
def test_each_side_moves_a_half(
    adapter_factory: Callable[[str], Adapter], direction: Direction, layout: str
) -> None:
    exposed_tensors, claimed_tensors = LAYOUTS[layout](1), LAYOUTS[layout](50)
    sources, targets = exposed_tensors, claimed_tensors
    if direction is WRITE:
        sources, targets = targets, sources
    expected = [one.clone() for one in sources]
    with (
        Connection(adapter_factory("owner"), timeout=20) as owner,
        Connection(adapter_factory("claimant"), timeout=20) as claimant,
    ):
        meet(owner, claimant)
        exposed = owner.expose(direction, [tensor_memory(one) for one in exposed_tensors])
        exposed.num_awaiting += 1
        active = claimant.claim(exposed.offer(), [tensor_memory(one) for one in claimed_tensors])
        active.wait()
        exposed.wait()
        for target, source in zip(targets, expected, strict=True):
            assert torch.equal(target, source)
        assert active.wait_released(5)
        assert exposed.wait_released(5)
        theirs = exposed.assistance
        assert theirs is not None
        start = assist.middle(exposed_nbytes(exposed_tensors))
        assert theirs.released
        assert theirs.error is None
        assert (active.moved_nbytes, moved(theirs)) == (
            start,
            exposed_nbytes(exposed_tensors) - start,
        )
        assert (len(owner.operations), len(claimant.operations)) == (0, 0)
        counted = owner.statistics(), claimant.statistics()
        assert [one.operations for one in counted] == [2, 2], "with that of contact"


def exposed_nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(one.numel() for one in tensors)


def moved(operation: object) -> int:
    assert isinstance(operation, ActiveOperation)
    return operation.moved_nbytes


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.owner.abort()
    two.claimant.abort()


def test_an_owner_for_whom_nobody_waits_declines(two: Two) -> None:
    exposed, active = two.begin(waits=False)
    exposed.add_done_callback(lambda: None)  # As `publish` does, which waits for nothing.
    assert two.step(lambda: exposed.released and active.released)
    assert active.error is None
    assert exposed.assistance is None
    assert active.moved_nbytes == NBYTES
    assert torch.equal(two.source, two.target)


@pytest.mark.parametrize("cancels", [False, True])
def test_an_owner_keeps_its_memory_while_it_moves_it_whatever_the_claimant_says(
    two: Two, cancels: bool
) -> None:
    exposed, active = two.begin_slowly()
    remote = two.claimant.contacts.get(two.owner.name)
    assert remote is not None
    if cancels:  # In another thread, while the lie is taken in.
        assert exposed.grant.claimant is not None
        exposed.grant.done(exposed.grant.claimant)
        exposed.cancel()
    else:
        lie = wire.Done(exposed.key, active.claim, wire.Outcome.COMPLETE, "")
        two.claimant.contacts.send(remote, lie)
    assert two.step(lambda: exposed.done)
    two.step(turns=20)
    held = exposed.memories
    assert held
    two.let_go()
    while in_flight(exposed):
        two.owner.rounds.advance()
    assert not exposed.memories, "given back at once, not at the next tick"
    assert two.step(lambda: active.released)
    assert two.works_still()


def test_little_memory_device_memory_and_other_paths_are_moved_by_the_claimant(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[wire.Frame] = []
    send = two.claimant.contacts.send

    def noting_send(remote: Remote, frame: wire.Frame) -> None:
        sent.append(frame)
        send(remote, frame)

    monkeypatch.setattr(two.claimant.contacts, "send", noting_send)
    monkeypatch.setattr(assist, "ASSIST_BYTES", NBYTES + 1)
    exposed, active = two.begin()
    assert two.step(lambda: exposed.released and active.released)
    monkeypatch.setattr(assist, "ASSIST_BYTES", NBYTES)
    monkeypatch.setattr(two.claimant.contacts, "path", lambda remote: "tcp")
    other, also = two.begin()
    assert two.step(lambda: other.released and also.released)
    monkeypatch.undo()
    monkeypatch.setattr(assist, "ASSIST_BYTES", NBYTES)
    monkeypatch.setattr(two.claimant.contacts, "send", noting_send)
    assert exposed.assistance is other.assistance is None
    device = [
        address_memory(one.data_ptr(), NBYTES, kind=MemoryKind.VRAM, owner=one)
        for one in (two.source, two.target)
    ]
    on_device = two.owner.expose(READ, [device[0]])
    on_device.num_awaiting += 1
    last = two.claimant.claim(on_device.offer(), [device[1]])
    assert two.step(lambda: on_device.released and last.released)
    assert on_device.assistance is None
    assert not any(isinstance(frame, wire.Assist) for frame in sent)
    assert any(isinstance(frame, wire.Claim) for frame in sent)
    for one in (active, also, last):
        assert one.error is None
        assert one.moved_nbytes == NBYTES


def test_an_owner_that_would_have_to_wait_for_other_operations_declines(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = two.owner.contacts.get(two.claimant.name)
    assert remote is not None
    remote.flight = 1
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "knows", lambda remote, info: False)
        patch.setattr(Remote, "has_room", lambda remote, info: False)
        exposed, active = two.begin()
        two.step(lambda: exposed.assistance is not None)
        two.step(turns=3)
    assert not remote.crowded, "nobody waits for room"
    assert two.step(lambda: exposed.released and active.released)
    assert (active.error, active.moved_nbytes) == (None, NBYTES)
    assert torch.equal(two.source, two.target)
    assert remote.flight == 1
    remote.flight = 0
    assert two.works_still()


def test_an_owner_that_fails_at_its_half_fails_both(two: Two) -> None:
    two.fabric.fail_next(two.agent, "post", TransferError("scripted"))
    exposed, active = two.begin()
    assert two.step(lambda: exposed.released and active.released)
    for one in (exposed, active):
        assert isinstance(one.error, TransferError)
        assert "scripted" in str(one.error)
    assert two.works_still()


def test_memory_stays_owned_until_the_owner_has_ended_after_a_cancel(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "LONG_PIECE_BYTES", 4096)
    exposed, active = two.begin_slowly()
    active.cancel()
    assert isinstance(active.error, TransferCancelled)
    assert not two.step(lambda: active.released, turns=20)
    assert active.memories
    two.let_go()
    assert two.step(lambda: active.released and exposed.released)
    assert moved(exposed.assistance) <= 4096 * transfer.WINDOW, "only what was under way"
    assert isinstance(exposed.error, TransferCancelled)
    assert two.works_still()


def test_time_is_up_while_the_owner_moves_its_half(two: Two) -> None:
    exposed, active = two.begin_slowly()
    active.expire()
    assert isinstance(active.error, TransferTimeout)
    assert "second half" in str(active.error)
    assert not two.step(lambda: active.released, turns=20)
    two.let_go()
    assert two.step(lambda: active.released and exposed.released)
    assert isinstance(exposed.error, TransferTimeout)
    assert two.works_still()


def test_an_owner_that_cancels_is_heard_while_it_moves_its_half(two: Two) -> None:
    exposed, active = two.begin_slowly()
    exposed.cancel()
    assert exposed.assistance is not None
    assert exposed.assistance.done, "without a word of the claimant, which may be stopped"
    assert not two.step(lambda: exposed.released, turns=20), "its own half still moves"
    assert isinstance(active.error, TransferCancelled)
    two.let_go()
    assert two.step(lambda: active.released and exposed.released)
    assert two.works_still()


def test_a_refused_claim_ends_with_its_part(two: Two) -> None:
    exposed, active = two.begin()
    assert two.step(lambda: exposed.released and active.released)
    offer = replace(exposed_offer(two), key=bytes(16))
    two.target.zero_()
    late = two.claimant.claim(offer, [tensor_memory(two.target)])
    assert two.step(lambda: late.released)
    assert late.error is not None
    assert not two.target.any()
    assert len(two.claimant.operations) == 0


def test_a_part_is_never_withdrawn_before_it_was_asked_for(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes the connection between CLAIM and ASSIST."""
    send = two.claimant.contacts.send

    def closing_send(remote: Remote, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Assist):
            for operation in two.claimant.operations.all():
                operation.shut(ClosedError("closing"))
        send(remote, frame)

    monkeypatch.setattr(two.claimant.contacts, "send", closing_send)
    two.slow_owner()
    exposed, active = two.begin()
    assert isinstance(active.error, ClosedError)
    two.step(lambda: active.released, turns=50)
    part = exposed.assistance
    assert not active.released or part is None or part.released
    two.let_go()
    assert two.step(lambda: active.released and exposed.released)
    monkeypatch.undo()
    assert two.works_still()


def test_an_owner_that_was_given_up_and_lives_can_be_claimed_from_again(two: Two) -> None:
    exposed, active = two.begin_slowly()
    owner = two.claimant.contacts.get(two.owner.name)
    assert owner is not None
    two.claimant.contacts.lose(owner, PeerLostError("given up"))
    assert isinstance(active.error, PeerLostError)
    assert not two.step(lambda: active.released, turns=20)
    assert owner.flight == 0, "nothing of this side's own is under way"
    two.let_go()
    assert two.step(lambda: active.released and exposed.released)
    assert isinstance(exposed.error, PeerLostError)
    assert two.works_still()


def test_an_owner_whose_answer_came_while_it_was_given_up_is_asked_again(two: Two) -> None:
    two.fabric.delay(64, initiator="claimant")
    exposed, active = two.begin()
    assert two.step(lambda: active.in_flight > 0)
    owner = two.claimant.contacts.get(two.owner.name)
    assert owner is not None
    two.claimant.contacts.lose(owner, PeerLostError("given up"))
    # The owner's part ends well, and says so to one that does not listen.
    assert two.step(lambda: exposed.assistance is not None and exposed.assistance.released)
    two.step(turns=20)
    assert not active.released
    two.fabric.delay(None, initiator="claimant")
    assert two.step(lambda: active.released and exposed.released)
    assert two.works_still()


def test_a_claimant_that_was_given_up_and_lives_learns_of_it(two: Two) -> None:
    exposed, active = two.begin_slowly()
    claimant = two.owner.contacts.get(two.claimant.name)
    assert claimant is not None
    two.owner.contacts.lose(claimant, PeerLostError("given up"))
    assert isinstance(exposed.error, PeerLostError)
    two.step(turns=20)
    assert not active.released
    two.let_go()
    assert two.step(lambda: active.released and exposed.released)
    assert isinstance(active.error, PeerLostError)
    assert two.works_still()


def test_a_claim_after_its_owner_had_given_the_claimant_up_is_like_any(two: Two) -> None:
    """The owner takes ASSIST up after its new HELLO, which so says nothing of the part."""
    claimant = two.owner.contacts.get(two.claimant.name)
    assert claimant is not None
    two.owner.contacts.lose(claimant, PeerLostError("given up"))
    two.step(turns=10)
    exposed, active = two.begin_slowly()
    two.step(turns=50)
    assert (active.done, exposed.done) == (False, False)
    two.let_go()
    assert two.step(lambda: active.released and exposed.released)
    assert (active.error, exposed.error) == (None, None)
    assert torch.equal(two.source, two.target)


def test_two_that_have_given_each_other_up_find_each_other_for_what_they_hold(two: Two) -> None:
    exposed, active = two.begin_slowly()
    for connection, other in ((two.owner, two.claimant), (two.claimant, two.owner)):
        remote = connection.contacts.get(other.name)
        assert remote is not None
        connection.contacts.lose(remote, PeerLostError("given up"))
    two.let_go()
    assert two.step(lambda: active.released and exposed.released)
    assert two.works_still()


def test_memory_is_kept_while_what_came_by_a_lost_connection_is_dealt_with() -> None:
    """Over TCP, where the owner's process moves the bytes: a handle that failed stops none."""
    two = Two(LoopbackFabric(mode="tcp"))
    with contextlib.ExitStack() as stack:
        stack.callback(two.claimant.abort)
        stack.callback(two.owner.abort)
        exposed = two.owner.expose(WRITE, [tensor_memory(two.source)])
        two.fabric.delay(64, initiator="claimant")
        data = filled(NBYTES, 3)
        active = two.claimant.claim(exposed.offer(), [tensor_memory(data)])
        assert two.step(lambda: active.in_flight > 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(two.claimant.adapter, "poll", _connection_was_reset)
            two.claimant.rounds.advance()
        assert active.released
        two.claimant.contact(two.owner.name, two.owner.contacts.own_blob)
        assert two.step(lambda: exposed.done)
        started = time.monotonic()
        assert not two.step(lambda: exposed.released, turns=20)
        assert two.step(lambda: exposed.released)
        settled = remotes.SETTLING_LOOKS * remotes.SETTLING_SECONDS
        assert time.monotonic() - started > 0.9 * settled


def _connection_was_reset(transfer: object) -> bool:
    raise PeerLostError("Connection reset", remote="owner")


def test_a_loss_is_explained_once_and_keeps_its_cause(two: Two) -> None:
    """By `learn`, of a peer that was lost between contact and that."""
    with Connection(two.fabric.adapter("third"), timeout=20) as third:
        third.progress.stop()
        blob = third.contacts.own_blob
        remote = two.claimant.contact(third.name, blob)
        reset = PeerLostError("reset by peer", remote=third.name)
        reset.__cause__ = OSError("NIXL's own")
        explained = remote.explain(reset)
        assert explained.__cause__ is reset.__cause__
        assert str(explained).count("never answered") == 1
        two.claimant.contacts.lose(remote, explained)
        with pytest.raises(PeerLostError) as again:
            two.claimant.contacts.learn(remote, [blob], [two.claimant.adapter.inspect(blob)])
        assert remote.explain(again.value) is again.value
        assert str(again.value).count("never answered") == 1


def test_no_farewell_is_said_before_a_transfer_that_is_about_to_begin(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has entered it into the tables, and goes on while the connection closes."""
    remote = two.owner.contacts.get(two.claimant.name)
    assert remote is not None
    exposed = two.owner.expose(READ, [tensor_memory(two.source)])
    with monkeypatch.context() as patch:
        patch.setattr(ActiveOperation, "attend", lambda operation: False)
        active = two.claimant.claim(exposed.offer(), [tensor_memory(two.target)])
        patch.setattr(ActiveOperation, "shut", lambda operation, error: None)
        two.claimant.close(0.1)
    assert active.error is not None
    two.step_owner(20)
    assert not remote.closed


def test_other_peers_hear_farewells_though_an_owner_does_not_end(two: Two) -> None:
    with Connection(two.fabric.adapter("third"), timeout=20) as third:
        meet(third, two.claimant)
        remote = third.contacts.get(two.claimant.name)
        assert remote is not None
        exposed, active = two.begin_slowly()
        two.fabric.stop("owner")
        two.claimant.close(0.2)
        assert third.progress.wait_until(lambda: remote.closed, time.monotonic() + 5)
        two.fabric.resume("owner")
        assert exposed.error is None
        assert active.error is not None


@pytest.mark.parametrize("step", ["constructing", "entering", "waking"])
def test_an_interrupt_at_any_step_leaves_one_answer(
    two: Two, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Ctrl-C in the thread that takes the ASSIST in: nobody moves what another one moves, too."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    exposed, active = two.begin()
    with monkeypatch.context() as patch:
        if step == "constructing":
            patch.setattr(assisting, "borrow", interrupt)
        elif step == "entering":
            patch.setattr(two.owner.operations, "add", interrupt)
        else:
            patch.setattr(PassiveOperation, "ring", interrupt)
        with pytest.raises(KeyboardInterrupt):
            two.step()
    assert two.step(lambda: exposed.released and active.released)
    part = exposed.assistance
    whole = active.moved_nbytes + (0 if part is None else moved(part))
    assert (active.error, exposed.error, whole) == (None, None, NBYTES)
    assert torch.equal(two.source, two.target)
    assert two.works_still()


def test_a_waiting_thread_among_others_moves_its_half_at_once() -> None:
    """It is not the one that polls, and sleeps long if nobody wakes it."""
    fabric = LoopbackFabric()
    with (
        Connection(fabric.adapter("owner"), timeout=20) as owner,
        Connection(fabric.adapter("claimant"), timeout=20) as claimant,
    ):
        meet(owner, claimant)
        others = [owner.expose(READ, [tensor_memory(torch.ones(1))]) for _ in range(3)]
        exposures = [owner.expose(READ, [tensor_memory(filled(NBYTES, 1))]) for _ in range(7)]
        threads = [threading.Thread(target=_wait, args=(one,)) for one in (*others, *exposures)]
        for thread in threads:
            thread.start()
        took = []
        for exposed in exposures:
            while not exposed.waited_for:
                time.sleep(0.001)
            time.sleep(0.05)  # All of them sleep by then.
            started = time.monotonic()
            target = torch.zeros(NBYTES, dtype=torch.uint8)
            claimant.claim(exposed.offer(), [tensor_memory(target)]).wait()
            took.append(time.monotonic() - started)
            assert exposed.assistance is not None
        for one in others:
            one.cancel()
        for thread in threads:
            thread.join()
    assert sorted(took)[3] < 0.03


def _wait(operation: PassiveOperation) -> None:
    with contextlib.suppress(TransferCancelled):
        operation.wait()


def exposed_offer(two: Two) -> Offer:
    exposed = two.owner.expose(READ, [tensor_memory(two.source)])
    offer = exposed.offer()
    exposed.cancel()
    return offer


def test_closing_while_the_owner_moves_its_half(two: Two) -> None:
    exposed, active = two.begin_slowly()
    closing = threading.Thread(target=two.claimant.close, args=(1.0,))
    closing.start()
    deadline = time.monotonic() + 5
    while closing.is_alive():
        two.owner.progress.step()
        assert time.monotonic() < deadline
    closing.join()
    assert active.error is not None
    two.let_go()
    while not exposed.done:
        two.owner.progress.step()
        two.owner.rounds.advance()
        assert time.monotonic() < deadline
    assert exposed.error is not None


def test_what_makes_no_sense_is_declined_or_refused_and_moves_nothing(two: Two) -> None:
    """Each ASSIST is a true one but for one thing, of a claim whose claimant sends none."""
    owner, claimant = two.owner, two.claimant
    remote = claimant.contacts.get(owner.name)
    assert remote is not None
    small = torch.zeros(100, dtype=torch.uint8)
    victim = torch.zeros(NBYTES, dtype=torch.uint8)

    def offer_of(tensor: torch.Tensor, direction: Direction = WRITE) -> Offer:
        exposed = claimant.expose(direction, [tensor_memory(tensor)])
        offer = exposed.offer()
        exposed.abort(TransferError("only its offer is wanted"))
        return offer

    good, of_small = offer_of(victim), offer_of(small)
    cases: dict[str, Callable[[wire.Assist], wire.Assist]] = {
        "unknown key": lambda true: replace(true, key=bytes(16)),
        "another claim": lambda true: replace(true, claim=true.claim + 1),
        "behind the end": lambda true: replace(true, start=NBYTES),
        "far behind the end": lambda true: replace(true, start=(1 << 64) - 1),
        "wrong size": lambda true: replace(true, offer=of_small.pack(key=None)),
        "wrong direction": lambda true: replace(true, offer=offer_of(victim, READ).pack(key=None)),
        "in two": lambda true: replace(
            true, offer=replace(good, memories=good.memories * 2).pack(key=None)
        ),
        "another's memory": lambda true: replace(true, offer=exposed_offer(two).pack(key=None)),
        "garbage": lambda true: replace(true, offer=b"garbage"),
        "nothing": lambda true: replace(true, offer=b""),
    }

    def begin() -> tuple[PassiveOperation, ActiveOperation, wire.Assist]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assist, "ASSIST_BYTES", 1 << 60)
            exposed, active = two.begin()
        while exposed.grant.claimant is None:
            owner.progress.step()
        return exposed, active, wire.Assist(exposed.key, active.claim, START, good.pack(key=None))

    for name, forge in cases.items():
        exposed, active, true = begin()
        claimant.contacts.send(remote, forge(true))
        owner.progress.step()
        assert exposed.assistance is None, name
        assert two.step(partial(_are_released, exposed, active)), name
        assert active.error is None
        assert not victim.any(), name
        assert not small.any(), name
    exposed, active, true = begin()
    claimant.contacts.send(remote, true)
    assert two.step(partial(_are_released, exposed, active))
    assert exposed.assistance is not None, "a true one is taken up"
    assert torch.equal(victim[START:], two.source[START:])
    assert two.works_still()


def _are_released(*operations: PassiveOperation | ActiveOperation) -> bool:
    return all(one.released for one in operations)


def test_only_the_first_assist_of_a_claim_counts(two: Two) -> None:
    exposed, active = two.begin_slowly()
    remote = two.claimant.contacts.get(two.owner.name)
    assert remote is not None
    first = exposed.assistance
    victim = torch.zeros(NBYTES, dtype=torch.uint8)
    again = two.claimant.expose(WRITE, [tensor_memory(victim)])
    body = again.offer().pack(key=None)
    two.claimant.contacts.send(remote, wire.Assist(exposed.key, active.claim, 0, body))
    two.let_go()
    assert two.step(lambda: active.released and exposed.released)
    assert exposed.assistance is first
    assert not victim.any()
    assert active.error is None
    again.cancel()


def dies_in_the_middle(rank: Rank, *, victim: int) -> None:
    """Of two that move a half each, one is killed: the other learns of it, and is freed."""
    assist.ASSIST_BYTES = 4096
    transfer.LONG_PIECE_BYTES = transfer.PIECE_BYTES
    store = rank.store()
    store.set(f"pid {rank.rank}", str(os.getpid()))
    tensor = torch.ones(256 << 20, dtype=torch.uint8)

    def offer(key: str) -> Offer:
        data = bytes.fromhex(store.get(key).decode())
        return Offer.unpack(data, key=None, parse_metadata=connection.adapter.inspect)

    with Connection.open("w", timeout=20) as connection:
        operation: PassiveOperation | ActiveOperation
        moving: object
        if rank.rank == 0:
            first = connection.expose(READ, [tensor_memory(torch.ones(1))])
            store.set("first", first.offer().pack(key=None).hex())
            first.wait()
            exposed = operation = connection.expose(READ, [tensor_memory(tensor)])
            exposed.num_awaiting += 1
            store.set("offer", exposed.offer().pack(key=None).hex())
            until = time.monotonic() + 10
            assert connection.progress.wait_until(lambda: bool(exposed.assistance), until)
            moving = exposed.assistance
        else:
            connection.claim(offer("first"), [tensor_memory(torch.zeros(1))]).wait()
            moving = operation = connection.claim(offer("offer"), [tensor_memory(tensor)])
        if rank.rank != victim:
            until = time.monotonic() + 10
            assert connection.progress.wait_until(lambda: moved(moving) > 0, until)
            os.kill(int(store.get(f"pid {victim}")), signal.SIGKILL)
            assert not operation.done
        with pytest.raises(PeerLostError):
            operation.wait(10)
        assert operation.wait_released(5)
        assert len(connection.operations) == 0


@pytest.mark.parametrize("victim", [0, 1], ids=["owner", "claimant"])
def test_a_death_while_both_move_is_noticed_and_frees_the_memory(
    rank_pool: RankPool, victim: int
) -> None:
    with pytest.raises(RanksFailed) as failed:
        rank_pool.run(
            owner_dies if victim == 0 else claimant_dies, world_size=2, timeout=40, env=QUIET
        )
    assert set(failed.value.failures) == {victim}, str(failed.value)
    assert "SIGKILL" in failed.value.failures[victim]


def owner_dies(rank: Rank) -> None:
    dies_in_the_middle(rank, victim=0)


def claimant_dies(rank: Rank) -> None:
    dies_in_the_middle(rank, victim=1)
