"""What a hostile review broke once: waiters, the connection's end and cost, over the loopback."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from torch_nixl.engine import host, starting
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.grants import Claimant
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import Memory, tensor_memory
from torch_nixl.engine.operation import Alarm
from torch_nixl.engine.passive import PassiveOperation
from torch_nixl.engine.progress import BRISK_FOR_SECONDS, BRISK_SECONDS, Progress
from torch_nixl.engine.rounds import IDLE_SECONDS, WAIT_SECONDS, Rounds
from torch_nixl.errors import ClosedError, TransferCancelled

READ = Direction.READ
Connect = Callable[[str], Connection]


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.fixture
def connect(fabric: LoopbackFabric) -> Iterator[Connect]:
    made: list[Connection] = []

    def connect(name: str) -> Connection:
        made.append(Connection(fabric.adapter(name), timeout=10))
        return made[-1]

    yield connect
    for connection in made:
        connection.abort()


def memory(nbytes: int = 64, fill: int = 0) -> Memory:
    return tensor_memory(torch.full((nbytes,), fill, dtype=torch.uint8))


def read(owner: Connection, reader: Connection) -> None:
    """Have one read succeed."""
    target = torch.zeros(64, dtype=torch.uint8)
    reader.claim(owner.expose(READ, [memory(fill=1)]).offer(), [tensor_memory(target)]).wait(5)
    assert target.all()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(condition())


def test_a_waiter_that_follows_learns_of_its_grant_at_once(
    connect: Connect, fabric: LoopbackFabric
) -> None:
    reader, owner = connect("r"), connect("o")
    read(owner, reader)
    never = reader.expose(READ, [memory()])

    def lead() -> None:
        with contextlib.suppress(TransferCancelled):  # At the test's end.
            never.wait(8)

    leader = in_thread(lead)
    took: list[float] = []
    for _ in range(5):
        offer = owner.expose(READ, [memory()]).offer()
        fabric.stop("o")
        active = reader.claim(offer, [memory()])
        waiter = in_thread(active.wait)
        assert until(lambda: reader.progress._followers)
        started = time.monotonic()
        fabric.resume("o")
        while waiter.is_alive() and time.monotonic() < started + 5:
            reader.progress.step()  # so that it's not the leader who hears of the grant
        took.append(time.monotonic() - started)
    never.cancel()
    leader.join(5)
    # The sleep of a follower that nobody rings lasts 100 ms, and had just begun each time.
    assert sorted(took)[2] < 0.04


class Polled(Rounds):
    """Rounds of which only the polls matter."""

    def __init__(self) -> None:
        self.polled_by: set[str] = set()

    def poll(self) -> bool:
        self.polled_by.add(threading.current_thread().name)
        return False

    def advance(self) -> bool:
        return False

    def tick(self, now: float) -> None:
        pass

    def is_moving(self) -> bool:
        return False

    def is_watched(self) -> bool:
        return False

    def poll_interval(self) -> float | None:
        return 0.001

    def crash(self, error: BaseException) -> None:
        raise AssertionError from error


def test_a_callback_that_keeps_the_only_waiter_does_not_stop_the_polls() -> None:
    rounds = Polled()
    progress = Progress(rounds, "t")
    seen: list[bool] = []

    def callback() -> None:
        rounds.polled_by.clear()
        progress.kick()
        seen.append(until(lambda: rounds.polled_by))

    progress.call_from_finalizer(callback)
    progress.wait_until(lambda: bool(seen), time.monotonic() + 8)
    progress.stop()
    assert seen == [True]


def test_a_driver_that_expects_a_question_is_brisk_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = Progress(Polled(), "t")
    assert progress.longest_sleep() == WAIT_SECONDS
    progress.expect()
    assert progress.longest_sleep() == BRISK_SECONDS
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + BRISK_FOR_SECONDS)
    assert progress.longest_sleep() == WAIT_SECONDS
    monkeypatch.undo()
    progress.stop()


class StoppedWhenSilenced(Alarm):
    """Its driver is stopped in the moment in which the thread silences it before it looks.

    Once nothing has happened for so long that the thread would sleep as long as it is told to.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._calm = False
        self.stopped = threading.Event()

    def ring(self) -> None:
        super().ring()
        if self._progress._background._stopping:
            self.stopped.set()

    def sleep(self, seconds: float | None) -> bool:
        if self._calm and seconds == 0:
            self._calm = False
            in_thread(self._progress.stop)
            assert self.stopped.wait(5)
        elif seconds == IDLE_SECONDS:
            self._calm = True
        return super().sleep(seconds)


def test_a_thread_that_is_stopped_as_it_begins_to_look_does_not_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = Progress(Polled(), "t")
    background = progress._background
    background._alarm = alarm = StoppedWhenSilenced(progress)
    monkeypatch.setattr(
        Polled, "poll_interval", lambda _: None if alarm.stopped.is_set() else IDLE_SECONDS
    )
    progress.kick()
    assert background._thread is not None
    background._thread.join(5)
    assert not background._thread.is_alive()


