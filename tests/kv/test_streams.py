"""Pages on a device: before, after, and what a failed request leaves in them.

The device is a fake whose streams are threads. Nothing here measures time: a kernel waits for a
`threading.Event` that the host sets later, so a call that blocked the host would never return.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from slow_streams import SECONDS, wait_on

from kv import caches
from kv.conftest import BOTH, Open
from kv.worlds import (
    DIM,
    HEADS,
    LAYERS,
    MODES,
    PAGE,
    Decode,
    Prefill,
    arrived,
    nothing_held,
    over,
    until,
)
from torch_nixl.errors import (
    ClosedError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.kv import fetch as fetching
from torch_nixl.kv.cache import CacheGroup, KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.compatibility import Compatibility
from torch_nixl.kv.fetch import Fetch
from torch_nixl.kv.filling import fill
from torch_nixl.kv.hub import hub_of
from torch_nixl.kv.layout import Geometry
from torch_nixl.kv.offer import Offer
from torch_nixl.kv.server import KVCacheServer
from torch_nixl.testing import FakeDevice, FakeStream, LoopbackFabric


def queued(
    stream: FakeStream, pool: Sequence[torch.Tensor], pages: list[int]
) -> list[torch.Tensor]:
    """Queue a kernel that reads pages of all layers; return where it puts what it saw."""
    seen: list[torch.Tensor] = []
    stream.launch(lambda: seen.extend(one[:, pages].clone() for one in pool))
    return seen


def produce(stream: FakeStream, pool: Sequence[torch.Tensor], pages: list[int]) -> None:
    """Queue a kernel that doubles what pages hold."""

    def kernel() -> None:
        for one in pool:
            one[:, pages] *= 2

    stream.launch(kernel)


def stepped(*sides: Prefill | Decode) -> None:
    """Give both sides the time to do what they should not."""
    for _ in range(200):
        for side in sides:
            side.connection.progress.step()
            side.connection.rounds.advance()


# Before.


@BOTH
def test_pages_go_after_what_was_queued_and_the_host_goes_on(
    connect: Open, device: FakeDevice, slow: threading.Event, mode: str
) -> None:
    prefill, decode = Prefill(connect("p"), device=device), Decode(connect("d"))
    stream = device.new_stream()
    stream.launch(lambda: wait_on(slow))
    produce(stream, prefill.tensors, [3, 1])
    with device.stream(stream):
        offer = prefill.server.offer("one", [3, 1], 20)
    fetch = decode.fetch(mode, offer.ticket, [4, 5])
    until(lambda: prefill.server.statistics().asked == 1)
    stepped(prefill, decode)
    assert (offer.num_ready, fetch.num_layers_ready, fetch.done) == (0, 0, False)
    assert not any(bool(one.any()) for one in decode.tensors), "read before it was computed"
    expected = [one.clone() for one in prefill.tensors]
    for one in expected:
        one[:, [3, 1]] *= 2
    slow.set()
    fetch.wait(10)
    assert over(offer, fetch)
    assert arrived(expected, [3, 1], decode.tensors, [4, 5], 0, 20)


@BOTH
def test_layers_go_in_order_each_after_its_own_stream(
    connect: Open, device: FakeDevice, slow: threading.Event, mode: str
) -> None:
    prefill, decode = Prefill(connect("p"), device=device), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4])
    free, busy = device.new_stream(), device.new_stream()
    busy.launch(lambda: wait_on(slow))
    for layer in range(LAYERS):
        stream = busy if layer == 1 else free
        produce(stream, prefill.tensors[layer : layer + 1], [3])
        if layer % 2:
            offer.layer_ready(layer, stream=stream)
        else:
            with device.stream(stream):
                offer.layer_ready(layer)
    fetch.wait_layer(0, 10)
    assert arrived(prefill.tensors[:1], [3], decode.tensors[:1], [4], 0, 16)
    free.synchronize()
    stepped(prefill, decode)
    assert offer.num_ready == fetch.num_layers_ready == 1
    assert not any(bool(one.any()) for one in decode.tensors[1:]), "a layer overtook another"
    with pytest.raises(ValueError, match="all layers are ready"):
        offer.layer_ready(0)
    slow.set()
    fetch.wait(10)
    assert over(offer, fetch)
    assert arrived(prefill.tensors, [3], decode.tensors, [4], 0, 16)


@BOTH
def test_pages_are_not_filled_while_queued_work_reads_them(
    connect: Open, device: FakeDevice, slow: threading.Event, mode: str
) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"), device=device)
    for one in decode.tensors:
        one.fill_(3)
    decode.fetch(mode, prefill.server.offer("warm", [9], 16).ticket, [9]).wait(10)
    stream = device.new_stream()
    stream.launch(lambda: wait_on(slow))
    before = queued(stream, decode.tensors, [4, 5])
    offer = prefill.server.offer("one", [3, 1], 32)
    with device.stream(stream):
        fetch = decode.fetch(mode, offer.ticket, [4, 5])
    stepped(prefill, decode)
    assert all(bool((one[:, [4, 5]] == 3).all()) for one in decode.tensors), "filled too early"
    slow.set()
    fetch.synchronize()
    assert all(bool((one == 3).all()) for one in before)
    assert over(offer, fetch)
    assert arrived(prefill.tensors, [3, 1], decode.tensors, [4, 5], 0, 32)


@BOTH
def test_stream_argument_counts_instead_of_the_current_one(
    connect: Open, device: FakeDevice, slow: threading.Event, mode: str
) -> None:
    prefill, decode = Prefill(connect("p"), device=device), Decode(connect("d"), device=device)
    busy, free = device.new_stream(), device.new_stream()
    busy.launch(lambda: wait_on(slow))
    with device.stream(busy):
        offer = prefill.server.offer("one", [3], 16, stream=free)
        decode.fetch(mode, offer.ticket, [4], stream=free).synchronize(10)
    offer = prefill.server.offer("two", [3], 16, stream=busy)
    fetch = decode.fetch(mode, offer.ticket, [4])
    until(lambda: prefill.server.statistics().asked == 2)
    stepped(prefill, decode)
    assert not fetch.done
    slow.set()
    fetch.synchronize(10)


def test_streams_that_mean_nothing_are_refused(connect: Open, device: FakeDevice) -> None:
    prefill, decode = Prefill(connect("p"), device=device), Decode(connect("d"), device=device)
    host = Prefill(connect("h"))
    stream = FakeDevice("fake:1").new_stream()
    ticket = prefill.server.offer("one", [3], 16).ticket
    for call in (
        lambda: prefill.server.offer("two", [3], 16, stream=stream),
        lambda: decode.client.pull(ticket, [4], stream=stream),
        lambda: prefill.server.offer("two", [3], 16, ready=False).layer_ready(0, stream=stream),
    ):
        with pytest.raises(ValueError, match="a stream of fake:0"):
            call()
    with pytest.raises(ValueError, match="host memory"):
        host.server.offer("three", [3], 16, stream=device.new_stream())
    with pytest.raises(ValueError, match="no layer is ready yet"):
        prefill.server.offer("four", [3], 16, ready=False, stream=device.default_stream)
    assert nothing_held(decode.client.statistics(), host.server.statistics())
    decode.client.pull(ticket, [4]).synchronize(10)


def test_capture_is_refused_by_name(connect: Open, device: FakeDevice) -> None:
    prefill, decode = Prefill(connect("p"), device=device), Decode(connect("d"), device=device)
    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = decode.client.pull(offer.ticket, [4])
    device.captured.add(device.default_stream)
    for call in (
        lambda: prefill.server.offer("two", [3], 16),
        lambda: decode.client.push(offer.ticket, [5]),
        lambda: offer.layer_ready(0),
        fetch.wait,
    ):
        with pytest.raises(TransferError, match="captured into a graph"):
            call()
    device.captured.clear()
    for layer in range(LAYERS):
        offer.layer_ready(layer)
    fetch.synchronize(10)


@BOTH
def test_request_whose_stream_never_gets_there_times_out(
    connect: Open, device: FakeDevice, slow: threading.Event, mode: str
) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"), device=device)
    decode.fetch(mode, prefill.server.offer("warm", [9], 16).ticket, [9]).synchronize(10)
    offer = prefill.server.offer("one", [3], 16)
    device.default_stream.launch(lambda: wait_on(slow))
    before = queued(device.default_stream, decode.tensors, [4])
    fetch = decode.fetch(mode, offer.ticket, [4])
    with pytest.raises(TransferTimeout, match="stream had work queued"):
        fetch.synchronize(0.05)
    assert not fetch.released, "its pages are still used by what was queued"
    slow.set()
    assert fetch.wait_released(10)
    assert not any(bool(one.any()) for one in before)
    assert all(bool(one[:, 4].isnan().all()) for one in decode.tensors)


# After.


@BOTH
def test_wait_lets_streams_go_on_and_returns_at_once(
    connect: Open, device: FakeDevice, mode: str
) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"), device=device)
    offer = prefill.server.offer("one", [3, 1], 32, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4, 5])
    first, second = device.new_stream(), device.new_stream()
    seen = []
    for stream in (first, second):
        with device.stream(stream):
            fetch.wait()
            seen.append(queued(stream, decode.tensors, [4, 5]))
    assert not fetch.done
    for layer in range(LAYERS):
        assert seen == [[], []], "a consumer ran before its pages were filled"
        offer.layer_ready(layer)
    for stream, found in zip((first, second), seen, strict=True):
        stream.synchronize()
        assert arrived(prefill.tensors, [3, 1], found, [0, 1], 0, 32)
    fetch.synchronize(10)
    assert over(offer, fetch) and fetch.error is None


def test_wait_after_the_end_leaves_the_stream_alone(connect: Open, device: FakeDevice) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"), device=device)
    fetch = decode.client.pull(prefill.server.offer("one", [3], 16).ticket, [4])
    fetch.synchronize(10)
    fetch.wait()
    assert "hold" not in {call for call, _ in device.calls}


@BOTH
def test_wait_with_a_timeout_blocks_the_host(connect: Open, device: FakeDevice, mode: str) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"), device=device)
    fetch = decode.fetch(mode, prefill.server.offer("one", [3], 16).ticket, [4])
    fetch.wait(SECONDS)
    assert arrived(prefill.tensors, [3], decode.tensors, [4], 0, 16)
    never = decode.fetch(mode, prefill.server.offer("two", [3], 16, ready=False).ticket, [4])
    with pytest.raises(TransferTimeout):
        never.wait(0.02)


@BOTH
def test_device_whose_streams_can_not_wait_blocks_the_host(connect: Open, mode: str) -> None:
    device = FakeDevice(holds=False)
    prefill, decode = Prefill(connect("p")), Decode(connect("d"), device=device)
    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(fetch.wait)
        for layer in range(LAYERS):
            assert not waiting.done()
            offer.layer_ready(layer)
        waiting.result(SECONDS)
    assert arrived(prefill.tensors, [3], decode.tensors, [4], 0, 16)
    assert "hold" not in {call for call, _ in device.calls}


@BOTH
def test_driver_calls_nothing_of_the_device(connect: Open, device: FakeDevice, mode: str) -> None:
    prefill, decode = Prefill(connect("p"), device=device), Decode(connect("d"), device=device)
    busy = device.new_stream()
    busy.launch(lambda: None, seconds=0.02)
    with device.stream(busy):
        offer = prefill.server.offer("one", [3], 16, ready=False)
        fetch = decode.fetch(mode, offer.ticket, [4])
        fetch.wait()
        for layer in range(LAYERS):  # On another stream: that one waits for them.
            offer.layer_ready(layer, stream=device.default_stream)
    failed = decode.fetch(mode, prefill.server.offer("two", [5], 16).ticket, [6])
    failed.cancel()
    busy.synchronize()
    assert fetch.wait_released(10) and failed.wait_released(10)
    assert {"fill", "record", "hold"} <= {call for call, _ in device.calls}
    threads = {thread for _, thread in device.calls}
    assert threads <= {"MainThread", "fake-fake:0-run"}, "the driver's thread called the device"


def test_pages_in_host_memory_cost_nothing(connect: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    for connection in (prefill.connection, decode.connection):
        monkeypatch.setattr(connection, "defer", lambda *_: pytest.fail("something was deferred"))
    offer = prefill.server.offer("one", [3], 16)
    fetch = decode.client.pull(offer.ticket, [4])
    assert fetch.order is None
    fetch.wait()
    assert fetch.done and over(offer, fetch)


# Failure.


def by_prefill(offer: Offer, fetch: Fetch) -> None:
    offer.cancel()


def by_decode(offer: Offer, fetch: Fetch) -> None:
    fetch.cancel()


def by_timeout(offer: Offer, fetch: Fetch) -> None:
    with pytest.raises(TransferTimeout):
        fetch.wait(0.02)


def by_loss(offer: Offer, fetch: Fetch) -> None:
    offer._connection.close()


def by_abort(offer: Offer, fetch: Fetch) -> None:
    fetch._connection.abort()


@BOTH
@pytest.mark.parametrize("fail", [by_prefill, by_decode, by_timeout, by_loss, by_abort])
@pytest.mark.parametrize("layers", [0, 2])
def test_failure_fills_the_pages_and_lets_the_stream_go_on(
    connect: Open,
    device: FakeDevice,
    mode: str,
    fail: Callable[[Offer, Fetch], None],
    layers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "LINGER_SECONDS", 0.05)
    prefill, decode = Prefill(connect("p")), Decode(connect("d"), device=device)
    for one in decode.tensors:
        one.fill_(3)
    offer = prefill.server.offer("one", [3, 1], 32, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4, 6])
    for layer in range(layers):
        offer.layer_ready(layer)
        fetch.wait_layer(layer, 10)
    until(lambda: prefill.server.statistics().asked == 1)
    fetch.wait()
    seen = queued(device.default_stream, decode.tensors, list(range(32)))
    fail(offer, fetch)
    device.default_stream.synchronize()
    others = [page for page in range(32) if page not in (4, 6)]
    for one in seen:
        assert bool(one[:, [4, 6]].isnan().all())
        assert bool((one[:, others] == 3).all()), "another page was filled"
    assert fetch.done and fetch.failed_pages == ((4, 6),)
    with pytest.raises((TransferCancelled, TransferTimeout, PeerLostError, ClosedError)):
        fetch.wait()
    if fail is by_abort:
        return
    if fail is not by_loss:
        assert over(offer, fetch)
        [ended] = decode.client.poll()
        assert ended.failed_pages == ((4, 6),) and ended.error is fetch.error
        # The others go on: nothing is poisoned.
        again = decode.fetch(mode, prefill.server.offer("two", [3, 1], 32).ticket, [4, 6])
        again.wait()
        found = queued(device.default_stream, decode.tensors, [4, 6])
        device.default_stream.synchronize()
        assert arrived(prefill.tensors, [3, 1], found, [0, 1], 0, 32)


@pytest.mark.parametrize(
    ("dtype", "byte"),
    [(torch.bfloat16, 0xFF), (torch.uint8, 0xFF), (torch.float8_e4m3fnuz, 0x80)],
)
def test_what_pages_are_filled_with(
    connect: Open, device: FakeDevice, dtype: torch.dtype, byte: int
) -> None:
    def cache() -> KVCache:
        pool = [device.adopt(torch.zeros(2, 8, PAGE, HEADS, DIM).to(dtype)) for _ in range(2)]
        return KVCache(pool, model="m")

    server, client = KVCacheServer(connect("p"), cache()), KVCacheClient(connect("d"), cache())
    fetch = client.pull(server.offer("one", [3], 16, ready=False).ticket, [4])
    fetch.cancel()
    assert fetch.wait_released(10)
    for (owner,) in zip(*client.cache.owners, strict=True):
        raw = owner.view(torch.uint8)
        assert bool((raw[:, 4] == byte).all())
        assert not raw[:, [0, 1, 2, 3, 5, 6, 7]].any()


@BOTH
def test_interpreter_that_takes_no_new_threads(
    connect: Open, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.12 and later at exit: everything ends, by the threads that there are."""
    device = FakeDevice()
    prefill, decode = Prefill(connect("p")), Decode(connect("d"), device=device)
    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4])
    until(lambda: prefill.server.statistics().asked == 1)
    fetch.wait()
    seen = queued(device.default_stream, decode.tensors, [4])
    device._side.synchronize()  # Its thread is there; the device's own is not.
    called = threading.Event()
    fetch.add_done_callback(called.set)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fetch.cancel()
    assert fetch.wait_released(10) and called.wait(10)
    device.default_stream.synchronize()
    assert all(bool(one.isnan().all()) for one in seen)


