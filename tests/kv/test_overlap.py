"""Caches that overlap, compared with sets of bytes; and what is made of it."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv.conftest import Open
from kv.worlds import DIM, HEADS, LAYERS, PAGE, Decode, Prefill, tensors
from torch_nixl.kv.cache import KVCache
from torch_nixl.kv.client import KVCacheClient
from torch_nixl.kv.layout import Geometry, Layout
from torch_nixl.kv.overlap import Sharing, find_overlap, sharing
from torch_nixl.kv.server import KVCacheServer


@st.composite
def patterns(draw: st.DrawFn) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    """Sizes and strides of pages, tokens and heads in which no two rows overlap."""
    row = draw(st.integers(1, 3))
    sizes = [draw(st.integers(1, 4)) for _ in range(3)]
    strides, reach = [0, 0, 0], row
    for axis in draw(st.permutations(range(3))):
        strides[axis] = reach + draw(st.integers(0, 5))
        reach += (sizes[axis] - 1) * strides[axis]
    return (sizes[0], sizes[1], sizes[2]), (strides[0], strides[1], strides[2]), row


def layout(
    pattern: tuple[tuple[int, int, int], tuple[int, int, int], int], offsets: list[int]
) -> Layout:
    (pages, tokens, heads), strides, row = pattern
    geometry = Geometry(len(offsets), heads, row, torch.uint8, tokens, num_parts=1)
    return Layout(
        geometry,
        pages,
        np.zeros((len(offsets), 1), np.int64),
        np.array(offsets, np.int64)[:, None],
        *strides,
        region_nbytes=(1 << 20,),
    )


def page_bytes(one: Layout, page: int, offset: int) -> set[int]:
    found = set()
    for token in range(one.geometry.page_size):
        for head in range(len(one.geometry.heads)):
            at = offset + page * one.page_stride + token * one.token_stride
            at += head * one.head_stride
            found |= set(range(at, at + one.geometry.row_nbytes))
    return found


def part_bytes(one: Layout, offset: int) -> set[int]:
    return set().union(*(page_bytes(one, page, offset) for page in range(one.num_pages)))


OFFSETS = st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True)


@given(patterns(), OFFSETS)
def test_overlap_is_found_where_bytes_are_shared(
    pattern: tuple[tuple[int, int, int], tuple[int, int, int], int], offsets: list[int]
) -> None:
    one = layout(pattern, offsets)
    parts = [part_bytes(one, offset) for offset in offsets]
    pairs = itertools.combinations(range(len(parts)), 2)
    wrong = {(a, b) for a, b in pairs if parts[a] & parts[b]}
    found = find_overlap(one)
    assert (found is None) if not wrong else tuple(sorted(found or ())) in wrong


@given(patterns(), OFFSETS, patterns(), OFFSETS, st.booleans())
def test_sharing_is_what_the_bytes_of_pages_say(
    pattern: tuple[tuple[int, int, int], tuple[int, int, int], int],
    offsets: list[int],
    other_pattern: tuple[tuple[int, int, int], tuple[int, int, int], int],
    other_offsets: list[int],
    alike: bool,
) -> None:
    one = layout(pattern, offsets)
    other = layout(pattern if alike else other_pattern, other_offsets)
    shared = {
        (page, another)
        for page in range(one.num_pages)
        for another in range(other.num_pages)
        for a, b in itertools.product(offsets, other_offsets)
        if page_bytes(one, page, 1000 + a) & page_bytes(other, another, 1007 + b)
    }
    truth = Sharing.APART if not shared else Sharing.SAME
    if any(page != another for page, another in shared):
        truth = Sharing.CROSSED
    found = sharing(one, [1000], other, [1007])
    # Where the patterns differ it need not be exact, but must not miss anything.
    assert found is truth or (not alike and found is Sharing.CROSSED), truth


def test_layers_that_overlap_are_refused_by_name() -> None:
    whole = torch.zeros(2 * 2 * 8 * PAGE * HEADS * DIM)
    size = whole.numel() // 2
    shape = (2, 8, PAGE, HEADS, DIM)
    layers = [whole[start : start + size].view(shape) for start in (0, size - 8)]
    with pytest.raises(ValueError, match="layer 0, part 1 and layer 1, part 0 have bytes in"):
        KVCache(layers, model="m")
    page = torch.zeros(8, 2, PAGE, HEADS, DIM)
    KVCache([page[:, 0], page[:, 1]], "PTHD", model="m")
    with pytest.raises(ValueError, match="tensors overlap: layer 0, part 0 and layer 1, part 0"):
        KVCache([page[:-1, 0], page[1:, 0]], "PTHD", model="m")


def test_many_layers_are_compared_in_time() -> None:
    page = torch.zeros(4, 1000, 2, 1, 4, 8)
    layers = [[page[:, layer, part] for part in range(2)] for layer in range(1000)]
    started = time.thread_time()
    KVCache([page], "PLKTHD", model="m")
    KVCache(layers, "PTHD", model="m")
    # One by one, the two million pairs would take more.
    assert time.thread_time() - started < 2


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_caches_of_one_pool_know_what_the_other_has_in_use(connect: Open, mode: str) -> None:
    prefill, connection = Prefill(connect("p")), connect("d")
    pool = tensors(8)
    client = KVCacheClient(connection, KVCache(pool, model="m"))
    again = KVCacheClient(connection, KVCache(pool, model="m"))
    server = KVCacheServer(connection, KVCache(pool[:2], model="m"))
    offer = prefill.server.offer("one", [3], 16, ready=False)
    fetch = getattr(client, mode)(offer.ticket, [2])
    with pytest.raises(ValueError, match="page 2 is being filled"):
        again.pull(prefill.server.offer("two", [3], 16).ticket, [2])
    with pytest.raises(ValueError, match="page 2 is being filled"):
        server.offer("three", [2], 16)
    for layer in range(LAYERS):
        offer.layer_ready(layer)
    fetch.wait(10)
    assert fetch.wait_released(10)
    client.close()
    kept = server.offer("three", [2], 16)
    with pytest.raises(ValueError, match="page 2 is still offered"):
        again.pull(prefill.server.offer("two", [3], 16).ticket, [2])
    kept.cancel()
    again.pull(prefill.server.offer("two", [3], 16).ticket, [2]).wait(10)


def test_other_pages_of_the_same_memory_are_refused(connect: Open) -> None:
    decode = Decode(connect("d"))
    pool = decode.tensors
    for cache in (
        KVCache([one[:, 1:] for one in pool], model="m"),
        KVCache([one.view(2, 16, 2 * PAGE, HEADS, DIM) for one in pool], model="m"),
        KVCache([one[:, :16] for one in pool], model="m"),
    ):
        with pytest.raises(ValueError, match="shares memory with another cache"):
            KVCacheServer(decode.connection, cache)
    # Layers of their own in the same storages are another matter.
    storage = torch.zeros(2, 2, 8, PAGE, HEADS, DIM)
    for half in storage:
        KVCacheServer(decode.connection, KVCache([half], model="m"))
    decode.client.close()
    KVCacheServer(decode.connection, KVCache([one[:, 1:] for one in pool], model="m"))
