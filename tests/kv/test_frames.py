"""Frame bodies, pools and tickets: they survive the wire, and nothing else gets through."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv.caches import SHAPES, make
from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.engine.envelope import derive
from torch_nixl.errors import MetadataError
from torch_nixl.kv import frames, pools
from torch_nixl.kv.compatibility import Compatibility
from torch_nixl.kv.frames import Head, Take
from torch_nixl.kv.layout import Geometry
from torch_nixl.kv.leases import LeaseId
from torch_nixl.kv.plan import Run
from torch_nixl.kv.pools import Pool
from torch_nixl.kv.protocol import Mode, Outcome
from torch_nixl.kv.ticket import MAX_TICKET, Ticket, describe

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
POSITION = st.integers(0, frames.MAX_POSITION - 1)
HEADS = st.builds(Head, U32, U64, st.builds(LeaseId, U32, U32))
RUNS = st.lists(
    st.builds(
        Run,
        st.lists(st.integers(0, 2**31 - 1), max_size=9).map(lambda ids: np.array(ids, np.int64)),
        POSITION,
    ),
    min_size=1,
    max_size=4,
).map(tuple)
HEAD = Head(1, 2, LeaseId(3, 4))
GEOMETRY = Geometry(2, 2, 4, torch.bfloat16, page_size=4)


def same(one: tuple[Run, ...], other: tuple[Run, ...]) -> bool:
    return len(one) == len(other) and all(
        a.first == b.first and np.array_equal(a.pages, b.pages)
        for a, b in zip(one, other, strict=True)
    )


@given(head=HEADS, service=U32, ends=st.tuples(POSITION, POSITION).map(sorted), runs=RUNS)
def test_take_survives_the_wire(
    head: Head, service: int, ends: list[int], runs: tuple[Run, ...]
) -> None:
    for mode, named in ((Mode.PUSH, runs), (Mode.PULL, ())):
        take = Take(head, service, mode, ends[0], ends[1], named)
        found = frames.parse_take(frames.pack_take(take))
        assert same(found.runs, named)
        for name in ("head", "service", "mode", "start", "stop"):
            assert getattr(found, name) == getattr(take, name)


@given(head=HEADS, count=U32, runs=RUNS, outcome=st.sampled_from(Outcome), text=st.text())
def test_other_frames_survive_the_wire(
    head: Head, count: int, runs: tuple[Run, ...], outcome: Outcome, text: str
) -> None:
    grant = frames.pack_count(head, count, frames.pack_runs(runs))
    ready, found = frames.parse_grant(grant)
    assert ready == count and same(found, runs)
    assert frames.parse_count(frames.pack_count(head, count)) == count
    end = frames.pack_end(head, outcome, text)
    said, words = frames.parse_end(end)
    assert said is outcome and len(words.encode()) <= frames.MAX_TEXT
    assert words == text.encode("utf-8", "replace").decode() or len(text) > 250
    for body in (grant, end):
        assert frames.parse_head(body) == head


@given(runs=RUNS, cut=st.integers(1, 99))
def test_frames_that_are_cut_or_longer_are_refused(runs: tuple[Run, ...], cut: int) -> None:
    take = frames.pack_take(Take(HEAD, 1, Mode.PUSH, 0, 9, runs))
    grant = frames.pack_count(HEAD, 1, frames.pack_runs(runs))
    for body, parse in ((take, frames.parse_take), (grant, frames.parse_grant)):
        for wrong in (body[: max(0, len(body) - cut)], body + b"\0" * cut):
            with pytest.raises(MetadataError):
                parse(wrong)


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_nothing_else_is_raised(body: bytes) -> None:
    for parse in (
        frames.parse_head,
        frames.parse_take,
        frames.parse_grant,
        frames.parse_count,
        frames.parse_end,
        lambda data: pools.parse_pool(data, 0),
        lambda data: Ticket.unpack(data, key=None),
    ):
        try:
            parse(body)
        except MetadataError:
            pass


def test_values_that_do_not_exist_are_refused() -> None:
    take = bytearray(frames.pack_take(Take(HEAD, 1, Mode.PULL, 0, 9, ())))
    at = len(HEAD.pack()) + 4
    take[at] = 2
    with pytest.raises(MetadataError, match="mode"):
        frames.parse_take(bytes(take))
    with pytest.raises(MetadataError, match="positions"):
        frames.parse_take(frames.pack_take(Take(HEAD, 1, Mode.PULL, 10, 9, ())))
    with pytest.raises(MetadataError, match="positions"):
        frames.parse_take(frames.pack_take(Take(HEAD, 1, Mode.PULL, 0, 1 << 40, ())))
    with pytest.raises(MetadataError, match="exactly"):
        frames.parse_take(frames.pack_take(Take(HEAD, 1, Mode.PUSH, 0, 9, ())))
    with pytest.raises(MetadataError, match="outcome 12"):
        frames.parse_end(HEAD.pack() + b"\x0c")
    with pytest.raises(MetadataError, match="UTF-8"):
        frames.parse_end(HEAD.pack() + b"\0\xff")
    with pytest.raises(MetadataError, match="positions"):
        frames.parse_runs(b"\x01" + (1 << 40).to_bytes(8, "little") + bytes(4), 0)
    with pytest.raises(MetadataError, match="pages"):
        frames.parse_runs(b"\x01" + bytes(8) + b"\xff" * 4, 0)
    with pytest.raises(ValueError, match="at most"):
        frames.pack_runs([Run(np.zeros(frames.MAX_PAGES + 1, np.int64))])


def pool(axes: str = "KPTHD", geometry: Geometry = GEOMETRY, groups: int = 1) -> Pool:
    caches = [make(axes, geometry, 8, index) for index in range(groups)]
    count = geometry.num_layers
    return Pool(
        Compatibility(
            "model",
            (geometry,) * groups,
            tuple(tuple(range(i * count, (i + 1) * count)) for i in range(groups)),
        ),
        tuple(cache.layout for cache in caches),
        tuple(
            np.array([(4096 * (1 + i), 7 + i) for i in range(len(cache.owners))], np.uint64)
            for cache in caches
        ),
        MemoryKind.DRAM,
        (b"blob", b"another"),
    )


@pytest.mark.parametrize("axes", SHAPES.values())
@pytest.mark.parametrize("groups", [1, 3])
def test_pool_survives_the_wire(axes: str, groups: int) -> None:
    geometry = dataclasses.replace(GEOMETRY, tp_rank=1, tp_size=2, dtype=torch.float8_e4m3fn)
    one = pool(axes, geometry, groups)
    found = pools.parse_pool(b"xy" + pools.pack_pool(one), 2)
    assert found.compatibility == one.compatibility
    assert (found.kind, found.blobs) == (one.kind, one.blobs)
    for mine, theirs in zip(one.layouts, found.layouts, strict=True):
        for name in (
            "geometry",
            "num_pages",
            "page_stride",
            "token_stride",
            "head_stride",
            "region_nbytes",
        ):
            assert getattr(mine, name) == getattr(theirs, name)
        assert np.array_equal(mine.regions, theirs.regions)
        assert np.array_equal(mine.offsets, theirs.offsets)
    assert all(np.array_equal(a, b) for a, b in zip(one.regions, found.regions, strict=True))


def test_pool_that_is_cut_or_longer_is_refused() -> None:
    packed = pools.pack_pool(pool(groups=2))
    for size in range(len(packed)):
        with pytest.raises(MetadataError):
            pools.parse_pool(packed[:size], 0)
    with pytest.raises(MetadataError, match="longer"):
        pools.parse_pool(packed + b"\0", 0)


@given(at=st.integers(0, 10_000), value=st.integers(0, 255), more=st.binary(max_size=8))
def test_altered_pool_is_refused_or_lies_in_its_regions(at: int, value: int, more: bytes) -> None:
    packed = bytearray(pools.pack_pool(pool("PHTD", groups=2)))
    at %= len(packed)
    data = bytes((value,)) + more
    packed[at : at + len(data)] = data[: len(packed) - at]
    try:
        found = pools.parse_pool(bytes(packed), 0)
    except MetadataError:
        return
    for layout, regions in zip(found.layouts, found.regions, strict=True):
        size = layout.geometry.page_size
        last = (layout.num_pages - 1) * layout.page_stride + (size - 1) * layout.token_stride
        for region, offset in zip(layout.regions.flat, layout.offsets.flat, strict=True):
            assert 0 <= offset <= offset + last <= layout.region_nbytes[region]
            assert int(regions[region, 0]) + layout.region_nbytes[region] <= 2**64


def test_first_difference_of_two_caches_is_named() -> None:
    one = Compatibility("m", (GEOMETRY, GEOMETRY), ((0, 2), (1, 3)))
    assert one.difference(one) == ""
    newer = dataclasses.replace(one, version="9.9.1", model="x")
    assert one.difference(newer).startswith("torch_nixl is '") and "'9.9.1'" in one.difference(
        newer
    )
    patched = dataclasses.replace(one, version=one.version + "9")
    assert one.difference(patched) == ""
    other = dataclasses.replace(one, model="x")
    assert one.difference(other) == "model is 'm' here and 'x' there"
    fewer = Compatibility("m", (GEOMETRY,), ((0, 2),))
    assert one.difference(fewer) == "number of groups of layers is 2 here and 1 there"
    wide = dataclasses.replace(GEOMETRY, head_dim=8)
    assert (
        one.difference(dataclasses.replace(one, geometries=(GEOMETRY, wide)))
        == "head_dim is 4 here and 8 there (group 1)"
    )
    swapped = dataclasses.replace(one, layers=((0, 1), (2, 3)))
    assert one.difference(swapped) == "layers are 0, 2 here and 0, 1 there (group 0)"
    for changed in (newer, other, fewer, swapped):
        # Whoever holds a ticket of the one finds the same as whoever meets it.
        ticket = TICKET.model_copy(update={"compatibility": describe(changed)})
        read = Ticket.unpack(ticket.pack(key=None), key=None)
        assert read.difference(one) == one.difference(changed) != ""
    small = dataclasses.replace(GEOMETRY, page_size=2, tp_size=2)
    fits = dataclasses.replace(one, geometries=(small, small))
    assert TICKET.model_copy(update={"compatibility": describe(fits)}).difference(one) == ""


@pytest.mark.parametrize(
    ("model", "geometries", "layers", "why"),
    [
        ("m" * 256, (GEOMETRY,), ((0, 1),), "model"),
        ("m", (), (), "groups"),
        ("m", (GEOMETRY,), ((0,),), "one number for each"),
        ("m", (GEOMETRY,), ((1, 0),), "ascending"),
        ("m", (GEOMETRY,), ((-1, 0),), "ascending"),
        ("m", (GEOMETRY, GEOMETRY), ((0, 1), (1, 2)), "in two groups"),
        ("m", (GEOMETRY, dataclasses.replace(GEOMETRY, tp_size=2)), ((0, 1), (2, 3)), "one rank"),
        ("m", (dataclasses.replace(GEOMETRY, packing="p" * 256),), ((0, 1),), "packing"),
    ],
)
def test_impossible_records_are_refused(
    model: str, geometries: tuple[Geometry, ...], layers: tuple[tuple[int, ...], ...], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Compatibility(model, geometries, layers)


KEY = derive(b"secret", "metadata")
TICKET = Ticket(
    server="prefill-1-0123456789ab",
    service=1,
    slot=5,
    generation=2,
    request="chatcmpl-1 é",
    num_tokens=1500,
    lease_ms=30_000,
    compatibility=("0.1.0", "m", ((2, 2, 1, 4, "bfloat16", 16, "", None),)),
    metadata=Ticket.encode(bytes(range(200)) * 2),
)


@pytest.mark.parametrize("key", [None, KEY])
def test_ticket_survives_proxies_and_stays_small(key: bytes | None) -> None:
    text = TICKET.pack(key=key)
    assert len(text.encode()) <= MAX_TICKET < 2048
    found = Ticket.unpack(text, key=key)
    assert found.lease == LeaseId(5, 2)
    assert found.connection_blob == bytes(range(200)) * 2
    reordered = dict(reversed(json.loads(text).items()))
    for again in (json.dumps(reordered, indent=2), json.dumps(reordered, ensure_ascii=False)):
        assert Ticket.unpack(again, key=key) == found
        assert Ticket.unpack(again.encode(), key=key) == found


def test_ticket_of_another_secret_is_refused() -> None:
    other = derive(b"another", "metadata")
    for made, read in ((KEY, None), (None, KEY), (KEY, other)):
        with pytest.raises(MetadataError, match=r"TORCH_NIXL_SECRET|failed auth"):
            Ticket.unpack(TICKET.pack(key=made), key=read)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slot", 6),
        ("generation", 3),
        ("server", "other"),
        ("num_tokens", 1501),
        ("metadata", Ticket.encode(b"other")),
        ("torch_nixl_kv", 2),
        ("slot", "5"),
        ("slot", 5.0),
        ("slot", True),
        ("slot", -1),
        ("slot", 2**32),
        ("generation", 0),
        ("num_tokens", 2**40),
        ("compatibility", None),
        ("compatibility", "0123456789abcdef"),
        ("compatibility", ["0.1.0", "m", []]),
        ("compatibility", ["0.1.0", "m", [[2, 2, 1, 4, "bfloat16", 16, "", [-1]]]]),
        ("compatibility", ["0.1.0", "x" * 256, [[2, 2, 1, 4, "bfloat16", 16, "", None]]]),
        ("request", "x" * 257),
        ("seal", "AAAA"),
        ("seal", "*"),
        ("seal", ""),
        ("extra", 1),
        ("server", None),
    ],
)
def test_altered_ticket_is_refused(name: str, value: object, key: bytes | None) -> None:
    fields = json.loads(TICKET.pack(key=key))
    fields[name] = value
    with pytest.raises(MetadataError):
        Ticket.unpack(json.dumps(fields), key=key)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "1",
        '"x"',
        "{",
        "[" * 2000,
        "x" * 100_000,
        "\ud800",
        '{"a": NaN}',
        "\0",
    ],
)
def test_what_is_no_ticket_is_refused(text: str) -> None:
    with pytest.raises(MetadataError):
        Ticket.unpack(text, key=None)


@given(at=st.integers(0, 5000), value=st.characters())
def test_ticket_with_one_other_character_is_refused_or_the_same(at: int, value: str) -> None:
    text = TICKET.pack(key=None)
    at %= len(text)
    try:
        found = Ticket.unpack(text[:at] + value + text[at + 1 :], key=None)
    except MetadataError:
        return
    assert found == Ticket.unpack(text, key=None)


def test_ticket_that_would_be_too_long_is_not_made() -> None:
    long = TICKET.model_copy(update={"metadata": "b64:" + "A" * 1900})
    with pytest.raises(ValueError, match="bytes"):
        long.pack(key=None)


def test_ticket_leaves_out_what_makes_it_too_long() -> None:
    groups = ((200, 2, 1, 4, "bfloat16", 16, "", tuple(range(1, 400, 2))),) * 2
    long = TICKET.model_copy(update={"compatibility": ("0.1.0", "m", groups)})
    read = Ticket.unpack(long.pack(key=None), key=None)
    assert read == TICKET.model_copy(update={"compatibility": None, "seal": read.seal})
    assert read.difference(Compatibility("n", (GEOMETRY,), ((0, 1),))) == ""


@pytest.mark.parametrize(
    "group",
    [
        (0, 2, 1, 4, "bfloat16", 16, "", None),
        (2, 7, 1, 4, "bfloat16", 16, "", None),
        (2, 2, 1, 4, "float1024", 16, "", None),
        (2, 2, 1, 4, "bfloat16", 16, "", (3, 2)),
        (1 << 31, 2, 1, 4, "bfloat16", 16, "", None),
    ],
)
def test_record_that_makes_no_sense_is_left_to_the_handshake(group: tuple[object, ...]) -> None:
    ticket = TICKET.model_copy(update={"compatibility": ("0.1.0", "m", (group,))})
    read = Ticket.unpack(ticket.pack(key=None), key=None)
    assert read.difference(Compatibility("m", (GEOMETRY,), ((0, 1),))) == ""
