"""Field reports, group C: KV pages freed, reused or matched wrongly. Two agents in this process."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from kv.worlds import LAYERS, PAGE, Decode, Prefill, arrived, nothing_held, over, until

from torch_nixl.engine.connection import Connection
from torch_nixl.errors import (
    IncompatibleError,
    LeaseConsumed,
    LeaseExpired,
    LeaseOutOfRange,
    LeaseUnknown,
    MetadataError,
    TransferCancelled,
)
from torch_nixl.kv import frames
from torch_nixl.kv.cache import CacheGroup, KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.leases import LeaseId
from torch_nixl.kv.protocol import Outcome
from torch_nixl.kv.request import Ended
from torch_nixl.kv.server import KVCacheServer
from torch_nixl.kv.ticket import Ticket

Open = Callable[[str], Connection]


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Connection, Connection]]:
    connections = Connection.open("prefill"), Connection.open("decode")
    yield connections
    for connection in connections:
        connection.abort()


@pytest.fixture
def sides(agents: tuple[Connection, Connection]) -> Iterator[tuple[Prefill, Decode]]:
    prefill, decode = Prefill(agents[0]), Decode(agents[1])
    yield prefill, decode
    decode.client.close()
    prefill.server.close()


def forged(ticket: str, **changes: object) -> str:
    fields = Ticket.unpack(ticket, key=None).model_dump(exclude={"seal"})
    return Ticket(**{**fields, **changes}).pack(key=None)


def test_c1_pages_stay_held_until_the_writer_has_let_go(sides: tuple[Prefill, Decode]) -> None:
    prefill, decode = sides
    offer = prefill.server.offer("a", [1, 2, 3, 4], 64, ready=False)
    first = decode.client.push(offer.ticket, [1, 2, 3, 4])
    offer.layer_ready(0)
    first.wait_layer(0, 10)
    with prefill.server.hub.lock:  # The writer hears nothing yet, and goes on.
        first.cancel()
        assert decode.client.poll() == [] and not first.released
        offer.layer_ready(1)
    # Taken from the pool only once they are free: before, the client itself refuses them.
    ended: list[Ended] = []

    def look() -> bool:
        ended.extend(decode.client.poll())
        return bool(ended)

    until(look)
    assert isinstance(ended[0].error, TransferCancelled)
    assert ended[0].pages == ((1, 2, 3, 4),)
    for tensor in decode.tensors:
        tensor[:, [1, 2, 3, 4]] = 7.0
    for layer in range(2, LAYERS):
        offer.layer_ready(layer)
    assert over(offer, first)
    assert all(bool((tensor[:, [1, 2, 3, 4]] == 7.0).all()) for tensor in decode.tensors)


def test_c1_pages_that_may_be_written_are_refused_to_others(
    sides: tuple[Prefill, Decode],
) -> None:
    prefill, decode = sides
    offer = prefill.server.offer("a", [1, 2], 32, ready=False)
    first = decode.client.push(offer.ticket, [1, 2])
    other = prefill.server.offer("b", [3, 4], 32)
    with pytest.raises(ValueError, match="being filled by another request"):
        decode.client.pull(other.ticket, [2, 1])
    offer.cancel()
    assert over(offer, first)
    decode.client.pull(other.ticket, [2, 1]).wait(10)


def test_c2_lease_that_ran_out_never_gives_the_new_data(sides: tuple[Prefill, Decode]) -> None:
    prefill, decode = sides
    offer = prefill.server.offer("a", [1, 2], 32, lease=0.05)
    assert offer.wait_released(10)
    for tensor in prefill.tensors:
        tensor[:, [1, 2]] = 9.0
    fetch = decode.client.pull(offer.ticket, [5, 6])
    with pytest.raises(LeaseExpired):
        fetch.wait(10)
    assert not any(bool(tensor.any()) for tensor in decode.tensors)


def test_c3_four_wrong_references_are_four_errors(sides: tuple[Prefill, Decode]) -> None:
    prefill, decode = sides
    offer = prefill.server.offer("a", [1, 2], 32)
    decode.client.pull(offer.ticket, [5, 6]).wait(10)
    assert offer.wait_released(10)
    before = [tensor.clone() for tensor in decode.tensors]
    lapsed = prefill.server.offer("b", [1, 2], 32, lease=0.02)
    assert lapsed.wait_released(10)
    prefill.server.offer("c", [1, 2], 32)  # The pages are another's by now.
    wrong = [
        (forged(offer.ticket, slot=99), 32, LeaseUnknown),
        (prefill.server.offer("d", [3], 16).ticket, 32, LeaseOutOfRange),
        (offer.ticket, 32, LeaseConsumed),
        (lapsed.ticket, 32, LeaseExpired),
    ]
    for ticket, stop, error in wrong:
        fetch = decode.client.pull(ticket, [7, 8], stop=stop)
        with pytest.raises(error):
            fetch.wait(10)
        assert fetch.failed_pages == ((7, 8),)
    for old, new in zip(before, decode.tensors, strict=True):
        assert torch.equal(old, new)
    outcomes = decode.client.statistics().outcomes
    assert all(outcomes[name] == 1 for name in ("unknown", "out_of_range", "consumed", "expired"))


def test_c5_the_tail_of_a_pushed_prompt_arrives(sides: tuple[Prefill, Decode]) -> None:
    prefill, decode = sides
    offer = prefill.server.offer("a", [1, 2, 3, 4, 5, 6], 6 * PAGE)
    decode.client.push(offer.ticket, [9, 8], start=4 * PAGE, first=4 * PAGE).wait(10)
    assert arrived(prefill.tensors, [5, 6], decode.tensors, [9, 8], 0, 2 * PAGE)


def test_c6_heads_before_tokens_are_converted(agents: tuple[Connection, Connection]) -> None:
    numbers = torch.arange(2 * 4 * 16 * 3 * 4, dtype=torch.float32).view(2, 4, 16, 3, 4)
    there = torch.zeros(2, 4, 3, 16, 4)
    with (
        KVCacheServer(agents[0], KVCache([numbers], "KPTHD", model="m")) as server,
        KVCacheClient(agents[1], KVCache([there], "KPHTD", model="m")) as client,
    ):
        offer = server.offer("a", [3, 0], 30)
        client.pull(offer.ticket, [1, 2]).wait(10)
        assert offer.wait_released(10)
    got, sent = there.transpose(2, 3)[:, [1, 2]], numbers[:, [3, 0]]
    assert torch.equal(got.flatten(1, 2)[:, :30], sent.flatten(1, 2)[:, :30])


@pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (32, 16)])
def test_c7_block_sizes_may_differ(
    agents: tuple[Connection, Connection], ours: int, theirs: int
) -> None:
    source, target = torch.randn(2, 8, ours, 2, 4), torch.zeros(2, 8, theirs, 2, 4)
    with (
        KVCacheServer(agents[0], KVCache([source], model="m")) as server,
        KVCacheClient(agents[1], KVCache([target], model="m")) as client,
    ):
        src, dst = [5, 2, 7, 1][: 64 // ours], [4, 0, 6, 3][: 64 // theirs]
        client.pull(server.offer("a", src, 60).ticket, dst).wait(10)
    one, other = source[:, src].flatten(1, 2), target[:, dst].flatten(1, 2)
    assert torch.equal(one[:, :60], other[:, :60])


def test_c7_block_sizes_that_do_not_fit_are_refused_by_name(
    agents: tuple[Connection, Connection],
) -> None:
    with (
        KVCacheServer(agents[0], KVCache([torch.zeros(2, 8, 16, 2, 4)], model="m")) as server,
        KVCacheClient(agents[1], KVCache([torch.zeros(2, 8, 24, 2, 4)], model="m")) as client,
    ):
        ticket = server.offer("a", [1], 16).ticket
        with pytest.raises(IncompatibleError, match="page_size is 24 here and 16 there"):
            client.pull(ticket, [1])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_c8_float8_is_exact_to_the_bit(
    agents: tuple[Connection, Connection], dtype: torch.dtype
) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(2 * 4 * 16 * 2 * 8 // 256)
    source = every.view(2, 4, 16, 2, 8)
    target = torch.zeros_like(source)
    with (
        KVCacheServer(agents[0], KVCache([source.view(dtype)], model="m")) as server,
        KVCacheClient(agents[1], KVCache([target.view(dtype)], model="m")) as client,
    ):
        client.pull(server.offer("a", [2, 0], 32).ticket, [1, 3]).wait(10)
    assert torch.equal(target[:, [1, 3]], source[:, [2, 0]])


def test_c10_what_is_reported_complete_has_the_same_hash(
    agents: tuple[Connection, Connection],
) -> None:
    """Five threads, eight rounds of 4 x 2.3 MB + 4 x 16 KB each."""
    shapes = [(2, 5, 32, 4, 4500)] * 2 + [(2, 5, 32, 4, 32)] * 2
    here = [torch.empty(shape) for shape in shapes]
    there = [torch.zeros(shape) for shape in shapes]
    caches = [
        KVCache.of_groups(
            [CacheGroup(one[:2], layers=(0, 1)), CacheGroup(one[2:], layers=(2, 3))], model="m"
        )
        for one in (here, there)
    ]
    server = KVCacheServer(agents[0], caches[0])
    client = KVCacheClient(agents[1], caches[1])
    failures: list[str] = []

    def rounds(page: int) -> None:
        for turn in range(8):
            for tensor in here:
                tensor[:, page].uniform_()
            offer = server.offer(f"{page}.{turn}", [[page], [page]], 32)
            fetch = client.pull(offer.ticket, [[4 - page], [4 - page]])
            fetch.wait(30)
            # At once, and what is moved last first.
            got = [tensor[:, 4 - page].clone() for tensor in reversed(there)]
            for one, other in zip(reversed(here), got, strict=True):
                hashes = {
                    hashlib.blake2b(part.contiguous().numpy().tobytes()).digest()
                    for part in (one[:, page], other)
                }
                if len(hashes) != 1:
                    failures.append(f"page {page}, turn {turn}")
            if not (offer.wait_released(30) and fetch.wait_released(30)):
                failures.append(f"page {page}, turn {turn} is held")

    threads = [threading.Thread(target=rounds, args=(page,)) for page in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    client.close()
    server.close()


def test_c13_token_indices_for_page_indices_are_out_of_bounds(
    sides: tuple[Prefill, Decode],
) -> None:
    prefill, decode = sides
    with pytest.raises(ValueError, match="page 48 does not exist; there are 32"):
        prefill.server.offer("a", [3 * PAGE], 16)
    offer = prefill.server.offer("a", [3], 16)
    with pytest.raises(ValueError, match="page 48 does not exist; there are 32"):
        decode.client.pull(offer.ticket, [3 * PAGE])


def test_c14_words_about_requests_that_are_over_are_ignored(
    sides: tuple[Prefill, Decode], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    prefill, decode = sides
    offer = prefill.server.offer("a", [1], 16, lease=0.02)
    assert offer.wait_released(10)
    remote = decode.connection.contact(prefill.connection.name, prefill.connection.metadata()[0])
    before = prefill.connection.statistics().frames_received
    for lease in (offer.lease.name, offer.lease.name, LeaseId(77, 1)):
        head = frames.Head(prefill.server.number, 5, lease)
        body = frames.pack_end(head, Outcome.COMPLETE)
        decode.connection.contacts.send_body(remote, frames.DONE, body)
    until(lambda: prefill.connection.statistics().frames_received >= before + 3)
    again = prefill.server.offer("b", [1], 16)
    decode.client.pull(again.ticket, [1]).wait(10)
    assert not caplog.records


def test_c16_pages_of_an_aborted_load_come_back_when_prefill_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefill's process is killed in ../kv/test_handoff_nixl.py."""
    prefill, decode = Prefill(Connection.open("gone")), Decode(Connection.open("stays"))
    offer = prefill.server.offer("a", [1, 2], 32, ready=False)
    fetch = decode.client.push(offer.ticket, [1, 2])
    until(lambda: prefill.server.statistics().asked == 1)
    # It says no more that it writes nothing: all that is left to go by is that it has gone.
    monkeypatch.setattr(prefill.connection.contacts, "send_body", lambda *_: None)
    fetch.cancel()
    assert not fetch.wait_released(0.2)
    prefill.connection.close(0.5)
    assert fetch.wait_released(10)
    assert nothing_held(decode.client.statistics())
    decode.connection.close()


