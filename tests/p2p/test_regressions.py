"""What once went wrong: interrupts, ends in bad moments, memory that is gone when it is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from p2p.conftest import World
from torch_nixl.errors import (
    ClosedError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p import default, hub, peer, protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.offered import OfferedMessage
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.testing import LoopbackFabric

LARGE = 4 * protocol.EAGER_NBYTES
"""Elements of float32 in a message that is offered."""

SIZES = pytest.mark.parametrize("count", [4, LARGE], ids=["in its frame", "offered"])


def met(world: World, **options: Any) -> list[Communicator]:
    """Two ranks that know each other, and of which nothing is under way."""
    ranks = world(**options)
    a, b = ranks
    for one, other in ((a, b), (b, a)):
        one.send(torch.ones(1), other.rank)
        other.recv(one.rank)
    return ranks


def bounded(call: Callable[[], object], seconds: float = 10.0) -> object:
    """Call in another thread, and fail if that does not return."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    [result] = results
    if isinstance(result, BaseException):
        raise result
    return result


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what other threads bring about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.001)


def rest(communicator: Communicator) -> None:
    """Stop the background thread: from now on the test's own thread drives, or nobody."""
    progress = communicator.connection.progress
    progress.stop()
    thread = progress._background._thread
    assert thread is None or not thread.is_alive()


# Interrupts.


class Interrupting:
    """A lock that has the main thread interrupted right after it took it, once."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._armed = True

    def acquire(self, *args: Any, **options: Any) -> bool:
        taken: bool = self._lock.acquire(*args, **options)
        if taken and self._armed and threading.current_thread() is threading.main_thread():
            self._armed = False
            raise KeyboardInterrupt
        return taken

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return True

    def is_free(self) -> bool:
        """Whether another thread could take it."""

        def take() -> bool:
            taken: bool = self._lock.acquire(timeout=1)
            if taken:
                self._lock.release()
            return taken

        return bool(bounded(take))


def interrupt(owner: Any, name: str) -> Interrupting:
    lock = Interrupting(getattr(owner, name))
    setattr(owner, name, lock)
    return lock


@pytest.mark.parametrize("call", ["step", "sweep"])
def test_an_interrupt_right_after_a_poll_began_stops_no_other(world: World, call: str) -> None:
    a, b = met(world)
    rest(a)
    progress = a.connection.progress
    lock = interrupt(progress, "_driving")
    with pytest.raises(KeyboardInterrupt):
        getattr(progress, call)()
    assert lock.is_free()
    b.send(torch.ones(1), 0)
    assert float(a.recv(1, timeout=5)) == 1.0


def test_an_interrupt_of_who_lets_others_poll_keeps_nobody_from_it(world: World) -> None:
    a, _ = met(world)
    rest(a)
    progress = a.connection.progress
    lock = interrupt(progress, "_driving")
    progress._driver = -1  # as if another thread polled
    with pytest.raises(KeyboardInterrupt):
        progress.let_poll()
    progress._driver = 0
    assert lock.is_free()


def test_an_interrupt_of_who_begins_to_lead_lets_others_lead(world: World) -> None:
    a, b = met(world)
    lock = interrupt(a.connection.progress, "_leading")
    work = a.irecv(1)
    with pytest.raises(KeyboardInterrupt):
        work.wait(5)
    assert lock.is_free()
    b.send(torch.ones(1), 0)
    work.wait(5)


def test_an_interrupt_of_who_begins_to_attend_stops_no_transfer(
    world: World, fabric: LoopbackFabric, path: str
) -> None:
    a, b = met(world)
    mover = b if path == "cma" else a
    fabric.delay(1, initiator=mover.connection.name)
    send = a.isend(torch.ones(LARGE), 1)
    receive = b.irecv(0)
    until(lambda: bool(mover.connection.operations.transfers))
    [transfer] = mover.connection.operations.transfers
    rest(mover)
    lock = interrupt(transfer, "_attending")
    with pytest.raises(KeyboardInterrupt):
        transfer.attend()
    assert lock.is_free()
    fabric.delay(None, initiator=mover.connection.name)
    fabric.delay(1 << 30)
    # Nobody else drives the one that moves.
    until(lambda: transfer.attend() or mover.connection.progress.step() or send.is_completed())
    until(lambda: mover.connection.progress.step() or send.is_completed())
    for work in (receive, send):
        work.wait(5)


def test_an_interrupt_of_who_lets_go_of_the_lost_keeps_nobody_from_contact(world: World) -> None:
    a, _ = met(world)
    rest(a)
    lost = a.connection.lost
    lost.lingering.append(SimpleNamespace(name="", flight=1))  # type: ignore[arg-type]
    lock = interrupt(a.connection.contacts, "contacting")
    with pytest.raises(KeyboardInterrupt):
        lost.sweep()
    lost.lingering.clear()
    assert lock.is_free()


class Alarm(BaseException):
    """What a signal handler raises."""


@contextlib.contextmanager
def alarms(rng: random.Random) -> Iterator[Callable[[], None]]:
    """Have the main thread interrupted some time after each call of what this gives."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)

    def wind() -> None:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.002))

    try:
        yield wind
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Where a finalizer is interrupted, Python can only tell that it was.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@SIZES
def test_interrupts_at_any_moment_stop_nothing_for_good(world: World, count: int) -> None:
    a, b = met(world)
    tag = 0
    num_interrupted = 0
    works = []
    with alarms(random.Random(count)) as wind:
        for turn in range(400):
            tag = turn + 1
            if turn % 2:
                works.append(b.isend(torch.full((count,), float(turn)), 0, tag=tag, timeout=5))
            try:
                wind()
                received = a.recv(1, tag=tag, timeout=1)
                assert bool((received == turn).all())
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                num_interrupted += 1
            while signal.getitimer(signal.ITIMER_REAL)[0]:
                with contextlib.suppress(Alarm):
                    signal.setitimer(signal.ITIMER_REAL, 0)
    assert num_interrupted > 150
    until(lambda: a.statistics().outstanding == 0)
    assert not a.connection.closed
    work = b.isend(torch.full((count,), -1.0), 0)
    assert bool((a.recv(1, timeout=5) == -1).all())
    work.wait()
    for one in works:
        one.cancel()


