"""Connection: grants, deadlines, loss and ends, over both adapters, two agents in one process."""

from __future__ import annotations

import gc
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_nixl.engine.adapter import Adapter, Direction, MemoryKind
from torch_nixl.engine.arrays import as_memory
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import LoopbackFabric
from torch_nixl.engine.memory import Memory, address_memory, tensor_memory
from torch_nixl.engine.nixl import NixlAdapter
from torch_nixl.errors import (
    ClosedError,
    LeaseExpired,
    MetadataError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

READ, WRITE = Direction.READ, Direction.WRITE
Make = Callable[..., Connection]


@pytest.fixture
def make(adapter_factory: Callable[[str], Adapter]) -> Iterator[Make]:
    made: list[Connection] = []

    def make(name: str = "w", **options: object) -> Connection:
        connection = Connection(adapter_factory(name), timeout=20.0, **options)  # type: ignore[arg-type]
        made.append(connection)
        return connection

    make.adapter_factory = adapter_factory  # type: ignore[attr-defined]
    yield make
    for connection in made:
        connection.abort()


@pytest.fixture
def pair(make: Make) -> tuple[Connection, Connection]:
    return make("owner"), make("reader")


def test_a_read_moves_the_bytes_and_ends_both_sides(pair: tuple[Connection, Connection]) -> None:
    owner, reader = pair
    source, target = torch.arange(1000.0), torch.zeros(1000)
    exposed = owner.expose(READ, [tensor_memory(source)])
    active = reader.claim(exposed.offer(), [tensor_memory(target)])
    active.wait(10)
    exposed.wait(10)
    assert torch.equal(source, target)
    assert active.released and exposed.released
    assert exposed.remote is not None and exposed.remote.name == reader.name


def test_a_write_moves_the_bytes_and_ends_both_sides(pair: tuple[Connection, Connection]) -> None:
    owner, writer = pair
    source, target = torch.arange(1000.0), torch.zeros(1000)
    exposed = owner.expose(WRITE, [tensor_memory(target)])
    active = writer.claim(exposed.offer(), [tensor_memory(source)])
    active.wait(10)
    exposed.wait(10)
    assert torch.equal(source, target)


def test_the_owner_learns_of_the_end_without_anyone_waiting_inline(
    pair: tuple[Connection, Connection],
) -> None:
    owner, reader = pair
    exposed = owner.expose(READ, [tensor_memory(torch.ones(10))])
    ended = threading.Event()
    exposed.add_done_callback(ended.set)
    active = reader.claim(exposed.offer(), [tensor_memory(torch.zeros(10))])
    both = threading.Event()
    active.add_done_callback(both.set)
    assert both.wait(10) and ended.wait(10)
    assert exposed.error is None and active.error is None


def test_lists_of_strided_and_empty_memories_arrive_element_by_element(
    pair: tuple[Connection, Connection],
) -> None:
    owner, reader = pair
    sources = [torch.arange(12.0).view(3, 4).t(), torch.empty(0), torch.arange(6)[::2]]
    targets = [torch.zeros(4, 3), torch.empty(0), torch.zeros(2, 3, dtype=torch.int64)[1]]
    exposed = owner.expose(READ, [tensor_memory(t) for t in sources])
    reader.claim(exposed.offer(), [tensor_memory(t) for t in targets]).wait(10)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


def test_a_list_may_mix_kinds_of_memory() -> None:
    """On the fake, which moves bytes of any kind: there is no device memory here."""
    fabric = LoopbackFabric()
    owner, reader = (Connection(fabric.adapter(name), timeout=10) for name in ("o", "r"))
    sources = [torch.arange(100), torch.arange(100, 200), torch.arange(5)]
    targets = [torch.zeros_like(one) for one in sources]

    def memories(tensors: list[torch.Tensor]) -> list[Memory]:
        first, device, last = tensors
        address, nbytes = device.data_ptr(), device.nbytes
        return [
            tensor_memory(first),
            address_memory(address, nbytes, kind=MemoryKind.VRAM, device_id=1, owner=device),
            tensor_memory(last),
        ]

    exposed = owner.expose(READ, memories(sources))
    reader.claim(exposed.offer(), memories(targets)).wait()
    exposed.wait()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(sources, targets, strict=True))
    owner.close()
    reader.close()


