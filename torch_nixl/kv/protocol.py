"""Who may touch whose pages, and until when. Pure: no I/O, no clock, no threads.

A request hands the pages of one prompt from PREFILL, which offers them, to DECODE, which takes
them: decode reads them (pull), or prefill writes them (push). Of either side's pages one of two
things is true while bytes may move: this side moves the bytes itself (MOVING), or the other side
does (EXPOSED).

    prefill                           decode
    OFFERED      ── ticket ──▶        (waits; BEAT keeps the lease)
                 ◀── TAKE ───         ASKED (pull)  or  EXPOSED (push: its pages go with TAKE)
    EXPOSED      ── GRANT ──▶         MOVING        pull: prefill's pages go with GRANT
    or MOVING    ── GRANT ──▶         EXPOSED       push
                 ── READY ──▶         each layer that can be read now, or has been written
                 ◀── DONE ───         RELEASED      pull: "I read no more"
    RELEASED     ── DONE ───▶         RELEASED      push: "I write no more"

Who gives up says CANCEL at once, so that the other side's waiters hear of it, and DONE when it
touches the other's pages no more. The rules that everything here serves:

- Pages are free in RELEASED and not before. A side that moves bytes gets there when its own
  transfers are final (SETTLED), a side that is exposed when the other says DONE or REJECT, or is
  proven dead. A lost connection proves nothing: the other side may still write.
- A lease may lapse while it is OFFERED, never later.
- A request *ends*, with one outcome, as soon as that is known; its pages may be free only later.
- What the table does not list is ignored where two messages can cross (LATE), and refused as the
  peer's mistake otherwise; in both cases nothing changes.
- Whoever moves bytes answers a CANCEL with DONE even when it is through, or has never heard of the
  request. So a side whose pages are held after a break in the connection only has to ask again.

The allocator of pages is the program's: this module only says when they are free.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, TypeAlias

from torch_nixl.errors import (
    IncompatibleError,
    LeaseConsumed,
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


class Role(enum.Enum):
    """Which side of a request."""

    PREFILL = "prefill"
    DECODE = "decode"

    __hash__ = object.__hash__


class Mode(enum.IntEnum):
    """Who moves the bytes: decode reads, or prefill writes."""

    PULL = 0
    PUSH = 1


class Phase(enum.Enum):
    """How far one side of a request is."""

    OFFERED = "offered"
    ASKED = "asked"
    MOVING = "moving"
    EXPOSED = "exposed"
    STOPPING = "stopping"
    REVOKING = "revoking"
    RELEASED = "released"

    __hash__ = object.__hash__


class Event(enum.Enum):
    """What can happen to one side. The first group comes from the peer, as frames."""

    TAKE_PULL = "take_pull"
    TAKE_PUSH = "take_push"
    GRANT = "grant"
    REJECT = "reject"
    READY = "ready"
    WITHDRAW = "withdraw"
    """The peer's CANCEL."""
    DONE = "done"

    LAYER = "layer"
    """The program has computed one more layer."""
    CANCEL = "cancel"
    """The program gives up."""
    TIMEOUT = "timeout"
    """The request's deadline on this side."""
    EXPIRE = "expire"
    """The lease's end."""
    FAIL = "fail"
    """One of our transfers failed."""
    SETTLED = "settled"
    """None of our transfers is under way: all is moved, or no more is going to be."""
    LOST = "lost"
    """The connection to the peer broke."""
    DEAD = "dead"
    """The peer is proven not to exist any more."""

    __hash__ = object.__hash__


PEER_EVENTS: Final = frozenset(
    {
        Event.TAKE_PULL,
        Event.TAKE_PUSH,
        Event.GRANT,
        Event.REJECT,
        Event.READY,
        Event.WITHDRAW,
        Event.DONE,
    }
)


class Action(enum.Enum):
    """What the owner of a side has to do after a step, in this order."""

    GRANT = "grant"
    """Send GRANT."""
    START = "start"
    """Begin to move bytes, layers that are ready first."""
    STOP = "stop"
    """Post no more; SETTLED follows when what is under way is final."""
    CANCEL = "cancel"
    """Send CANCEL."""
    DONE = "done"
    """Send DONE, with the outcome."""
    READY = "ready"
    """Send READY (exposed), or move one more layer (moving)."""

    __hash__ = object.__hash__


class Outcome(enum.IntEnum):
    """How a request ended; on the wire the reason in REJECT, CANCEL and DONE."""

    COMPLETE = 0
    CANCELLED = 1
    TIMED_OUT = 2
    FAILED = 3
    LOST = 4
    CLOSED = 5
    INCOMPATIBLE = 6
    EXPIRED = 7
    CONSUMED = 8
    UNKNOWN = 9
    OUT_OF_RANGE = 10
    REUSED = 11