@BOTH
def test_pages_that_may_still_be_written_block_a_stream_for_a_bounded_time(
    fabric: LoopbackFabric,
    connect: Open,
    device: FakeDevice,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "LINGER_SECONDS", 0.05)
    prefill, decode = Prefill(connect("p")), Decode(connect("d"), device=device)
    decode.fetch(mode, prefill.server.offer("warm", [9], 16).ticket, [9]).synchronize(10)
    mover = decode if mode == "pull" else prefill
    fabric.delay(1, initiator=mover.connection.name)
    fetch = decode.fetch(mode, prefill.server.offer("one", [3], 16).ticket, [4])
    fetch.wait()
    seen = queued(device.default_stream, decode.tensors, [4])
    moving = mover.connection.operations.transfers
    until(lambda: any(one.in_flight for one in moving))
    with pytest.raises(TransferTimeout):
        fetch.synchronize(0.02)
    assert not fetch.released
    device.default_stream.synchronize()
    # Some more bytes of the message may have landed since.
    assert sum(int(one.isnan().sum()) for one in seen) > sum(one.numel() for one in seen) // 2
    assert not fetch.released
    fabric.delay(None, initiator=mover.connection.name)
    assert fetch.wait_released(SECONDS)
    assert all(bool(one[:, 4].isnan().all()) for one in decode.tensors), "late bytes pass for data"


