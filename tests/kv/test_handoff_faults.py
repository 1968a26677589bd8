"""What goes wrong: leases, givers-up at every stage, deaths, strangers. On the loopback adapter."""

from __future__ import annotations

import json
import logging
import threading

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
from torch_nixl.errors import (
    ClosedError,
    IncompatibleError,
    LeaseConsumed,
    LeaseExpired,
    LeaseOutOfRange,
    LeaseReused,
    LeaseUnknown,
    MetadataError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.kv import frames, leases
from torch_nixl.kv.cache import KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.protocol import Mode, Outcome
from torch_nixl.kv.server import KVCacheServer
from torch_nixl.kv.ticket import Ticket, describe
from torch_nixl.testing import LoopbackFabric


def forged(ticket: str, **changes: object) -> str:
    """A ticket of other fields whose seal is good: no secret is set."""
    fields = Ticket.unpack(ticket, key=None).model_dump(exclude={"seal"})
    return Ticket(**{**fields, **changes}).pack(key=None)


def untouched(decode: Decode) -> bool:
    return not any(bool(one.any()) for one in decode.tensors)


# Leases.


@BOTH
def test_expired_lease_moves_nothing(connect: Open, mode: str) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 1], 32, lease=0.01)
    with pytest.raises(LeaseExpired):
        offer.wait(10)
    assert offer.released
    fetch = decode.fetch(mode, offer.ticket, [4, 5])
    with pytest.raises(LeaseExpired, match="'one' lapsed before it was taken"):
        fetch.wait(10)
    assert fetch.wait_released(10)
    assert fetch.failed_pages == ((4, 5),)
    assert untouched(decode)
    [ended] = decode.client.poll()
    assert isinstance(ended.error, LeaseExpired) and ended.failed_pages == ((4, 5),)
    assert nothing_held(prefill.server.statistics(), decode.client.statistics())
    assert dict(decode.client.statistics().outcomes) == {"expired": 1}


@BOTH
def test_consumed_lease_moves_nothing(connect: Open, mode: str) -> None:
    prefill, decode, late = Prefill(connect("p")), Decode(connect("d")), Decode(connect("l"))
    offer = prefill.server.offer("one", [3], 16, ready=False)
    first = decode.fetch(mode, offer.ticket, [4])
    until(lambda: prefill.server.statistics().asked == 1)
    with pytest.raises(LeaseConsumed):  # While it is being taken.
        late.fetch(mode, offer.ticket, [4]).wait(10)
    for layer in range(LAYERS):
        offer.layer_ready(layer)
    first.wait(10)
    assert over(offer, first)
    with pytest.raises(LeaseConsumed):  # And ever after.
        late.fetch(mode, offer.ticket, [4]).wait(10)
    assert untouched(late)
    assert arrived(prefill.tensors, [3], decode.tensors, [4], 0, 16)


@BOTH
def test_unknown_lease_moves_nothing(connect: Open, mode: str) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    for changes in ({"slot": 7}, {"generation": 9}, {"service": 1000}):
        fetch = decode.fetch(mode, forged(offer.ticket, **changes), [4])
        with pytest.raises(LeaseUnknown):
            fetch.wait(10)
        assert fetch.wait_released(10)
    assert untouched(decode) and not offer.done
    decode.fetch(mode, offer.ticket, [4]).wait(10)


@BOTH
def test_range_beyond_the_lease_moves_nothing(connect: Open, mode: str) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 1], 32, first=16)
    with pytest.raises(LeaseOutOfRange, match="positions 16 to 40 were asked for"):
        decode.fetch(mode, offer.ticket, [4, 5, 6], start=16, stop=40).wait(10)
    with pytest.raises(LeaseOutOfRange, match="16"):
        decode.fetch(mode, offer.ticket, [4, 5], stop=32).wait(10)
    assert untouched(decode) and not offer.done
    decode.fetch(mode, offer.ticket, [4, 5], start=16).wait(10)


def test_reused_lease_moves_nothing(connect: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "KEPT_LEASES", 0)
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    old = prefill.server.offer("one", [3], 16)
    old.cancel()
    assert old.released
    new = prefill.server.offer("two", [3], 16)
    with pytest.raises(LeaseReused):
        decode.client.pull(old.ticket, [4]).wait(10)
    assert untouched(decode) and not new.done
    decode.client.pull(new.ticket, [4]).wait(10)


