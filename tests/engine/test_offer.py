from __future__ import annotations

import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nixl.engine.adapter import Direction, MemoryKind, Spans
from torch_nixl.engine.blob import BlobInfo, RegionList
from torch_nixl.engine.envelope import derive, seal, unseal
from torch_nixl.engine.offer import MAX_BLOBS, MAX_MEMORIES, Offer, OfferedMemory
from torch_nixl.errors import MetadataError

SOAK = os.environ.get("TORCH_NIXL_SOAK") == "1"
FUZZ = settings(
    max_examples=100_000 if SOAK else 150, derandomize=not SOAK, deadline=None, database=None
)
pytestmark = pytest.mark.timeout(3600 if SOAK else 60)

KEY = derive(b"secret", "metadata")
NAME = bytes(range(16))
HOST_KEY = bytes.fromhex("01000000000000000000ff")
BASE = 0x7F0000000000
REGIONS = [(BASE, 1 << 20, 3), (BASE + (1 << 20), 1 << 20, 3), (BASE, 1 << 30, 7)]
Rows = list[tuple[int, int, int]]


def field(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<Q", len(value)) + value + b"|"


def blob(regions: Rows = REGIONS, kind: int = 0, agent: bytes = b"owner-1") -> bytes:
    """Metadata without connection, as NIXL 1.5.1 writes it."""
    rows = [field(b"", struct.pack("<QQQ", *row) + HOST_KEY) for row in regions]
    return (
        b"nixlSerDes|"
        + field(b"Agent", agent)
        + field(b"Conns", bytes(8))
        + field(b"", b"MemSection")
        + field(b"nixlSecElms", struct.pack("<Q", 1 if rows else 0))
        + (
            field(b"bknd", b"UCX")
            + field(b"nixlDList", b"nixlSDList")
            + field(b"t", struct.pack("<i", kind))
            + field(b"n", struct.pack("<Q", len(rows)))
            if rows
            else b""
        )
        + b"".join(rows)
    )


def spans(rows: Rows) -> Spans:
    return np.array(rows, np.uint64).reshape(-1, 3)


def memory(rows: Rows, kind: MemoryKind = MemoryKind.DRAM) -> OfferedMemory:
    return OfferedMemory(kind, spans(rows), sum(row[1] for row in rows))


def offer(*memories: OfferedMemory, metadata: tuple[bytes, ...] = (blob(),)) -> Offer:
    return Offer("owner-1", NAME, Direction.READ, memories, metadata)


def same(left: Offer, right: Offer) -> bool:
    return (left.owner, left.key, left.direction, left.metadata) == (
        right.owner,
        right.key,
        right.direction,
        right.metadata,
    ) and [(m.kind, m.nbytes, m.spans.tolist()) for m in left.memories] == [
        (m.kind, m.nbytes, m.spans.tolist()) for m in right.memories
    ]


def refused(data: bytes, match: str | None = None, key: bytes | None = None) -> None:
    with pytest.raises(MetadataError, match=match):
        Offer.unpack(data, key=key)


def with_body(body: bytes) -> bytes:
    return seal(body, key=None)


OFFER = offer(
    memory([(BASE, 4096, 3), (BASE + 8192, 1, 3)]), memory([]), memory([(BASE, 1 << 30, 7)])
)
BODY = unseal(OFFER.pack(key=None), key=None)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("direction", Direction)
def test_an_offer_comes_back_as_it_was(key: bytes | None, direction: Direction) -> None:
    given_offer = Offer(
        "owner-1",
        NAME,
        direction,
        (*OFFER.memories, memory([(64, 32, 0)], MemoryKind.VRAM)),
        (blob(), blob([(0, 128, 0)], kind=1), blob([])),
    )
    found = Offer.unpack(given_offer.pack(key=key), key=key)
    assert same(found, given_offer)
    assert found.memories[0].spans.dtype == np.uint64
    assert found.memories[0].spans.flags.c_contiguous


def test_an_offer_of_nothing_is_legal() -> None:
    assert Offer.unpack(offer(metadata=(blob([]),)).pack(key=None), key=None).memories == ()
    empty = Offer.unpack(offer(memory([]), metadata=(blob([]),)).pack(key=None), key=None)
    assert (empty.memories[0].nbytes, empty.memories[0].spans.shape) == (0, (0, 3))


@FUZZ
@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, (1 << 20) - 1), st.integers(1, 1 << 20), st.sampled_from([3, 7])
            ),
            max_size=4,
        ),
        max_size=4,
    ),
    st.sampled_from([None, KEY]),
)
def test_offers_inside_the_regions_come_back(rows: list[Rows], key: bytes | None) -> None:
    inside = [
        [(BASE + a, n if d == 7 else min(n, (1 << 20) - a), d) for a, n, d in part] for part in rows
    ]
    given_offer = offer(*(memory(part) for part in inside))
    assert same(Offer.unpack(given_offer.pack(key=key), key=key), given_offer)


