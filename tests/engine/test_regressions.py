"""What a hostile review broke once: ends, memory, loss and cost, over the loopback fabric."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from torch_nixl.engine import ending, host, liveness, operation, transfer, wire
from torch_nixl.engine.adapter import Direction, MemoryKind, Region, Registration, Transfer
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import Memory, address_memory, tensor_memory
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.errors import (
    PeerLostError,
    RegistrationError,
    TorchNixlError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

READ, WRITE = Direction.READ, Direction.WRITE
PIECE = 1 << 14
NBYTES = 16 * PIECE
Connect = Callable[..., Connection]


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.fixture
def connect(fabric: LoopbackFabric) -> Iterator[Connect]:
    made: list[Connection] = []

    def connect(
        name: str,
        *,
        timeout: float | None = 10.0,
        peer_timeout: float | None = None,
        secret: bytes | None = None,
    ) -> Connection:
        made.append(
            Connection(
                fabric.adapter(name), timeout=timeout, peer_timeout=peer_timeout, secret=secret
            )
        )
        return made[-1]

    yield connect
    for connection in made:
        connection.abort()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(transfer, "LONG_PIECE_BYTES", PIECE)


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


# Ends.


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("how", ["cancel", "expire"])
def test_an_end_that_loses_the_cpu_midway_never_makes_a_part_a_success(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    owner, reader = connect("o"), connect("r")
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    active = reader.claim(owner.expose(READ, [memory(NBYTES, 1)]).offer(), [tensor_memory(target)])
    finish, post = operation.Operation._finish, reader.adapter.post
    ending, ended = threading.Event(), threading.Event()
    posts: list[Transfer] = []

    def slow_finish(self: operation.Operation, error: BaseException | None) -> bool:
        if self is active and isinstance(error, (TransferCancelled, TransferTimeout)):
            ending.set()
            ended.wait(2)
        elif self is active:
            try:
                return finish(self, error)
            finally:
                ended.set()
        return finish(self, error)

    def slow_post(one: Transfer, notification: bytes = b"") -> bool:
        posts.append(one)
        if len(posts) == 2:
            in_thread(getattr(active, how))
            assert ending.wait(5)
        return post(one, notification)

    monkeypatch.setattr(operation.Operation, "_finish", slow_finish)
    monkeypatch.setattr(reader.adapter, "post", slow_post)
    try:
        active.wait(8)
    except TransferError:
        return
    assert target.all()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("where", ["prepare", "poll", "post"])
def test_an_interrupted_wait_is_no_success_with_bytes_missing(
    connect: Connect, fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    owner, reader = connect("o"), connect("r")
    fabric.delay(PIECE // 4)
    reader.progress.stop()  # so that the pieces are posted here, where the signal comes
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    call, calls = getattr(reader.adapter, where), Counter[str]()

    def interrupted(*args: object) -> object:
        calls[where] += 1
        result = call(*args)
        if calls[where] == 3:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(reader.adapter, where, interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        active = reader.claim(
            owner.expose(READ, [memory(NBYTES, 1)]).offer(), [tensor_memory(target)]
        )
        with pytest.raises(KeyboardInterrupt):
            active.wait(5)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(TransferError, match="interrupted"):
        active.wait(5)
    assert until(lambda: active.attend() or active.released)


def test_each_wait_raises_an_error_of_its_own(connect: Connect) -> None:
    owner, reader = connect("o"), connect("r")
    read(owner, reader)
    active = reader.claim(owner.expose(READ, [memory()]).offer(), [memory()])
    remote = active.remote
    assert remote is not None
    active.on_lost(PeerLostError("gone", remote="o"))
    raised: list[PeerLostError] = []
    for _ in range(3):
        with pytest.raises(PeerLostError, match="gone") as caught:
            active.wait(5)
        raised.append(caught.value)
    assert len({id(error) for error in raised}) == 3
    assert {error.remote for error in raised} == {"o"}
    assert active.error is not None and active.error.__traceback__ is None


def test_timeouts_that_are_no_durations_are_refused(connect: Connect) -> None:
    owner = connect("o")
    assert owner.expose(READ, [memory()], timeout=math.inf).deadline is None
    offer = owner.expose(READ, [memory()]).offer()
    for timeout in (-1.0, math.nan):
        with pytest.raises(ValueError, match="timeout"):
            owner.expose(READ, [memory()], timeout=timeout)
        with pytest.raises(ValueError, match="timeout"):
            owner.claim(offer, [memory()], timeout=timeout)
    assert connect("p", timeout=None).expose(READ, [memory()]).deadline is None


# Memory.


def test_memory_that_a_lost_peer_of_another_host_may_write_stays_owned(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, writer = connect("o"), connect("w")
    ours = writer.contacts.identity
    writer.contacts.identity = wire.Identity(b"elsewhere" + bytes(7), ours.pid, ours.start_time)
    read(owner, writer)
    writer.progress.stop()  # so that it never gets to its end
    exposed = owner.expose(WRITE, [memory()])
    writer.claim(exposed.offer(), [memory()])
    assert until(lambda: exposed.remote is not None)
    assert exposed.remote is not None
    owner.contacts.lose(exposed.remote, PeerLostError("broken", remote="w"))
    with pytest.raises(PeerLostError):
        exposed.wait(5)
    assert not exposed.wait_released(0.1)
    assert exposed.memories
    monkeypatch.setattr(liveness, "OFF_HOST_SECONDS", 0.01)
    assert exposed.wait_released(5)


@pytest.mark.parametrize("patient", [True, False])
def test_abort_waits_for_a_post_or_never_gives_its_memory_back(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(host, "keep_for_ever", kept.append)
    monkeypatch.setattr(ending, "ABORT_SECONDS", 5.0 if patient else 0.05)
    owner, reader = connect("o"), connect("r")
    read(owner, reader)
    inside, go_on = threading.Event(), threading.Event()
    post = reader.adapter.post

    def slow_post(one: Transfer, notification: bytes = b"") -> bool:
        inside.set()
        go_on.wait(5)
        return post(one, notification)

    monkeypatch.setattr(reader.adapter, "post", slow_post)
    active = reader.claim(owner.expose(READ, [memory()]).offer(), [memory()])
    held = active.memories
    reader.progress.stop()

    def wait() -> None:
        with contextlib.suppress(TorchNixlError):  # As abort or the post comes first.
            active.wait(5)

    waiter = in_thread(wait)
    assert inside.wait(5)
    aborting = in_thread(reader.abort)
    aborting.join(0.05 if patient else 5)
    assert aborting.is_alive() is patient
    assert active.released is not patient
    assert (held in kept) is not patient
    go_on.set()
    aborting.join(5)
    waiter.join(5)
    assert active.released


@pytest.mark.parametrize("peer", ["alive", "dead"])
def test_abort_never_gives_back_what_a_living_peer_was_granted(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(host, "keep_for_ever", kept.append)
    owner, writer = connect("o"), connect("w")
    read(owner, writer)
    writer.progress.stop()  # so that it never gets to its end
    exposed = owner.expose(WRITE, [memory()])
    held = exposed.memories
    writer.claim(exposed.offer(), [memory()])
    assert until(lambda: exposed.remote is not None)
    monkeypatch.setattr(host, "is_alive", lambda identity: peer == "alive")
    owner.abort()
    assert exposed.released
    assert (held in kept) is (peer == "alive")


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_that_fails_gives_no_memory_back_that_others_still_move(
    connect: Connect, fabric: LoopbackFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = connect("o"), connect("r")
    read(owner, reader)
    fabric.delay(1, initiator="r")
    post = reader.adapter.post
    posted: list[Transfer] = []

    def fail_the_third(one: Transfer, notification: bytes = b"") -> bool:
        posted.append(one)
        if len(posted) == 3:
            raise TransferError("refused")
        return post(one, notification)

    monkeypatch.setattr(reader.adapter, "post", fail_the_third)
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    offer = owner.expose(READ, [memory(NBYTES, 1)]).offer()
    active = reader.claim(offer, [tensor_memory(target)])
    with pytest.raises(TransferError, match="refused"):
        active.wait(5)
    assert not active.wait_released(0.05), "two pieces still move"
    assert active.in_flight == 2
    fabric.delay(None, initiator="r")
    assert active.wait_released(5)
    assert len(posted) == 3


def registrations(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[Region]]:
    """Watch which regions are registered with the library."""
    live: list[Region] = []
    register, deregister = connection.adapter.register, connection.adapter.deregister

    def watched_register(region: Region) -> Registration:
        live.append(region)
        return register(region)

    def watched_deregister(registration: Registration) -> None:
        live.remove(registration.region)
        deregister(registration)

    monkeypatch.setattr(connection.adapter, "register", watched_register)
    monkeypatch.setattr(connection.adapter, "deregister", watched_deregister)
    return lambda: live


def part(tensor: torch.Tensor, start: int, nbytes: int) -> Memory:
    """A stretch of memory that the registry can't connect with the tensor."""
    return address_memory(
        tensor.data_ptr() + start, nbytes, kind=MemoryKind.DRAM, owner=tensor.numpy()
    )


