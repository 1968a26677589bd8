"""The state table: every event in every phase, and two sides driven in any order of events."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_nixl.errors import (
    IncompatibleError,
    LeaseConsumed,
    LeaseError,
    LeaseExpired,
    LeaseOutOfRange,
    LeaseReused,
    LeaseUnknown,
    MetadataError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.kv import protocol
from torch_nixl.kv.layout import Pages
from torch_nixl.kv.leases import Lease, LeaseTable, PageLedger
from torch_nixl.kv.protocol import Action, Event, Mode, Outcome, Phase, Role, Side

PHASES = [(role, phase) for role, rules in protocol.TABLE.items() for phase in rules]
END = {Event.REJECT: Outcome.UNKNOWN, Event.WITHDRAW: Outcome.CANCELLED, Event.DONE: None}


@pytest.mark.parametrize(("role", "phase"), PHASES)
@pytest.mark.parametrize("event", Event)
def test_every_event_in_every_phase_has_a_defined_outcome(
    role: Role, phase: Phase, event: Event
) -> None:
    side = Side(role, phase)
    rule_ = protocol.TABLE[role][phase].get(event)
    if rule_ is not None:
        assert side.step(event, END.get(event)) == rule_[1]
        assert side.phase is rule_[0]
        # Only what can't be the end leaves a request without one.
        goes_on = side.phase in (Phase.OFFERED, Phase.ASKED, Phase.MOVING, Phase.EXPOSED)
        stopped = phase in (Phase.STOPPING, Phase.REVOKING)
        assert side.ended is not goes_on or stopped
        return
    if event in protocol.PEER_EVENTS and event not in protocol.LATE[role][phase]:
        with pytest.raises(MetadataError, match=f"says {event.value} to a request"):
            side.step(event, END.get(event))
    else:
        assert side.step(event, END.get(event)) == ()
    assert (side.phase, side.outcome) == (phase, None)


def test_table_and_late_events_are_consistent() -> None:
    for role, phase in PHASES:
        late = protocol.LATE[role][phase]
        assert late <= protocol.PEER_EVENTS
        assert not late & protocol.TABLE[role][phase].keys()
        for after, _ in protocol.TABLE[role][phase].values():
            assert after in protocol.TABLE[role]
    assert all(protocol.TABLE[role][Phase.RELEASED] == {} for role in Role)


def test_phases_never_go_back() -> None:
    order = list(Phase)
    for role, phase in PHASES:
        for after, _ in protocol.TABLE[role][phase].values():
            assert order.index(after) >= order.index(phase)


@pytest.mark.parametrize("event", [Event.REJECT, Event.WITHDRAW])
@pytest.mark.parametrize("reason", [None, Outcome.COMPLETE])
def test_refusal_without_a_reason_is_refused(event: Event, reason: Outcome | None) -> None:
    side = Side.take(Mode.PUSH)
    with pytest.raises(MetadataError, match="without a reason"):
        side.step(event, reason)
    assert side.phase is Phase.EXPOSED


def test_first_outcome_stays() -> None:
    side = Side.take(Mode.PUSH)
    side.step(Event.TIMEOUT)
    side.step(Event.DONE, Outcome.COMPLETE)
    assert (side.outcome, side.phase) == (Outcome.TIMED_OUT, Phase.RELEASED)


def test_mover_that_is_through_says_done_again_and_nobody_else_does() -> None:
    pull = Side.take(Mode.PULL)
    assert pull.step(Event.GRANT) == (Action.START,)
    assert pull.step(Event.SETTLED) == (Action.DONE,)
    assert pull.step(Event.WITHDRAW, Outcome.CANCELLED) == (Action.DONE,)
    push = Side.take(Mode.PUSH)
    push.step(Event.DONE, Outcome.COMPLETE)
    assert push.step(Event.WITHDRAW, Outcome.CANCELLED) == ()
    assert push.outcome is Outcome.COMPLETE


def test_lease_matters_only_before_the_grant() -> None:
    for take in (Event.TAKE_PULL, Event.TAKE_PUSH):
        side = Side.offer()
        side.step(take)
        phase = side.phase
        assert side.step(Event.EXPIRE) == () and side.phase is phase and not side.ended
    side = Side.offer()
    assert side.step(Event.EXPIRE) == () and side.released and side.outcome is Outcome.EXPIRED


def test_cancel_whose_grant_got_lost_ends_the_request() -> None:
    """Prefill granted, the connection broke, and it asks again what became of its pages."""
    side = Side.take(Mode.PULL)
    assert side.step(Event.WITHDRAW, Outcome.LOST) == (Action.DONE,)
    assert (side.released, side.outcome) == (True, Outcome.LOST)


def test_lost_connection_does_not_free_what_the_peer_may_write() -> None:
    side = Side.take(Mode.PUSH)
    side.step(Event.LOST)
    assert side.ended and not side.released
    side.step(Event.DEAD)
    assert side.released


def test_outcomes_are_errors_of_their_own() -> None:
    kinds = {
        Outcome.CANCELLED: TransferCancelled,
        Outcome.TIMED_OUT: TransferTimeout,
        Outcome.FAILED: TransferError,
        Outcome.LOST: PeerLostError,
        Outcome.INCOMPATIBLE: IncompatibleError,
        Outcome.EXPIRED: LeaseExpired,
        Outcome.CONSUMED: LeaseConsumed,
        Outcome.UNKNOWN: LeaseUnknown,
        Outcome.OUT_OF_RANGE: LeaseOutOfRange,
        Outcome.REUSED: LeaseReused,
    }
    for outcome, kind in kinds.items():
        error = protocol.error_of(outcome, "why")
        assert error is not None
        assert type(error) is kind and str(error) == "why"
        assert protocol.outcome_of(error) is outcome
    assert protocol.error_of(Outcome.COMPLETE, "") is None
    assert protocol.outcome_of(RuntimeError()) is Outcome.FAILED
    five = [LeaseExpired, LeaseConsumed, LeaseUnknown, LeaseOutOfRange, LeaseReused]
    for one, other in itertools.permutations(five, 2):
        assert issubclass(one, LeaseError) and not issubclass(one, other)


# Two decode processes and one prefill process, in any order of events.

NUM_PAGES = 24


@dataclass(eq=False)
class Taken:
    """One side of one request, with what a real one would have besides."""

    side: Side
    peer: int
    number: int
    lease: Lease | None
    pages: Pages
    num_flying: int = 0
    started: bool = False


@dataclass
class Message:
    event: Event
    number: int
    lease: Lease
    reason: Outcome | None = None


@dataclass
class Process:
    """A decode process: rank `index` of a group of two, or a worker by itself."""

    index: int
    ledger: PageLedger = field(default_factory=lambda: PageLedger(NUM_PAGES))
    taken: dict[int, Taken] = field(default_factory=dict)
    to_prefill: deque[Message] = field(default_factory=deque)
    to_decode: deque[Message] = field(default_factory=deque)
    alive: bool = True
    broken: bool = False


class Handoffs(RuleBasedStateMachine):
    """Prefill and two decodes; the rules are what programs, networks and clocks can do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = LeaseTable()
        self.ledger = PageLedger(NUM_PAGES)
        self.offers: dict[Lease, Pages] = {}
        self.ours: dict[tuple[int, int], Taken] = {}
        """Prefill's side of each request that was taken, by process and number."""
        self.processes = [Process(0), Process(1)]
        self.numbers = itertools.count(1)
        self.sizes: dict[Lease, int] = {}
        self.all_leases: list[Lease] = []
        self.prefill_alive = True

    # What each side does about a step.

    def act(self, process: Process, one: Taken, actions: tuple[Action, ...], lease: Lease) -> None:
        mine = one.side.role is Role.PREFILL
        for action in actions:
            if action is Action.START:
                one.started = True
                one.num_flying += 1
            elif action is Action.READY and one.side.mover:
                one.num_flying += 1
            elif action is not Action.STOP:
                event = {
                    Action.GRANT: Event.GRANT,
                    Action.CANCEL: Event.WITHDRAW,
                    Action.DONE: Event.DONE,
                    Action.READY: Event.READY,
                }[action]
                reason = one.side.outcome if event in (Event.WITHDRAW, Event.DONE) else None
                self.send(process, Message(event, one.number, lease, reason), to_decode=mine)
        if one.side.phase is Phase.STOPPING and one.num_flying == 0:
            self.act(process, one, one.side.step(Event.SETTLED), lease)
        self.free(process, one)

    def send(self, process: Process, message: Message, *, to_decode: bool) -> None:
        if process.broken:
            return
        (process.to_decode if to_decode else process.to_prefill).append(message)

    def free(self, process: Process, one: Taken) -> None:
        if one.side.role is Role.DECODE:
            if one.side.released and len(one.pages):
                process.ledger.release(one.pages)
                one.pages = one.pages[:0]
        else:
            self.collect()

    def collect(self) -> None:
        for lease in list(self.offers):
            if lease.released:
                self.ledger.release(self.offers.pop(lease))
                self.table.remove(lease)

    # The programs.

    @rule(
        start=st.integers(0, NUM_PAGES - 4),
        count=st.integers(0, 4),
        lasts=st.sampled_from([1, 5]),
        size=st.integers(1, 2),
    )
    def offer(self, start: int, count: int, lasts: int, size: int) -> None:
        if not self.prefill_alive:
            return
        pages = np.arange(start, start + count)
        self.ledger.hold(pages, exclusive=False)
        lease = self.table.grant("request", 4 * count, self.now + lasts)
        self.offers[lease] = pages
        self.sizes[lease] = size
        self.all_leases.append(lease)

    @precondition(lambda self: self.prefill_alive and self.all_leases)
    @rule(
        index=st.integers(0, 1),
        which=st.integers(0, 1000),
        mode=st.sampled_from(Mode),
        start=st.integers(0, NUM_PAGES - 4),
    )
    def take(self, index: int, which: int, mode: Mode, start: int) -> None:
        process = self.processes[index]
        if not process.alive or not self.all_leases:
            return
        lease = self.all_leases[-1 - which % min(4, len(self.all_leases))]
        pages = np.arange(start, start + 2)
        try:
            process.ledger.hold(pages, exclusive=True)
        except ValueError:
            return
        number = next(self.numbers)
        one = Taken(Side.take(mode), index, number, lease, pages)
        process.taken[number] = one
        event = Event.TAKE_PULL if mode is Mode.PULL else Event.TAKE_PUSH
        self.send(process, Message(event, number, lease), to_decode=False)

    @precondition(lambda self: self.prefill_alive)
    @rule(
        index=st.integers(0, 1),
        mode=st.sampled_from(Mode),
        start=st.integers(0, NUM_PAGES - 4),
        size=st.integers(1, 2),
        heard=st.integers(0, 2),
    )
    def offer_and_take(self, index: int, mode: Mode, start: int, size: int, heard: int) -> None:
        """The usual beginning, as far as `heard` says: the rest needs other rules' luck."""
        self.offer(start, 2, 5, size)
        self.take(index, 0, mode, start)
        process = self.processes[index]
        for _ in range(len(process.to_prefill) if heard > 0 else 0):
            self.at_prefill(process, process.to_prefill.popleft())
        for _ in range(len(process.to_decode) if heard > 1 and process.alive else 0):
            self.at_decode(process, process.to_decode.popleft())

    @precondition(lambda self: self.prefill_alive and self.offers)
    @rule(which=st.integers(0, 1000), event=st.sampled_from([Event.LAYER, Event.CANCEL]))
    def prefill_program(self, which: int, event: Event) -> None:
        leases = list(self.offers)
        if leases and self.prefill_alive:
            self.on_offer(leases[which % len(leases)], event)

    @precondition(lambda self: any(one.taken for one in self.processes))
    @rule(
        index=st.integers(0, 1),
        which=st.integers(0, 1000),
        event=st.sampled_from([Event.CANCEL, Event.TIMEOUT]),
    )
    def decode_program(self, index: int, which: int, event: Event) -> None:
        process = self.processes[index]
        going = [one for one in process.taken.values() if not one.side.released]
        if going and process.alive:
            one = going[which % len(going)]
            assert one.lease is not None
            self.act(process, one, one.side.step(event), one.lease)

    def on_offer(self, lease: Lease, event: Event) -> None:
        for side in list(lease.sides.values()):
            found = [one for one in self.ours.values() if one.side is side]
            if found:
                self.act(self.processes[found[0].peer], found[0], side.step(event), lease)
            else:
                side.step(event)
        self.collect()

    # Time and transfers.

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        if self.prefill_alive:
            self.table.expire(self.now)
            self.collect()

    @precondition(lambda self: self.offers)
    @rule(which=st.integers(0, 1000), lasts=st.sampled_from([1, 3]))
    def beat(self, which: int, lasts: int) -> None:
        if self.all_leases and self.prefill_alive:
            lease = self.all_leases[which % len(self.all_leases)]
            try:
                self.table.renew(lease.name, self.now + lasts)
            except (LeaseError, TransferCancelled):
                assert lease not in self.offers

    def movers(self) -> list[tuple[Process, Taken]]:
        found = [(self.processes[one.peer], one) for one in self.ours.values()]
        if not self.prefill_alive:
            found = []
        for process in self.processes:
            if process.alive:
                found += [(process, one) for one in process.taken.values()]
        return [(process, one) for process, one in found if one.started or one.num_flying]

    @precondition(lambda self: any(one.num_flying for _, one in self.movers()))
    @rule(which=st.integers(0, 1000), fails=st.sampled_from([False, False, True]))
    def transfer_ends(self, which: int, fails: bool) -> None:
        flying = [(process, one) for process, one in self.movers() if one.num_flying]
        if not flying:
            return
        process, one = flying[which % len(flying)]
        one.num_flying -= 1
        assert one.lease is not None
        if fails:
            self.act(process, one, one.side.step(Event.FAIL), one.lease)
        elif one.num_flying == 0 and one.side.phase in (Phase.MOVING, Phase.STOPPING):
            self.act(process, one, one.side.step(Event.SETTLED), one.lease)

    # The network.

    @precondition(lambda self: any(one.to_decode or one.to_prefill for one in self.processes))
    @rule(which=st.integers(0, 3), count=st.integers(1, 3))
    def deliver(self, which: int, count: int) -> None:
        queues = [
            (process, to_decode)
            for process in self.processes
            for to_decode in (False, True)
            if (process.to_decode if to_decode else process.to_prefill)
        ]
        process, to_decode = queues[which % len(queues)]
        queue = process.to_decode if to_decode else process.to_prefill
        for _ in range(min(count, len(queue))):
            message = queue.popleft()
            if to_decode and process.alive:
                self.at_decode(process, message)
            elif not to_decode and self.prefill_alive:
                self.at_prefill(process, message)

    def at_decode(self, process: Process, message: Message) -> None:
        one = process.taken[message.number]
        # No order of events that honest sides can bring about is refused: this never raises.
        self.act(process, one, one.side.step(message.event, message.reason), message.lease)

    def at_prefill(self, process: Process, message: Message) -> None:
        key = (process.index, message.number)
        if message.event in (Event.TAKE_PULL, Event.TAKE_PUSH):
            self.table.expire(self.now)
            self.collect()
            try:
                lease = self.table.find(message.lease.name)
                assert lease is message.lease
                # One rank takes all, or two take a share each.
                ranks = range(self.sizes[lease])
                rank = process.index % len(ranks)
                side = lease.find(rank, len(ranks), ranks)
            except (LeaseExpired, LeaseConsumed, LeaseReused, TransferCancelled) as error:
                why = protocol.outcome_of(error)
                refused = Message(Event.REJECT, message.number, message.lease, why)
                self.send(process, refused, to_decode=True)
                return
            side = lease.enter(rank, len(ranks), ranks)
            one = Taken(side, process.index, message.number, lease, np.arange(0))
            self.ours[key] = one
            self.act(process, one, side.step(message.event), lease)
            return
        found = self.ours.get(key)
        if found is None:
            # Of a TAKE that was refused, or got lost.
            if message.event is Event.WITHDRAW:
                done = Message(Event.DONE, message.number, message.lease, Outcome.UNKNOWN)
                self.send(process, done, to_decode=True)
            return
        self.act(process, found, found.side.step(message.event, message.reason), message.lease)

    @rule(index=st.integers(0, 1), chance=st.integers(0, 3), at_prefill=st.booleans())
    def connection_may_break(self, index: int, chance: int, at_prefill: bool) -> None:
        if chance == 2:  # Hypothesis favours 0.
            self.connection_breaks(index)
            self.tell(self.processes[index], Event.LOST, at_prefill=at_prefill)

    def connection_breaks(self, index: int) -> None:
        process = self.processes[index]
        process.broken = True
        process.to_prefill.clear()
        process.to_decode.clear()

    @precondition(lambda self: any(one.broken for one in self.processes))
    @rule(index=st.integers(0, 1), at_prefill=st.booleans())
    def break_is_noticed(self, index: int, at_prefill: bool) -> None:
        process = self.processes[index]
        if process.broken:
            self.tell(process, Event.LOST, at_prefill=at_prefill)

    @precondition(lambda self: any(one.broken for one in self.processes))
    @rule(index=st.integers(0, 1))
    def connection_heals(self, index: int) -> None:
        """Those whose pages are held ask again."""
        process = self.processes[index]
        if not process.alive or not self.prefill_alive:
            return
        process.broken = False
        for one in self.sides_of(process, at_prefill=True) + self.sides_of(
            process, at_prefill=False
        ):
            if one.side.phase is Phase.REVOKING:
                assert one.lease is not None
                mine = one.side.role is Role.PREFILL
                again = Message(Event.WITHDRAW, one.number, one.lease, one.side.outcome)
                self.send(process, again, to_decode=mine)

    @rule(chance=st.integers(0, 9))
    def decode_is_killed(self, chance: int) -> None:
        if chance == 7:  # Always the same one: the other lives to the end.
            process = self.processes[1]
            process.alive = False
            process.broken = True
            process.to_prefill.clear()
            process.to_decode.clear()

    @rule(chance=st.integers(0, 19))
    def prefill_is_killed(self, chance: int) -> None:
        if chance == 13:
            self.prefill_alive = False
            for index in (0, 1):
                self.connection_breaks(index)

    @precondition(lambda self: not self.prefill_alive or not self.processes[1].alive)
    @rule(index=st.integers(0, 1))
    def death_is_proven(self, index: int) -> None:
        process = self.processes[index]
        if not process.alive:
            self.tell(process, Event.DEAD, at_prefill=True)
        if not self.prefill_alive:
            self.tell(process, Event.DEAD, at_prefill=False)

    def sides_of(self, process: Process, *, at_prefill: bool) -> list[Taken]:
        if at_prefill:
            return [one for one in self.ours.values() if one.peer == process.index]
        return list(process.taken.values())

    def tell(self, process: Process, event: Event, *, at_prefill: bool) -> None:
        if not (self.prefill_alive if at_prefill else process.alive):
            return
        for one in self.sides_of(process, at_prefill=at_prefill):
            assert one.lease is not None
            self.act(process, one, one.side.step(event), one.lease)

    # What has to hold.

    @invariant()
    def nobody_touches_free_pages(self) -> None:
        for process in self.processes:
            for one in process.taken.values():
                ours = self.ours.get((process.index, one.number))
                mine = one.side
                if process.alive and (mine.phase is Phase.MOVING or one.num_flying):
                    # It reads prefill's pages.
                    assert one.lease in self.offers
                    assert not mine.released or not one.num_flying
                if ours is None or not self.prefill_alive:
                    continue
                if ours.side.phase is Phase.MOVING or ours.num_flying:
                    # It writes decode's pages, and reads its own.
                    assert not process.alive or not mine.released
                    assert ours.lease in self.offers

    @invariant()
    def released_is_ended(self) -> None:
        for process in self.processes:
            for one in process.taken.values():
                assert one.side.ended or not one.side.released
        for one in self.ours.values():
            assert one.side.ended or not one.side.released

    def teardown(self) -> None:
        """Everything comes to an end: deadlines pass, transfers become final, messages arrive."""
        self.now += 100
        self.table.expire(self.now)
        self.collect()
        for index in (0, 1):
            self.connection_heals(index)
            self.death_is_proven(index)
        for _ in range(3):
            for process in self.processes:
                while process.to_decode or process.to_prefill:
                    self.deliver(process.index, 1)
            while flying := [one for _, one in self.movers() if one.num_flying]:
                assert flying
                self.transfer_ends(0, False)
            for process in self.processes:
                if process.alive:
                    self.tell(process, Event.TIMEOUT, at_prefill=False)
                self.tell(process, Event.TIMEOUT, at_prefill=True)
                if process.alive:
                    self.connection_heals(process.index)
        if self.prefill_alive:
            assert not self.offers
            assert len(self.table) == 0
            assert self.ledger.num_held == 0
        for process in self.processes:
            if process.alive:
                assert all(one.side.ended for one in process.taken.values())
                assert all(one.side.released for one in process.taken.values())
                assert process.ledger.num_held == 0


Handoffs.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestHandoffs = Handoffs.TestCase
