"""What a hostile review broke once: contact, loss, frames, waiters and cost, over the loopback."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torch_nixl.engine import lost, remotes, wire
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import Memory, tensor_memory
from torch_nixl.engine.offer import OfferedMemory
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.engine.transfer import TransferOperation
from torch_nixl.errors import PeerLostError, TorchNixlError

READ, WRITE = Direction.READ, Direction.WRITE
SECRET = b"sixteen bytes or"
KIND = 40
Connect = Callable[..., Connection]


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.fixture
def connect(fabric: LoopbackFabric) -> Iterator[Connect]:
    made: list[Connection] = []

    def connect(
        name: str, *, peer_timeout: float | None = None, secret: bytes | None = None
    ) -> Connection:
        adapter = fabric.adapter(name)
        made.append(Connection(adapter, timeout=10, peer_timeout=peer_timeout, secret=secret))
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


def acquaint(one: Connection, other: Connection) -> Remote:
    """Have two connections meet; return what the first knows of the second."""
    read(other, one)
    remote = one.contacts.get(other.name)
    assert remote is not None
    assert until(lambda: remote.contact is Contact.READY)
    return remote


def in_thread(work: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(condition())


# Contact and loss.


def test_a_process_that_only_gave_its_metadata_away_answers(connect: Connect) -> None:
    quiet, caller = connect("q"), connect("c")
    remote = caller.contact("q", quiet.metadata()[0])
    assert caller.progress.wait_until(lambda: remote.contact is Contact.READY, time.monotonic() + 5)


def test_a_peer_that_was_given_up_and_lives_is_contacted_anew(
    connect: Connect, fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost, "RECONTACT_SECONDS", 0.0)
    hasty, stopped = connect("h", peer_timeout=0.1), connect("s")
    acquaint(hasty, stopped)
    offer = stopped.expose(READ, [memory()]).offer()
    fabric.stop("s")
    active = hasty.claim(offer, [memory()])
    with pytest.raises(PeerLostError, match="peer_timeout"):
        active.wait(5)
    assert active.wait_released(5)
    fabric.resume("s")
    read(hasty, stopped)
    read(stopped, hasty)


def test_silence_counts_from_the_first_ping_that_was_not_answered(
    connect: Connect, fabric: LoopbackFabric
) -> None:
    caller, busy = connect("c", peer_timeout=0.4), connect("b")
    remote = acquaint(caller, busy)
    offer = busy.expose(READ, [memory()]).offer()
    remote.heard_at -= 100.0  # nobody needed anything for so long
    fabric.stop("b")
    started = time.monotonic()
    with pytest.raises(PeerLostError):
        caller.claim(offer, [memory()]).wait(5)
    assert 0.35 < time.monotonic() - started < 3


def test_that_a_peer_is_still_there_is_no_news(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After news a waiter polls hotly: at four answers a second that took 3 % of a core."""
    one, other = connect("o"), connect("t")
    remote = acquaint(one, other)
    time.sleep(0.1)  # What has to do with that has arrived.
    news: list[str] = []

    def spy_on(connection: Connection) -> None:
        poll = connection.rounds.poll

        def spied() -> bool:
            moved = poll()
            if moved:
                news.append(connection.name)
            return moved

        monkeypatch.setattr(connection.rounds, "poll", spied)

    spy_on(one)
    spy_on(other)
    received = one.statistics().frames_received
    one.contacts.send(remote, wire.Ping(1))
    assert until(lambda: one.statistics().frames_received > received)
    assert not news
    read(other, one)
    assert set(news) == {"o", "t"}


