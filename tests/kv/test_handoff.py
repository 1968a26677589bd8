"""Pages that arrive: pull and push, prefixes, layers, ranks, groups, many requests."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch

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
from torch_nixl.kv.cache import CacheGroup, KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.fetch import Fetch
from torch_nixl.kv.server import KVCacheServer
from torch_nixl.kv.ticket import Ticket
from torch_nixl.testing import LoopbackFabric


@BOTH
def test_pages_arrive_and_are_free_on_both_sides(connect: Open, mode: str) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 1, 2], 40)
    fetch = decode.fetch(mode, offer.ticket, [10, 20, 11])
    fetch.wait(10)
    assert over(offer, fetch)
    assert arrived(prefill.tensors, [3, 1, 2], decode.tensors, [10, 20, 11], 0, 40)
    # What lies beyond the prompt's end is not touched.
    assert not decode.tensors[0][:, 11, 8:].any()
    [ended] = prefill.server.poll()
    assert (ended.request, ended.pages, ended.error) == ("one", ((3, 1, 2),), None)
    [ended] = decode.client.poll()
    assert (ended.request, ended.pages, ended.error) == ("one", ((10, 20, 11),), None)
    assert ended.failed_pages == ()
    assert prefill.server.poll() == decode.client.poll() == []
    assert nothing_held(prefill.server.statistics(), decode.client.statistics())


@BOTH
@pytest.mark.parametrize(("start", "stop"), [(16, 40), (20, 40), (20, 21), (0, 7), (40, 40)])
def test_only_missing_positions_move(connect: Open, mode: str, start: int, stop: int) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 1, 2], 40)
    before = [one.clone() for one in decode.tensors]
    fetch = decode.fetch(mode, offer.ticket, [10, 20, 11], start=start, stop=stop)
    fetch.wait(10)
    assert over(offer, fetch)
    assert arrived(prefill.tensors, [3, 1, 2], decode.tensors, [10, 20, 11], start, stop)
    for old, new in zip(before, decode.tensors, strict=True):
        new[:, [10, 20, 11]].flatten(1, 2)[:, start:stop] = 0
        kept = torch.ones(3 * PAGE, dtype=torch.bool)
        kept[start:stop] = False
        tokens = new[:, [10, 20, 11]].flatten(1, 2)
        assert torch.equal(tokens[:, kept], old[:, [10, 20, 11]].flatten(1, 2)[:, kept])


def test_pages_of_a_prefix_need_not_be_named(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 1, 2], 48)
    fetch = decode.client.pull(offer.ticket, [7, 8], start=16, first=16)
    fetch.wait(10)
    assert arrived(prefill.tensors, [1, 2], decode.tensors, [7, 8], 0, 32)
    # Prefill may have kept only the end, too.
    offer = prefill.server.offer("two", [5], 48, first=32)
    decode.client.pull(offer.ticket, [9], start=32, first=32).wait(10)
    assert arrived(prefill.tensors, [5], decode.tensors, [9], 0, 16)


@BOTH
@pytest.mark.parametrize("taken_after", [0, 2, LAYERS])
def test_layers_move_as_they_are_computed(connect: Open, mode: str, taken_after: int) -> None:
    prefill, decode = Prefill(connect("p"), seed=1), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 1], 20, ready=False)
    fetch: Fetch | None = None
    for layer in range(LAYERS):
        if layer == taken_after:
            fetch = decode.fetch(mode, offer.ticket, [10, 20])
        prefill.tensors[layer].add_(1.0)
        offer.layer_ready(layer)
        if fetch is not None:
            fetch.wait_layer(layer, 10)
            assert fetch.num_layers_ready > layer
            src, dst = prefill.tensors[: layer + 1], decode.tensors[: layer + 1]
            assert arrived(src, [3, 1], dst, [10, 20], 0, 20)
            assert fetch.done or not decode.tensors[-1].any()
    fetch = fetch or decode.fetch(mode, offer.ticket, [10, 20])
    fetch.wait(10)
    assert over(offer, fetch)
    assert arrived(prefill.tensors, [3, 1], decode.tensors, [10, 20], 0, 20)


def test_layers_are_ready_in_order_and_once(connect: Open) -> None:
    offer = Prefill(connect("p")).server.offer("one", [3], 16, ready=False)
    with pytest.raises(ValueError, match="layer 0 is to be ready next"):
        offer.layer_ready(1)
    for layer in range(LAYERS):
        offer.layer_ready(layer)
    with pytest.raises(ValueError, match="all layers are ready"):
        offer.layer_ready(0)


@BOTH
@pytest.mark.parametrize(("sizes", "axes"), [((16, 64), "KPHTD"), ((32, 8), "KPTHD")])
def test_caches_of_other_shapes_are_converted(
    connect: Open, mode: str, sizes: tuple[int, int], axes: str
) -> None:
    ours, theirs = sizes
    generator = torch.Generator().manual_seed(5)
    src = [torch.randn(2, 8, ours, 3, 4, generator=generator) for _ in range(2)]
    shape = (2, 8, 3, theirs, 4) if axes == "KPHTD" else (2, 8, theirs, 3, 4)
    dst = [torch.zeros(shape) for _ in range(2)]
    server = KVCacheServer(connect("p"), KVCache(src, model="m"))
    client = KVCacheClient(connect("d"), KVCache(dst, axes, model="m"))
    pages = [5, 2, 7, 1][: -(-60 // ours)]
    offer = server.offer("one", pages, 60)
    wanted = [4, 0, 6, 3, 1, 2, 5, 7][: -(-60 // theirs)]
    getattr(client, mode)(offer.ticket, wanted).wait(10)
    for a, b in zip(src, dst, strict=True):
        b = b.transpose(2, 3) if axes == "KPHTD" else b
        one, other = a[:, pages].flatten(1, 2), b[:, wanted].flatten(1, 2)
        assert torch.equal(one[:, :60], other[:, :60])


@BOTH
@pytest.mark.parametrize(("prefills", "decodes"), [(1, 2), (2, 1), (4, 2), (2, 4), (4, 4)])
def test_ranks_of_tensor_parallel_groups_share_heads(
    connect: Open, mode: str, prefills: int, decodes: int
) -> None:
    heads = 4
    whole = [torch.randn(2, 8, PAGE, heads, DIM) for _ in range(2)]
    servers = []
    for rank in range(prefills):
        each = heads // prefills
        mine = [one[:, :, :, rank * each : (rank + 1) * each].contiguous() for one in whole]
        cache = KVCache(mine, model="m", tp_rank=rank, tp_size=prefills)
        servers.append(KVCacheServer(connect(f"p{rank}"), cache))
    offers = [server.offer("one", [3, 1], 20) for server in servers]
    tickets = [offer.ticket for offer in offers]
    fetches = []
    for rank in range(decodes):
        each = heads // decodes
        mine = [torch.zeros(2, 8, PAGE, each, DIM) for _ in range(2)]
        cache = KVCache(mine, model="m", tp_rank=rank, tp_size=decodes)
        client = KVCacheClient(connect(f"d{rank}"), cache)
        fetch = getattr(client, mode)(tickets, [5, 6])
        fetches.append((fetch, mine, slice(rank * each, (rank + 1) * each)))
    for fetch, mine, part in fetches:
        fetch.wait(10)
        assert fetch.wait_released(10)
        for ours, theirs in zip(whole, mine, strict=True):
            a, b = ours[:, [3, 1]][:, :, :, part], theirs[:, [5, 6]]
            assert torch.equal(a.flatten(1, 2)[:, :20], b.flatten(1, 2)[:, :20])
    for offer in offers:
        assert offer.wait_released(10) and offer.error is None


def test_groups_with_page_tables_of_their_own(connect: Open) -> None:
    """Full attention beside a sliding window, which wants only its end."""

    def cache(seed: int | None) -> tuple[KVCache, list[torch.Tensor], list[torch.Tensor]]:
        full = [torch.zeros(2, 16, 8, 2, 4) for _ in range(2)]
        window = [torch.zeros(2, 8, 16, 4, 4)]
        if seed is not None:
            for one in full + window:
                one.normal_()
        groups = [CacheGroup(full, layers=[0, 2]), CacheGroup(window, layers=[1])]
        return KVCache.of_groups(groups, model="m"), full, window

    ours, full, window = cache(1)
    theirs, their_full, their_window = cache(None)
    server, client = KVCacheServer(connect("p"), ours), KVCacheClient(connect("d"), theirs)
    offer = server.offer("one", [[1, 2, 3, 4, 5], [7]], 40, first=[0, 32], ready=False)
    fetch = client.push(offer.ticket, [[9, 8, 7, 6, 5], [2]], first=[0, 32])
    for layer in range(3):
        offer.layer_ready(layer)
        fetch.wait_layer(layer, 10)
    fetch.wait(10)
    assert over(offer, fetch)
    for a, b in zip(full, their_full, strict=True):
        assert torch.equal(a[:, [1, 2, 3, 4, 5]], b[:, [9, 8, 7, 6, 5]])
    assert torch.equal(window[0][:, 7, :8], their_window[0][:, 2, :8])
    # A page of the full group may have the number of one of the window's: they are other memory.
    assert server.offer("two", [[7], [7]], 8).lease.open
    with pytest.raises(ValueError, match="1 lists of pages"):
        server.offer("three", [1, 2], 8)


def test_groups_that_share_their_pages_share_a_ledger(connect: Open) -> None:
    pool = [torch.zeros(2, 8, 16, 2, 4) for _ in range(2)]
    groups = [CacheGroup([pool[0]], layers=[0]), CacheGroup([pool[0]], layers=[1])]
    client = KVCacheClient(connect("d"), KVCache.of_groups(groups, model="m"))
    server = KVCacheServer(connect("p"), KVCache.of_groups(groups, model="m"))
    offer = server.offer("one", [[1], [2]], 16)
    with pytest.raises(ValueError, match="named twice"):
        client.pull(offer.ticket, [[1], [1]])
    other = pool[0].view(2, 4, 32, 2, 4)
    mixed = [CacheGroup([pool[0]], layers=[0]), CacheGroup([other], layers=[1])]
    with pytest.raises(ValueError, match="share memory"):
        KVCacheServer(connect("q"), KVCache.of_groups(mixed, model="m"))


@BOTH
def test_a_process_hands_over_to_itself(connect: Open, mode: str) -> None:
    connection = connect("both")
    prefill, decode = Prefill(connection), Decode(connection)
    offer = prefill.server.offer("one", [3, 1], 32)
    fetch = decode.fetch(mode, offer.ticket, [4, 5])
    fetch.wait(10)
    assert over(offer, fetch)
    assert arrived(prefill.tensors, [3, 1], decode.tensors, [4, 5], 0, 32)


@BOTH
def test_both_processes_offer_and_ask(connect: Open, mode: str) -> None:
    """Numbers and leases are the same in both directions: services tell them apart."""
    a, b = connect("a"), connect("b")
    one, two = (Prefill(a, seed=1), Decode(a)), (Prefill(b, seed=2), Decode(b))
    for _ in range(3):
        offers = [prefill.server.offer("r", [3, 1], 32) for prefill, _ in (one, two)]
        fetches = [
            two[1].fetch(mode, offers[0].ticket, [4, 5]),
            one[1].fetch(mode, offers[1].ticket, [4, 5]),
        ]
        for fetch in fetches:
            fetch.wait(10)
        assert over(offers[0], *fetches) and over(offers[1])
        assert arrived(one[0].tensors, [3, 1], two[1].tensors, [4, 5], 0, 32)
        assert arrived(two[0].tensors, [3, 1], one[1].tensors, [4, 5], 0, 32)


def test_a_prefix_may_be_offered_by_many_requests(connect: Open) -> None:
    prefill = Prefill(connect("p"))
    decodes = [Decode(connect(f"d{index}")) for index in range(3)]
    offers = [prefill.server.offer(f"r{index}", [3, 1, 4 + index], 48) for index in range(3)]
    fetches = [
        decode.client.pull(offer.ticket, [5, 6, 7])
        for decode, offer in zip(decodes, offers, strict=True)
    ]
    for index, fetch in enumerate(fetches):
        fetch.wait(10)
        src = [3, 1, 4 + index]
        assert arrived(prefill.tensors, src, decodes[index].tensors, [5, 6, 7], 0, 48)


def test_one_cache_can_be_served_and_filled(connect: Open) -> None:
    """The ledger is one: what is being filled can't be offered."""
    prefill = Prefill(connect("p"))
    connection = connect("d")
    cache = KVCache([torch.zeros(2, 8, PAGE, HEADS, DIM) for _ in range(LAYERS)], model="m")
    client, server = KVCacheClient(connection, cache), KVCacheServer(connection, cache)
    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = client.pull(offer.ticket, [2])
    with pytest.raises(ValueError, match="being filled"):
        server.offer("again", [2], 16)
    for layer in range(LAYERS):
        offer.layer_ready(layer)
    fetch.wait(10)
    assert fetch.wait_released(10)
    server.offer("again", [2], 16)
    with pytest.raises(ValueError, match="still offered"):
        client.pull(prefill.server.offer("two", [3], 16).ticket, [2])