@FUZZ
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, BASE - 1, BASE, BASE + (1 << 20), BASE + (1 << 21), 2**64 - 1]),
            st.sampled_from([1, 1 << 20, (1 << 20) + 1, 1 << 30, 1 << 63, 2**64 - 1]),
            st.sampled_from([0, 3, 7, 8]),
        ),
        max_size=5,
    )
)
def test_spans_are_accepted_exactly_if_one_region_holds_them(rows: Rows) -> None:
    while sum(row[1] for row in rows) >= 2**64:
        rows.pop()
    data = offer(*(memory([row]) for row in rows)).pack(key=None)
    if all(
        any(d == rd and ra <= a and a + n <= ra + rn for ra, rn, rd in REGIONS) for a, n, d in rows
    ):
        assert len(Offer.unpack(data, key=None).memories) == len(rows)
    else:
        refused(data, "no region")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ((BASE, 4096, 4), MemoryKind.DRAM),
        ((BASE, 4096, 3), MemoryKind.VRAM),
        ((BASE, 4096, 3), MemoryKind.FILE),
        ((BASE - 1, 2, 3), MemoryKind.DRAM),
        ((BASE + (1 << 20) - 1, 2, 3), MemoryKind.DRAM),
        ((BASE + (1 << 21), 1, 3), MemoryKind.DRAM),
        ((2**64 - 4096, 4096, 3), MemoryKind.DRAM),
    ],
)
def test_memory_outside_the_regions_is_refused(row: tuple[int, int, int], kind: MemoryKind) -> None:
    refused(offer(memory([row], kind)).pack(key=None), "no region")


def test_a_span_that_nests_is_looked_up_as_nixl_does() -> None:
    nested = (blob([(BASE, 1 << 20, 3), (BASE + 4096, 4096, 3)]),)
    inner = offer(memory([(BASE + 4096, 10, 3)]), metadata=nested)
    before = offer(memory([(BASE, 4096, 3)]), metadata=nested)
    outer = offer(memory([(BASE + 16384, 10, 3)]), metadata=nested)
    Offer.unpack(inner.pack(key=None), key=None)
    Offer.unpack(before.pack(key=None), key=None)
    refused(outer.pack(key=None), "no region")


def test_metadata_has_to_be_its_owners() -> None:
    refused(offer(metadata=(blob(agent=b"owner-2"),)).pack(key=None), "another agent")
    refused(offer(metadata=(blob(), blob(agent=b"owner-2"))).pack(key=None), "another agent")
    refused(offer(metadata=(b"nixlSerDes|",)).pack(key=None))
    refused(offer(metadata=(b"",)).pack(key=None))


def test_both_ends_need_the_same_secret() -> None:
    refused(OFFER.pack(key=None), "not authenticated", KEY)
    refused(OFFER.pack(key=KEY), "TORCH_NIXL_SECRET")


@pytest.mark.parametrize("key", [None, KEY])
def test_an_offer_cut_or_altered_on_its_way_is_refused(key: bytes | None) -> None:
    data = bytearray(OFFER.pack(key=key))
    for at in range(len(data)):
        refused(bytes(data[:at]), key=key)
        data[at] ^= 1 << at % 8
        refused(bytes(data), key=key)
        data[at] ^= 1 << at % 8


def test_an_offer_that_was_sealed_wrong_is_read_or_refused_at_any_length_and_bit() -> None:
    body = bytearray(BODY)
    for at in range(len(body)):
        refused(with_body(bytes(body[:at])))
        for bit in range(8):
            body[at] ^= 1 << bit
            try:
                Offer.unpack(with_body(bytes(body)), key=None)
            except MetadataError:
                pass
            body[at] ^= 1 << bit


@FUZZ
@given(st.binary(max_size=300), st.sampled_from([b"", b"TO\x01", BODY[:40], BODY[:100]]))
def test_random_bytes_are_refused(tail: bytes, start: bytes) -> None:
    refused(start + tail)
    refused(with_body(start + tail))


@FUZZ
@given(st.integers(0, len(BODY) - 1), st.integers(0, 12), st.binary(max_size=12))
def test_a_spliced_offer_is_read_or_refused(at: int, cut: int, piece: bytes) -> None:
    try:
        Offer.unpack(with_body(BODY[:at] + piece + BODY[at + cut :]), key=None)
    except MetadataError:
        pass


def at(offset: int, value: bytes) -> bytes:
    return BODY[:offset] + value + BODY[offset + len(value) :]


