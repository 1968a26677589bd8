"""Claims that are made again: their owner had given the claimant up, and may have dropped them.

Over the loopback fabric. An owner that still moves bytes for a lost peer can't contact it anew, and
drops what it says meanwhile.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from engine.assisted import NBYTES, Two

from torch_nixl.engine import assist, wire
from torch_nixl.engine.active import ActiveOperation, refusal
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.assist import AssistedPart
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.grants import Grant, GrantState
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import Memory, tensor_memory
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.remotes import Remote
from torch_nixl.engine.streams import StreamOrder
from torch_nixl.errors import PeerLostError, TransferCancelled, TransferError

READ, WRITE = Direction.READ, Direction.WRITE
GIVEN_UP = "given up"


@pytest.fixture(params=[None, b"sixteen bytes or"], ids=["open", "secret"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Connection]]:
    """An owner and a claimant that have met."""
    fabric = LoopbackFabric()
    made = [
        Connection(fabric.adapter(name), timeout=10, secret=request.param)
        for name in ("owner", "claimant")
    ]
    move(*made)
    yield made[0], made[1]
    for connection in made:
        connection.abort()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """An owner that is asked to move a half of all that is claimed."""
    monkeypatch.setattr(assist, "ASSIST_BYTES", NBYTES)
    made = Two()
    yield made
    made.owner.abort()
    made.claimant.abort()


def memory(fill: int = 0) -> Memory:
    return tensor_memory(torch.full((64,), fill, dtype=torch.uint8))


def move(owner: Connection, claimant: Connection) -> None:
    target = torch.zeros(64, dtype=torch.uint8)
    claimant.claim(owner.expose(READ, [memory(1)]).offer(), [tensor_memory(target)]).wait(5)
    assert target.all()


def until(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(condition())


def known(connection: Connection, name: str) -> Remote:
    assert until(lambda: connection.contacts.get(name))
    remote = connection.contacts.get(name)
    assert remote is not None
    return remote


class GivenUp:
    """The owner has lost the claimant, and can't contact it anew before `over`."""

    def __init__(self, owner: Connection) -> None:
        self._owner = owner
        self._lost = known(owner, "claimant")
        self._lost.flight += 1
        owner.contacts.lose(self._lost, PeerLostError(GIVEN_UP))
        self._refused = owner.statistics().frames_refused

    def has_dropped(self, count: int = 1) -> bool:
        return self._owner.statistics().frames_refused >= self._refused + count

    def over(self) -> None:
        self._lost.flight -= 1


@pytest.mark.parametrize("direction", [READ, WRITE])
def test_a_claim_that_was_dropped_is_made_again(
    pair: tuple[Connection, Connection], direction: Direction
) -> None:
    """It waited for its deadline."""
    owner, claimant = pair
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8)
    ours, theirs = (source, target) if direction is WRITE else (target, source)
    exposed = owner.expose(direction, [tensor_memory(theirs)], timeout=math.inf)
    given_up = GivenUp(owner)
    active = claimant.claim(exposed.offer(), [tensor_memory(ours)], timeout=math.inf)
    assert until(given_up.has_dropped)
    given_up.over()
    active.wait(5)
    exposed.wait(5)
    assert torch.equal(source, target)


def test_also_if_the_claimant_has_given_the_owner_up(pair: tuple[Connection, Connection]) -> None:
    """Its HELLO is dropped, too, and it makes no other."""
    owner, claimant = pair
    exposed = owner.expose(READ, [memory(1)])
    given_up = GivenUp(owner)
    claimant.contacts.lose(known(claimant, "owner"), PeerLostError(GIVEN_UP))
    active = claimant.claim(exposed.offer(), [memory()])
    assert until(given_up.has_dropped)
    given_up.over()
    active.wait(5)
    exposed.wait(5)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("direction", [READ, WRITE])
def test_what_the_owner_was_asked_to_move_is_moved_by_the_claimant(
    two: Two, direction: Direction, waits: bool
) -> None:
    """The ASSIST has been dropped with the CLAIM, and can't be sent again: see `withdraw`."""
    given_up = GivenUp(two.owner)
    exposed, active = two.begin(direction, waits=waits)
    assert two.step(lambda: given_up.has_dropped(2))
    given_up.over()
    assert two.step(lambda: exposed.released and active.released)
    assert (active.error, exposed.error) == (None, None)
    assert torch.equal(two.source, two.target)