def soak(fabric: LoopbackFabric, connect: Open, count: int, seed: int) -> None:
    """Several servers and clients, small pools, random lengths and modes; every page verified."""
    rng = random.Random(seed)
    prefills = [Prefill(connect(f"p{i}"), num_pages=24, seed=i) for i in range(2)]
    decodes = [Decode(connect(f"d{i}"), num_pages=24) for i in range(2)]
    their_free = {prefill: set(range(24)) for prefill in prefills}
    our_free = {decode: set(range(24)) for decode in decodes}
    going: dict[str, tuple[list[torch.Tensor], list[int], int, int]] = {}
    started = checked = 0
    deadline = time.monotonic() + 30 + count
    while checked < count:
        assert time.monotonic() < deadline
        for prefill in prefills:
            for ended in prefill.server.poll():
                assert ended.error is None, ended
                their_free[prefill] |= set(ended.pages[0])
        for decode in decodes:
            for ended in decode.client.poll():
                assert ended.error is None, ended
                expected, dst, start, tokens = going.pop(ended.request)
                assert arrived(expected, range(len(dst)), decode.tensors, dst, start, tokens)
                our_free[decode] |= set(ended.pages[0])
                checked += 1
        prefill, decode = rng.choice(prefills), rng.choice(decodes)
        tokens = rng.randint(1, 8 * PAGE)
        size = -(-tokens // PAGE)
        if started == count or size > len(their_free[prefill]) or size > len(our_free[decode]):
            time.sleep(0)
            continue
        src = rng.sample(sorted(their_free[prefill]), size)
        dst = rng.sample(sorted(our_free[decode]), size)
        start = rng.randint(0, tokens)
        their_free[prefill] -= set(src)
        for tensor in prefill.tensors:
            tensor[:, src] = torch.randn(2, size, PAGE, HEADS, DIM)
        ready = rng.random() < 0.5
        request = f"r{started}"
        offer = prefill.server.offer(request, src, tokens, ready=ready)
        fetch = decode.fetch(rng.choice(MODES), offer.ticket, dst, start=start)
        our_free[decode] -= set(fetch.runs[0].pages.tolist())
        going[request] = [one[:, src].clone() for one in prefill.tensors], dst, start, tokens
        for layer in range(0 if ready else LAYERS):
            offer.layer_ready(layer)
        started += 1
    services = [*(one.server for one in prefills), *(one.client for one in decodes)]
    until(lambda: nothing_held(*(one.statistics() for one in services)))


def test_many_requests_between_several_servers_and_clients(
    fabric: LoopbackFabric, connect: Open
) -> None:
    soak(fabric, connect, 200, seed=3)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_soak(fabric: LoopbackFabric, connect: Open, seed: int) -> None:
    soak(fabric, connect, 1000, seed)


def test_ticket_is_short_json_and_names_the_cache(connect: Open) -> None:
    prefill = Prefill(connect("p"), lease=7.0)
    offer = prefill.server.offer("x" * 1000, [1], 5)
    assert len(offer.ticket.encode()) < 2048
    ticket = Ticket.unpack(offer.ticket, key=None)
    assert (ticket.num_tokens, ticket.lease_ms) == (5, 7000)
    assert ticket.request == "x" * 256


def test_statistics(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 4, 1], 48)
    fetch = decode.client.pull(offer.ticket, [5, 6, 9])
    fetch.wait(10)
    assert over(offer, fetch)
    served, fetched = prefill.server.statistics(), decode.client.statistics()
    token = LAYERS * 2 * HEADS * DIM * 4
    assert (fetched.nbytes, served.nbytes) == (48 * token, 0)
    # Pages 3 and 4 go to 5 and 6: one span for each layer and part.
    assert fetched.spans == 2 * LAYERS * 2
    assert fetched.pages == served.pages == 3
    assert dict(fetched.outcomes) == dict(served.outcomes) == {"complete": 1}
    assert (served.offers, served.asked, fetched.asked) == (1, 1, 1)
    assert set(fetched.latencies) == {"meet", "grant", "move", "total"}
    assert all(0 < one.p50 <= one.p99 < 10 for one in fetched.latencies.values())
    assert sum(fetched.paths.values()) == 1
    with pytest.raises(AttributeError):
        fetched.nbytes = 1  # type: ignore[misc]
    assert replace(fetched, nbytes=1).nbytes == 1