U32 = struct.Struct("<I").pack
FIRST_MEMORY, FIRST_SPAN = 40, 40 + 3 * 16


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (at(0, b"TX"), "not an offer"),
        (at(2, b"\x02"), "version 2"),
        (at(3, b"\x02"), "direction"),
        (at(4, U32(MAX_MEMORIES + 1)), "limit"),
        (at(4, U32(MAX_MEMORIES)), "cut"),
        (at(24, U32(0)), "limit"),
        (at(24, U32(1025)), "limit"),
        (at(28, U32(0)), "limit"),
        (at(28, U32(MAX_BLOBS + 1)), "limit"),
        (at(32, U32(2**32 - 1)), "cut"),
        (at(36, U32(1)), "version"),
        (at(FIRST_MEMORY, struct.pack("<Q", 4096)), "add up"),
        (at(FIRST_MEMORY + 8, U32(3)), "share out"),
        (at(FIRST_MEMORY + 8, U32(2**32 - 1)), "share out"),
        (at(FIRST_MEMORY + 12, b"\x05"), "kind"),
        (at(FIRST_MEMORY + 12, b"\xff"), "kind"),
        (at(FIRST_MEMORY + 13, b"\x01"), "kind"),
        (at(FIRST_SPAN + 8, bytes(8)), "empty"),
        (at(FIRST_SPAN + 8, struct.pack("<Q", 4095)), "add up"),
    ],
)
def test_an_offer_whose_parts_disagree_is_refused(body: bytes, match: str) -> None:
    tracemalloc.start()
    try:
        refused(with_body(body), match)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_sizes_that_would_wrap_around_are_summed_exactly() -> None:
    huge = (blob([(0, 2**63, 0), (2**63, 2**63, 0)]),)
    good = memory([(0, 2**63, 0), (2**63, 2**63 - 1, 0)])
    found = Offer.unpack(offer(good, metadata=huge).pack(key=None), key=None)
    assert found.memories[0].nbytes == 2**64 - 1
    # 2^63 and 2^63 are 0, modulo 2^64.
    body = bytearray(unseal(offer(good, metadata=huge).pack(key=None), key=None))
    span = body.index(struct.pack("<QQ", 2**63, 2**63 - 1))
    body[span + 8 : span + 16] = struct.pack("<Q", 2**63)
    body[FIRST_MEMORY : FIRST_MEMORY + 8] = bytes(8)
    refused(with_body(bytes(body)), "add up")
    two = offer(memory([(0, 2**63, 0)]), memory([(0, 2**63, 0)]), metadata=huge)
    with pytest.raises(ValueError, match="bytes"):
        two.pack(key=None)


def test_layout_is_the_documented_one() -> None:
    metadata = blob([(0, 8, 1)])
    body = unseal(offer(memory([(0, 8, 1)]), metadata=(metadata,)).pack(key=None), key=None)
    expected = b"TO\x01\x00" + U32(1) + NAME + U32(7) + U32(1) + U32(1) + U32(0)
    expected += struct.pack("<QIB3x", 8, 1, 0) + struct.pack("<QQQ", 0, 8, 1)
    assert body == expected + U32(len(metadata)) + b"owner-1" + metadata
    assert len(seal(body, key=None)) == len(body) + 48
    assert zlib.crc32(body) == zlib.crc32(expected + U32(len(metadata)) + b"owner-1" + metadata)


@pytest.mark.parametrize(
    "bad",
    [
        Offer("", NAME, Direction.READ, (), (blob(),)),
        Offer("x" * 1025, NAME, Direction.READ, (), (blob(),)),
        Offer("owner-1", b"short", Direction.READ, (), (blob(),)),
        Offer("owner-1", NAME, Direction.READ, (), ()),
        Offer("owner-1", NAME, Direction.READ, (), (blob(),) * (MAX_BLOBS + 1)),
        offer(OfferedMemory(MemoryKind.DRAM, spans([(BASE, 8, 3)]), 9)),
        offer(OfferedMemory(MemoryKind.DRAM, spans([(BASE, 0, 3)]), 0)),
        offer(metadata=(bytes(5 << 20),)),
    ],
)
def test_values_that_do_not_fit_are_refused_when_packing(bad: Offer) -> None:
    with pytest.raises(ValueError, match=r"bytes|blobs"):
        bad.pack(key=None)


def test_another_adapters_metadata_is_checked_by_its_own_rules() -> None:
    def parse_fake(data: bytes) -> BlobInfo:
        if data != b"fake":
            raise MetadataError("not fake")
        return BlobInfo("owner-1", (), (RegionList("fake", MemoryKind.DRAM, spans(REGIONS)),))

    data = offer(memory([(BASE, 8, 7)]), metadata=(b"fake",)).pack(key=None)
    assert Offer.unpack(data, key=None, parse_metadata=parse_fake).memories[0].nbytes == 8
    refused(data, "NIXL")
    with pytest.raises(MetadataError, match="not fake"):
        Offer.unpack(offer().pack(key=None), key=None, parse_metadata=parse_fake)


def test_offers_of_many_spans_are_read_in_proportion() -> None:
    rows = [(BASE + 64 * i, 32, 7) for i in range(50_000)]
    data = offer(memory(rows)).pack(key=None)
    tracemalloc.start()
    try:
        found = Offer.unpack(data, key=None)
        assert tracemalloc.get_traced_memory()[1] < 12 * len(data)
    finally:
        tracemalloc.stop()
    assert found.memories[0].spans.tolist() == [list(row) for row in rows]