@pytest.mark.parametrize("shape", sorted(caches.SHAPES))
def test_exactly_the_pages_are_filled_whatever_the_layout(
    connect: Open, device: FakeDevice, shape: str
) -> None:
    geometry = Geometry(2, 2, 4, torch.float16, 4)
    made = caches.make(caches.SHAPES[shape], geometry, 8, 0, one_storage=True)
    device.adopt(made.owners[0])
    before = [[part.clone() for part in row] for row in made.parts]
    cache = KVCache.__new__(KVCache)
    cache.layouts, cache.owners = (made.layout,), (tuple(made.owners),)
    cache.compatibility = Compatibility("m", (geometry,), ((0, 1),))
    pool = hub_of(connect("d")).register(cache)
    order = pool.order(None)
    assert order is not None
    done = threading.Event()
    fill(pool, cache.runs([6, 1, 2]), order, done.set)
    assert done.wait(SECONDS)
    for row, old in zip(made.parts, before, strict=True):
        for part, was in zip(row, old, strict=True):
            assert bool(part[[1, 2, 6]].isnan().all())
            others = [0, 3, 4, 5, 7]
            assert torch.equal(part[others].view(torch.int16), was[others].view(torch.int16))


def test_failed_pages_of_several_groups(connect: Open, device: FakeDevice) -> None:
    def cache() -> tuple[KVCache, list[torch.Tensor]]:
        full = [device.zeros(2, 16, 8, 2, 4) for _ in range(2)]
        window = [device.zeros(2, 8, 16, 4, 4)]
        groups = [CacheGroup(full, layers=[0, 2]), CacheGroup(window, layers=[1])]
        return KVCache.of_groups(groups, model="m"), [*full, *window]

    server, (ours, pool) = KVCacheServer(connect("p"), cache()[0]), cache()
    client = KVCacheClient(connect("d"), ours)
    offer = server.offer("one", [[1, 2], [7]], 16, ready=False)
    fetch = client.pull(offer.ticket, [[9, 8], [2]])
    fetch.cancel()
    assert fetch.wait_released(10) and fetch.failed_pages == ((9, 8), (2,))
    for one, pages in zip(pool, ([8, 9], [8, 9], [2]), strict=True):
        found = one.isnan().flatten(2).any(2).any(0).nonzero().flatten().tolist()
        assert found == pages and bool(one[:, pages].isnan().all())