OUTCOMES: Final = {int(outcome): outcome for outcome in Outcome}

_ERRORS: Final[dict[Outcome, type[TransferError]]] = {
    Outcome.CANCELLED: TransferCancelled,
    Outcome.TIMED_OUT: TransferTimeout,
    Outcome.FAILED: TransferError,
    Outcome.LOST: PeerLostError,
    Outcome.CLOSED: TransferCancelled,
    Outcome.INCOMPATIBLE: IncompatibleError,
    Outcome.EXPIRED: LeaseExpired,
    Outcome.CONSUMED: LeaseConsumed,
    Outcome.UNKNOWN: LeaseUnknown,
    Outcome.OUT_OF_RANGE: LeaseOutOfRange,
    Outcome.REUSED: LeaseReused,
}


def error_of(outcome: Outcome, text: str) -> TransferError | None:
    """Return what a request that ended so raises; None if it ended well."""
    kind = _ERRORS.get(outcome)
    return None if kind is None else kind(text)


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome that stands for an error; FAILED if none does."""
    for outcome, kind in _ERRORS.items():
        if type(error) is kind:
            return outcome
    return Outcome.FAILED


_Step: TypeAlias = tuple[Phase, tuple[Action, ...]]
_Rules: TypeAlias = dict[Event, _Step]

_MOVING: Final[_Rules] = {
    Event.SETTLED: (Phase.RELEASED, (Action.DONE,)),
    Event.CANCEL: (Phase.STOPPING, (Action.STOP, Action.CANCEL)),
    Event.TIMEOUT: (Phase.STOPPING, (Action.STOP, Action.CANCEL)),
    Event.FAIL: (Phase.STOPPING, (Action.STOP, Action.CANCEL)),
    Event.WITHDRAW: (Phase.STOPPING, (Action.STOP,)),
    Event.LOST: (Phase.STOPPING, (Action.STOP,)),
    Event.DEAD: (Phase.STOPPING, (Action.STOP,)),
}
_STOPPING: Final[_Rules] = {Event.SETTLED: (Phase.RELEASED, (Action.DONE,))}
_EXPOSED: Final[_Rules] = {
    Event.DONE: (Phase.RELEASED, ()),
    Event.CANCEL: (Phase.REVOKING, (Action.CANCEL,)),
    Event.TIMEOUT: (Phase.REVOKING, (Action.CANCEL,)),
    Event.WITHDRAW: (Phase.REVOKING, ()),
    Event.LOST: (Phase.REVOKING, ()),
    Event.DEAD: (Phase.RELEASED, ()),
}
_REVOKING: Final[_Rules] = {
    Event.DONE: (Phase.RELEASED, ()),
    Event.DEAD: (Phase.RELEASED, ()),
}

TABLE: Final[dict[Role, dict[Phase, _Rules]]] = {
    Role.PREFILL: {
        Phase.OFFERED: {
            Event.TAKE_PULL: (Phase.EXPOSED, (Action.GRANT,)),
            Event.TAKE_PUSH: (Phase.MOVING, (Action.GRANT, Action.START)),
            Event.LAYER: (Phase.OFFERED, ()),
            Event.CANCEL: (Phase.RELEASED, ()),
            Event.TIMEOUT: (Phase.RELEASED, ()),
            Event.EXPIRE: (Phase.RELEASED, ()),
        },
        Phase.MOVING: {**_MOVING, Event.LAYER: (Phase.MOVING, (Action.READY,))},
        Phase.STOPPING: _STOPPING,
        Phase.EXPOSED: {**_EXPOSED, Event.LAYER: (Phase.EXPOSED, (Action.READY,))},
        Phase.REVOKING: _REVOKING,
        Phase.RELEASED: {},
    },
    Role.DECODE: {
        Phase.ASKED: {
            Event.GRANT: (Phase.MOVING, (Action.START,)),
            Event.REJECT: (Phase.RELEASED, ()),
            # It may have been granted meanwhile: DONE says that it is not going to be used.
            Event.CANCEL: (Phase.RELEASED, (Action.DONE,)),
            Event.TIMEOUT: (Phase.RELEASED, (Action.DONE,)),
            # The GRANT before it got lost with the connection.
            Event.WITHDRAW: (Phase.RELEASED, (Action.DONE,)),
            Event.LOST: (Phase.RELEASED, ()),
            Event.DEAD: (Phase.RELEASED, ()),
        },
        Phase.MOVING: {**_MOVING, Event.READY: (Phase.MOVING, (Action.READY,))},
        Phase.STOPPING: _STOPPING,
        Phase.EXPOSED: {
            **_EXPOSED,
            Event.GRANT: (Phase.EXPOSED, ()),
            Event.READY: (Phase.EXPOSED, ()),
            Event.REJECT: (Phase.RELEASED, ()),
        },
        Phase.REVOKING: {**_REVOKING, Event.REJECT: (Phase.RELEASED, ())},
        Phase.RELEASED: {},
    },
}
"""What changes what. `START` and `DONE` are sent once in a side's life; RELEASED is the end."""