@pytest.mark.parametrize("step", ["revoke", "finish", "send"])
def test_an_interrupt_while_it_is_withdrawn_holds_no_memory(
    two: Two, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    given_up = GivenUp(two.owner)
    exposed, active = two.begin()
    assert two.step(lambda: given_up.has_dropped(2))
    given_up.over()
    [part] = [one for one in two.claimant.operations.busy if isinstance(one, AssistedPart)]

    with monkeypatch.context() as patch:
        if step == "send":
            patch.setattr(AssistedPart, "_send_revoke", interrupt)
        elif step == "finish":
            patch.setattr(AssistedPart, "_finish", interrupt)
        else:
            patch.setattr(Grant, "revoke", interrupt)
        with pytest.raises(KeyboardInterrupt):
            two.step()
    assert two.step(lambda: exposed.released and active.released and part.released)
    assert isinstance(active.error, TransferError)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("direction", [READ, WRITE])
def test_what_the_owner_moves_already_may_be_claimed_again(
    two: Two, direction: Direction, turns: int
) -> None:
    """It stops, or has moved all, and the claimant moves that again."""
    exposed, active = two.begin(direction)
    two.step_owner(turns)
    active.claim_again()
    assert two.step(lambda: exposed.released and active.released)
    assert (active.error, exposed.error) == (None, None)
    assert torch.equal(two.source, two.target)


def test_a_claim_made_twice_is_granted_once(pair: tuple[Connection, Connection]) -> None:
    """One by which the owner hears the claimant again is taken in, and made again all the same."""
    owner, claimant = pair
    for _ in range(20):
        owner.contacts.lose(known(owner, "claimant"), PeerLostError(GIVEN_UP))
        move(owner, claimant)
    assert until(lambda: not owner.operations.all() and not claimant.operations.all())


def test_one_that_the_owner_had_granted_and_given_up_is_refused(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _ = pair
    remote = known(owner, "claimant")
    exposed = owner.expose(READ, [memory()])
    claim = wire.Claim(exposed.key, 7, READ, 64, 1)
    answers: list[wire.Frame] = []
    monkeypatch.setattr(owner.contacts, "send", lambda _, frame: answers.append(frame))
    exposed.on_claim(remote, claim)
    exposed.on_claim(remote, claim)
    assert answers == [wire.Granted(exposed.key, 7)]
    exposed.on_lost(PeerLostError(GIVEN_UP))
    exposed.on_claim(remote, claim)
    refused = answers[-1]
    assert isinstance(refused, wire.Refuse) and refused.reason is wire.Reason.FAILED
    assert isinstance(refusal("read", refused), PeerLostError)
    exposed.on_done(remote, wire.Done(exposed.key, 7, wire.Outcome.FAILED, ""))
    assert exposed.released


def test_who_is_lost_while_its_claim_is_taken_in_is_granted_nothing(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grant would be said to nobody, and no loss would end it."""
    owner, claimant = pair
    exposed = owner.expose(READ, [memory()])
    find = owner.operations.offer
    losses: list[threading.Thread] = []

    def find_late(key: bytes) -> PassiveOperation | None:
        if not losses:
            remote = known(owner, "claimant")
            lose = owner.contacts.lose
            losses.append(threading.Thread(target=lose, args=(remote, PeerLostError(GIVEN_UP))))
            losses[0].start()
            losses[0].join()
        return find(key)

    monkeypatch.setattr(owner.operations, "offer", find_late)
    claimant.claim(exposed.offer(), [memory()]).wait(5)
    exposed.wait(5)
    assert losses


class Held(StreamOrder):
    """Device work that has not run yet."""

    def __init__(self) -> None:
        super().__init__([])
        self.over = False

    def passed(self) -> bool:
        return self.over


def test_a_closing_owner_keeps_what_it_has_granted(pair: tuple[Connection, Connection]) -> None:
    """The second claim was refused, of one whose grant waited for device work."""
    owner, claimant = pair
    exposed = owner.expose(READ, [memory(1)])
    exposed.order = held = Held()
    active = claimant.claim(exposed.offer(), [memory()])
    assert until(lambda: exposed.grant.state is GrantState.GRANTED)
    closing = threading.Thread(target=owner.close, args=(5,))
    closing.start()
    assert until(lambda: owner.closing)
    received = owner.statistics().frames_received
    active.claim_again()
    assert until(lambda: owner.statistics().frames_received > received)
    held.over = True
    active.wait(5)
    closing.join()


def claims_of(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> list[wire.Frame]:
    found: list[wire.Frame] = []
    send = connection.contacts.send

    def spied(remote: Remote, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Claim):
            found.append(frame)
        send(remote, frame)

    monkeypatch.setattr(connection.contacts, "send", spied)
    return found


def test_what_has_not_claimed_yet_claims_nothing_again(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant that came before it knew the memory would be overlooked."""
    owner, claimant = pair
    remote = known(claimant, "owner")
    exposed = owner.expose(READ, [memory()])
    sent = claims_of(claimant, monkeypatch)
    remote.crowded = True
    remote.flight += 1
    active = claimant.claim(exposed.offer(), [memory()])
    active.claim_again()
    assert not sent
    remote.flight -= 1
    active.wait(5)
    active.claim_again()
    assert len(sent) == 1


def test_what_has_ended_claims_nothing_again(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would tell the owner of its end after that."""
    owner, claimant = pair
    exposed = owner.expose(READ, [memory()])
    given_up = GivenUp(owner)
    sent = claims_of(claimant, monkeypatch)
    active = claimant.claim(exposed.offer(), [memory()])
    assert until(given_up.has_dropped)
    advance = ActiveOperation._advance

    def cancelled_first(self: ActiveOperation) -> bool:
        self._finish(TransferCancelled("meanwhile"))
        return advance(self)

    monkeypatch.setattr(ActiveOperation, "_advance", cancelled_first)
    active.claim_again()
    assert until(lambda: active.released)
    given_up.over()
    assert len(sent) == 1
    assert exposed.grant.state is GrantState.OFFERED
