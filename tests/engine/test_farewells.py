"""Who has left is told nothing more: NIXL logs an error for each word to it, over the loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from torch_nixl.engine import wire
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.errors import MetadataError, PeerLostError, TorchNixlError

DEADLINE = 5.0
SECRET = b"sixteen bytes or"
NO_KEY = bytes(wire.KEY_NBYTES)
KIND = 40
Told = list[tuple[str, str]]

# Words that are answered: with PONG, DONE, DONE again and REFUSE.
ANSWERED = [
    wire.Ping(1),
    wire.Granted(NO_KEY, 1),
    wire.Revoke(NO_KEY, 1, wire.Reason.REVOKED, "no more"),
    wire.Claim(NO_KEY, 1, Direction.READ, 64, 1),
]


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Connection]]:
    fabric = LoopbackFabric()
    one, other = (Connection(fabric.adapter(name), secret=request.param) for name in "ab")
    yield one, other
    one.abort()
    other.abort()


def met(one: Connection, other: Connection) -> Remote:
    """Have them meet; return what the second knows of the first. The first then polls no more."""
    target = torch.zeros(64, dtype=torch.uint8)
    offer = one.expose(Direction.READ, [tensor_memory(torch.ones(64, dtype=torch.uint8))]).offer()
    other.claim(offer, [tensor_memory(target)]).wait(DEADLINE)
    remote, back = other.contacts.get(one.name), one.contacts.get(other.name)
    assert remote is not None and back is not None
    for connection, end in ((other, remote), (one, back)):
        ready = time.monotonic() + DEADLINE
        assert connection.progress.wait_until(lambda end=end: end.answered, ready)  # type: ignore[misc]
    one.progress.stop()
    one.progress.sweep()
    return remote


def spy(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Told:
    """Note all that a connection sends, and to whom it made way."""
    told: Told = []
    notify, add = connection.adapter.notify, connection.adapter.add_remote

    def noted(name: str, message: bytes) -> None:
        told.append(("notify", name))
        notify(name, message)

    def added(blob: bytes) -> str:
        told.append(("add_remote", connection.adapter.inspect(blob).agent))
        return add(blob)

    monkeypatch.setattr(connection.adapter, "notify", noted)
    monkeypatch.setattr(connection.adapter, "add_remote", added)
    return told


@pytest.mark.parametrize("word", ANSWERED, ids=[type(word).__name__ for word in ANSWERED])
def test_words_that_come_with_a_bye_are_not_answered(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch, word: wire.Frame
) -> None:
    one, other = pair
    remote = met(one, other)
    back = one.contacts.get(other.name)
    other.contacts.send(remote, word)
    other.close()
    told = spy(one, monkeypatch)
    one.progress.sweep()
    assert told == []
    assert back is not None and back.closed and one.contacts.get(other.name) is None


@pytest.mark.parametrize("word", ANSWERED, ids=[type(word).__name__ for word in ANSWERED])
def test_the_same_words_alone_are_answered(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch, word: wire.Frame
) -> None:
    one, other = pair
    remote = met(one, other)
    other.contacts.send(remote, word)
    other.contacts.send(remote, wire.Pong(1))
    told = spy(one, monkeypatch)
    one.progress.sweep()
    assert told == [("notify", other.name)]


def test_what_comes_with_a_bye_is_taken_in(pair: tuple[Connection, Connection]) -> None:
    one, other = pair
    heard: list[bytes] = []
    one.route(KIND, lambda _, body: heard.append(body))
    remote = met(one, other)
    other.contacts.send_body(remote, KIND, b"first")
    other.contacts.send_body(remote, KIND, b"last")
    other.close()
    one.progress.sweep()
    assert heard == [b"first", b"last"]


def test_who_has_come_and_gone_is_heard_and_not_contacted(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    heard: list[bytes] = []
    one.route(KIND, lambda _, body: heard.append(body))
    one.progress.stop()
    other.progress.stop()
    remote = other.contact(one.name, one.contacts.own_blob)
    other.contacts.send_body(remote, KIND, b"hello")
    assert one.adapter.drain() == []  # The round trip that contact takes.
    other.progress.sweep()
    other.close()
    told = spy(one, monkeypatch)
    one.progress.sweep()
    assert heard == [b"hello"]
    assert told == []
    assert one.contacts.get(other.name) is None


def test_a_forged_bye_keeps_nobody_from_being_answered(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    remote = met(one, other)
    forged = bytearray(wire.Codec(1, None, name=other.name).pack(wire.Bye("gone"), to=one.name))
    forged[-1] ^= 1
    other.contacts.send(remote, wire.Ping(1))
    other.contacts.send_raw(remote, bytes(forged))
    told = spy(one, monkeypatch)
    one.progress.sweep()
    assert told == [("notify", other.name)]
    other.contacts.send(remote, wire.Ping(2))
    one.progress.sweep()
    assert told == [("notify", other.name)] * 2


def test_two_who_end_at_once_do_not_speak_to_who_was_forgotten(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    met(one, other)
    failed: list[TorchNixlError] = []
    notify = one.adapter.notify

    def late(name: str, message: bytes) -> None:
        """Have the other leave, and another thread poll, right before what is sent is sent."""
        in_thread(other.close)
        in_thread(one.progress.step)
        one.lost.sweep()
        try:
            notify(name, message)
        except (PeerLostError, MetadataError) as error:
            failed.append(error)

    monkeypatch.setattr(one.adapter, "notify", late)
    back = one.contacts.get(other.name)
    assert back is not None and back.contact is Contact.READY
    one.close()
    assert other.closed
    assert failed == []


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_who_is_lost_while_something_is_sent_is_not_tried_twice(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    met(one, other)
    back = one.contacts.get(other.name)
    assert back is not None
    tried: list[str] = []

    def forgotten(name: str, _: bytes) -> None:
        tried.append(name)
        one.contacts.lose(back, PeerLostError("gone", remote=name))
        raise MetadataError(f"{name} isn't known")

    monkeypatch.setattr(one.adapter, "notify", forgotten)
    one.contacts.send(back, wire.Ping(1))
    assert tried == [other.name]
