"""Leases: five distinct errors, several takers, bounded memory; and which pages are held."""

from __future__ import annotations

import math

import numpy as np
import pytest

from torch_nixl.errors import (
    LeaseConsumed,
    LeaseError,
    LeaseExpired,
    LeaseOutOfRange,
    LeaseReused,
    LeaseUnknown,
    TransferCancelled,
)
from torch_nixl.kv import leases
from torch_nixl.kv.leases import Lease, LeaseId, LeaseTable, PageLedger
from torch_nixl.kv.protocol import Event, Outcome, Phase


def take(lease: Lease, rank: int = 0, size: int = 1) -> None:
    ranks = range(size)
    side = lease.find(rank, size, ranks)
    assert lease.enter(rank, size, ranks).phase is side.phase is Phase.OFFERED
    lease.sides[rank].step(Event.TAKE_PULL)


def test_five_errors_are_told_apart() -> None:
    table = LeaseTable()
    lapsed, used, open_ = (table.grant(name, 100, 5.0) for name in ("a", "b", "c"))
    take(used)
    with pytest.raises(LeaseConsumed, match="'b' was taken before"):
        table.find(used.name).find(0, 1, [0])
    used.sides[0].step(Event.DONE, Outcome.COMPLETE)
    table.remove(used)
    with pytest.raises(LeaseConsumed):
        table.find(used.name)
    table.renew(open_.name, 9.0)
    assert table.expire(5.0) == [lapsed]
    assert lapsed.released
    with pytest.raises(LeaseExpired, match="'a' lapsed"):
        table.find(lapsed.name).find(0, 1, [0])
    table.remove(lapsed)
    with pytest.raises(LeaseExpired):
        table.find(lapsed.name)
    for name in (LeaseId(0, 0), LeaseId(0, 2), LeaseId(3, 1), LeaseId(-1, 1), LeaseId(2**32, 1)):
        with pytest.raises(LeaseUnknown):
            table.find(name)
    for start, stop in ((0, 101), (-1, 4), (5, 4), (101, 101)):
        with pytest.raises(LeaseOutOfRange, match="has 100 tokens"):
            open_.check_range(start, stop)
    open_.check_range(100, 100)
    assert table.find(open_.name) is open_


def test_reused_slot_refuses_the_old_ticket_and_serves_the_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "KEPT_LEASES", 3)
    table = LeaseTable()
    names = []
    for _ in range(40):
        lease = table.grant("r", 1, math.inf)
        names.append(lease.name)
        lease.sides[-1].step(Event.CANCEL)
        table.remove(lease)
        table.remove(lease)
    assert len(table) == 0
    assert {name.slot for name in names} == {0, 1, 2, 3}
    for name in names[-4:]:
        with pytest.raises(TransferCancelled, match="withdrawn"):
            table.find(name)
    for name in names[:-4]:
        with pytest.raises(LeaseReused):
            table.find(name)


def test_heartbeat_extends_and_never_shortens() -> None:
    table = LeaseTable()
    lease = table.grant("r", 1, 5.0)
    assert table.renew(lease.name, 8.0) and table.renew(lease.name, 2.0)
    assert table.expire(7.9) == []
    assert lease.open
    assert table.expire(8.0) == [lease]
    assert table.renew(lease.name, 99.0) is False
    assert lease.released


def test_lease_that_was_granted_does_not_lapse() -> None:
    table = LeaseTable()
    lease = table.grant("r", 1, 5.0)
    take(lease)
    assert table.renew(lease.name, 9.0) is False
    assert table.expire(1e9) == []
    assert not lease.ended and not lease.released


def test_ranks_take_once_each_and_pages_are_free_after_the_last() -> None:
    table = LeaseTable()
    lease = table.grant("r", 1, 5.0)
    take(lease, 3, 4)
    take(lease, 0, 4)
    with pytest.raises(LeaseConsumed):
        lease.find(3, 4, range(4))
    with pytest.raises(LeaseConsumed, match="group of 4"):
        lease.find(0, 2, range(2))
    with pytest.raises(LeaseOutOfRange, match="rank 7"):
        lease.find(7, 4, range(4))
    take(lease, 1, 4)
    for rank in (0, 1, 3):
        lease.sides[rank].step(Event.DONE, Outcome.COMPLETE)
    assert (lease.open, lease.released, lease.outcome) == (True, False, None)
    table.expire(6.0)
    assert lease.released and lease.outcome is Outcome.EXPIRED
    with pytest.raises(LeaseExpired):
        lease.find(2, 4, range(4))
    table.remove(lease)
    with pytest.raises(LeaseConsumed):
        table.find(lease.name)


def test_cancelled_after_the_grant_is_consumed_to_latecomers() -> None:
    table = LeaseTable()
    lease = table.grant("r", 1, 5.0)
    take(lease)
    lease.sides[0].step(Event.CANCEL)
    with pytest.raises(LeaseConsumed):
        lease.find(0, 1, [0])
    assert not lease.released


def test_memory_stays_bounded() -> None:
    table = LeaseTable()
    for index in range(5000):
        lease = table.grant("r", 1, 1e9 + index)
        take(lease)
        lease.sides[0].step(Event.DONE, Outcome.COMPLETE)
        table.remove(lease)
    assert len(table._slots) <= leases.KEPT_LEASES + 2
    assert len(table._deadlines) <= 70
    assert table.live() == []


def test_too_many_leases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_LEASES", 2)
    table = LeaseTable()
    table.grant("a", 1, 1.0)
    table.grant("b", 1, 1.0)
    with pytest.raises(ValueError, match="too many"):
        table.grant("c", 1, 1.0)


def test_all_lease_errors_have_one_base() -> None:
    for kind in (LeaseExpired, LeaseConsumed, LeaseUnknown, LeaseReused, LeaseOutOfRange):
        assert issubclass(kind, LeaseError)


def test_ledger_counts_readers_and_excludes_writers() -> None:
    ledger = PageLedger(8)
    ledger.hold(np.array([1, 2]), exclusive=False)
    ledger.hold(np.array([2, 3]), exclusive=False)
    assert ledger.num_held == 3
    for wrong in ([3, 4], [2]):
        with pytest.raises(ValueError, match=r"page [23] is still offered"):
            ledger.hold(np.array(wrong), exclusive=True)
    ledger.release(np.array([1, 2]))
    assert ledger.num_held == 2
    ledger.hold(np.array([1, 0]), exclusive=True)
    for exclusive in (True, False):
        with pytest.raises(ValueError, match="page 0 is being filled"):
            ledger.hold(np.array([5, 0]), exclusive=exclusive)
    assert ledger.num_held == 4
    ledger.release(np.array([1, 0]))
    ledger.release(np.array([2, 3]))
    assert ledger.num_held == 0
    with pytest.raises(AssertionError):
        ledger.release(np.array([0]))


@pytest.mark.parametrize("pages", [[8], [-1], [0, 0]])
def test_pages_that_make_no_sense_are_not_held(pages: list[int]) -> None:
    ledger = PageLedger(8)
    with pytest.raises(ValueError, match=r"does not exist|named twice"):
        ledger.hold(np.array(pages), exclusive=False)
    assert ledger.num_held == 0
    ledger.hold(np.array([], np.int64), exclusive=True)
    ledger.release(np.array([], np.int64))