def test_a_new_contact_waits_until_the_lost_one_is_forgotten(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, owner = connect("c"), connect("o")
    remote = acquaint(caller, owner)
    caller.metadata()  # so that it goes on polling
    done: list[str] = []
    sweeping, go_on = threading.Event(), threading.Event()
    add, remove = caller.adapter.add_remote, caller.adapter.remove_remote

    def watched_add(blob: bytes) -> str:
        done.append("add")
        return add(blob)

    def slow_remove(name: str) -> None:
        sweeping.set()
        go_on.wait(5)
        remove(name)
        done.append("remove")

    monkeypatch.setattr(caller.adapter, "add_remote", watched_add)
    monkeypatch.setattr(caller.adapter, "remove_remote", slow_remove)
    caller.contacts.lose(remote, PeerLostError("for a moment", remote="o"))
    assert sweeping.wait(5)
    reading = in_thread(read, owner, caller)
    reading.join(0.05)
    go_on.set()
    reading.join(5)
    assert done[:2] == ["remove", "add"]
    read(owner, caller)


def test_many_threads_that_crowd_a_remote_all_get_their_bytes(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "MAX_KNOWN_REGIONS", 2)
    owner, reader = connect("o"), connect("r")
    add = reader.adapter.add_remote

    def slow_add(blob: bytes) -> str:
        time.sleep(0.001)  # for the others to come in between
        return add(blob)

    monkeypatch.setattr(reader.adapter, "add_remote", slow_add)
    exposed = [owner.expose(READ, [memory(fill=1)]) for _ in range(60)]
    offers = [one.offer() for one in exposed]
    failures: list[BaseException] = []

    def work(start: int) -> None:
        for offer in offers[start::6]:
            target = torch.zeros(64, dtype=torch.uint8)
            try:
                reader.claim(offer, [tensor_memory(target)]).wait(5)
                assert target.all()
            except (TorchNixlError, AssertionError) as error:
                failures.append(error)

    threads = [in_thread(work, start) for start in range(6)]
    for thread in threads:
        thread.join(10)
    assert not failures
    assert reader.counters.relearned > 10
    assert until(lambda: all(one.released and one.error is None for one in exposed))


# Frames.


def test_a_frame_that_a_handler_chokes_on_costs_none_behind_it(connect: Connect) -> None:
    receiver, sender = connect("r"), connect("s")
    remote = acquaint(sender, receiver)
    got: list[bytes] = []

    def handle(remote: Remote, body: bytes) -> None:
        if not got:
            got.append(b"choked")
            raise RuntimeError("a bug above")
        got.append(body)

    receiver.route(KIND, handle)
    receiver.progress.stop()
    for body in (b"1", b"2", b"3"):
        sender.contacts.send_raw(remote, sender.codec.pack_raw(KIND, body, to="r"))
    receiver.progress.step()
    assert got == [b"choked", b"2", b"3"]
    assert receiver.statistics().frames_refused == 1
    assert not receiver.closed


def test_a_frame_that_loses_the_cpu_is_not_overtaken_and_refused(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, sender = connect("r", secret=SECRET), connect("s", secret=SECRET)
    remote = acquaint(sender, receiver)
    notify = sender.adapter.notify
    first, overtaken, arrived = threading.Event(), threading.Event(), threading.Event()
    receiver.route(KIND, lambda remote, body: arrived.set())

    def slow_notify(name: str, message: bytes) -> None:
        if threading.current_thread() is slow:
            first.set()
            overtaken.wait(0.2)
        notify(name, message)

    def overtake() -> None:
        for number in range(400):
            sender.contacts.send(remote, wire.Pong(number))
        overtaken.set()

    monkeypatch.setattr(sender.adapter, "notify", slow_notify)
    slow = threading.Thread(target=sender.contacts.send, args=(remote, wire.Pong(0)))
    slow.start()
    assert first.wait(5)
    in_thread(overtake).join(5)
    slow.join(5)
    sender.contacts.send_raw(remote, sender.codec.pack_raw(KIND, b"", to="r"))
    assert arrived.wait(5)
    assert receiver.statistics().frames_refused == 0


def test_threads_that_send_to_several_peers_have_no_frame_refused(connect: Connect) -> None:
    hub = connect("hub", secret=SECRET)
    peers = [connect(name, secret=SECRET) for name in ("p", "q")]
    known = [acquaint(hub, peer) for peer in peers]
    before = [peer.statistics().frames_received for peer in peers]

    def work() -> None:
        for number, remote in itertools.product(range(300), known):
            hub.contacts.send(remote, wire.Pong(number))

    for thread in [in_thread(work) for _ in range(6)]:
        thread.join(10)
    for peer, count in zip(peers, before, strict=True):
        assert until(lambda: peer.statistics().frames_received >= count + 1800)  # noqa: B023 - called in this turn
        assert peer.statistics().frames_refused == 0


def write(
    writer: Connection, owner: Connection, target: RegisteredMemory, **options: Any
) -> TransferOperation:
    """Make an operation that writes into an owner's memory, by the rules of a protocol above."""
    remote = acquaint(writer, owner)
    for blob in owner.metadata([target], connection=False):
        writer.adapter.add_remote(blob)
    theirs = [OfferedMemory(target.memory.kind, target.spans, target.memory.nbytes)]
    source = [writer.register(memory(target.memory.nbytes, fill=1))]
    return TransferOperation(writer, remote, WRITE, source, theirs, **options)


def test_a_closing_frame_that_comes_after_many_others_is_taken(connect: Connect) -> None:
    owner, writer = connect("o", secret=SECRET), connect("w", secret=SECRET)
    arrived = threading.Event()
    owner.route(KIND, lambda remote, body: arrived.set())
    target = owner.register(memory())
    late = write(writer, owner, target, frame=(KIND, b"late"))
    assert late.remote is not None
    for number in range(400):
        writer.contacts.send(late.remote, wire.Pong(number))
    writer.transfer(late)
    late.wait(5)
    assert arrived.wait(5)
    assert owner.statistics().frames_refused == 0