@BOTH
def test_ranks_fill_their_heads_in_order(
    connect: Open, device: FakeDevice, slow: threading.Event, mode: str
) -> None:
    """One request with several servers, of which one is late."""
    whole = [torch.randn(2, 8, PAGE, 4, DIM) for _ in range(2)]
    offers = []
    for rank in range(2):
        part = [device.tensor(one[:, :, :, 2 * rank : 2 * rank + 2]) for one in whole]
        server = KVCacheServer(
            connect(f"p{rank}"), KVCache(part, model="m", tp_rank=rank, tp_size=2)
        )
        stream = device.new_stream()
        if rank:
            stream.launch(lambda: wait_on(slow))
        offers.append(server.offer("one", [3, 1], 32, stream=stream))
    pool = [device.zeros(2, 8, PAGE, 4, DIM) for _ in range(2)]
    client = KVCacheClient(connect("d"), KVCache(pool, model="m"))
    fetch = getattr(client, mode)([offer.ticket for offer in offers], [4, 5])
    fetch.wait()
    seen = queued(device.default_stream, pool, [4, 5])
    until(lambda: offers[0].released)
    assert not seen, "half of the heads was enough"
    slow.set()
    device.default_stream.synchronize()
    assert arrived(whole, [3, 1], seen, [0, 1], 0, 32)
    assert over(offers[0], fetch) and offers[1].wait_released(10)


