"""Caches of a small Hugging Face model, handed from one connection to another."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from torch_nixl.engine.connection import Connection
from torch_nixl.errors import (
    ClosedError,
    IncompatibleError,
    LeaseExpired,
    MetadataError,
    TransferTimeout,
)
from torch_nixl.integrations.transformers import DynamicCacheClient, DynamicCacheServer, PagePool

Connect = Callable[[str], Connection]
LAYERS, HEADS, DIM = 3, 2, 8
CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=4 * DIM,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=HEADS,
    max_position_embeddings=2048,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=0,
)


def random_cache(num_tokens: int, seed: int = 0, **shape: Any) -> DynamicCache:
    """A cache as a model leaves it, of one sequence unless told otherwise."""
    generator = torch.Generator().manual_seed(seed)
    size: dict[str, Any] = {"batch": 1, "heads": HEADS, "dim": DIM, "layers": LAYERS}
    size |= {"dtype": torch.float32, **shape}
    cache = DynamicCache()
    for layer in range(size["layers"]):
        whole = (2, size["batch"], size["heads"], num_tokens, size["dim"])
        keys, values = torch.randn(whole, generator=generator).to(size["dtype"])
        cache.update(keys, values, layer)
    return cache


def same(ours: DynamicCache, theirs: DynamicCache) -> bool:
    return len(ours.layers) == len(theirs.layers) and all(
        torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        for one, other in zip(ours.layers, theirs.layers, strict=True)
    )


def pool(num_pages: int = 8, **options: Any) -> PagePool:
    return PagePool(
        CONFIG, num_pages, **{"model": "tiny", "page_size": 4, "dtype": torch.float32, **options}
    )


class Pair:
    """A server and a client."""

    def __init__(
        self, connect: Connect, ours: PagePool, theirs: PagePool, *, lease: float = 30.0
    ) -> None:
        self.server = DynamicCacheServer(connect("prefill"), ours, lease=lease, timeout=20)
        self.client = DynamicCacheClient(connect("decode"), theirs, timeout=20)

    def until_all_is_free(self) -> None:
        deadline = time.monotonic() + 10
        for side in (self.server, self.client):
            reached = side._service.connection.progress.wait_until(
                lambda: side.reclaim() == side.pool.num_pages,  # noqa: B023 - called in this turn
                deadline,
            )
            assert reached, side.pool


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


@torch.inference_mode()
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 1500])
def test_text_is_that_of_one_process(connect: Connect, model: Any, num_tokens: int) -> None:
    pair = Pair(connect, pool(400), pool(400, page_size=16))
    torch.manual_seed(num_tokens)
    tokens = torch.randint(1, 128, (1, num_tokens))
    expected = model.generate(tokens, do_sample=False, max_new_tokens=9)

    cache = DynamicCache()
    first = model(tokens, cache=cache).logits[:, -1:].argmax(-1)
    ticket = pair.server.offer("a", cache).ticket
    for layer in cache.layers:
        layer.keys.zero_()  # It is the program's own as soon as it is on offer.
    taken = pair.client.pull(ticket)
    text = model.generate(
        torch.cat([tokens, first], 1), cache=taken, do_sample=False, max_new_tokens=8
    )
    assert text.tolist() == expected.tolist()
    pair.until_all_is_free()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_values_arrive_to_the_bit(connect: Connect, dtype: torch.dtype, page_size: int) -> None:
    ours, theirs = pool(dtype=dtype), pool(32, dtype=dtype, page_size=page_size)
    pair = Pair(connect, ours, theirs)
    for num_tokens in (1, 4, 13):
        cache = random_cache(num_tokens, num_tokens, dtype=dtype)
        taken = pair.client.pull(pair.server.offer("a", cache).ticket)
        assert same(taken, cache)
        assert taken.get_seq_length() == num_tokens
        assert all(layer.keys.is_contiguous() for layer in taken.layers)
    pair.until_all_is_free()


def test_many_at_once_through_small_pools(connect: Connect) -> None:
    pair = Pair(connect, pool(5), pool(4))
    caches = [random_cache(1 + 3 * number % 13, number) for number in range(40)]

    def hand_over(number: int) -> bool:
        offer = pair.server.offer(f"{number}", caches[number], timeout=20)
        return same(pair.client.pull(offer.ticket), caches[number])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(hand_over, range(40)))
    pair.until_all_is_free()
    assert pair.client.client.statistics().outcomes == {"complete": 40}


def test_lease_is_kept_while_there_is_no_room(connect: Connect) -> None:
    pair = Pair(connect, pool(), pool(2), lease=0.3)
    held = pair.client.pool.allocate(8)
    assert held is not None
    cache = random_cache(8)
    offer = pair.server.offer("a", cache)
    lapses = pair.server.offer("nobody keeps this one", cache)
    with ThreadPoolExecutor(1) as thread:
        pulling = thread.submit(pair.client.pull, offer.ticket)
        with pytest.raises(LeaseExpired):
            lapses.wait(10)
        time.sleep(0.3)  # A whole lease more: what is waited for is that nothing happens.
        assert not pulling.done() and not offer.done
        pair.client.pool.free(held)
        assert same(pulling.result(20), cache)
    pair.until_all_is_free()


def test_wait_for_room_ends_with_the_lease(connect: Connect) -> None:
    pair = Pair(connect, pool(), pool(2))
    held = pair.client.pool.allocate(8)
    assert held is not None
    offer = pair.server.offer("a", random_cache(8))
    offer.cancel()
    with pytest.raises(Exception, match="lease") as raised:
        pair.client.pull(offer.ticket)
    assert not isinstance(raised.value, TransferTimeout)
    pair.client.pool.free(held)
    pair.until_all_is_free()


def test_no_room_in_time(connect: Connect) -> None:
    pair = Pair(connect, pool(2), pool(2))
    offer = pair.server.offer("a", random_cache(8))
    with pytest.raises(TransferTimeout, match="no room for 1 tokens: 0 of 2 pages are free"):
        pair.server.offer("b", random_cache(1), timeout=0.05)
    held = pair.client.pool.allocate(1)
    assert held is not None
    with pytest.raises(TransferTimeout, match="no room for 8 tokens: 1 of 2"):
        pair.client.pull(offer.ticket, timeout=0.05)
    pair.client.pool.free(held)
    assert same(pair.client.pull(offer.ticket), random_cache(8))
    pair.until_all_is_free()


def test_close_wakes_who_waits_for_room(connect: Connect) -> None:
    pair = Pair(connect, pool(1), pool(1))
    pair.server.offer("a", random_cache(4))
    waits = threading.Event()
    reclaim = pair.server.reclaim

    def reclaim_and_tell() -> int:
        waits.set()
        return reclaim()

    pair.server.reclaim = reclaim_and_tell  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as thread:
        offering = thread.submit(pair.server.offer, "b", random_cache(4))
        assert waits.wait(10)
        pair.server.close()
        with pytest.raises(ClosedError):
            offering.result(10)
    assert pair.server.reclaim() == 1


def test_what_does_not_fit_is_refused_by_name(connect: Connect) -> None:
    pair = Pair(connect, pool(), pool())
    for cache, sentence in (
        (random_cache(4, batch=2), "expected one sequence"),
        (random_cache(4, heads=3), "3 heads of 8 values, the pool's 2 of 8"),
        (random_cache(4, dim=16), "2 heads of 16 values, the pool's 2 of 8"),
        (random_cache(4, layers=2), "2 layers, the pool 3"),
        (random_cache(4, dtype=torch.float16), "torch.float16, not torch.float32"),
        (random_cache(33), "33 tokens: the pool has 8 pages of 4"),
        (DynamicCache(), "0 tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            pair.server.offer("a", cache)
        assert pair.server.pool.num_free == 8
    assert not pair.server.pool.tensor.any()


def test_windows_of_positions_are_refused() -> None:
    config = Gemma3TextConfig(num_hidden_layers=6, sliding_window=4)
    with pytest.raises(ValueError, match="layers of sliding_attention"):
        PagePool(config, 4, model="gemma")


def test_other_models_and_other_tickets_are_refused(connect: Connect) -> None:
    pair = Pair(connect, pool(), pool(model="another"))
    offer = pair.server.offer("a", random_cache(4))
    with pytest.raises(IncompatibleError, match="'another'"):
        pair.client.pull(offer.ticket)
    with pytest.raises(MetadataError):
        pair.client.pull(offer.ticket.replace('"num_tokens":4', '"num_tokens":5'))
    offer.cancel()
    pair.until_all_is_free()


def test_pages_are_given_back_once() -> None:
    pages = pool(4)
    taken = pages.allocate(12)
    assert taken == [0, 1, 2]
    assert pages.allocate(8) is None
    for wrong in ([3], [0, 0], [4], [-1]):
        with pytest.raises(ValueError, match="some are free"):
            pages.free(wrong)
    pages.free([2, 0])
    assert pages.allocate(5) == [0, 2]
    with pytest.raises(ValueError, match="can't hold 9 tokens"):
        pages.read([0, 2], 9)


def test_missing_transformers_is_a_sentence() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "try:\n    import torch_nixl.integrations.transformers\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install 'torch-nixl[transformers]'" in done.stdout