@dataclasses.dataclass
class FillsOnce:
    """Its step can't be replaced: that raises `raises`."""

    tensor: torch.Tensor
    step: int = 1

    raises = AttributeError("write-once")

    def __setattr__(self, name: str, value: object) -> None:
        if name == "step" and "step" in self.__dict__:
            raise self.raises
        object.__setattr__(self, name, value)


class Interrupts(FillsOnce):
    raises = KeyboardInterrupt()  # type: ignore[assignment]


CALLS: dict[str, tuple[Callable[[Communicator], object], Callable[[Communicator, int], None]]] = {
    "recv": (
        lambda one: one.recv(1, timeout=5),
        lambda one, value: one.send(torch.tensor(value), 0),
    ),
    "recv_tree": (
        lambda one: one.recv_tree(1, timeout=5),
        lambda one, value: one.send_tree({"value": value}, 0),
    ),
    "recv_object": (
        lambda one: one.recv_object(1, timeout=5),
        lambda one, value: one.send_object([value], 0),
    ),
}


@pytest.mark.parametrize("where", ["spin", "wait"])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupted_receive_does_not_take_the_next_message(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, where: str
) -> None:
    a, b = met(world)
    receive, send = CALLS[call]

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(a.connection.progress, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            receive(a)
    assert a.statistics().outstanding == 0
    for value in (1, 2):
        send(b, value)
    assert "1" in str(receive(a))
    assert "2" in str(receive(a))


@pytest.mark.parametrize("call", ["send", "send_tree", "send_object"])
def test_an_interrupted_send_is_withdrawn(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    a, b = met(world)
    tensor = torch.zeros(LARGE)
    value: object = {"send": tensor, "send_tree": [tensor], "send_object": bytes(LARGE)}[call]

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(a.connection.progress, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(a, call)(value, 1)
    until(lambda: a.statistics().outstanding == 0)
    assert b.iprobe(0) is None


# A receive that has been given a message always ends.


def failing(error: BaseException) -> Callable[..., torch.Tensor]:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise error

    return fail


@SIZES
@pytest.mark.parametrize("posted", [True, False])
def test_whatever_making_a_tensor_raises_ends_the_receive_and_tells_the_sender(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, count: int, posted: bool
) -> None:
    a, b = met(world)
    # What torch raises where it was built without the device that is asked for.
    broken = failing(AssertionError("not compiled with that"))
    if posted:
        receive = b.irecv(0, timeout=5)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", broken)
            send = a.isend(torch.ones(count), 1)
            with pytest.raises(AssertionError):
                bounded(receive.wait)
    else:
        send = a.isend(torch.ones(count), 1)
        b.probe(0)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", broken)
            with pytest.raises(AssertionError):
                bounded(lambda: b.recv(0, timeout=5))
    until(lambda: send.exception() is not None)
    assert "not compiled" in str(send.exception())
    assert send.wait_released(5)


@pytest.mark.parametrize("posted", [True, False])
def test_whatever_filling_a_tree_raises_ends_the_receive(world: World, posted: bool) -> None:
    a, b = met(world)
    out = FillsOnce(torch.zeros(2))
    if posted:
        receive = b.irecv_tree(0, out=out, timeout=5)
        a.send_tree(FillsOnce(torch.ones(2), 2), 1)
        with pytest.raises(AttributeError):
            bounded(receive.wait)
    else:
        a.send_tree(FillsOnce(torch.ones(2), 2), 1)
        b.probe(0)
        with pytest.raises(AttributeError):
            bounded(lambda: b.recv_tree(0, out=out, timeout=5))
    assert b.statistics().outstanding == 0


def test_an_interrupt_while_a_message_is_put_in_place_ends_its_receive(world: World) -> None:
    a, b = met(world)
    rest(b)
    receive = b.irecv_tree(0, out=Interrupts(torch.zeros(2)), timeout=5)
    a.send_tree(FillsOnce(torch.ones(2), 2), 1)
    with pytest.raises(KeyboardInterrupt):
        receive.wait()
    with pytest.raises(TransferError, match="interrupted"):
        receive.wait(5)
    assert receive.wait_released(5)
    assert b.statistics().outstanding == 0


@pytest.mark.parametrize("where", ["accept", "begin", "start", "move", "_push", "place", "_read"])
def test_an_interrupt_while_an_offer_is_taken_up_ends_it_on_both_sides(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, where: str
) -> None:
    a, b = met(world)
    rest(b)
    receive = b.irecv(0, timeout=5)
    send = a.isend(torch.ones(LARGE), 1)
    reached = []

    def interrupted(*_: object) -> None:
        reached.append(where)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        owners = {"accept": ReceiveOperation, "begin": ReceiveOperation, "place": peer.Peer}
        patch.setattr(owners.get(where, OfferedMessage), where, interrupted)
        with contextlib.suppress(KeyboardInterrupt):  # Not all paths come by there: see below.
            receive.wait()
    if reached:
        with pytest.raises(TransferError, match="interrupted"):
            receive.wait(5)
        until(lambda: b.connection.progress.step() or send.exception() is not None)
        with pytest.raises(TransferError, match="interrupted"):
            send.wait(5)
    else:
        assert where in (("_push", "place") if path == "cma" else ("_read",))
    for work in (receive, send):
        assert work.wait_released(5)


class Slow:
    """Holds whoever gives a receive its message in the middle of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        call = getattr(owner, name)
        self.reached, self._go = threading.Event(), threading.Event()

        def slow(*args: Any) -> Any:
            self.reached.set()
            assert self._go.wait(20)
            return call(*args)

        monkeypatch.setattr(owner, name, slow)

    def go(self) -> None:
        self._go.set()


def test_a_receive_can_be_cancelled_with_the_lock_held_in_the_moment_it_is_matched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = met(world)
    receive = b.irecv(0)
    slow = Slow(monkeypatch, b._exchange.inbox, "_begin")
    send = a.isend(torch.ones(LARGE), 1)
    assert slow.reached.wait(10)

    def cancel() -> None:
        with b._exchange.lock:  # as whoever sends to a peer that is lost
            receive.cancel()

    try:
        bounded(cancel)
    finally:
        slow.go()
    for work in (receive, send):
        with pytest.raises(TransferCancelled):
            work.wait(5)
        assert work.wait_released(5)


@SIZES
def test_a_receive_that_was_matched_before_its_time_was_up_gets_its_message_or_refuses_it(
    world: World, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    a, b = met(world)
    receive = b.irecv(0)
    slow = Slow(monkeypatch, b._exchange.inbox, "_deliver" if count < LARGE else "_begin")
    send = a.isend(torch.ones(count), 1)
    assert slow.reached.wait(10)
    threading.Timer(0.5, slow.go).start()
    if count < LARGE:
        bounded(lambda: receive.wait(0.1))
        assert float(receive.result()[0]) == 1.0  # type: ignore[index]
        return
    for work in (receive, send):
        with pytest.raises(TransferTimeout):
            bounded(lambda: work.wait(0.1 if work is receive else 5))  # noqa: B023 - called in this turn


def test_a_receive_whose_message_is_never_given_to_it_ends_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = met(world)
    monkeypatch.setattr("torch_nixl.p2p.receiving.MATCHED_SECONDS", 0.1)
    receive = b.irecv(0)
    monkeypatch.setattr(b._exchange.inbox, "_deliver", lambda *_: None)
    a.send(torch.ones(1), 1)
    until(lambda: b._exchange.inbox.matcher.match(0, 0) is None)
    with pytest.raises(TransferTimeout):
        bounded(lambda: receive.wait(0.1))


def test_an_offer_that_is_received_while_the_agent_dies_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = met(world)
    send = a.isend(torch.ones(LARGE), 1)
    b.probe(0)
    enter = b._exchange.inbox.enter

    def die(receive: ReceiveOperation) -> None:
        b.connection.abort()
        enter(receive)

    monkeypatch.setattr(b._exchange.inbox, "enter", die)
    with pytest.raises(ClosedError):
        bounded(lambda: b.recv(0, timeout=5))
    with pytest.raises(TransferError):
        send.wait(0.1)


# The end.


@SIZES
def test_nothing_is_received_once_the_communicator_is_closed(world: World, count: int) -> None:
    a, b = met(world)
    sent = torch.ones(count)
    send = a.isend(sent, 1)
    b.probe(0)
    b.close(0.2)
    if count == LARGE:
        with pytest.raises(PeerLostError):
            send.wait(5)
    sent.zero_()  # ours again
    for call in (lambda: b.recv(0, timeout=1), lambda: b.probe(0, timeout=1)):
        with pytest.raises(ClosedError):
            bounded(call)
    assert b.iprobe(0) is None
    assert b.statistics().unexpected == 0


def test_messages_that_arrive_after_the_end_are_not_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = met(world)
    monkeypatch.setattr(b._hub, "remove", lambda exchange: None)
    monkeypatch.setattr(b._exchange, "say_leave", lambda: None)
    b.close(0.1)
    a.send(torch.ones(1), 1)
    send = a.isend(torch.ones(LARGE), 1)
    until(lambda: bool(b._exchange.inbox._offers))
    assert b.statistics().unexpected == 0
    send.cancel()
    assert send.wait_released(5), "a CANCEL is answered nevertheless"


def test_nothing_can_be_sent_or_received_once_the_agent_is_gone(world: World) -> None:
    a, b = met(world)
    b.send(torch.ones(1), 0)
    a.probe(1)
    a.connection.abort()
    value = torch.ones(4)
    calls: list[Callable[[], object]] = [
        lambda: a.send(value, 1),
        lambda: a.isend(value, 1),
        lambda: a.isend(torch.ones(LARGE), 1),
        lambda: a.send_tree([value], 1),
        lambda: a.send_object(1, 1),
        lambda: a.send(value, 0),
        lambda: a.recv(1),
        lambda: a.irecv(1),
        lambda: a.probe(1),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            bounded(call)
    assert a.statistics().sent == 1


def test_a_forked_child_is_told_so_whatever_locks_were_held(world: World) -> None:
    a, _ = met(world)
    held, go = threading.Event(), threading.Event()
    tensors = torch.ones(1), torch.ones(LARGE)  # torch's own threads don't survive a fork

    def hold() -> None:
        with a._exchange.lock, hub._lock, default._lock:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: the point
            child = os.fork()
        if child == 0:
            os._exit(_in_child(a, tensors))
        killer = threading.Timer(20, os.kill, (child, signal.SIGKILL))
        killer.start()
        _, status = os.waitpid(child, 0)
        killer.cancel()
    finally:
        go.set()
        thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def _in_child(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> int:
    """Return how many calls went wrong."""
    calls: list[Callable[[], object]] = [
        lambda: communicator.send(tensors[0], 1),
        lambda: communicator.recv(1, timeout=1),
        lambda: communicator.isend(tensors[1], 1, timeout=1),
    ]
    wrong = 0
    for call in calls:
        try:
            call()
            wrong += 1
        except ClosedError:
            continue
        except BaseException:  # noqa: BLE001 - it must not get out of the child
            wrong += 1
    hub.exchanges_of(communicator.connection)
    default.shutdown()
    return wrong


# Memory.


def test_a_region_that_a_waiting_offer_lies_in_is_remembered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "MAX_TOLD", 2)
    monkeypatch.setattr(peer, "MAX_REGIONS", 8)
    a, b = met(world)
    tensor = torch.full((LARGE,), 3.0)
    a.isend(tensor, 1)
    b.recv(0)  # told
    waiting = a.isend(tensor, 1, tag=9)
    kept = [torch.ones(LARGE) for _ in range(12)]  # or their addresses would come again
    for other in kept:
        work = a.isend(other, 1)
        b.recv(0)
        work.wait(5)
    assert float(b.recv(0, tag=9, timeout=5)[-1]) == 3.0
    waiting.wait(5)


@pytest.mark.parametrize("end", ["cancel", "wait"])
def test_a_receive_that_ends_while_its_memory_is_registered_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    a, b = met(world)
    receive = b.irecv(0)
    slow = Slow(monkeypatch, ReceiveOperation, "_hold")
    send = a.isend(torch.ones(LARGE), 1)
    assert slow.reached.wait(10)
    if end == "cancel":
        receive.cancel()
    else:
        with pytest.raises(TransferTimeout):
            receive.wait(0.05)
    slow.go()
    for work in (receive, send):
        assert work.wait_released(5)
    until(lambda: not b.connection.operations.transfers)
    assert b._exchange.peers[0].remote.flight == 0


def test_a_receive_that_is_given_up_owns_its_memory_until_both_halves_are_final(
    world: World, fabric: LoopbackFabric
) -> None:
    a, b = met(world)
    count = protocol.SPLIT_NBYTES // 2  # two MiB: neither half ends byte by byte
    send = a.isend(torch.ones(count), 1)
    b.probe(0)

    def wait() -> None:
        with contextlib.suppress(TransferError):  # It is cancelled by the receiver.
            send.wait(20)

    waiting = threading.Thread(target=wait)
    waiting.start()
    [offer] = b._exchange.inbox._offers.values()
    until(lambda: offer.sender_waits)
    for rank in (a, b):
        fabric.delay(1, initiator=rank.connection.name)
    out = torch.zeros(count)  # held, so that bytes that land too late have a place
    receive = b.irecv(0, out=out)
    until(lambda: receive._operation.in_flight > 0 and send._operation.in_flight > 0)  # type: ignore[union-attr]
    assert receive.statistics().route == "split"
    receive.cancel()
    fabric.delay(None, initiator=b.connection.name)
    until(lambda: receive._operation.in_flight == 0)  # type: ignore[union-attr]
    assert not receive.wait_released(0.05), "the sender still writes"
    fabric.delay(None, initiator=a.connection.name)
    assert receive.wait_released(5)
    waiting.join(10)


def test_an_operation_that_has_ended_before_it_starts_enters_no_table(world: World) -> None:
    a, b = met(world)
    done = a.irecv(1)
    b.send(torch.ones(1), 0)
    done.wait()
    operation = done._operation
    assert operation is not None
    num_operations = len(a.connection.operations)
    a.connection.operations.add(operation)
    assert len(a.connection.operations) == num_operations


@pytest.mark.parametrize("left", [0, 64])
@pytest.mark.parametrize("form", ["tensor", "scattered", "tree", "large", "large tree"])
def test_a_target_that_has_shrunk_since_is_refused(world: World, form: str, left: int) -> None:
    a, b = met(world)
    count = LARGE if "large" in form else 5000
    out = torch.zeros(2 * count)
    target = out[::2] if form == "scattered" else out[:count]
    is_tree = "tree" in form
    receive = b.irecv_tree(0, out=[target]) if is_tree else b.irecv(0, out=target)
    out.untyped_storage().resize_(left)
    sent = torch.ones(count)
    send = a.isend_tree([sent], 1) if is_tree else a.isend(sent, 1)
    with pytest.raises(ValueError, match=r"shrunk|freed"):
        receive.wait(5)
    until(lambda: send.exception() is not None)


@pytest.mark.parametrize("left", [0, 64])
@pytest.mark.parametrize("count", [5000, LARGE])
def test_what_was_freed_while_it_waited_to_be_sent_is_not_sent(
    world: World, left: int, count: int
) -> None:
    a, b = met(world)
    for _ in range(protocol.CREDIT_FRAMES):
        a.isend(torch.ones(1), 1, tag=9)
    gone, next_one = torch.ones(count), torch.full((3,), 7.0)
    send = a.isend(gone, 1, tag=1)
    after = a.isend(next_one, 1, tag=1)
    assert send.statistics().queued
    gone.untyped_storage().resize_(left)
    assert float(b.recv(0, tag=1, timeout=5)[0]) == 7.0
    with pytest.raises(TransferError, match="resized or freed"):
        send.wait(5)
    after.wait(5)
    for _ in range(protocol.CREDIT_FRAMES):
        b.recv(0, tag=9)
    allowance = a._exchange.peers[1].allowance
    until(lambda: allowance.frames > protocol.CREDIT_FRAMES // 2)


# Liars, and the rest.


def test_a_number_that_is_offered_twice_is_refused(world: World) -> None:
    a, b = met(world)
    sent = []
    exchange = a._exchange
    send = exchange.send

    def note(to: Any, kind: int, body: bytes) -> None:
        sent.append((kind, body))
        send(to, kind, body)

    exchange.outbox._send = note  # type: ignore[assignment]
    work = a.isend(torch.full((LARGE,), 2.0), 1)
    b.probe(0)
    [(kind, body)] = sent
    refused = b.connection.statistics().frames_refused
    send(exchange.peers[1], kind, body)
    until(lambda: b.connection.statistics().frames_refused == refused + 1)
    assert float(b.recv(0)[-1]) == 2.0
    work.wait(5)
    assert b.statistics().unexpected == 0


def test_cancels_at_any_moment_leave_nothing(world: World, path: str) -> None:
    a, b = met(world)
    stop = threading.Event()
    failures: list[BaseException] = []
    sizes = (0, 1, 500, 16384, 16385, 70000)

    def run(one: Communicator, tag: int) -> None:
        rng = random.Random(2 * tag + one.rank)
        try:
            while not stop.is_set():
                timeout = rng.choice((0.001, 0.02, 1.0))
                if (tag + one.rank) % 2:
                    tensor = torch.full((rng.choice(sizes),), 3.0)
                    work = one.isend(tensor, 1 - one.rank, tag=tag, timeout=timeout)
                else:
                    work = one.irecv(1 - one.rank, tag=tag, timeout=timeout)
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.002)
                    work.cancel()
                with contextlib.suppress(TransferError):
                    received = work.result()
                    assert received is None or bool((received == 3).all())
                assert work.wait_released(10), work
        except BaseException as error:  # noqa: BLE001 - raised by the test's thread
            failures.append(error)
            stop.set()

    threads = [
        threading.Thread(target=run, args=(one, tag), daemon=True)
        for one in (a, b)
        for tag in range(2)
    ]
    for thread in threads:
        thread.start()
    stop.wait(2)  # So long it is tried; shorter if it fails.
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not failures, failures
    for one in (a, b):
        until(lambda: not one.connection.operations.transfers)  # noqa: B023 - called in this turn
        until(lambda: one.statistics().outstanding == 0)  # noqa: B023 - called in this turn
        assert all(peer.remote.flight == 0 for peer in one._exchange.peers.values())