@BOTH
def test_groups_on_two_devices(connect: Open, slow: threading.Event, mode: str) -> None:
    """Each has a current stream of its own; both are waited for, wait, and are let go."""
    one, two = FakeDevice("fake:0"), FakeDevice("fake:1")

    def cache(*devices: FakeDevice) -> tuple[KVCache, list[torch.Tensor]]:
        pool = [device.zeros(2, 8, PAGE, HEADS, DIM) for device in devices]
        groups = [CacheGroup([part], layers=[index]) for index, part in enumerate(pool)]
        return KVCache.of_groups(groups, model="m"), pool

    ours, source = cache(one, two)
    theirs, pool = cache(two, one)
    server, client = KVCacheServer(connect("p"), ours), KVCacheClient(connect("d"), theirs)
    two.default_stream.launch(lambda: wait_on(slow))
    two.default_stream.launch(lambda: source[1].fill_(2))
    offer = server.offer("one", [[3], [3]], 16)
    fetch = getattr(client, mode)(offer.ticket, [[4], [4]])
    fetch.wait()
    seen: list[bool] = []
    for device, part, value in ((two, pool[0], 0), (one, pool[1], 2)):
        device.default_stream.launch(
            lambda part=part, value=value: seen.append(bool((part[:, 4] == value).all()))  # type: ignore[misc]
        )
    slow.set()
    for device in (one, two):
        device.default_stream.synchronize()
    assert seen == [True, True] and over(offer, fetch)
    failed = getattr(client, mode)(server.offer("two", [[3], [3]], 16).ticket, [[4], [5]])
    failed.cancel()
    assert failed.wait_released(10)
    assert bool(pool[0][:, 4].isnan().all()) and bool(pool[1][:, 5].isnan().all())
    assert not pool[1][:, 4].isnan().any()