def test_a_large_transfer_is_cut_and_arrives_whole(pair: tuple[Connection, Connection]) -> None:
    owner, reader = pair
    source = torch.randint(0, 255, (37 << 20,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    exposed = owner.expose(READ, [tensor_memory(source)])
    reader.claim(exposed.offer(), [tensor_memory(target)]).wait(20)
    assert torch.equal(source, target)


def test_an_operation_on_the_own_memory_works(make: Make) -> None:
    alone = make("alone")
    source, target = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    exposed = alone.expose(READ, [tensor_memory(source)])
    alone.claim(exposed.offer(), [tensor_memory(target)]).wait(10)
    exposed.wait(10)
    assert torch.equal(source, target)


def test_the_second_claim_is_refused_and_moves_nothing(
    pair: tuple[Connection, Connection],
) -> None:
    owner, reader = pair
    source, first, second = torch.ones(10), torch.zeros(10), torch.zeros(10)
    exposed = owner.expose(READ, [tensor_memory(source)])
    offer = exposed.offer()
    reader.claim(offer, [tensor_memory(first)]).wait(10)
    exposed.wait(10)
    with pytest.raises(TransferError, match="already taken"):
        reader.claim(offer, [tensor_memory(second)]).wait(10)
    assert not second.any()


def test_what_is_prepared_before_the_grant_moves_nothing_and_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transfer is set up while the owner's answer is under way; a refusal has it freed."""
    fabric = LoopbackFabric()
    owner, reader = (Connection(fabric.adapter(name), timeout=10) for name in ("o", "r"))
    source, target = torch.ones(10), torch.zeros(10)
    exposed = owner.expose(READ, [tensor_memory(source)])
    offer = exposed.offer()
    held: list[object] = []
    prepare, release = reader.adapter.prepare, reader.adapter.release

    def keep(*arguments: Any) -> Any:
        held.append(prepare(*arguments))
        return held[-1]

    def let_go(transfer: Any) -> None:
        held.remove(transfer)
        release(transfer)

    monkeypatch.setattr(reader.adapter, "prepare", keep)
    monkeypatch.setattr(reader.adapter, "release", let_go)
    with owner.progress._driving:  # nobody answers
        late = reader.claim(offer, [tensor_memory(target)])
        assert reader.progress.wait_until(lambda: bool(held), time.monotonic() + 10)
        assert not target.any()
        late.cancel()
    assert late.wait_released(10) and not held and not target.any()
    with pytest.raises(TransferCancelled):
        exposed.wait(10)
    again = reader.claim(offer, [tensor_memory(target)])
    with pytest.raises(TransferError):
        again.wait(10)
    assert again.wait_released(10) and not held and not target.any()
    owner.close()
    reader.close()


def test_a_foreign_owner_that_is_lost_is_told_nothing_and_costs_nobody_else() -> None:
    """Its key is of its own length, and no frame of ours can hold it."""
    fabric = LoopbackFabric()
    owner, reader = (Connection(fabric.adapter(name), timeout=10) for name in ("o", "r"))
    exposed = owner.expose(READ, [tensor_memory(torch.ones(10))])
    offer = replace(exposed.offer(), key=b"a key of thirty-six bytes, as a UUID")
    reader.contact("o", offer.metadata[0], foreign=True)
    adapter: Any = reader.adapter
    fabric.fail_next(adapter, "post", PeerLostError("scripted: gone", remote="o"))
    with pytest.raises(PeerLostError):
        reader.claim(offer, [tensor_memory(torch.zeros(10))]).wait(10)
    assert not reader.closed
    owner.close()
    reader.close()


def test_a_withdrawn_offer_is_refused_as_cancelled(pair: tuple[Connection, Connection]) -> None:
    owner, reader = pair
    exposed = owner.expose(READ, [tensor_memory(torch.ones(10))])
    offer = exposed.offer()
    exposed.cancel()
    with pytest.raises(TransferCancelled):
        exposed.wait(1)
    assert exposed.released
    target = torch.zeros(10)
    with pytest.raises(TransferCancelled, match="withdrawn"):
        reader.claim(offer, [tensor_memory(target)]).wait(10)
    assert not target.any()


def test_a_lapsed_offer_is_refused_as_expired(pair: tuple[Connection, Connection]) -> None:
    owner, reader = pair
    exposed = owner.expose(READ, [tensor_memory(torch.ones(10))], timeout=0.05)
    offer = exposed.offer()
    with pytest.raises(TransferTimeout, match="before any peer"):
        exposed.wait()
    with pytest.raises(LeaseExpired):
        reader.claim(offer, [tensor_memory(torch.zeros(10))]).wait(10)


def test_a_lease_lapses_though_nobody_waits(pair: tuple[Connection, Connection]) -> None:
    owner, _ = pair
    exposed = owner.expose(READ, [tensor_memory(torch.ones(10))], timeout=0.05)
    ended = threading.Event()
    exposed.add_done_callback(ended.set)
    assert ended.wait(5)
    assert isinstance(exposed.error, TransferTimeout)


def test_sizes_that_differ_are_refused_before_anything_moves(
    pair: tuple[Connection, Connection],
) -> None:
    owner, reader = pair
    offer = owner.expose(READ, [tensor_memory(torch.ones(10))]).offer()
    before = reader.statistics().outstanding
    with pytest.raises(TransferError, match=r"44.*40"):
        reader.claim(offer, [tensor_memory(torch.zeros(11))])
    with pytest.raises(TransferError):
        reader.claim(offer, [tensor_memory(torch.zeros(5)), tensor_memory(torch.zeros(5))])
    assert reader.statistics().outstanding == before
    target = torch.zeros(10)
    reader.claim(offer, [tensor_memory(target)]).wait(10)
    assert target.all()


def test_a_read_only_target_is_refused_by_name(pair: tuple[Connection, Connection]) -> None:
    owner, reader = pair
    offer = owner.expose(READ, [as_memory(b"0123456789", name="x")]).offer()
    with pytest.raises(ValueError, match=r"memories\[0\]"):
        reader.claim(offer, [as_memory(b"9876543210", name="y")])
    with pytest.raises(ValueError, match=r"memories\[0\]"):
        owner.expose(WRITE, [as_memory(b"0123456789", name="x")])


def test_an_owner_that_does_not_answer_is_a_timeout(pair: tuple[Connection, Connection]) -> None:
    owner, reader = pair
    exposed = owner.expose(READ, [tensor_memory(torch.ones(10))])
    offer = exposed.offer()
    owner.progress.stop()  # as a process that neither waits nor lets its thread run
    active = reader.claim(offer, [tensor_memory(torch.zeros(10))])
    started = time.monotonic()
    with pytest.raises(TransferTimeout):
        active.wait(0.2)
    assert time.monotonic() - started < 2
    assert active.wait_released(1)
    # Its late grant is given back, so the owner isn't left with memory that nobody will release.
    owner.progress.wait_until(lambda: exposed.done, time.monotonic() + 5)
    assert owner.progress.wait_until(lambda: exposed.released, time.monotonic() + 5)


def test_closing_the_owner_fails_the_reader(pair: tuple[Connection, Connection]) -> None:
    owner, reader = pair
    offer = owner.expose(READ, [tensor_memory(torch.ones(10))]).offer()
    reader.claim(offer, [tensor_memory(torch.zeros(10))]).wait(10)
    late = owner.expose(READ, [tensor_memory(torch.ones(10))]).offer()
    owner.close()
    with pytest.raises((PeerLostError, MetadataError)):
        reader.claim(late, [tensor_memory(torch.zeros(10))]).wait(10)
    with pytest.raises(ClosedError):
        owner.expose(READ, [tensor_memory(torch.ones(1))])


def test_close_and_abort_are_idempotent_and_fail_what_is_outstanding(make: Make) -> None:
    owner = make("owner")
    exposed = owner.expose(READ, [tensor_memory(torch.ones(10))])
    woken: list[BaseException] = []

    def wait() -> None:
        try:
            exposed.wait(30)
        except (ClosedError, TransferCancelled) as error:
            woken.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    owner.abort()
    waiter.join(5)
    assert len(woken) == 1
    owner.abort()
    owner.close()


def test_many_operations_in_flight_all_end(pair: tuple[Connection, Connection]) -> None:
    owner, reader = pair
    # The fake goes through all transfers under way at each poll.
    count = 1000 if isinstance(owner.adapter, NixlAdapter) else 100
    sources = torch.arange(count * 16).view(count, 16)
    targets = torch.zeros_like(sources)
    exposed = [owner.expose(READ, [tensor_memory(row)]) for row in sources]
    active = [
        reader.claim(one.offer(), [tensor_memory(row)])
        for one, row in zip(exposed, targets, strict=True)
    ]
    for operation in [*active, *exposed]:
        operation.wait(20)
    assert torch.equal(sources, targets)
    assert owner.statistics().outstanding == reader.statistics().outstanding == 0
    assert reader.statistics().live_registrations == 1


def test_a_region_that_grows_round_an_older_one_can_be_read_anywhere(
    pair: tuple[Connection, Connection],
) -> None:
    """Told [1M, 2M), freed, then [0, 64M) told."""
    owner, reader = pair
    million = 1 << 20
    arena = torch.randint(0, 255, (64 * million,), dtype=torch.uint8)
    base = arena.data_ptr()

    def read(address: int, nbytes: int) -> torch.Tensor:
        memory = address_memory(address, nbytes, kind=MemoryKind.DRAM, owner=arena)
        target = torch.zeros(nbytes, dtype=torch.uint8)
        exposed = owner.expose(READ, [memory])
        reader.claim(exposed.offer(), [tensor_memory(target)]).wait(10)
        exposed.wait(10)
        return target

    assert torch.equal(read(base + million, million), arena[million : 2 * million])
    assert owner.statistics().live_registrations == 0
    whole = owner.register(tensor_memory(arena))
    target = torch.zeros(million, dtype=torch.uint8)
    exposed = owner.expose(READ, [tensor_memory(arena[10 * million : 11 * million])])
    reader.claim(exposed.offer(), [tensor_memory(target)]).wait(10)
    assert torch.equal(target, arena[10 * million : 11 * million])
    assert torch.equal(read(base + million, million), arena[million : 2 * million])
    owner.registry.release(whole)


def test_a_dropped_target_stays_alive_until_its_read_is_done(
    pair: tuple[Connection, Connection],
) -> None:
    owner, reader = pair
    source = torch.randint(0, 255, (8 << 20,), dtype=torch.uint8)
    exposed = owner.expose(READ, [tensor_memory(source)])
    target = torch.zeros_like(source)
    address = target.data_ptr()
    active = reader.claim(exposed.offer(), [tensor_memory(target)])
    del target
    gc.collect()
    junk = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(4)]
    assert all(one.data_ptr() != address for one in junk) or active.released
    active.wait(10)
    exposed.wait(10)


def test_threads_that_share_a_connection_get_their_own_bytes(
    pair: tuple[Connection, Connection],
) -> None:
    owner, reader = pair
    failures: list[str] = []

    def hammer(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(50):
            source = torch.from_numpy(generator.integers(0, 255, 4096).astype(np.uint8))
            target = torch.zeros_like(source)
            exposed = owner.expose(READ, [tensor_memory(source)])
            active = reader.claim(exposed.offer(), [tensor_memory(target)])
            active.wait(20)
            exposed.wait(20)
            if not torch.equal(source, target):
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_a_secret_is_needed_on_both_sides(make: Make) -> None:
    owner = make("owner", secret="one")
    friend, stranger = make("friend", secret="one"), make("stranger", secret="other")
    exposed = owner.expose(READ, [tensor_memory(torch.ones(4))])
    offer = exposed.offer()
    with pytest.raises(TransferTimeout):
        stranger.claim(offer, [tensor_memory(torch.zeros(4))]).wait(0.3)
    assert owner.statistics().frames_refused > 0
    target = torch.zeros(4)
    friend.claim(offer, [tensor_memory(target)]).wait(10)
    assert target.all()


def test_garbage_from_a_peer_is_counted_and_hurts_nobody(
    pair: tuple[Connection, Connection],
) -> None:
    owner, reader = pair
    exposed = owner.expose(READ, [tensor_memory(torch.ones(4))])
    offer = exposed.offer()
    remote = reader.contact(offer.owner, offer.metadata[0])
    for garbage in (b"", b"x", b"TN" + bytes(60), bytes(range(256)) * 9):
        reader.contacts.send_raw(remote, garbage)
    target = torch.zeros(4)
    reader.claim(offer, [tensor_memory(target)]).wait(10)
    exposed.wait(10)
    assert target.all()
    assert owner.statistics().frames_refused == 4


def test_statistics_count_what_happened(pair: tuple[Connection, Connection]) -> None:
    owner, reader = pair
    source = torch.ones(1000)
    for _ in range(3):
        exposed = owner.expose(READ, [tensor_memory(source)])
        reader.claim(exposed.offer(), [tensor_memory(torch.zeros(1000))]).wait(10)
        exposed.wait(10)
    figures = owner.statistics()
    assert figures.operations == 3
    assert figures.nbytes == 12000
    assert figures.registrations == 1
    assert figures.cache_hits == 2
    assert figures.failures == {}


def test_threads_that_hammer_one_connection_in_every_way(make: Make) -> None:
    """Poll, post, register, meet peers and lose them, all at once, on one Connection."""
    hub = make("hub")
    stop = threading.Event()
    failures: list[Exception] = []
    source = torch.randint(0, 255, (1 << 16,), dtype=torch.uint8)

    def in_thread(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                while not stop.is_set():
                    work()
            except Exception as error:  # noqa: BLE001 - shown by the test
                failures.append(error)
                stop.set()

        return threading.Thread(target=run)

    def poll() -> None:
        hub.progress.step()

    def register() -> None:
        held = [hub.register(tensor_memory(torch.zeros(100))) for _ in range(20)]
        for one in held:
            hub.registry.release(one)

    def meet() -> None:
        with Connection(adapter_of(make), timeout=20.0) as peer:
            target = torch.zeros_like(source)
            exposed = hub.expose(READ, [tensor_memory(source)])
            peer.claim(exposed.offer(), [tensor_memory(target)]).wait()
            exposed.wait()
            assert torch.equal(source, target)

    def own() -> None:
        target = torch.zeros_like(source)
        exposed = hub.expose(READ, [tensor_memory(source)])
        hub.claim(exposed.offer(), [tensor_memory(target)]).wait()
        exposed.wait()
        assert torch.equal(source, target)

    threads = [in_thread(work) for work in (poll, poll, register, register, meet, own, own)]
    for thread in threads:
        thread.start()
    stop.wait(3)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert hub.statistics().failures == {}


def adapter_of(make: Make) -> Adapter:
    """A further agent that the test closes by itself."""
    return make.adapter_factory("peer")  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("known", [True, False])
def test_who_died_before_it_answered_is_known_to_be_gone_if_its_process_is_known(
    known: bool,
) -> None:
    """Memory that it was told of is given back then: over there nobody can touch it any more."""
    fabric = LoopbackFabric()
    process = subprocess.Popen(["sleep", "60"])
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    ghost = fabric.adapter("ghost")
    with Connection(fabric.adapter("here")) as here:
        identity = replace(here.contacts.identity, pid=process.pid, start_time=int(stat[19]))
        blob = ghost.metadata([], connection=True)
        remote = here.contact("ghost", blob, identity=identity if known else None)
        assert not here.liveness.is_gone(remote)
        process.kill()
        process.wait()
        fabric.kill("ghost")
        here.contacts.lose(remote, PeerLostError("it never answered"))
        assert here.liveness.is_gone(remote) is known