@pytest.fixture
def physical(fabric: LoopbackFabric) -> Iterator[tuple[Connection, Connection]]:
    """Two connections whose device ids are not free to choose, as with several backends."""
    network = LoopbackFabric(free_device_ids=())
    pair = Connection(network.adapter("o"), timeout=10), Connection(network.adapter("r"))
    yield pair
    for connection in pair:
        connection.abort()


def test_equal_regions_are_registered_once_under_one_id(
    physical: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = physical
    live = registrations(reader, monkeypatch)
    target = torch.zeros(4096, dtype=torch.uint8)
    for _ in range(3):
        whole = reader.register(tensor_memory(target))
        same = reader.register(part(target, 0, 4096))
        assert len(live()) == 1
        reader.registry.release(same)
        assert len(live()) == 1
        offer = owner.expose(READ, [memory(4096, 1)]).offer()
        reader.claim(offer, [tensor_memory(target)]).wait(5)
        reader.registry.release(whole)
    assert target.all()


def test_nested_regions_share_a_registration_and_enclosing_ones_are_refused(
    physical: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = physical
    live = registrations(owner, monkeypatch)
    source = torch.ones(4096, dtype=torch.uint8)
    inner = owner.register(part(source, 1024, 512))
    for start, nbytes in ((0, 4096), (1000, 100)):
        with pytest.raises(RegistrationError, match=rf"{nbytes} bytes.*overlap.*512 bytes"):
            owner.expose(READ, [part(source, start, nbytes)])
    owner.registry.release(inner)
    outer = owner.register(part(source, 0, 4096))
    inner = owner.register(part(source, 1024, 512))
    assert [region.nbytes for region in live()] == [4096]
    owner.registry.release(outer)
    target = torch.zeros(512, dtype=torch.uint8)
    offer = owner.expose(READ, [part(source, 1024, 512)]).offer()
    reader.claim(offer, [tensor_memory(target)]).wait(5)
    assert target.all()
    owner.registry.release(inner)


def test_close_keeps_what_a_foreign_peer_may_touch_and_does_not_wait_for_it(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[RegisteredMemory, ...]] = []
    monkeypatch.setattr(host, "keep_for_ever", kept.append)
    owner = connect("o")
    exposed = owner.expose(WRITE, [memory()], public=True)
    owner.accept_key(exposed, b"a foreign key of some length")
    held = exposed.memories
    started = time.monotonic()
    owner.close()
    assert time.monotonic() - started < 2
    assert kept == [held]