def test_heartbeat_keeps_a_lease_until_it_is_taken(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16, lease=0.25)
    heartbeat = decode.client.keep(offer.ticket)
    until(lambda: prefill.server.statistics().heartbeats >= 8)
    assert heartbeat.error is None and not offer.done
    fetch = decode.client.pull(offer.ticket, [4])
    assert not heartbeat.active
    fetch.wait(10)
    # Without one it lapses.
    offer = prefill.server.offer("two", [3], 16, lease=0.05)
    with pytest.raises(LeaseExpired):
        offer.wait(10)
    heartbeat = decode.client.keep(offer.ticket)
    until(lambda: not heartbeat.active)
    assert isinstance(heartbeat.error, LeaseExpired)


def test_lost_server_ends_a_heartbeat(fabric: LoopbackFabric, connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16, lease=0.1)
    heartbeat = decode.client.keep(offer.ticket)
    until(lambda: prefill.server.statistics().heartbeats >= 1)
    fabric.kill("p")
    until(lambda: not heartbeat.active)
    assert isinstance(heartbeat.error, PeerLostError)


# Givers-up.


@BOTH
@pytest.mark.parametrize("layers", [0, 1, LAYERS - 1])
def test_prefill_gives_up_in_the_middle(connect: Open, mode: str, layers: int) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 1], 32, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4, 5])
    for layer in range(layers):
        offer.layer_ready(layer)
        fetch.wait_layer(layer, 10)
    until(lambda: prefill.server.statistics().asked == 1)
    offer.cancel()
    with pytest.raises(TransferCancelled, match="withdrawn by prefill"):
        fetch.wait(10)
    assert over(offer, fetch)
    assert fetch.failed_pages == ((4, 5),)
    assert isinstance(offer.error, TransferCancelled)
    assert nothing_held(prefill.server.statistics(), decode.client.statistics())


@BOTH
@pytest.mark.parametrize("layers", [0, 1, LAYERS - 1])
def test_decode_gives_up_in_the_middle(connect: Open, mode: str, layers: int) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 1], 32, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4, 5])
    for layer in range(layers):
        offer.layer_ready(layer)
        fetch.wait_layer(layer, 10)
    until(lambda: prefill.server.statistics().asked == 1)
    fetch.cancel()
    with pytest.raises(TransferCancelled, match="given up by decode"):
        offer.wait(10)
    assert over(offer, fetch)
    assert isinstance(fetch.error, TransferCancelled)
    assert nothing_held(prefill.server.statistics(), decode.client.statistics())
    # The pages can be used at once, and the rest of the layers come too late to do harm.
    for layer in range(layers, LAYERS):
        offer.layer_ready(layer)
    again = prefill.server.offer("two", [3, 1], 32)
    decode.fetch(mode, again.ticket, [4, 5]).wait(10)


@BOTH
def test_pages_are_held_until_a_slow_mover_has_stopped(
    fabric: LoopbackFabric, connect: Open, mode: str
) -> None:
    """The other side has heard that its peer gave up, but what it posted before still moves."""
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    decode.fetch(mode, prefill.server.offer("met", [0], 16).ticket, [0]).wait(10)
    mover = (decode if mode == "pull" else prefill).connection
    fabric.delay(1, initiator=mover.name)
    pages = range(1, 32)
    offer = prefill.server.offer("one", pages, 31 * PAGE)
    fetch = decode.fetch(mode, offer.ticket, pages)
    until(lambda: any(one.in_flight for one in list(mover.operations.transfers)))
    ours, theirs = (offer, fetch) if mode == "pull" else (fetch, offer)
    ours.cancel()
    with pytest.raises(TransferCancelled):
        theirs.wait(10)
    assert not ours.wait_released(0.2)
    assert any(one.in_flight for one in list(mover.operations.transfers))
    fabric.delay(None, initiator=mover.name)
    assert over(offer, fetch)
    assert not mover.operations.transfers


@BOTH
def test_decode_gives_up_before_the_caches_have_met(
    fabric: LoopbackFabric, connect: Open, mode: str
) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    fabric.cut("p", "d")
    fetch = decode.fetch(mode, offer.ticket, [4])
    fetch.cancel()
    fabric.heal("p", "d")
    assert fetch.wait_released(10)
    decode.fetch(mode, offer.ticket, [4]).wait(10)
    assert over(offer)


