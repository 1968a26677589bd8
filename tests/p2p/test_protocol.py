"""Frame bodies, descriptions and credits: pure, so driven with whatever Hypothesis thinks of."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.errors import MetadataError
from torch_nixl.p2p import description, protocol
from torch_nixl.p2p.place import (
    MAX_SPANS,
    PlacedRegion,
    Stretch,
    align,
    pack_place,
    parse_place,
)
from torch_nixl.p2p.protocol import Allowance, Debt, Outcome, Route

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SPANS = st.lists(
    st.tuples(st.integers(0, 2**62), st.integers(1, 2**40), st.integers(0, 2**64 - 1)),
    min_size=1,
    max_size=20,
)


REGIONS = st.lists(
    st.tuples(
        st.sampled_from([MemoryKind.DRAM, MemoryKind.VRAM]), U32, SPANS, st.binary(max_size=300)
    ),
    min_size=1,
    max_size=5,
)
Rows = list[tuple[int, int, int]]
Regions = list[tuple[MemoryKind, int, Rows, bytes]]


def packed(regions: Regions) -> bytes:
    rows = [row for _, _, rows, _ in regions for row in rows]
    heads = [PlacedRegion(kind, number, len(rows), blob) for kind, number, rows, blob in regions]
    return pack_place(heads, np.array(rows, np.uint64))


@given(regions=REGIONS, front=st.binary(max_size=9))
def test_place_survives_the_wire(regions: Regions, front: bytes) -> None:
    place = parse_place(front + packed(regions), len(front))
    found = [(one.kind, one.number, one.num_spans, one.blob) for one in place.regions]
    assert found == [(kind, number, len(rows), blob) for kind, number, rows, blob in regions]
    rows = [row for _, _, rows, _ in regions for row in rows]
    assert place.spans.tolist() == [list(row) for row in rows]
    assert place.nbytes == sum(row[1] for row in rows)


@given(regions=REGIONS, cut=st.integers(1, 60))
def test_place_that_is_cut_or_longer_is_refused(regions: Regions, cut: int) -> None:
    body = packed(regions)
    for wrong in (body[: max(0, len(body) - cut)], body + b"x" * cut):
        with pytest.raises(MetadataError):
            parse_place(wrong, 0)


@given(regions=REGIONS, at=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_part_of_a_place_is_those_bytes(regions: Regions, at: tuple[float, float]) -> None:
    place = parse_place(packed(regions), 0)
    start, stop = sorted(int(one * place.nbytes) for one in at)
    at_byte = 0
    expected: list[list[object]] = []
    for kind, _, rows, _ in regions:
        for address, nbytes, device_id in rows:
            low, high = max(start, at_byte), min(stop, at_byte + nbytes)
            if low < high:
                expected.append([kind, address + low - at_byte, high - low, device_id])
            at_byte += nbytes
    found = [[kind, *row] for kind, rows in place.stretches(start, stop) for row in rows.tolist()]
    assert found == expected


@given(data=st.data(), sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_aligned_stretches_are_of_one_kind_each_and_pair_the_same_bytes(
    data: st.DataObject, sizes: list[int]
) -> None:
    def side(base: int) -> list[Stretch]:
        """The same bytes, cut elsewhere: the byte at position p has the address base + p."""
        total = sum(sizes)
        cuts = data.draw(st.sets(st.integers(1, total), max_size=5)) | {total}
        result: list[Stretch] = []
        start = 0
        for stop in sorted(cuts):
            kind = data.draw(st.sampled_from([MemoryKind.DRAM, MemoryKind.VRAM]))
            rows = [[base + at, 1, 0] for at in range(start, stop)]
            result.append((kind, np.array(rows, np.uint64)))
            start = stop
        return result

    ours, theirs = side(1000), side(5000)
    pairs = align(ours, theirs)
    addresses = [
        [int(row[0]) for pair in pairs for row in pair[index][1].tolist()] for index in (0, 1)
    ]
    assert addresses == [[base + at for at in range(sum(sizes))] for base in (1000, 5000)]
    assert all(len(mine[1]) == len(other[1]) for mine, other in pairs)


@given(st.binary(max_size=400))
def test_garbage_is_refused_and_nothing_else_is_raised(body: bytes) -> None:
    parsers = (
        lambda: parse_place(body, 0),
        lambda: protocol.parse_push(body),
        lambda: protocol.parse_end(body),
        lambda: protocol.parse_intro(body),
        lambda: protocol.parse_credit(body),
        lambda: protocol.parse_want(body),
        lambda: protocol.parse_number(body),
        lambda: description.parse(body, 0),
    )
    for parse in parsers:
        try:
            parse()
        except MetadataError:
            pass


@pytest.mark.parametrize(
    "row", [(0, 0, 0), (2**64 - 8, 9, 0)], ids=["empty span", "beyond all addresses"]
)
def test_place_with_an_impossible_span_is_refused(row: tuple[int, int, int]) -> None:
    for rows in ([row], [(4096, 8, 0), row]):
        body = packed([(MemoryKind.DRAM, 0, rows, b"")])
        with pytest.raises(MetadataError, match="empty span"):
            parse_place(body, 0)


def test_place_with_too_many_spans_or_a_region_without_any_is_refused() -> None:
    row = (4096, 8, 0)
    body = packed([(MemoryKind.DRAM, 0, [row] * (MAX_SPANS + 1), b"")])
    with pytest.raises(MetadataError, match="number of spans"):
        parse_place(body, 0)
    empty = [(MemoryKind.DRAM, 0, [row, row, row], b""), (MemoryKind.DRAM, 1, [], b"")]
    with pytest.raises(MetadataError, match="kind or a size"):
        parse_place(packed(empty), 0)


@given(number=U64, outcome=st.sampled_from(list(Outcome)), text=st.text(max_size=2000))
def test_end_survives_the_wire_with_its_text_cut(number: int, outcome: Outcome, text: str) -> None:
    body = protocol.pack_end(7, number, outcome, text)
    found, how, why = protocol.parse_end(body)
    assert (found, how) == (number, outcome)
    sent = text.encode("utf-8", "replace").decode()
    assert sent.startswith(why)
    assert why == sent or len(why.encode()) > protocol.MAX_TEXT - 4


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@given(
    shape=st.lists(st.integers(0, 5), max_size=6),
    dtype=st.sampled_from(sorted(description.DTYPES.values(), key=str)),
)
def test_description_survives_the_wire(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    described = description.describe(tensor)
    parsed = description.parse_tensor(b"abc" + described.packed + b"payload", 3)
    assert (parsed.dtype, parsed.shape, parsed.device) == (dtype, tuple(shape), "cpu")
    assert parsed.nbytes == tensor.nbytes
    assert parsed.fits(tensor)


def test_every_dtype_that_tensors_are_made_of_can_be_described() -> None:
    quantised = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    for name in dir(torch):
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or dtype in quantised:
            continue
        if name.startswith("bit") or (name.startswith(("int", "uint")) and dtype.itemsize == 1):
            if name not in ("int8", "uint8"):
                continue  # Shells without arithmetic: nothing makes tensors of them yet.
        assert dtype in description.DTYPES.values(), name


def test_description_with_too_many_bytes_is_refused() -> None:
    packed = description.describe(torch.empty(1, 1, dtype=torch.int64)).packed
    with pytest.raises(MetadataError, match="2\\^63"):
        description.parse_tensor(packed[:4] + (2**40).to_bytes(8, "little") * 2, 0)


def test_descriptions_that_are_remembered_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MAX_REMEMBERED", 10)
    for size in range(50):
        packed = description.describe(torch.empty(size)).packed
        assert description.parse_tensor(packed, 0).shape == (size,)
    assert len(description._described) <= 10
    assert len(description._parsed) <= 10


# Credits: a sender, a receiver, and frames between them that take their time.

STEPS = st.lists(st.sampled_from(["send", "arrive", "match", "credit"]), max_size=300)


@given(steps=STEPS, sizes=st.lists(st.integers(0, 400), min_size=1, max_size=20))
def test_credits_bound_what_waits_and_never_lock_up(steps: list[str], sizes: list[int]) -> None:
    frames, nbytes = 8, 1000
    allowance, debt = Allowance(frames, nbytes), Debt(frames, nbytes)
    size = itertools.cycle(sizes)
    flying: deque[int] = deque()
    waiting: deque[int] = deque()
    returning: deque[tuple[int, int]] = deque()

    def match() -> None:
        due = debt.settle(waiting.popleft())
        if due is not None:
            returning.append(due)

    for step in steps:
        if step == "send":
            next_size = next(size)
            if allowance.take(next_size):
                flying.append(next_size)
        elif step == "arrive" and flying:
            waiting.append(flying.popleft())
            debt.arrive(waiting[-1])
        elif step == "match" and waiting:
            match()
        elif step == "credit" and returning:
            allowance.give(*returning.popleft())
        assert len(waiting) + len(flying) <= frames
        assert sum(waiting) + sum(flying) <= nbytes
        # A sender that has no credit for the largest message, with all its frames arrived and all
        # credit returned, is seen as strained: receives that wait will ask.
        if not flying and not returning and not Allowance.take(_copy(allowance), nbytes // 2):
            assert debt.strained
    while flying:
        waiting.append(flying.popleft())
        debt.arrive(waiting[-1])
    while waiting:
        match()
    while returning:
        allowance.give(*returning.popleft())
    assert allowance.take(0), "all was received, and the sender still has no credit"


def _copy(allowance: Allowance) -> Allowance:
    copy = Allowance(8, 1000)
    copy.frames, copy.nbytes = allowance.frames, allowance.nbytes
    return copy


def test_credit_that_was_never_used_is_refused() -> None:
    allowance = Allowance(4, 100)
    assert allowance.take(60)
    assert not allowance.take(50)
    with pytest.raises(MetadataError, match="never used"):
        allowance.give(1, 61)
    allowance.give(1, 60)
    with pytest.raises(MetadataError, match="never used"):
        allowance.give(1, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 64, 100_000])
def test_largest_messages_fit_the_credit_of_any_number_of_ranks(num_ranks: int) -> None:
    half = protocol.credit_nbytes(num_ranks) // 2
    assert protocol.HEAD.size + 4 + 8 * 64 + protocol.EAGER_NBYTES <= half
    assert protocol.offer_cost(MAX_SPANS, 1 << 20) <= half
    assert protocol.eager_cost(1 << 20) <= half


def test_route_is_read_on_one_host_and_write_elsewhere() -> None:
    def route(path: str, nbytes: int, *, dense: bool = True, waits: bool = False) -> Route:
        return protocol.choose_route(path, nbytes, dense=dense, sender_waits=waits)

    large = 256 << 20
    assert route("cma", large) is Route.READ
    assert route("cma", large, waits=True) is Route.SPLIT
    assert route("cma", large, waits=True, dense=False) is Route.READ
    assert route("cma", protocol.SPLIT_NBYTES - 1, waits=True) is Route.READ
    assert route("tcp", large, waits=True) is Route.WRITE
    assert route("network", 1 << 16) is Route.WRITE


def test_many_short_spans_are_packed_and_few_long_ones_are_not() -> None:
    assert not protocol.should_pack(1, 10)
    assert not protocol.should_pack(2, 2 << 20)
    assert protocol.should_pack(1000, 64 << 10)
    assert protocol.should_pack(MAX_SPANS + 1, 1 << 40)
