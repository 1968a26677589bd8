"""Who makes a connection move, and when.

Nothing happens in the library unless somebody polls it. A thread that waits polls inline, which
has the lowest latency; one background thread per connection polls for the rest, as often as what
is outstanding asks for, and not at all when nothing is.

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
from typing import Protocol

from torch_nixl.engine.operation import Alarm, Operation

log = logging.getLogger("torch_nixl.progress")

HOT_SECONDS = 0.002
"""How long a waiter polls without sleeping: most answers come within this."""

STALLED_SECONDS = 0.005
"""Time without a poll after which the background thread polls though others are meant to."""

SWEEP_SECONDS = 1.0
"""How long `sweep` waits for a poll that is under way."""

STOP_SECONDS = 10.0
"""How long `stop` waits for the background thread, which a callback may keep."""

CONTENDED_SECONDS = 0.25
"""How long posts are kept short after one has held up a poll."""

LET_POLL_SECONDS = 0.005
"""Longest that a post waits for a poll."""

YIELD_TURNS = 2
"""Turns of the hot loop between two yields. A rank that shares its core with the one it waits for
must let it run; one that doesn't loses less than a microsecond each time. Against 8, collectives of
four ranks on two cores gain a tenth or more, and two ranks lose nothing that can be measured; with
1, small messages begin to lose."""

INLINE_SECONDS = 0.010
"""How long after a wait the next one is taken to be near: the program polls inline."""

ALERT_SECONDS = 0.050
"""How long the background thread goes on polling every WAIT_SECONDS after something happened."""

BRISK_SECONDS = 0.0001
"""Longest sleep between two polls while bytes move. The side that only waits has to poll, too: over
TCP for every byte, and for the last step of every transfer that follows a message."""

BRISK_FOR_SECONDS = 0.050
"""How long after the last news bytes are taken to be moving. A stopped peer is not worth it."""

WAIT_SECONDS = 0.001
"""Longest sleep between two polls while someone waits: 3 % of a core, 0.5 ms of latency."""

EXPOSED_SECONDS = 0.005
"""Sleep between two polls while memory is exposed but nobody waits."""

IDLE_SECONDS = 0.010
"""Sleep between two polls while remotes are known but nothing is outstanding."""

TICK_SECONDS = 0.020
"""Interval between two looks at deadlines and silent remotes."""


class Driven(Protocol):
    """What the driver drives: a Connection."""

    def poll(self) -> bool:
        """Take in what has arrived; return whether anything had."""
        ...

    def advance(self) -> bool:
        """Advance operations that no thread attends; return whether anything moved."""
        ...

    def tick(self, now: float) -> None:
        """Look at deadlines and silent remotes."""
        ...

    def is_moving(self) -> bool:
        """Whether bytes are meant to be moving, to or from this process."""
        ...

    def is_watched(self) -> bool:
        """Whether somebody waits for an end who doesn't poll."""
        ...

    def poll_interval(self) -> float | None:
        """Longest sleep that what is outstanding allows; None for as long as you like."""
        ...

    def crash(self, error: BaseException) -> None:
        """The background thread met a bug: fail everything rather than hang."""
        ...