def test_withdrawn_before_it_was_taken(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    offer.cancel()
    assert offer.done and offer.released
    with pytest.raises(TransferCancelled, match="withdrawn"):
        decode.client.pull(offer.ticket, [4]).wait(10)


@BOTH
@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_timeout_on_either_side_ends_both(connect: Open, mode: str, slow: str) -> None:
    mine = 0.05
    prefill = Prefill(connect("p"), timeout=mine if slow == "decode" else 30.0)
    decode = Decode(connect("d"), timeout=mine if slow == "prefill" else 30.0)
    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4])
    with pytest.raises(TransferTimeout):
        fetch.wait(10)
    with pytest.raises(TransferTimeout):
        offer.wait(10)
    assert over(offer, fetch)
    assert nothing_held(prefill.server.statistics(), decode.client.statistics())


@BOTH
def test_wait_with_a_timeout_ends_the_request(connect: Open, mode: str) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4])
    with pytest.raises(TransferTimeout):
        fetch.wait_layer(0, 0.01)
    assert not fetch.done
    with pytest.raises(TransferTimeout):
        fetch.wait(0.02)
    assert over(offer, fetch)
    lonely = prefill.server.offer("two", [3], 16)
    with pytest.raises(TransferTimeout):
        lonely.wait(0.01)
    assert lonely.released


@BOTH
@pytest.mark.parametrize("what", ["prepare", "post"])
def test_failed_transfer_is_reported_for_each_page(
    fabric: LoopbackFabric, connect: Open, mode: str, what: str
) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    first = prefill.server.offer("one", [3], 16)
    decode.fetch(mode, first.ticket, [4]).wait(10)
    mover = decode if mode == "pull" else prefill
    fabric.fail_next(mover.connection.adapter, what, TransferError("NIXL says no"))  # type: ignore[arg-type]
    offer = prefill.server.offer("two", [3, 1], 32)
    fetch = decode.fetch(mode, offer.ticket, [4, 5])
    with pytest.raises(TransferError, match="NIXL says no"):
        fetch.wait(10)
    assert over(offer, fetch)
    assert fetch.failed_pages == ((4, 5),)
    assert isinstance(offer.error, TransferError)
    third = prefill.server.offer("three", [3, 1], 32)
    decode.fetch(mode, third.ticket, [4, 5]).wait(10)


# Deaths.


@BOTH
@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("dies", ["p", "d"])
def test_killed_peer_frees_pages_and_the_others_go_on(
    fabric: LoopbackFabric, connect: Open, mode: str, layers: int, dies: str
) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    other = Decode(connect("o")) if dies == "d" else Prefill(connect("o"))
    offer = prefill.server.offer("one", [3, 1], 32, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4, 5])
    for layer in range(layers):
        offer.layer_ready(layer)
        fetch.wait_layer(layer, 10)
    until(lambda: prefill.server.statistics().asked == 1)
    fabric.kill(dies)
    left = offer if dies == "d" else fetch
    with pytest.raises(PeerLostError):
        left.wait(10)
    # Of one process, like everything here: it counts as alive until it says otherwise.
    victim = decode if dies == "d" else prefill
    survivor = prefill if dies == "d" else decode
    remote = next(
        one.remote
        for one in (*offer.handoffs, *fetch.handoffs)
        if one.remote is not None and one.remote.name == victim.connection.name
    )
    remote.closed = True
    assert left.wait_released(10)
    if isinstance(other, Decode):
        again = survivor.server.offer("two", [3, 1], 32)  # type: ignore[union-attr]
        other.fetch(mode, again.ticket, [4, 5]).wait(10)
    else:
        again = other.server.offer("two", [3, 1], 32)
        survivor.fetch(mode, again.ticket, [4, 5]).wait(10)  # type: ignore[union-attr]