LATE: Final[dict[Role, dict[Phase, frozenset[Event]]]] = {
    Role.PREFILL: {
        Phase.OFFERED: frozenset(),
        Phase.MOVING: frozenset(),
        Phase.STOPPING: frozenset({Event.WITHDRAW}),
        Phase.EXPOSED: frozenset(),
        Phase.REVOKING: frozenset({Event.WITHDRAW}),
        Phase.RELEASED: frozenset({Event.WITHDRAW, Event.DONE}),
    },
    Role.DECODE: {
        Phase.ASKED: frozenset(),
        Phase.MOVING: frozenset(),
        Phase.STOPPING: frozenset({Event.READY, Event.WITHDRAW}),
        Phase.EXPOSED: frozenset(),
        Phase.REVOKING: frozenset({Event.GRANT, Event.READY, Event.WITHDRAW}),
        Phase.RELEASED: frozenset(
            {Event.GRANT, Event.REJECT, Event.READY, Event.WITHDRAW, Event.DONE}
        ),
    },
}
"""Events of the peer that may come after this side has gone on, and mean nothing then."""

_ENDS: Final = {
    Event.CANCEL: Outcome.CANCELLED,
    Event.TIMEOUT: Outcome.TIMED_OUT,
    Event.EXPIRE: Outcome.EXPIRED,
    Event.FAIL: Outcome.FAILED,
    Event.LOST: Outcome.LOST,
    Event.DEAD: Outcome.LOST,
    Event.SETTLED: Outcome.COMPLETE,
}


@dataclass(slots=True)
class Side:
    """One side of one request: a row of the table, and how it ended.

    Attributes:
        role: Which side.
        phase: How far it is.
        outcome: How the request ended on this side; None while it goes on.
        mover: Whether this side moves the bytes; False before that is known.
    """

    role: Role
    phase: Phase
    outcome: Outcome | None = None
    mover: bool = False

    @classmethod
    def offer(cls) -> Side:
        """Begin as prefill."""
        return cls(Role.PREFILL, Phase.OFFERED)

    @classmethod
    def take(cls, mode: Mode) -> Side:
        """Begin as decode, which is about to say TAKE."""
        if mode is Mode.PULL:
            return cls(Role.DECODE, Phase.ASKED, mover=True)
        return cls(Role.DECODE, Phase.EXPOSED)

    @property
    def ended(self) -> bool:
        """Whether its outcome is known."""
        return self.outcome is not None

    @property
    def released(self) -> bool:
        """Whether its pages are this side's program's alone."""
        return self.phase is Phase.RELEASED

    def step(self, event: Event, reason: Outcome | None = None) -> tuple[Action, ...]:
        """Let something happen; return what is to be done about it, in order.

        Args:
            event: What happens.
            reason: The outcome that the peer gives with REJECT, WITHDRAW or DONE, or with which
                the program explains CANCEL or FAIL.

        Raises:
            MetadataError: The peer says what it can't say now. Nothing has changed.
        """
        rule = TABLE[self.role][self.phase].get(event)
        if rule is None:
            if event is Event.WITHDRAW and self.released and self.mover:
                return (Action.DONE,)
            if event not in PEER_EVENTS or event in LATE[self.role][self.phase]:
                return ()
            raise MetadataError(
                f"the peer says {event.value} to a request that is {self.phase.value} "
                f"on the {self.role.value} side"
            )
        if event in (Event.REJECT, Event.WITHDRAW) and reason in (None, Outcome.COMPLETE):
            raise MetadataError(f"the peer says {event.value} without a reason")
        phase, actions = rule
        self.phase = phase
        self.mover = self.mover or phase is Phase.MOVING
        if self.outcome is None:
            if event is Event.DONE:
                self.outcome = Outcome.COMPLETE if reason is None else reason
            elif event in (Event.REJECT, Event.WITHDRAW):
                self.outcome = reason
            elif event in _ENDS:
                self.outcome = _ENDS[event] if reason is None else reason
        return actions
