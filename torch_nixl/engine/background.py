"""The thread that polls for a connection when no other does.

There is one per connection, started when first needed. It polls as often as what is outstanding
asks for, and not at all when nothing is.

[Note: kicks]
Waking a thread costs more than a small transfer, and whoever starts one mostly waits for it, too.
So for a while after anything happened this thread looks again every WAIT_SECONDS by itself, and
only a thread that rests for longer is woken.

[Note: newcomers]
UCX needs four polls here to answer a process that makes contact, and the first three bring nothing
that could be seen: a thread at rest would sleep between them, 40 ms in all. But the first one
accepts a socket, which takes the lowest descriptor that is free. So where that has changed since
the last look, this thread looks often for a while. Whatever else opens files in this process costs
it a few polls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from torch_nixl.engine.operation import Alarm
from torch_nixl.engine.rounds import IDLE_SECONDS, WAIT_SECONDS, Rounds

if TYPE_CHECKING:
    from torch_nixl.engine.progress import Progress

log = logging.getLogger("torch_nixl.progress")

STALLED_SECONDS = 0.005
"""Time without a poll after which this thread polls though others are meant to."""

INLINE_SECONDS = 0.010
"""How long after a wait the next one is taken to be near: the program polls inline."""

KICKED_SECONDS = 0.001
"""Pause meanwhile if something was started that no thread may be waiting for."""

ALERT_SECONDS = 0.050
"""How long this thread goes on polling every WAIT_SECONDS after something happened."""

NEWCOMER_SECONDS = 0.020
"""How long this thread goes on polling every WAIT_SECONDS after a file was opened or closed."""

STOP_SECONDS = 10.0
"""How long `stop` waits for the thread, which a callback may keep."""


class Background:
    """The background thread of one connection, and its sleeps.

    Attributes:
        awake: Whether it need not be woken: it looks by itself soon, or never again.
    """

    def __init__(self, rounds: Rounds, progress: Progress, name: str) -> None:
        self._rounds = rounds
        self._progress = progress
        self._name = name
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._alarm = Alarm()
        self._stopping = False
        self.awake = False

    def wake(self) -> None:
        """Start the thread, or end its sleep."""
        if self._thread is None:
            with self._start_lock:
                if self._thread is None and not self._stopping:
                    # A daemon, since a forgotten connection must not keep the process alive.
                    # It is stopped and joined before the interpreter ends (host.py): a thread
                    # inside NIXL at that moment aborts the process.
                    thread = threading.Thread(
                        target=self._run, name=f"torch_nixl-{self._name}", daemon=True
                    )
                    # Since Python 3.12 an interpreter that exits takes no new threads.
                    with contextlib.suppress(RuntimeError):
                        thread.start()
                        self._thread = thread
        # Also if it was started just now by another thread: it may have looked already, and rest.
        self._alarm.ring()

    def ring(self) -> None:
        """End the thread's sleep, if it has been started. Takes no lock, so that finalizers may."""
        self._alarm.ring()

    def stop(self) -> None:
        """End the thread and wait for it; none is started any more."""
        self._stopping = True
        self._alarm.ring()
        with self._start_lock:  # It may just be starting.
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)

    def after_fork(self) -> None:
        """Take note that there is no thread here, and start none."""
        self._start_lock = threading.Lock()
        self._thread = None
        self._stopping = self.awake = True

    def _run(self) -> None:
        try:
            with contextlib.ExitStack() as stack:
                file = -1
                with contextlib.suppress(OSError):  # Too many are open.
                    file = stack.enter_context(open(os.devnull, "rb", buffering=0)).fileno()
                self._loop(file)
        except BaseException as error:
            log.exception("progress thread failed")
            self._rounds.crash(error)

    def _loop(self, file: int) -> None:
        rounds, progress = self._rounds, self._progress
        alert_until = kicked_until = 0.0
        pause = 0.0
        free = -1
        longest: float | None
        while True:
            self.awake = True
            self._alarm.sleep(0)
            if self._stopping:  # After that, which may have taken what `stop` rang.
                return
            moved = rounds.advance()
            # Threads that wait poll by themselves, and faster, unless a callback keeps them.
            if not progress.num_waiting or time.monotonic() - progress.stepped_at > STALLED_SECONDS:
                moved |= progress.step()
            else:
                progress.call_now()
            now = time.monotonic()
            inline = progress.num_waiting > 0 or (
                now - progress.waited_at < INLINE_SECONDS and not rounds.is_watched()
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
                longest = pause = KICKED_SECONDS if now < kicked_until else INLINE_SECONDS
            else:
                longest = progress.longest_sleep() if now < alert_until else rounds.poll_interval()
                if longest == IDLE_SECONDS:
                    before, free = free, _free_descriptor(file)
                    if free != before:  # [Note: newcomers]
                        alert_until, pause = now + NEWCOMER_SECONDS, 0.0
                        longest = progress.longest_sleep()
                pause = min(max(pause * 1.25, WAIT_SECONDS / 16), longest or WAIT_SECONDS)
            self.awake = pause <= KICKED_SECONDS and longest is not None
            # What was started before this thread said that it rests did not wake it.
            if not self.awake and not inline and rounds.poll_interval() != longest:
                continue
            if self._alarm.sleep(None if longest is None else pause):
                alert_until = kicked_until = time.monotonic() + ALERT_SECONDS
                pause = 0.0


def _free_descriptor(file: int) -> int:
    """The lowest file descriptor that is free, by duplicating one; -1 if that can't be told."""
    try:
        free = os.dup(file)
    except OSError:
        return -1
    os.close(free)
    return free