def schedule(connect: Open, count: int, seed: int) -> None:
    """Kernels of random length before and after many requests; what each consumer sees is right."""
    rng = random.Random(seed)
    device = FakeDevice()
    prefill = Prefill(connect("p"), num_pages=16, device=device)
    decode = Decode(connect("d"), num_pages=16, device=device)
    their_free, our_free = list(range(16)), list(range(16))
    producers = [device.new_stream() for _ in range(3)]
    consumers = [device.new_stream() for _ in range(3)]
    wrong: list[str] = []
    checked: list[str] = []
    sent: dict[str, bool] = {}
    started = ended = 0

    def write(pages: list[int], value: float, layers: range) -> None:
        for layer in layers:
            prefill.tensors[layer][:, pages] = value

    def check(name: str, pages: list[int], value: float, fails: bool) -> None:
        found = [one[:, pages] for one in decode.tensors]
        good = all(bool((one == value).all()) for one in found)
        # One that was cancelled late may have been complete before.
        bad = fails and all(bool(one.isnan().all()) for one in found)
        if not (good or bad):
            wrong.append(name)
        checked.append(name)

    until_ended = 0
    while ended < count:
        for over_there in prefill.server.poll():
            their_free += over_there.pages[0]
        for done in decode.client.poll():
            assert done.error is None or sent[done.request], done
            # A consumer may still read them: the next request's point is behind it.
            our_free += done.pages[0]
            ended += 1
        size = rng.randint(1, 3)
        if started == count or min(len(their_free), len(our_free)) < size:
            until_ended += 1
            threading.Event().wait(0.001)
            assert until_ended < 20_000
            continue
        src = [their_free.pop() for _ in range(size)]
        dst = [our_free.pop() for _ in range(size)]
        name, value = f"r{started}", float(started + 1)
        started += 1
        fails = sent[name] = rng.random() < 0.2
        producer, consumer = rng.choice(producers), consumers[dst[0] % 3]
        pause = rng.choice([0.0, 0.001, 0.004])
        # What is left on other streams for pages that are free again comes before.
        for stream, streams in ((producer, producers), (consumer, consumers)):
            for other in streams:
                if other is not stream:
                    stream.wait_event(other.record())
        whole = rng.random() < 0.5
        if whole:
            producer.launch(lambda a=src, v=value: write(a, v, range(LAYERS)), seconds=pause)  # type: ignore[misc]
        offer = prefill.server.offer(
            name, src, size * PAGE, ready=whole, stream=producer if whole else None
        )
        fetch = decode.fetch(rng.choice(MODES), offer.ticket, dst, stream=consumer)
        if rng.random() < 0.3:
            consumer.launch(lambda: None, seconds=pause)
        with device.stream(consumer):
            fetch.wait()
        consumer.launch(lambda n=name, d=dst, v=value, f=fails: check(n, d, v, f), seconds=pause)  # type: ignore[misc]
        for layer in range(0 if whole else LAYERS):
            producer.launch(
                lambda a=src, v=value, n=layer: write(a, v, range(n, n + 1)),  # type: ignore[misc]
                seconds=pause / 4,
            )
            offer.layer_ready(layer, stream=producer)
        if fails:
            if rng.random() < 0.5:
                fetch.cancel()
            offer.cancel()  # Else one that was not asked for yet has to lapse.
    for stream in (*producers, *consumers):
        stream.synchronize()
    assert not wrong and len(checked) == count
    until(lambda: nothing_held(prefill.server.statistics(), decode.client.statistics()))


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules(connect: Open, seed: int) -> None:
    schedule(connect, 40, seed)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_soak(connect: Open) -> None:
    schedule(connect, 2000, 99)