def test_a_thread_polls_though_no_file_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    rounds = Polled()
    monkeypatch.setattr(Polled, "poll_interval", lambda _: IDLE_SECONDS)
    monkeypatch.setattr("builtins.open", refuse)
    progress = Progress(rounds, "t")
    try:
        progress.kick()
        assert until(lambda: rounds.polled_by == {"torch_nixl-t"})
    finally:
        monkeypatch.undo()
        progress.stop()


def test_a_stop_waits_for_a_thread_that_is_just_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(Polled(), "t")
    inside, go_on = threading.Event(), threading.Event()
    start = threading.Thread.start

    def slow_start(thread: threading.Thread) -> None:
        if thread.name == "torch_nixl-t":
            inside.set()
            go_on.wait(5)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    kicking = in_thread(progress.kick)
    assert inside.wait(5)
    stopping = in_thread(progress.stop)
    stopping.join(0.05)
    assert stopping.is_alive()
    go_on.set()
    kicking.join(5)
    stopping.join(5)
    assert not stopping.is_alive()
    assert "torch_nixl-t" not in {one.name for one in threading.enumerate()}


def test_a_kick_while_the_thread_is_being_started_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = Progress(Polled(), "t")
    background = progress._background
    inside, go_on = threading.Event(), threading.Event()

    def slow_start(thread: threading.Thread) -> None:
        """It has looked and rests before its starter goes on."""
        if thread.name == "torch_nixl-t":
            inside.set()
            go_on.wait(5)
        else:
            start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", slow_start)
    starting = in_thread(progress.kick)
    assert inside.wait(5)
    kicking = in_thread(progress.kick)
    go_on.set()
    for thread in (starting, kicking):
        thread.join(5)
    assert background._alarm.sleep(0)
    background._thread = None  # Which was never started.


def test_an_exiting_interpreter_that_takes_no_new_thread_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    progress = Progress(Polled(), "t")
    monkeypatch.setattr(threading.Thread, "start", refused)
    progress.kick()
    progress.stop()


def test_callbacks_of_the_parent_are_not_called_by_a_forked_child() -> None:
    progress = Progress(Polled(), "t")
    called: list[int] = []
    progress.call_from_finalizer(lambda: called.append(1))
    progress.after_fork()
    progress.call_now()
    assert not called


# The connection's end.


@pytest.mark.parametrize("what", ["expose", "claim"])
def test_what_starts_while_the_connection_is_aborted_is_refused(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    owner, reader = connect("o"), connect("r")
    read(owner, reader)
    offer = owner.expose(READ, [memory()]).offer()
    older = reader.expose(READ, [memory()])
    ended = threading.Event()
    older.add_done_callback(ended.set)
    owner_of_step: Any = reader.registry if what == "expose" else reader.contacts
    step = "acquire" if what == "expose" else "contact"
    original = getattr(owner_of_step, step)

    def last_step(*args: Any, **options: Any) -> object:
        result = original(*args, **options)
        reader.abort()
        return result

    monkeypatch.setattr(owner_of_step, step, last_step)
    first = READ if what == "expose" else offer
    with pytest.raises(ClosedError):
        getattr(reader, what)(first, [memory()])
    assert ended.wait(1)
    assert reader.statistics().outstanding == 0


def test_close_does_not_raise_when_another_thread_aborts(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = connect("o")
    granted = owner.expose(READ, [memory()])
    granted.grant.claim(Claimant("nobody", 1))  # and so never done
    raised: list[BaseException] = []

    def close() -> None:
        try:
            owner.close(5)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            raised.append(error)

    forget = owner.registry.close

    def slow_forget() -> None:
        closing.join(0.1)  # polls an agent that is gone
        forget()

    monkeypatch.setattr(owner.registry, "close", slow_forget)
    closing = in_thread(close)
    assert until(lambda: owner.progress.num_waiting)
    owner.abort()
    closing.join(5)
    assert not closing.is_alive()
    assert not raised


def test_exit_closes_all_connections_though_one_fails(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Sequence[Connection] = [connect(name) for name in "abc"]
    monkeypatch.setattr(host, "_open", weakref.WeakSet(made))
    closed: list[str] = []
    shares: list[float] = []

    def close(self: Connection, timeout: float = 5.0) -> None:
        closed.append(self.name)
        shares.append(timeout)
        raise RuntimeError("can't be closed")

    monkeypatch.setattr(Connection, "close", close)
    monkeypatch.setattr(host, "_exiting", False)  # undone at the end
    host._close_all()
    assert sorted(closed) == ["a", "b", "c"]
    for left, share in zip((3, 2, 1), shares, strict=True):
        assert 0 < share <= host.EXIT_SECONDS / left, "one that can't end would cost the others all"


# Cost.


def test_ten_thousand_exposed_operations_cost_the_driver_nothing(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[str] = []

    class Counted(PassiveOperation):
        def __getattribute__(self, name: str) -> Any:
            touched.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(starting, "PassiveOperation", Counted)
    owner = connect("o")
    one = memory()
    owner.progress.stop()
    for _ in range(10_000):
        owner.expose(READ, [one])
    touched.clear()
    for turn in range(10):
        owner.rounds.advance()
        owner.rounds.poll_interval()
        owner.rounds.tick(time.monotonic() + turn / 100)
    assert len(touched) < 100