def test_poll_never_enters_the_library(connect: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    decode.client.pull(offer.ticket, [5]).wait(10)
    assert offer.wait_released(10)
    entered: list[str] = []
    with decode.client.hub.lock, prefill.server.hub.lock:  # As if a thread held them for long.
        for connection in (prefill.connection, decode.connection):
            for name in ("drain", "post", "poll", "prepare", "notify"):
                monkeypatch.setattr(
                    connection.adapter, name, lambda *args, **kwargs: entered.append("x")
                )
        connection.progress.stop()
        prefill.connection.progress.stop()
        entered.clear()
        assert len(prefill.server.poll()) == 1
        assert not entered
    monkeypatch.undo()


def test_callbacks_run_outside_of_locks(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    fetch = decode.client.pull(offer.ticket, [5])
    called: list[object] = []
    fetch.add_done_callback(lambda: called.append(decode.client.statistics()))
    offer.add_done_callback(lambda: called.append(prefill.server.statistics()))
    until(lambda: len(called) == 2)
    fetch.add_done_callback(lambda: called.append(None))
    assert len(called) == 3


def test_what_is_no_connection_is_refused_by_name(connect: Open) -> None:
    cache = KVCache(Prefill(connect("p")).tensors, model="m")
    with pytest.raises(TypeError, match="expected a Communicator or a Connection"):
        KVCacheServer("prefill-0", cache)  # type: ignore[arg-type]
