"""What the loopback fake does on request, and where it differs from NIXL on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from torch_nixl._testing.sides import Side, pair, spans
from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind, Region
from torch_nixl.engine.loopback import Call, LoopbackAdapter, LoopbackFabric
from torch_nixl.engine.loopback_tables import Blob
from torch_nixl.errors import (
    BackendError,
    MetadataError,
    PeerLostError,
    RegistrationError,
    TorchNixlError,
)
from torch_nixl.testing import LoopbackHarness

READ, WRITE = Direction.READ, Direction.WRITE
STEP = 1000


@pytest.fixture
def harness() -> LoopbackHarness:
    return LoopbackHarness()


def loopback(side: Side) -> LoopbackAdapter:
    assert isinstance(side.adapter, LoopbackAdapter)
    return side.adapter


def steps(*sides: Side, count: int = 4) -> None:
    for _ in range(count):
        for side in sides:
            side.step()


def test_the_fake_is_an_adapter(harness: LoopbackHarness) -> None:
    adapter: Adapter = harness.fabric.adapter("a")
    assert adapter.name == "a"
    assert adapter.capabilities.free_device_ids == {MemoryKind.DRAM}
    assert "alive" in repr(adapter)
    adapter.close()
    assert "closed" in repr(adapter)


def test_names_are_unique_among_the_living(harness: LoopbackHarness) -> None:
    first = harness.fabric.adapter("a")
    with pytest.raises(ValueError, match="alive"):
        harness.fabric.adapter("a")
    first.close()
    harness.fabric.adapter("a")
    with pytest.raises(ValueError, match="name"):
        harness.fabric.adapter("")


def test_inline_transfer_completes_in_post(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    a.buffer[:] = 1
    transfer = a.transfer(WRITE, a.span(0, STEP), b.span(0, STEP), "b")
    assert a.adapter.post(transfer)
    assert b.buffer[:STEP].all()


def test_tcp_transfer_moves_only_while_the_target_makes_progress() -> None:
    a, b = pair(LoopbackHarness(mode="tcp"))
    a.buffer[:] = 1
    size = 256 * 1024
    transfer = a.transfer(WRITE, a.span(0, size), b.span(0, size), "b")
    assert not a.adapter.post(transfer)
    for _ in range(10):
        assert not a.adapter.poll(transfer)
    assert b.buffer[1:].sum() == 0
    b.step()
    moved = int(b.buffer.sum())
    assert 0 < moved < size
    a.finish(transfer, b)
    assert b.buffer.sum() == size


def test_delay_sets_the_bytes_of_a_step(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    a.buffer[:] = 1
    harness.fabric.delay(STEP)
    transfer = a.transfer(WRITE, a.span(0, 3 * STEP), b.span(0, 3 * STEP), "b")
    assert not a.adapter.post(transfer)
    seen = [int(b.buffer[: 3 * STEP].sum())]
    while not a.adapter.poll(transfer):
        seen.append(int(b.buffer[: 3 * STEP].sum()))
    assert seen == [STEP, 2 * STEP]
    harness.fabric.delay(None)
    assert a.adapter.post(transfer)
    with pytest.raises(ValueError, match="at least a byte"):
        harness.fabric.delay(0)


def test_delay_can_be_for_one_initiator(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    harness.fabric.delay(STEP, initiator="a")
    slow = a.transfer(WRITE, a.span(0, 3 * STEP), b.span(0, 3 * STEP), "b")
    fast = b.transfer(READ, b.span(0, 3 * STEP), a.span(0, 3 * STEP), "a")
    assert not a.adapter.post(slow)
    assert b.adapter.post(fast)


def test_released_transfer_writes_late_until_its_agent_closes(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    a.buffer[:] = 1
    harness.fabric.delay(STEP)
    transfer = a.transfer(WRITE, a.span(0, 4 * STEP), b.span(0, 4 * STEP), "b")
    assert not a.adapter.post(transfer)
    a.adapter.release(transfer)
    b.buffer[:] = 0
    steps(a, b, count=1)
    assert b.buffer.sum() == STEP
    assert not b.buffer[:STEP].any()
    a.adapter.close()
    steps(b)
    assert b.buffer.sum() == STEP


def test_killed_agent_moves_and_says_nothing_more(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    harness.fabric.delay(STEP)
    a.buffer[:] = 1
    transfer = a.transfer(WRITE, a.span(0, 2 * STEP), b.span(0, 2 * STEP), "b")
    assert not a.adapter.post(transfer)
    harness.fabric.kill("a")
    assert not a.adapter.poll(transfer)
    a.adapter.notify("b", b"from the grave")
    assert a.adapter.drain() == []
    steps(b)
    assert b.buffer.sum() == STEP
    assert b.inbox == []
    with pytest.raises(PeerLostError) as info:
        b.adapter.notify("a", b"x")
    assert info.value.remote == "a"
    with pytest.raises(ValueError, match="no agent named 'a'"):
        harness.fabric.kill("a")


def test_message_to_a_dead_agent_is_lost_without_an_error(harness: LoopbackHarness) -> None:
    a, _ = pair(harness)
    harness.fabric.kill("b")
    a.adapter.notify("b", b"lost")
    a.step()
    with pytest.raises(PeerLostError):
        a.adapter.notify("b", b"refused")


def test_cut_stops_everything_without_an_error_until_healed(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    a.buffer[:] = 1
    harness.fabric.cut("b", "a")
    transfer = a.transfer(WRITE, a.span(0, STEP), b.span(0, STEP), "b")
    assert not a.adapter.post(transfer, b"done")
    a.adapter.notify("b", b"first")
    steps(a, b)
    assert not a.adapter.poll(transfer)
    assert not b.inbox
    harness.fabric.heal("a", "b")
    a.finish(transfer, b)
    steps(a, b)
    assert sorted(message for _, message in b.inbox) == [b"done", b"first"]
    assert b.buffer[:STEP].all()


def test_lost_notifications_are_counted_one_way(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    harness.fabric.lose_notifications("a", "b", 2)
    a.adapter.notify("b", b"1")
    a.run(a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b"), b, notification=b"2")
    a.adapter.notify("b", b"3")
    b.adapter.notify("a", b"4")
    steps(a, b)
    assert (b.inbox, a.inbox) == ([("a", b"3")], [("b", b"4")])


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("register", RegistrationError),
        ("add_remote", MetadataError),
        ("notify", PeerLostError),
        ("prepare", MetadataError),
        ("post", PeerLostError),
    ],
)
def test_call_fails_once_on_request(
    harness: LoopbackHarness, what: Call, kind: type[TorchNixlError]
) -> None:
    a, b = pair(harness)
    transfer = a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b")
    calls: dict[Call, Callable[[], object]] = {
        "register": lambda: a.adapter.register(a.region),
        "add_remote": lambda: a.know(b),
        "notify": lambda: a.adapter.notify("b", b"x"),
        "prepare": lambda: a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b"),
        "post": lambda: a.adapter.post(transfer),
    }
    harness.fabric.fail_next(loopback(a), what, BackendError("mine"))
    harness.fabric.fail_next(loopback(a), what)
    with pytest.raises(BackendError, match="mine"):
        calls[what]()
    with pytest.raises(kind, match="scripted"):
        calls[what]()
    if kind is PeerLostError:
        # The connection stays broken until the remote is learned anew.
        with pytest.raises(PeerLostError):
            calls[what]()
        a.adapter.remove_remote("b")
        a.know(b)
        a.run(a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b"), b)
    else:
        calls[what]()


def test_changed_key_poisons_the_name_for_good(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    good = b.adapter.metadata([b.registration], connection=True)
    b.adapter.deregister(b.registration)
    harness.fabric.change_keys("b")
    b.registration = b.adapter.register(b.region)
    with pytest.raises(MetadataError, match="another key"):
        a.know(b)
    for _ in range(2):
        with pytest.raises(MetadataError):
            a.adapter.add_remote(good)
        with pytest.raises(MetadataError):
            a.adapter.notify("b", b"x")
        a.adapter.remove_remote("b")


def test_successor_under_the_same_name_gives_the_loss_away(harness: LoopbackHarness) -> None:
    a, _ = pair(harness)
    harness.fabric.kill("b")
    harness.fabric.adapter("b")
    with pytest.raises(PeerLostError):
        a.adapter.notify("b", b"x")


def test_deregistering_under_a_transfer_is_our_bug(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    harness.fabric.delay(STEP)
    transfer = a.transfer(WRITE, a.span(0, 2 * STEP), b.span(0, 2 * STEP), "b")
    a.adapter.post(transfer)
    with pytest.raises(AssertionError, match="while a transfer uses it"):
        a.adapter.deregister(a.registration)
    # The target's side may: nothing revokes what it told.
    b.adapter.deregister(b.registration)
    a.finish(transfer, b)
    a.adapter.deregister(a.registration)


def test_memory_of_a_lost_peers_transfer_is_free_again(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    harness.fabric.delay(STEP)
    transfer = a.transfer(WRITE, a.span(0, 2 * STEP), b.span(0, 2 * STEP), "b")
    a.adapter.post(transfer)
    harness.fabric.kill("b")
    with pytest.raises(PeerLostError):
        a.adapter.poll(transfer)
    a.adapter.deregister(a.registration)


def test_stopped_agent_sends_only_after_it_resumes(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    harness.fabric.stop("a")
    a.adapter.notify("b", b"later")
    steps(a, b)
    assert not b.inbox
    harness.fabric.resume("a")
    steps(a, b)
    assert b.inbox == [("a", b"later")]


def test_registration_kinds_are_apart(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    device = a.adapter.register(Region(MemoryKind.VRAM, a.region.address, 64, 0))
    with pytest.raises(ValueError, match="one kind"):
        a.adapter.metadata([device, a.registration], connection=False)
    on_device = spans((a.region.address, 64, 0))
    a.adapter.prepare(WRITE, MemoryKind.VRAM, on_device, MemoryKind.DRAM, b.span(0, 64), "b")
    with pytest.raises(RegistrationError):
        a.transfer(WRITE, on_device, b.span(0, 64), "b")


def test_metadata_survive_the_way_there_and_back() -> None:
    keys = {
        Region(MemoryKind.DRAM, 2**63, 2**40, 2**64 - 1): 7,
        Region(MemoryKind.OBJECT, 0, 0, 0): 0,
    }
    blob = Blob("näme", 5, True, keys)
    assert Blob.decode(blob.encode()) == blob
    info = blob.info()
    assert info.agent == "näme"
    assert info.regions(MemoryKind.DRAM).tolist() == [[2**63, 2**40, 2**64 - 1]]
    assert info.regions(MemoryKind.DRAM).dtype == np.uint64


def test_every_altered_byte_of_metadata_is_found(harness: LoopbackHarness) -> None:
    a = Side(harness, "a")
    other = harness.fabric.adapter("other")
    told = a.adapter.metadata([a.registration], connection=True)
    for position in range(len(told)):
        altered = bytearray(told)
        altered[position] ^= 0x40
        with pytest.raises(MetadataError):
            other.add_remote(bytes(altered))
    for size in range(len(told)):
        with pytest.raises(MetadataError):
            other.add_remote(told[:size])


def test_fabrics_do_not_know_each_other() -> None:
    one, two = LoopbackFabric(), LoopbackFabric()
    with pytest.raises(PeerLostError):
        one.adapter("a").add_remote(two.adapter("b").metadata([], connection=True))
    with pytest.raises(ValueError, match="mode"):
        LoopbackFabric(mode="carrier pigeon")  # type: ignore[arg-type]


def test_script_and_agents_run_in_different_threads(harness: LoopbackHarness) -> None:
    a, b = pair(harness)
    stop = threading.Event()

    def play() -> None:
        while not stop.is_set():
            harness.fabric.cut("a", "b")
            harness.fabric.heal("a", "b")

    script = threading.Thread(target=play)
    script.start()
    try:
        for number in range(200):
            a.adapter.notify("b", b"%d" % number)
            a.run(a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b"), b)
    finally:
        stop.set()
        script.join(10)
    steps(a, b)
    assert [message for _, message in b.inbox] == [b"%d" % number for number in range(200)]