def test_c17_prefill_is_told_at_once_of_a_request_that_is_not_wanted(
    sides: tuple[Prefill, Decode],
) -> None:
    prefill, decode = sides
    offer = prefill.server.offer("a", [1, 2], 32, lease=480.0)
    decode.client.decline(offer.ticket)
    with pytest.raises(TransferCancelled):
        offer.wait(5)
    assert offer.released


def test_c18_metadata_of_another_server_is_refused_by_name(
    sides: tuple[Prefill, Decode],
) -> None:
    prefill, decode = sides
    other = Prefill(Connection.open("other"))
    ticket = prefill.server.offer("a", [1], 16).ticket
    theirs = Ticket.unpack(other.server.offer("b", [1], 16).ticket, key=None)
    mixed = forged(ticket, metadata=theirs.metadata, server="nobody")
    with pytest.raises(MetadataError, match=r"other-.*'nobody'"):
        decode.client.pull(mixed, [1])
    with pytest.raises(LeaseUnknown):
        decode.client.pull(
            forged(ticket, server=theirs.server, metadata=theirs.metadata, slot=50), [1]
        ).wait(10)
    assert not any(bool(tensor.any()) for tensor in decode.tensors)
    other.connection.close()


def test_c21_the_pages_of_the_offer_count(sides: tuple[Prefill, Decode]) -> None:
    """An offer is made when the prompt is computed: there is no earlier list that it could miss."""
    prefill, decode = sides
    with pytest.raises(ValueError, match="hold positions 0 to 16, not 0 to 17"):
        prefill.server.offer("a", [1], 17)
    offer = prefill.server.offer("a", [1, 2], 17)
    decode.client.pull(offer.ticket, [4, 5]).wait(10)
    assert arrived(prefill.tensors, [1, 2], decode.tensors, [4, 5], 0, 17)


def test_c22_a_part_of_a_larger_tensor_is_a_cache(agents: tuple[Connection, Connection]) -> None:
    elastic = torch.randn(2, 128, 16, 2, 4)
    there = torch.zeros(2, 64, 16, 2, 4)
    with (
        KVCacheServer(agents[0], KVCache([elastic[:, :64]], model="m")) as server,
        KVCacheClient(agents[1], KVCache([there], model="m")) as client,
    ):
        with pytest.raises(ValueError, match="page 64 does not exist; there are 64"):
            server.offer("a", [64], 16)
        client.pull(server.offer("a", [63], 16).ticket, [0]).wait(10)
    assert torch.equal(there[:, 0], elastic[:, 63])