@BOTH
def test_lost_but_living_peer_keeps_pages_until_it_answers(
    fabric: LoopbackFabric, connect: Open, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss proves nothing: pages that the peer may touch stay held until the two talk again."""
    monkeypatch.setattr("torch_nixl.kv.recontact.RECONTACT_SECONDS", 0.2)
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3, 1], 32, ready=False)
    fetch = decode.fetch(mode, offer.ticket, [4, 5])
    until(lambda: prefill.server.statistics().asked == 1)
    exposed = prefill if mode == "pull" else decode
    fabric.cut("p", "d")
    [remote] = exposed.connection.contacts.all()
    exposed.connection.contacts.lose(remote, PeerLostError("as if", remote=remote.name))
    left = offer if mode == "pull" else fetch
    with pytest.raises(PeerLostError):
        left.wait(10)
    assert not left.wait_released(0.1)
    fabric.heal("p", "d")
    assert left.wait_released(10)


def test_closing_withdraws_and_frees(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    taken = prefill.server.offer("one", [3], 16, ready=False)
    lonely = prefill.server.offer("two", [1], 16)
    fetch = decode.client.pull(taken.ticket, [4])
    until(lambda: prefill.server.statistics().asked == 1)
    prefill.server.close(0.05)
    assert lonely.released and isinstance(lonely.error, TransferCancelled)
    with pytest.raises(TransferCancelled):
        fetch.wait(10)
    assert over(taken, fetch)
    with pytest.raises(ClosedError):
        prefill.server.offer("three", [1], 16)
    for ticket in (lonely.ticket, taken.ticket):
        with pytest.raises(TransferError):
            decode.client.pull(ticket, [5]).wait(10)
    assert not prefill.server.registered.held
    prefill.server.close()
    decode.client.close()
    with pytest.raises(ClosedError):
        decode.client.pull(lonely.ticket, [5])
    with pytest.raises(ClosedError):
        decode.client.keep(lonely.ticket)
    # The connection lives: new services can be made on it.
    again = Prefill(prefill.connection)
    other = Decode(decode.connection)
    other.client.pull(again.server.offer("four", [1], 16).ticket, [2]).wait(10)


def test_close_waits_for_what_moves(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = decode.client.pull(offer.ticket, [4])
    until(lambda: prefill.server.statistics().asked == 1)
    closer = threading.Thread(target=prefill.server.close, args=(10.0,))
    closer.start()
    for layer in range(LAYERS):
        offer.layer_ready(layer)
    fetch.wait(10)
    closer.join(10)
    assert not closer.is_alive() and offer.error is None


@BOTH
@pytest.mark.parametrize("side", ["p", "d"])
def test_closing_connection_gives_up_what_waits_for_layers_at_once(
    connect: Open, mode: str, side: str
) -> None:
    """As at a process's exit: peers hear of it now, not when the time to close in is up."""
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16, ready=False)
    lonely = prefill.server.offer("two", [1], 16)
    fetch = decode.fetch(mode, offer.ticket, [4])
    offer.layer_ready(0)
    fetch.wait_layer(0, 10)
    ours, peer = (offer, fetch) if side == "p" else (fetch, offer)
    closing = (prefill if side == "p" else decode).connection
    closer = threading.Thread(target=closing.close, args=(60.0,))
    closer.start()
    who = "prefill is closing" if side == "p" else "decode is closing"
    for request in (ours, peer):
        with pytest.raises(TransferCancelled, match=who):
            request.wait(10)
        assert request.wait_released(10) or request is ours
    closer.join(10)
    assert not closer.is_alive()
    assert lonely.done is (side == "p")


