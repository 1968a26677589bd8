"""Who makes a connection move, and when.

Nothing happens in the library unless somebody polls it. A thread that waits polls inline, which
has the lowest latency; a background thread polls for the rest, see `background.py`.

[Note: who polls]
Several threads may wait. Each newcomer polls for `HOT_SECONDS`; then one of them, the leader,
goes on polling with growing sleeps of at most `WAIT_SECONDS`, and the others sleep on locks of
their own, released by whoever ends their operation. A leader that leaves wakes one of them to take
over. One poll happens at a time (`_driving`), so frames are handled in the order they arrive.

[Note: interrupts]
A signal handler may raise in the main thread between any two calls, also right after a lock was
taken and before a `try` is entered. A lock that is only tried for is therefore an RLock, which
knows its holder: it is tried for inside of the `try`, and whatever happened, `release` either frees
what this thread holds or raises RuntimeError (not in a function of our own: a handler may raise
before its first line). A flag tells whether this thread is in the middle of what the lock guards
already, which an RLock would let pass.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter

from torch_nixl.engine.background import Background
from torch_nixl.engine.operation import Alarm, Operation
from torch_nixl.engine.rounds import WAIT_SECONDS, Rounds

log = logging.getLogger("torch_nixl.progress")

HOT_SECONDS = 0.002
"""How long a waiter polls without sleeping: most answers come within this."""

SWEEP_SECONDS = 1.0
"""How long `sweep` waits for a poll that is under way."""

CONTENDED_SECONDS = 0.25
"""How long posts are kept short after one has held up a poll."""

LET_POLL_SECONDS = 0.005
"""Longest that a post waits for a poll."""

YIELD_TURNS = 2
"""Turns of the hot loop between two yields. A rank that shares its core with the one it waits for
must let it run; one that doesn't loses less than a microsecond each time. Against 8, collectives of
four ranks on two cores gain a tenth or more, and two ranks lose nothing that can be measured; with
1, small messages begin to lose."""

BRISK_SECONDS = 0.0001
"""Longest sleep between two polls while bytes move. The side that only waits has to poll, too: over
TCP for every byte, and for the last step of every transfer that follows a message."""

BRISK_FOR_SECONDS = 0.050
"""How long after the last news bytes are taken to be moving. A stopped peer is not worth it."""

FOLLOW_SECONDS = 0.001
"""Longest sleep of a follower that has bytes in flight. There may be many, each at a cost."""

TICK_SECONDS = 0.020
"""Interval between two looks at deadlines and silent remotes."""


class Progress:
    """The driver of one connection.

    Attributes:
        num_waiting: How many threads wait, now.
        stepped_at: `time.monotonic()` of the last poll.
        waited_at: When a `spin` ended last.
    """

    def __init__(self, rounds: Rounds, name: str) -> None:
        self._rounds = rounds
        self._driving = threading.RLock()
        self._leading = threading.RLock()
        self._followers: deque[Alarm] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._next_tick = 0.0
        self._contended_until = 0.0
        self._news_at = 0.0
        self._expected_until = 0.0
        self._driver = 0
        self.num_waiting = 0
        self.stepped_at = 0.0
        self.waited_at = 0.0
        self._background = Background(rounds, self, name)

    def step(self) -> bool:
        """Poll once; return whether anything happened. Returns at once if another thread polls."""
        if self._driver:
            return False
        driving = self._driving
        try:  # [Note: interrupts]
            if not driving.acquire(blocking=False):
                return False
            try:
                self._driver = threading.get_ident()
                moved = self._rounds.poll()
                now = time.monotonic()
                if now >= self._next_tick:
                    self._next_tick = now + TICK_SECONDS
                    self._rounds.tick(now)
                self.stepped_at = now
                if moved:
                    self._news_at = now
            finally:
                self._driver = 0
        finally:
            try:
                driving.release()
            except RuntimeError:
                pass
        if self._later:
            self.call_now()
        return moved

    def spin(self, ended: Callable[[], bool], seconds: float) -> bool:
        """Poll without sleeping until `ended`; return False if it hasn't after so long.

        For what mostly ends within microseconds, and need not be an operation until it doesn't.
        """
        self.num_waiting += 1
        try:
            until = time.monotonic() + seconds
            step = self.step
            turn = 0
            while not ended():
                step()
                turn += 1
                if turn % YIELD_TURNS == 0:
                    if ended():
                        break
                    if time.monotonic() >= until:
                        return False
                    os.sched_yield()
            return True
        finally:
            self.num_waiting -= 1
            self.waited_at = time.monotonic()

    def let_poll(self) -> None:
        """Wait for a poll that is under way, before a post that would hold it up.

        The library's lock prefers posts to polls: without this a thread that posts piece after
        piece could keep all others from polling until it has posted the last.
        """
        if self._driver and self._driver != threading.get_ident():
            self._contended_until = time.monotonic() + CONTENDED_SECONDS
            try:  # [Note: interrupts]
                self._driving.acquire(timeout=LET_POLL_SECONDS)
            finally:
                try:
                    self._driving.release()
                except RuntimeError:
                    pass

    @property
    def contended(self) -> bool:
        """Whether a post has held up a poll a short while ago."""
        return time.monotonic() < self._contended_until

    def sweep(self, then: Callable[[], object] | None = None) -> None:
        """Take in all that has arrived by now, even if another thread is polling.

        Does nothing in a frame handler, which is in the middle of that, and gives up after
        `SWEEP_SECONDS` if the other thread's handler is stuck.

        Args:
            then: Called last, in any case; before another thread polls, unless one is stuck.
        """
        if self._driver != threading.get_ident() and self._poll_now(then):
            return
        if then is not None:
            then()

    def _poll_now(self, then: Callable[[], object] | None) -> bool:
        driving = self._driving
        try:  # [Note: interrupts]
            if not driving.acquire(timeout=SWEEP_SECONDS):
                return False
            try:
                self._driver = threading.get_ident()
                self._rounds.poll()
                if then is not None:
                    then()
            finally:
                self._driver = 0
        finally:
            try:
                driving.release()
            except RuntimeError:
                pass
        return True

    def wait(self, operation: Operation, deadline: float | None) -> bool:
        """Drive until `operation` has ended; return False if the deadline comes first."""
        operation.attended += 1
        try:
            return self._wait(partial(_is_done, operation), deadline, operation)
        finally:
            operation.attended -= 1

    def wait_until(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        """Drive until a condition holds; return False if the deadline comes first."""
        return self._wait(condition, deadline, None)

    def _wait(
        self, condition: Callable[[], bool], deadline: float | None, operation: Operation | None
    ) -> bool:
        self.num_waiting += 1
        step = self.step
        attend = _nothing if operation is None else operation.attend
        try:
            hot_until = time.monotonic() + HOT_SECONDS
            turn = 0
            if condition():
                return True
            while True:
                moved = attend()
                if condition():
                    return True
                moved |= step()
                if condition():
                    return True
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    return False
                turn += 1
                if moved:
                    hot_until = now + HOT_SECONDS
                elif now < hot_until:
                    if turn % YIELD_TURNS == 0:
                        os.sched_yield()
                elif not self._lead(condition, deadline, operation):
                    return False
                else:
                    hot_until = time.monotonic() + HOT_SECONDS
        finally:
            self.num_waiting -= 1

    def _lead(
        self, condition: Callable[[], bool], deadline: float | None, operation: Operation | None
    ) -> bool:
        """Wait on, as leader or follower; return False at the deadline, True to look again."""
        if operation is None:
            return self._poll_slowly(condition, deadline, None, Alarm())
        alarm = Alarm()
        if not operation.add_waiter(alarm):
            return True
        try:
            leading = self._leading
            try:  # [Note: interrupts]
                if leading.acquire(blocking=False):
                    return self._poll_slowly(condition, deadline, operation, alarm)
            finally:
                try:
                    leading.release()
                except RuntimeError:
                    pass
                else:
                    self._promote()
            self._followers.append(alarm)
            # A waiter posts and polls its own pieces, however many others there are.
            alarm.sleep(_remaining(deadline, FOLLOW_SECONDS if operation.in_flight else 0.1))
            try:
                self._followers.remove(alarm)
            except ValueError:
                # Promoted. If it doesn't lead in the end, another one must.
                if condition():
                    self._promote()
            operation.attend()
            return condition() or not _passed(deadline)
        finally:
            operation.remove_waiter(alarm)

    def _poll_slowly(
        self,
        condition: Callable[[], bool],
        deadline: float | None,
        operation: Operation | None,
        alarm: Alarm,
    ) -> bool:
        pause = WAIT_SECONDS / 16
        while not condition():
            alarm.sleep(_remaining(deadline, pause))
            moved = operation.attend() if operation is not None else False
            if self.step() or moved:
                return True
            if _passed(deadline):
                return condition()
            pause = min(pause * 1.25, self.longest_sleep())
        return True

    def longest_sleep(self) -> float:
        """Longest sleep between two polls of the one thread that polls while someone waits."""
        now = time.monotonic()
        brisk = now < self._expected_until or (
            now - self._news_at < BRISK_FOR_SECONDS and self._rounds.is_moving()
        )
        return BRISK_SECONDS if brisk else WAIT_SECONDS

    def _promote(self) -> None:
        """Wake a follower to become the leader."""
        with contextlib.suppress(IndexError):
            self._followers.popleft().ring()

    def call_later(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have callbacks called soon, outside of all locks."""
        self._later.extend(callbacks)
        if self._later:
            self.kick()

    def call_from_finalizer(self, callback: Callable[[], None]) -> None:
        """Have a callback called soon, if a thread polls or has ever polled.

        A finalizer may run in any thread at any instruction, so it must take no lock.
        """
        self._later.append(callback)
        self._background.ring()

    def call_now(self) -> None:
        """Call what was to be called later."""
        while self._later:
            try:
                callback = self._later.popleft()
            except IndexError:
                return
            try:
                callback()
            except Exception:  # What waits behind it is not to blame.
                log.exception("a completion callback raised")

    def kick(self) -> None:
        """Something is outstanding that nobody may be waiting for: look at it soon."""
        if not self._background.awake:
            self._background.wake()

    def expect(self) -> None:
        """A peer is about to ask for something, and waits for the answer: be brisk for a while."""
        self._expected_until = time.monotonic() + BRISK_FOR_SECONDS
        self.kick()

    def after_fork(self) -> None:
        """Replace locks that other threads held at the fork."""
        self._driving, self._leading = threading.RLock(), threading.RLock()
        self._driver = 0
        self._later.clear()  # The parent calls them.
        self._background.after_fork()

    def stop(self) -> None:
        """End the background thread and wait for it."""
        self._background.stop()
        self.call_now()


_is_done = attrgetter("_done")
"""In C: a waiter asks three times in each turn."""


def _nothing() -> bool:
    return False


def _remaining(deadline: float | None, longest: float) -> float:
    if deadline is None:
        return longest
    return max(0.0, min(longest, deadline - time.monotonic()))


def _passed(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline
