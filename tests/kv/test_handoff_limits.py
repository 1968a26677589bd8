"""What must not be taken for granted: memory that moves, many caches, tickets mixed up, stalls."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading

import pytest
import torch

from kv.conftest import BOTH, Open
from kv.worlds import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    Decode,
    Prefill,
    arrived,
    nothing_held,
    over,
    tensors,
    until,
)
from torch_nixl.errors import (
    ClosedError,
    LeaseExpired,
    LeaseUnknown,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.kv import frames
from torch_nixl.kv.cache import KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.hub import hub_of
from torch_nixl.kv.server import KVCacheServer
from torch_nixl.testing import LoopbackFabric


@BOTH
def test_pool_that_has_moved_is_refused(connect: Open, mode: str) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    for one in decode.tensors:
        one.untyped_storage().resize_(4 * one.untyped_storage().nbytes())
    with pytest.raises(ValueError, match="has moved"):
        decode.fetch(mode, offer.ticket, [4])
    assert nothing_held(decode.client.statistics())
    for one in prefill.tensors:
        one.untyped_storage().resize_(4 * one.untyped_storage().nbytes())
    with pytest.raises(ValueError, match="has moved"):
        prefill.server.offer("two", [5], 16)
    assert prefill.server.statistics().held_pages == 1


def test_offer_that_fails_leaves_nothing(connect: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = Prefill(connect("p"))
    monkeypatch.setattr("torch_nixl.kv.ticket.MAX_TICKET", 10)
    with pytest.raises(ValueError, match="more than 10"):
        prefill.server.offer("one", [3], 16)
    assert len(prefill.server._leases) == 0
    assert nothing_held(prefill.server.statistics())


def test_peer_with_many_caches_pushes_out_its_own(
    connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_nixl.kv.service.MAX_MEETINGS_EACH", 4)
    monkeypatch.setattr("torch_nixl.kv.service.MAX_MEETINGS", 8)
    prefill, decode, stranger = Prefill(connect("p")), Decode(connect("d")), Decode(connect("x"))
    remote = stranger.connection.contact("p", prefill.connection.metadata()[0])
    for service in range(3, 43, 2):
        packed = stranger.client.registered.packed
        body = frames.pack_meet(prefill.server.number, service, packed)
        stranger.connection.contacts.send_body(remote, frames.MEET, body)
    decode.client.pull(prefill.server.offer("one", [3], 16).ticket, [4]).wait(10)
    assert len(prefill.server._meetings) <= 5
    # Clients of one process, one after the other, of which the last goes on being served.
    for _ in range(6):
        client = KVCacheClient(decode.connection, KVCache(decode.tensors, model="m"))
        client.pull(prefill.server.offer("two", [3], 16).ticket, [4]).wait(10)
        client.close()


@BOTH
def test_too_many_peers_are_refused_and_cost_nothing(
    connect: Open, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, late = Prefill(connect("p")), Decode(connect("d")), Decode(connect("l"))
    other = Prefill(connect("q"))
    decode.fetch(mode, prefill.server.offer("one", [3], 16).ticket, [4]).wait(10)
    monkeypatch.setattr("torch_nixl.kv.service.MAX_MEETINGS", 1)
    with pytest.raises(TransferError, match="too many"):
        decode.fetch(mode, other.server.offer("two", [3], 16).ticket, [5])
    fetch = late.fetch(mode, prefill.server.offer("three", [3], 16).ticket, [5])
    with pytest.raises(TransferError, match="too many"):
        fetch.wait(10)
    assert fetch.wait_released(10)
    assert nothing_held(decode.client.statistics(), late.client.statistics())
    # It is not for ever.
    monkeypatch.setattr("torch_nixl.kv.service.MAX_MEETINGS", 8)
    late.fetch(mode, prefill.server.offer("four", [3], 16).ticket, [5]).wait(10)


def test_two_tickets_of_one_rank_are_refused(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    one, two = (prefill.server.offer(name, [page], 16) for name, page in (("one", 3), ("two", 2)))
    with pytest.raises(ValueError, match="two different tickets of rank 0"):
        decode.client.pull([one.ticket, two.ticket], [4])
    decode.client.pull([two.ticket, two.ticket], [4]).wait(10)
    assert over(two) and not one.done
    assert arrived(prefill.tensors, [2], decode.tensors, [4], 0, 16)


@pytest.mark.parametrize("how", ["cancel", "timeout", "lost"])
def test_pages_that_no_peer_was_told_of_are_free_at_once(
    fabric: LoopbackFabric, connect: Open, how: str
) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    decode.connection.contact("p", prefill.connection.metadata()[0])
    fabric.cut("p", "d")
    fetch = decode.client.push(offer.ticket, [4], timeout=0.05 if how == "timeout" else 30.0)
    if how == "cancel":
        fetch.cancel()
    elif how == "lost":
        [remote] = decode.connection.contacts.all()
        decode.connection.contacts.lose(remote, TransferError("as if"))
    until(lambda: fetch.done)
    assert fetch.released
    if how == "timeout":
        with pytest.raises(TransferTimeout, match="the caches were to meet"):
            fetch.wait()
    fabric.heal("p", "d")


def test_heartbeats_count_that_came_while_prefill_stood_still(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16, lease=0.3)
    heartbeat = decode.client.keep(offer.ticket)
    until(lambda: prefill.server.statistics().heartbeats >= 2)
    sent = decode.client.statistics().heartbeats
    with prefill.server.hub.lock:  # Its driver can't go on.
        until(lambda: decode.client.statistics().heartbeats >= sent + 5)
    heard = prefill.server.statistics().heartbeats
    until(lambda: prefill.server.statistics().heartbeats >= heard + 5)
    assert heartbeat.error is None and not offer.done
    heartbeat.stop()
    with pytest.raises(LeaseExpired):
        offer.wait(10)


@BOTH
def test_slow_callback_holds_up_no_other_request(
    connect: Open, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    entered, go_on, last = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert go_on.wait(20)
        raise RuntimeError("of the program's")

    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4])
    for request in (offer, fetch):
        request.add_done_callback(slow)
    fetch.add_done_callback(last.set)
    for layer in range(LAYERS):
        offer.layer_ready(layer)
    assert entered.wait(10)
    for _ in range(3):
        again = prefill.server.offer("two", [3], 16)
        assert decode.fetch(mode, again.ticket, [5]).wait_released(10)
        assert again.wait_released(10)
    assert not last.is_set()
    go_on.set()
    assert last.wait(10)
    until(lambda: "a completion callback raised" in caplog.text)


def test_statistics_can_be_copied_and_sent(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    decode.client.pull(prefill.server.offer("one", [3], 16).ticket, [4]).wait(10)
    figures = decode.client.statistics()
    assert pickle.loads(pickle.dumps(figures)) == copy.deepcopy(figures) == figures  # noqa: S301
    assert dataclasses.asdict(figures)["outcomes"] == {"complete": 1}


def test_fork_while_another_thread_holds_the_lock(connect: Open) -> None:
    cache = KVCache(tensors(8), model="m")
    server = KVCacheServer(connect("p"), cache)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with server.hub.lock:
            held.set()
            go_on.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    server.connection.disown()  # What a forked child does first.
    assert server.hub.lock.acquire(blocking=False)
    server.hub.lock.release()
    with pytest.raises(ClosedError):
        server.offer("one", [3], 16)
    server.statistics()
    go_on.set()
    thread.join(10)


def split(connect: Open) -> tuple[KVCacheServer, list[KVCacheClient]]:
    """A server, and clients of the two ranks of a group."""
    server = KVCacheServer(connect("p"), KVCache(tensors(8, 1), model="m"))
    clients = []
    for rank in range(2):
        mine = [torch.zeros(2, 8, PAGE, HEADS // 2, DIM) for _ in range(LAYERS)]
        cache = KVCache(mine, model="m", tp_rank=rank, tp_size=2)
        clients.append(KVCacheClient(connect(f"d{rank}"), cache))
    return server, clients


@pytest.mark.parametrize("how", ["close", "abort"])
def test_closing_frees_what_one_rank_of_two_has_taken(connect: Open, how: str) -> None:
    server, clients = split(connect)
    offer = server.offer("one", [3], 16)
    clients[0].pull(offer.ticket, [4]).wait(10)
    until(lambda: offer.handoffs[0].done)
    getattr(server, how)()
    with pytest.raises(TransferCancelled, match="prefill closed"):
        offer.wait(10)
    assert offer.released and nothing_held(server.statistics())
    assert not server.registered.held
    with pytest.raises(LeaseUnknown):
        clients[1].pull(offer.ticket, [4]).wait(10)


def test_heartbeat_ends_with_its_server(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16, lease=0.1)
    heartbeat = decode.client.keep(offer.ticket)
    until(lambda: prefill.server.statistics().heartbeats >= 1)
    prefill.server.close()
    until(lambda: not heartbeat.active)
    assert isinstance(heartbeat.error, LeaseUnknown)


def test_dtype_that_cannot_be_sent(connect: Open) -> None:
    cache = KVCache([torch.empty(2, 8, PAGE, HEADS, DIM, dtype=torch.bits8)], model="m")
    connection = connect("p")
    with pytest.raises(ValueError, match=r"cache of torch\.bits8"):
        KVCacheServer(connection, cache)
    assert not hub_of(connection)._pools


@BOTH
@pytest.mark.parametrize(("prefills", "decodes"), [(4, 1), (4, 2), (4, 4), (2, 4)])
def test_replicas_that_nobody_needs_have_their_pages_back(
    connect: Open, mode: str, prefills: int, decodes: int
) -> None:
    """One latent, that all ranks of prefill hold."""

    def latent(value: float, rank: int, size: int) -> KVCache:
        pages = [torch.full((8, PAGE, DIM), value) for _ in range(LAYERS)]
        return KVCache(pages, "PTD", model="m", num_kv_heads=1, tp_rank=rank, tp_size=size)

    servers = [KVCacheServer(connect(f"p{n}"), latent(1.0, n, prefills)) for n in range(prefills)]
    clients = [KVCacheClient(connect(f"d{n}"), latent(0.0, n, decodes)) for n in range(decodes)]
    offers = [server.offer("one", [3], 16) for server in servers]
    tickets = [offer.ticket for offer in offers]
    for client in clients:
        getattr(client, mode)(tickets, [4]).wait(10)
        assert client.cache.owners[0][0][4].eq(1.0).all()
    assert all(offer.wait_released(10) for offer in offers)
    errors = [type(offer.error) for offer in offers]
    assert errors.count(type(None)) == min(prefills, decodes)
    assert errors.count(TransferCancelled) == prefills - min(prefills, decodes)