class Progress:
    """The driver of one connection."""

    def __init__(self, driven: Driven, name: str) -> None:
        self._driven = driven
        self._driving = threading.RLock()
        self._leading = threading.RLock()
        self._followers: deque[Alarm] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._next_tick = 0.0
        self._contended_until = 0.0
        self._stepped_at = 0.0
        self._news_at = 0.0
        self._expected_until = 0.0
        self._driver = 0
        self._waited_at = 0.0
        self._num_waiting = 0
        self._wake = threading.Event()
        self._stopping = False
        self._resting = False
        self._name = name
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """How many threads wait, now."""
        return self._num_waiting

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
                moved = self._driven.poll()
                now = time.monotonic()
                if now >= self._next_tick:
                    self._next_tick = now + TICK_SECONDS
                    self._driven.tick(now)
                self._stepped_at = now
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
            self._call_now()
        return moved

    def spin(self, ended: Callable[[], bool], seconds: float) -> bool:
        """Poll without sleeping until `ended`; return False if it hasn't after so long.

        For what mostly ends within microseconds, and need not be an operation until it doesn't.
        """
        self._num_waiting += 1
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
            self._num_waiting -= 1
            self._waited_at = time.monotonic()

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

    def sweep(self, timeout: float = SWEEP_SECONDS) -> None:
        """Take in all that has arrived by now, even if another thread is polling.

        Does nothing in a frame handler, which is in the middle of that, and gives up after
        `timeout` seconds if the other thread's handler is stuck.
        """
        if self._driver == threading.get_ident():
            return
        driving = self._driving
        try:  # [Note: interrupts]
            if not driving.acquire(timeout=timeout):
                return
            try:
                self._driver = threading.get_ident()
                self._driven.poll()
            finally:
                self._driver = 0
        finally:
            try:
                driving.release()
            except RuntimeError:
                pass

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
        self._num_waiting += 1
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
            self._num_waiting -= 1

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
            alarm.sleep(_remaining(deadline, WAIT_SECONDS if operation.in_flight else 0.1))
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
            pause = min(pause * 1.25, self._longest_sleep())
        return True

    def _longest_sleep(self) -> float:
        """Longest sleep between two polls of the one thread that polls while someone waits."""
        now = time.monotonic()
        brisk = now < self._expected_until or (
            now - self._news_at < BRISK_FOR_SECONDS and self._driven.is_moving()
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
        """Have a callback called by the next poll, without waking anybody.

        A finalizer may run in any thread at any instruction, so it must take no lock.
        """
        self._later.append(callback)

    def _call_now(self) -> None:
        while self._later:
            try:
                callback = self._later.popleft()
            except IndexError:
                return
            try:
                callback()
            except Exception:
                log.exception("a completion callback raised")

    def kick(self) -> None:
        """Something is outstanding that nobody may be waiting for: look at it soon."""
        if self._thread is None and not self._stopping:
            with self._start_lock:
                if self._thread is None and not self._stopping:
                    # A daemon, since a forgotten connection must not keep the process alive.
                    # It is stopped and joined before the interpreter ends (connection.py):
                    # a thread inside NIXL at that moment aborts the process.
                    self._thread = threading.Thread(
                        target=self._run, name=f"torch_nixl-{self._name}", daemon=True
                    )
                    self._thread.start()
        if self._resting:
            self._wake.set()

    def expect(self) -> None:
        """A peer is about to ask for something, and waits for the answer: be brisk for a while."""
        self._expected_until = time.monotonic() + BRISK_FOR_SECONDS
        self.kick()

    def after_fork(self) -> None:
        """Replace locks that other threads held at the fork; there is no background thread here."""
        self._driving, self._leading = threading.RLock(), threading.RLock()
        self._driver = 0
        self._start_lock = threading.Lock()
        self._stopping = True
        self._thread = None

    def stop(self) -> None:
        """End the background thread and wait for it."""
        self._stopping = True
        self._wake.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)
        self._call_now()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            log.exception("progress thread failed")
            self._driven.crash(error)

    def _loop(self) -> None:
        # [Note: kicks] Waking a thread costs more than a small transfer, and whoever starts one
        # mostly waits for it, too. So for a while after anything happened this thread looks again
        # every WAIT_SECONDS by itself, and only a thread that rests for longer is woken.
        alert_until = kicked_until = 0.0
        pause = 0.0
        while not self._stopping:
            self._wake.clear()
            moved = self._driven.advance()
            # Threads that wait poll by themselves, and faster, unless a callback keeps them.
            if self._num_waiting == 0 or time.monotonic() - self._stepped_at > STALLED_SECONDS:
                moved |= self.step()
            elif self._later:
                self._call_now()
            now = time.monotonic()
            inline = self._num_waiting > 0 or (
                now - self._waited_at < INLINE_SECONDS and not self._driven.is_watched()
            )
            if moved:
                alert_until = now + ALERT_SECONDS
                pause = WAIT_SECONDS / 16
                if not inline:
                    os.sched_yield()
                    continue
            if inline:
                # A thread polls, and waits for what it starts. Waking more often than this, we
                # would only take its GIL.
                longest: float | None = WAIT_SECONDS if now < kicked_until else IDLE_SECONDS
                pause = WAIT_SECONDS if now < kicked_until else IDLE_SECONDS
            else:
                longest = (
                    self._longest_sleep() if now < alert_until else self._driven.poll_interval()
                )
                pause = min(max(pause * 1.25, WAIT_SECONDS / 16), longest or WAIT_SECONDS)
            self._resting = pause > WAIT_SECONDS or longest is None
            # What was started before this thread said that it rests did not wake it.
            if self._resting and not inline and self._driven.poll_interval() != longest:
                self._resting = False
                continue
            if self._wake.wait(None if longest is None else pause):
                alert_until = kicked_until = time.monotonic() + ALERT_SECONDS
                pause = 0.0
            self._resting = False


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
