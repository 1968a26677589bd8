"""The grant table, event by event and in random orders."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_nixl.engine.grants import Claimant, Grant, GrantState
from torch_nixl.engine.wire import Reason

ALICE = Claimant("alice", 1)
BOB = Claimant("bob", 1)


def test_the_first_claim_is_granted_and_the_second_refused() -> None:
    grant = Grant()
    assert grant.claim(ALICE) is None
    assert grant.claim(BOB) is Reason.TAKEN
    assert grant.claimant == ALICE


def test_only_the_claimant_of_a_standing_grant_holds_it() -> None:
    grant = Grant()
    held = [grant.is_held_by(ALICE)]
    grant.claim(ALICE)
    held += [grant.is_held_by(ALICE), grant.is_held_by(BOB), grant.is_held_by(Claimant("alice", 2))]
    grant.revoke(Reason.FAILED)
    held.append(grant.is_held_by(ALICE))
    assert held == [False, True, False, False, False]


def test_a_withdrawn_offer_is_released_at_once_and_says_why() -> None:
    grant = Grant()
    assert grant.revoke(Reason.EXPIRED) is None
    assert grant.state is GrantState.RELEASED
    assert grant.claim(ALICE) is Reason.EXPIRED


def test_a_granted_one_stays_until_its_claimant_is_done() -> None:
    grant = Grant()
    grant.claim(ALICE)
    states = []
    assert grant.revoke(Reason.REVOKED) == ALICE
    states.append(grant.state)
    assert not grant.done(BOB)
    assert not grant.done(Claimant("alice", 2))
    states.append(grant.state)
    assert grant.done(ALICE)
    states.append(grant.state)
    assert states == [GrantState.REVOKING, GrantState.REVOKING, GrantState.RELEASED]


def test_done_twice_counts_once() -> None:
    grant = Grant()
    grant.claim(ALICE)
    assert grant.done(ALICE)
    assert not grant.done(ALICE)


EVENTS = st.lists(
    st.sampled_from(["claim-a", "claim-b", "done-a", "done-b", "revoke", "expire", "lost"]),
    max_size=12,
)


@given(EVENTS)
def test_memory_is_released_only_when_no_claimant_can_touch_it(events: list[str]) -> None:
    grant = Grant()
    may_touch: Claimant | None = None
    order = list(GrantState)
    for event in events:
        before = grant.state
        match event:
            case "claim-a" | "claim-b":
                who = ALICE if event == "claim-a" else BOB
                if grant.claim(who) is None:
                    assert may_touch is None
                    may_touch = who
            case "done-a" | "done-b":
                who = ALICE if event == "done-a" else BOB
                if grant.done(who):
                    assert may_touch == who
                    may_touch = None
            case "revoke":
                grant.revoke(Reason.REVOKED)
            case "expire":
                grant.revoke(Reason.EXPIRED)
            case "lost":
                if grant.state in (GrantState.GRANTED, GrantState.REVOKING):
                    grant.lost()
                    may_touch = None
        assert (grant.state is GrantState.RELEASED) <= (may_touch is None)
        assert order.index(grant.state) >= order.index(before)
        # Once taken up or ended, it is never offered again.
        if before is not GrantState.OFFERED:
            assert grant.claim(Claimant("late", 9)) is not None