def test_closing_connection_lets_end_what_moves(fabric: LoopbackFabric, connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    decode.client.pull(prefill.server.offer("warm", [9], 16).ticket, [9]).wait(10)
    fabric.delay(64)
    offer = prefill.server.offer("one", [3], 16)
    fetch = decode.client.pull(offer.ticket, [4])
    until(lambda: any(one.in_flight for one in decode.connection.operations.transfers))
    prefill.connection.close(20)
    fetch.wait(10)
    assert arrived(prefill.tensors, [3], decode.tensors, [4], 0, 16)
    assert offer.error is None


@pytest.mark.parametrize("side", ["p", "d"])
def test_aborted_connection_ends_everything(connect: Open, side: str) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    taken = prefill.server.offer("one", [3], 16, ready=False)
    lonely = prefill.server.offer("two", [1], 16)
    fetch = decode.client.pull(taken.ticket, [4])
    until(lambda: prefill.server.statistics().asked == 1)
    (prefill if side == "p" else decode).connection.abort()
    if side == "p":
        for offer in (taken, lonely):
            with pytest.raises(ClosedError):
                offer.wait(10)
        with pytest.raises(ClosedError):
            prefill.server.offer("three", [1], 16)
        with pytest.raises(ClosedError):
            KVCacheServer(prefill.connection, KVCache(prefill.tensors, model="m"))
        assert lonely.released
    else:
        with pytest.raises(ClosedError):
            fetch.wait(10)
        assert fetch.released
        with pytest.raises(ClosedError):
            decode.client.pull(lonely.ticket, [5])


# Bad input.


def incompatible() -> list[tuple[KVCache, str, str]]:
    """Caches that `Prefill`'s can't be converted to, and what differs: theirs, ours."""
    other = [torch.zeros(2, 8, PAGE, HEADS, 16) for _ in range(LAYERS)]
    halves = [torch.zeros(2, 8, PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS)]
    uneven = [torch.zeros(2, 8, 24, HEADS, DIM) for _ in range(LAYERS)]
    return [
        (KVCache(other, model="m"), "head_dim is 8 here and 16 there", "head_dim is 16 here"),
        (KVCache(other, model="n"), "model is 'm' here and 'n' there", "model is 'n' here"),
        (KVCache(halves, model="m"), "dtype is", "dtype is torch.bfloat16 here"),
        (KVCache(halves[:2], model="m"), "num_layers is 4 here and 2", "num_layers is 2 here"),
        (KVCache(uneven, model="m"), "page_size is 16 here and 24", "page_size is 24 here and 16"),
    ]


def test_incompatible_caches_are_refused_by_name_before_contact(
    connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(connect("p"))
    offer = prefill.server.offer("one", [3], 16)
    connection = connect("d")
    monkeypatch.setattr(connection, "contact", lambda *_: pytest.fail("it was contacted"))
    for cache, _, difference in incompatible():
        client = KVCacheClient(connection, cache)
        for mode in MODES:
            with pytest.raises(IncompatibleError, match=f"p: {difference}"):
                getattr(client, mode)(offer.ticket, [4])
        assert nothing_held(client.statistics())
    assert not offer.done
    Decode(connect("e")).client.pull(offer.ticket, [4]).wait(10)


@pytest.mark.parametrize("lies", [False, True])
def test_incompatible_caches_are_refused_by_name_when_they_meet(connect: Open, lies: bool) -> None:
    """The ticket doesn't say, or says the wrong thing."""
    prefill = Prefill(connect("p"))
    offer = prefill.server.offer("one", [3], 16)
    connection = connect("d")
    for cache, difference, _ in incompatible():
        client = KVCacheClient(connection, cache)
        record = describe(cache.compatibility) if lies else None
        ticket = forged(offer.ticket, compatibility=record)
        for mode in MODES:
            fetch = getattr(client, mode)(ticket, [4])
            with pytest.raises(IncompatibleError, match=difference):
                fetch.wait(10)
            assert fetch.wait_released(10)
    assert not offer.done
    Decode(connect("e")).client.pull(offer.ticket, [4]).wait(10)


def test_malformed_tickets_are_refused(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    fields = json.loads(offer.ticket)
    for ticket in (
        "",
        "{}",
        "[1]",
        "x" * 10000,
        offer.ticket[:-2],
        json.dumps({**fields, "slot": 5}),
        json.dumps({**fields, "server": "q"}),
        forged(offer.ticket, server="q"),
        forged(offer.ticket, metadata="AAAA"),
    ):
        with pytest.raises(MetadataError):
            decode.client.pull(ticket, [4])
        with pytest.raises(MetadataError):
            decode.client.keep(ticket)
    assert nothing_held(decode.client.statistics())
    decode.client.pull(offer.ticket, [4]).wait(10)


def test_ticket_of_a_dead_server(fabric: LoopbackFabric, connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    fabric.kill("p")
    with pytest.raises(PeerLostError):
        decode.client.pull(offer.ticket, [4]).wait(10)
    until(lambda: nothing_held(decode.client.statistics()))


def test_secret_is_demanded(connect: Open) -> None:
    prefill, decode = Prefill(connect("p", secret="s")), Decode(connect("d", secret="s"))
    stranger = Decode(connect("x"))
    offer = prefill.server.offer("one", [3], 16)
    with pytest.raises(MetadataError):
        stranger.client.pull(offer.ticket, [4])
    decode.client.pull(offer.ticket, [4]).wait(10)


def test_programs_mistakes(connect: Open) -> None:
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    bad_offers = [
        (([99], 16), {}, "page 99 does not exist"),
        (([-1], 16), {}, "page -1 does not exist"),
        (([1], 17), {}, "hold positions 0 to 16, not 0 to 17"),
        (([1, 1], 32), {}, "named twice"),
        (([1], 16), {"first": 3}, "expected a page's first position"),
        (([1], 16), {"lease": 0.0}, "lease=0.0"),
        (([1], -1), {}, "num_tokens=-1"),
        (([1.5], 16), {}, "expected a list of ids"),
    ]
    for arguments, options, match in bad_offers:
        with pytest.raises(ValueError, match=match):
            prefill.server.offer("bad", *arguments, **options)  # type: ignore[arg-type]
    bad_pulls: list[tuple[list[int], dict[str, int], str]] = [
        ([99], {}, "page 99 does not exist"),
        ([], {}, "hold positions 0 to 0, not 0 to 16"),
        ([1, 1], {"stop": 32}, "named twice"),
        ([1], {"start": 16, "stop": 8}, "positions 16 to 8"),
        ([1], {"first": 16}, "hold positions 16 to 32|begin after"),
    ]
    for pages, numbers, match in bad_pulls:
        if "stop" in numbers and match == "named twice":
            wide = prefill.server.offer("wide", [3, 4], 32)
            with pytest.raises(ValueError, match=match):
                decode.client.pull(wide.ticket, pages)
            wide.cancel()
            continue
        with pytest.raises(ValueError, match=match):
            decode.client.pull(offer.ticket, pages, **numbers)
    with pytest.raises(ValueError, match="timeout"):
        decode.client.pull(offer.ticket, [1], timeout=-1)
    assert prefill.server.statistics().open_requests == 1
    assert nothing_held(decode.client.statistics())


def test_garbage_does_not_harm_the_server(connect: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    prefill, decode = Prefill(connect("p")), Decode(connect("d"))
    offer = prefill.server.offer("one", [3], 16)
    stranger = connect("x")
    remote = stranger.contact("p", prefill.connection.metadata()[0])
    server = prefill.server.number
    lease = offer.lease.name
    head = frames.Head(server, 1, lease)
    bodies = {
        frames.MEET: [b"", b"\0" * 8, frames.pack_meet(server, 3, b"\xff" * 100)],
        frames.WELCOME: [b"", frames.pack_meet(3, server, b"junk")],
        frames.TAKE: [b"", head.pack(), head.pack() + b"\0" * 21 + b"\0"],
        frames.GRANT: [b"", frames.pack_count(head, 3, b"\0")],
        frames.READY: [b"", frames.pack_count(head, 3)],
        frames.REJECT: [b"", frames.pack_end(head, Outcome.UNKNOWN, "x")],
        frames.CANCEL: [b"", frames.pack_end(head, Outcome.CANCELLED, "x")],
        frames.DONE: [b"", frames.pack_end(head, Outcome.COMPLETE)],
        frames.BEAT: [b"", frames.pack_count(frames.Head(server, 1, leases.LeaseId(9, 9)), 5)],
        80: [b""],
    }
    for kind, each in bodies.items():
        for body in each:
            stranger.contacts.send_body(remote, kind, body)
    until(lambda: prefill.connection.statistics().frames_received >= 18)
    assert not offer.done
    decode.client.pull(offer.ticket, [4]).wait(10)
    assert arrived(prefill.tensors, [3], decode.tensors, [4], 0, 16)


def test_stranger_that_has_not_met_gets_nothing(connect: Open) -> None:
    prefill = Prefill(connect("p"))
    offer = prefill.server.offer("one", [3], 16)
    stranger = Decode(connect("x"))
    remote = stranger.connection.contact("p", prefill.connection.metadata()[0])
    heard: list[tuple[Outcome, str]] = []
    handlers = stranger.connection._dispatcher._handlers
    handlers[frames.REJECT] = lambda _, body: heard.append(frames.parse_end(body))
    take = frames.Take(
        frames.Head(prefill.server.number, 1, offer.lease.name), 3, Mode.PULL, 0, 16, ()
    )
    stranger.connection.contacts.send_body(remote, frames.TAKE, frames.pack_take(take))
    until(lambda: bool(heard))
    assert heard == [(Outcome.FAILED, "the caches have not met")]
    assert not offer.done
