"""Faults that a second look at the mended engine found, and that stay mended."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torch_nixl.engine import ending, host, lost, remotes, transfer, wire
from torch_nixl.engine.adapter import Direction, MemoryKind, Registration, Transfer
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import Call, LoopbackAdapter, LoopbackFabric
from torch_nixl.engine.memory import Memory, address_memory, tensor_memory
from torch_nixl.engine.offer import OfferedMemory
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.engine.transfer import TransferOperation
from torch_nixl.errors import PeerLostError, TransferError

READ, WRITE = Direction.READ, Direction.WRITE
KIND = 40
Connect = Callable[..., Connection]


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.fixture
def connect(fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    made: list[Connection] = []
    kept: list[object] = []
    # What fails here may leave a thread behind that would keep `abort` waiting.
    monkeypatch.setattr(ending, "ABORT_SECONDS", 0.1)
    monkeypatch.setattr(host, "keep_for_ever", kept.append)

    def connect(
        name: str,
        *,
        timeout: float = 5.0,
        peer_timeout: float | None = None,
        secret: bytes | None = None,
    ) -> Connection:
        adapter = fabric.adapter(name)
        made.append(Connection(adapter, timeout=timeout, peer_timeout=peer_timeout, secret=secret))
        return made[-1]

    yield connect
    for connection in made:
        connection.abort()


def memory(nbytes: int = 64, fill: int = 0) -> Memory:
    return tensor_memory(torch.full((nbytes,), fill, dtype=torch.uint8))


def acquaint(one: Connection, other: Connection) -> Remote:
    """Have two connections meet; return what the first knows of the second."""
    one.claim(other.expose(READ, [memory()]).offer(), [memory()]).wait(5)
    remote = one.contacts.get(other.name)
    assert remote is not None
    assert until(lambda: remote.contact is Contact.READY and remote.flight == 0)
    return remote


def fail_next(fabric: LoopbackFabric, connection: Connection, what: Call, error: Exception) -> None:
    assert isinstance(connection.adapter, LoopbackAdapter)
    fabric.fail_next(connection.adapter, what, error)


def in_thread(work: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(condition())


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


def test_a_numbered_frame_that_finds_its_peer_lost_does_not_lock_up(
    connect: Connect, fabric: LoopbackFabric
) -> None:
    reader, owner = connect("r", secret=b"shared"), connect("o", secret=b"shared")
    remote = acquaint(reader, owner)
    offer = owner.expose(READ, [memory()]).offer()
    fabric.stop("o")
    active = reader.claim(offer, [memory()])
    reader.progress.stop()
    fail_next(fabric, reader, "notify", PeerLostError("broken", remote="o"))
    sending = in_thread(reader.contacts.send, remote, wire.Pong(1))
    sending.join(1)
    assert not sending.is_alive()
    with pytest.raises(PeerLostError):
        active.wait(1)


def test_a_frame_sent_while_a_remote_is_learned_anew_does_not_lose_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, owner = connect("r"), connect("o")
    remote = acquaint(reader, owner)
    remove = reader.adapter.remove_remote

    def remove_and_send(name: str) -> None:
        remove(name)
        in_thread(reader.contacts.send, remote, wire.Pong(1)).join(0.2)

    monkeypatch.setattr(reader.adapter, "remove_remote", remove_and_send)
    monkeypatch.setattr(remotes, "MAX_KNOWN_REGIONS", 1)
    reader.claim(owner.expose(READ, [memory()]).offer(), [memory()]).wait(5)
    assert remote.lost_error is None


def test_a_post_that_fails_in_the_background_fails_its_operation_only(
    connect: Connect, fabric: LoopbackFabric
) -> None:
    reader, owner = connect("r"), connect("o")
    acquaint(reader, owner)
    fail_next(fabric, reader, "post", TransferError("scripted"))
    ended = threading.Event()
    active = reader.claim(owner.expose(READ, [memory()]).offer(), [memory()])
    active.add_done_callback(ended.set)
    assert ended.wait(5)
    assert isinstance(active.error, TransferError)
    acquaint(reader, owner)


def test_an_interrupt_right_before_a_post_stays_an_interrupt(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, owner = connect("r"), connect("o")
    acquaint(reader, owner)
    reader.progress.stop()

    def interrupted(one: Transfer, notification: bytes = b"") -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader.adapter, "post", interrupted)
    active = reader.claim(owner.expose(READ, [memory()]).offer(), [memory()])
    with pytest.raises(KeyboardInterrupt):
        active.wait(5)
    with pytest.raises(TransferError, match="interrupted"):
        active.wait(5)


def test_a_closing_frame_that_was_not_sent_is_no_success(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, owner = connect("w"), connect("o")
    arrived = threading.Event()
    owner.route(KIND, lambda remote, body: arrived.set())
    target = owner.register(memory())
    late = write(writer, owner, target, frame=(KIND, b""))
    writer.progress.stop()
    post, aborting = writer.adapter.post, threading.Thread(target=writer.abort, daemon=True)

    def slow_post(one: Transfer, notification: bytes = b"") -> bool:
        aborting.start()
        assert until(lambda: writer.closed)
        return post(one, notification)

    monkeypatch.setattr(writer.adapter, "post", slow_post)
    writer.transfer(late)
    late.attend()
    aborting.join(5)
    assert late.done
    assert late.error is not None or arrived.wait(1)


def test_a_wait_for_nan_seconds_is_refused(connect: Connect) -> None:
    owner = connect("o", timeout=0.1)
    exposed = owner.expose(READ, [memory()])
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            exposed.wait(math.nan)
        except (ValueError, TransferError) as error:
            ends.append(error)

    waiting = in_thread(wait)
    waiting.join(5)
    exposed.cancel()  # If it waits all the same, for ever and past the operation's own deadline.
    waiting.join(5)
    assert [type(end) for end in ends] == [ValueError]


def test_a_transfer_that_a_frame_starts_does_not_wait_for_its_own_poll(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, owner = connect("w"), connect("o")
    monkeypatch.setattr(transfer, "SHORT_BYTES", 1)
    target = owner.register(memory())
    operation = write(writer, owner, target)
    writer.route(KIND, lambda remote, body: writer.transfer(operation))
    back = acquaint(owner, writer)
    owner.contacts.send_raw(back, owner.codec.pack_raw(KIND, b"", to="w"))
    assert until(lambda: operation.done)
    assert not writer.progress.contended


def test_close_that_withdraws_while_another_thread_aborts_does_not_raise(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = connect("o")
    tensor = torch.ones(64)
    nameless = address_memory(
        tensor.data_ptr(), 256, kind=MemoryKind.DRAM, owner=tensor.numpy()
    )  # deregistered as soon as it is released
    owner.expose(READ, [nameless])
    owner.progress.stop()
    deregister, destroyed = owner.adapter.deregister, threading.Event()
    destroy = owner.adapter.close

    def watched_destroy() -> None:
        destroy()
        destroyed.set()

    def slow_deregister(registration: Registration) -> None:
        in_thread(owner.abort)
        assert destroyed.wait(5)
        deregister(registration)

    monkeypatch.setattr(owner.adapter, "close", watched_destroy)
    monkeypatch.setattr(owner.adapter, "deregister", slow_deregister)
    owner.close()


def test_an_owner_gets_its_memory_back_from_a_reader_that_had_given_it_up(
    connect: Connect, fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost, "RECONTACT_SECONDS", 0.0)
    reader, owner = connect("r"), connect("o")
    acquaint(reader, owner)
    exposed = owner.expose(READ, [memory()])
    fail_next(fabric, reader, "post", PeerLostError("for a moment", remote="o"))
    active = reader.claim(exposed.offer(), [memory()])
    with pytest.raises(PeerLostError):
        active.wait(5)
    assert active.wait_released(5)
    acquaint(reader, owner)
    exposed.cancel()
    assert exposed.wait_released(1)


def test_a_claim_right_after_a_one_sided_loss_is_answered(
    connect: Connect, fabric: LoopbackFabric
) -> None:
    hasty, stopped = connect("h", peer_timeout=0.1), connect("s")
    acquaint(hasty, stopped)
    offer = stopped.expose(READ, [memory()]).offer()
    fabric.stop("s")
    with pytest.raises(PeerLostError):
        hasty.claim(offer, [memory()]).wait(5)
    fabric.resume("s")
    stopped.claim(hasty.expose(READ, [memory()]).offer(), [memory()]).wait(2.5)


def test_a_lost_remote_is_forgotten_though_nothing_else_happens(connect: Connect) -> None:
    reader, owner = connect("r"), connect("o")
    remote = acquaint(reader, owner)
    reader.progress.stop()
    reader.contacts.lose(remote, PeerLostError("gone", remote="o"))
    assert reader.rounds.poll_interval() is not None


def test_a_peer_can_be_contacted_anew_as_soon_as_its_loss_was_raised(
    connect: Connect, fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, owner = connect("r"), connect("o")
    remote = acquaint(reader, owner)
    offers = [owner.expose(READ, [memory()]).offer() for _ in range(2)]
    fabric.stop("o")
    active = reader.claim(offers[0], [memory()])
    release = reader.registry.release

    def slow_release(held: RegisteredMemory) -> None:
        time.sleep(0.05)  # for whoever is told of the loss to come first
        release(held)

    monkeypatch.setattr(reader.registry, "release", slow_release)
    in_thread(reader.contacts.lose, remote, PeerLostError("for a moment", remote="o"))
    with pytest.raises(PeerLostError):
        active.wait(5)
    fabric.resume("o")
    reader.claim(offers[1], [memory()]).wait(5)


def test_a_frame_handler_may_close_the_connection(connect: Connect) -> None:
    receiver, sender = connect("r"), connect("s")
    remote = acquaint(sender, receiver)
    acquaint(receiver, sender)
    receiver.progress.stop()
    receiver.route(KIND, lambda remote, body: receiver.close(0.2))
    sender.contacts.send_raw(remote, sender.codec.pack_raw(KIND, b"", to="r"))
    handling = in_thread(receiver.progress.step)
    handling.join(2)
    assert not handling.is_alive()
