"""Layouts and plans against torch's own indexing: every shape to every other."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.caches import SHAPES, Cache, make, move, oracle
from torch_nixl.kv.layout import Geometry, Layout, describe, intersect, shares, takers
from torch_nixl.kv.plan import Plan, Run, make_plan

BF16 = torch.bfloat16
BASE = Geometry(num_layers=2, num_kv_heads=2, head_dim=4, dtype=BF16, page_size=4)


def check(
    src: Cache,
    dst: Cache,
    src_run: Run,
    dst_run: Run,
    start: int,
    stop: int,
    *,
    heads: range | None = None,
    max_bytes: int = 1 << 20,
    max_spans: int = 4096,
) -> Plan:
    """Move by plan and by oracle into the same bytes, and compare all storages."""
    before = dst.snapshot()
    plan = make_plan(src.layout, src_run, dst.layout, dst_run, start=start, stop=stop, heads=heads)
    assert move(plan, src, dst, max_bytes=max_bytes, max_spans=max_spans) == plan.nbytes
    moved = dst.snapshot()
    for region, bytes_before in enumerate(before):
        dst.storage(region).copy_(bytes_before)
    shared = intersect(src.layout.geometry.heads, dst.layout.geometry.heads)
    oracle(
        src, src_run.pages, src_run.first, dst, dst_run.pages, dst_run.first, start, stop,
        shared if heads is None else heads, range(src.layout.geometry.num_layers),
    )  # fmt: skip
    for region, expected in enumerate(dst.snapshot()):
        assert torch.equal(moved[region], expected)
    return plan


def pages(count: int, total: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.random.default_rng(seed).permutation(total)[:count].astype(np.int64)


@pytest.mark.parametrize("to", SHAPES)
@pytest.mark.parametrize("frm", SHAPES)
def test_every_shape_to_every_other_equals_torch_indexing(frm: str, to: str) -> None:
    sizes = [(4, 4), (2, 4), (4, 2), (1, 4), (4, 1)]
    ranges = [(0, 12), (3, 4), (2, 11), (4, 8), (5, 5)]
    for (a, b), (start, stop) in itertools.product(sizes, ranges):
        src = make(SHAPES[frm], dataclasses.replace(BASE, page_size=a), 16, 1)
        dst = make(SHAPES[to], dataclasses.replace(BASE, page_size=b), 16, 2)
        # Some neighbours, some not, so that runs merge and break.
        ours = pages(12 // a, 12 // a + 2, start)
        theirs = np.arange(12 // b)[::-1] if start == 2 else np.arange(12 // b) + 1
        check(src, dst, Run(ours), Run(theirs.astype(np.int64)), start, stop)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float32])
def test_dtype_moves_as_it_is(dtype: torch.dtype) -> None:
    geometry = dataclasses.replace(BASE, dtype=dtype)
    src, dst = make("KPTHD", geometry, 8, 1), make("PHTD", geometry, 8, 2)
    check(src, dst, Run(pages(3, 8, 1)), Run(pages(3, 8, 2)), 1, 10)


def test_layers_that_are_views_of_one_storage() -> None:
    src = make("PHTKD", BASE, 8, 1, one_storage=True)
    dst = make("PTHD", BASE, 8, 2, one_storage=True)
    assert len(src.owners) == len(dst.owners) == 1
    check(src, dst, Run(pages(3, 8, 1)), Run(pages(3, 8, 2)), 0, 12)


def test_strided_views_are_described_by_their_strides() -> None:
    whole = torch.arange(2 * 8 * 6 * 4 * 8, dtype=torch.int16).view(BF16).view(2, 8, 6, 4, 8)
    layout, owners = describe([whole[i][:, 1:5, ::2, :4] for i in range(2)], "PTHD")
    assert len(owners) == 1 and layout.geometry.num_parts == 1
    assert (layout.page_stride, layout.token_stride, layout.head_stride) == (384, 64, 32)
    assert layout.offsets.tolist() == [[64], [8 * 6 * 4 * 8 * 2 + 64]]


def test_latent_has_one_part_and_one_head_whatever_the_ranks() -> None:
    latent = Geometry(2, 1, 8, BF16, page_size=4, num_parts=1)
    src = make("PTD", latent, 8, 1)
    for rank in range(4):
        there = dataclasses.replace(latent, tp_rank=rank, tp_size=4, page_size=2)
        dst = make("PTD", there, 8, 2)
        [share] = shares(there, 1)
        assert share.rank == 0
        plan = check(src, dst, Run(pages(3, 8, 1)), Run(pages(6, 8, 2)), 0, 11, heads=share.heads)
        assert plan.nbytes == 11 * latent.token_nbytes


@pytest.mark.parametrize("axes", ["KPTHD", "PHTD", "PKTHD"])
@pytest.mark.parametrize(("src_tp", "dst_tp"), list(itertools.product([1, 2, 4, 8], repeat=2)))
def test_ranks_get_every_head_exactly_once(src_tp: int, dst_tp: int, axes: str) -> None:
    """With 4 heads: sliced up to 4 ranks, shared by two each at 8."""
    whole = dataclasses.replace(BASE, num_kv_heads=4)
    model = make("PTHD", whole, 8, 9)
    sources = []
    for rank in range(src_tp):
        part = make(axes, dataclasses.replace(whole, tp_rank=rank, tp_size=src_tp), 8, rank)
        heads = part.layout.geometry.heads
        for mine, whole_layer in zip(part.parts, model.parts, strict=True):
            for one, other in zip(mine, whole_layer, strict=True):
                one.view(torch.int16).copy_(other.view(torch.int16)[:, :, heads.start : heads.stop])
        sources.append(part)
    for rank in range(dst_tp):
        geometry = dataclasses.replace(whole, tp_rank=rank, tp_size=dst_tp)
        dst = make("PHTD", geometry, 8, 50 + rank)
        ours, theirs = pages(3, 8, 1), pages(3, 8, 2)
        found = shares(geometry, src_tp)
        assert [head for share in found for head in share.heads] == list(geometry.heads)
        for share in found:
            plan = make_plan(
                sources[share.rank].layout, Run(ours), dst.layout, Run(theirs),
                start=0, stop=12, heads=share.heads,
            )  # fmt: skip
            move(plan, sources[share.rank], dst)
        heads = geometry.heads
        for moved, right in zip(dst.parts, model.parts, strict=True):
            for one, other in zip(moved, right, strict=True):
                assert torch.equal(
                    one.view(torch.int16)[theirs],
                    other.view(torch.int16)[ours][:, :, heads.start : heads.stop],
                )


@pytest.mark.parametrize(("src_tp", "dst_tp"), list(itertools.product([1, 2, 4, 8], repeat=2)))
def test_both_sides_agree_on_who_takes_from_whom(src_tp: int, dst_tp: int) -> None:
    whole = dataclasses.replace(BASE, num_kv_heads=4)
    pairs = set()
    for rank in range(dst_tp):
        geometry = dataclasses.replace(whole, tp_rank=rank, tp_size=dst_tp)
        pairs |= {(share.rank, rank) for share in shares(geometry, src_tp)}
    there = dataclasses.replace(whole, tp_size=dst_tp)
    found = {
        (rank, taker)
        for rank in range(src_tp)
        for taker in takers(dataclasses.replace(whole, tp_rank=rank, tp_size=src_tp), there)
    }
    assert found == pairs


def test_replicas_share_the_load() -> None:
    geometry = Geometry(1, 2, 4, BF16, 4, tp_size=8)
    asked = [
        share.rank
        for rank in range(8)
        for share in shares(dataclasses.replace(geometry, tp_rank=rank), 4)
    ]
    assert asked == [0, 1, 0, 1, 2, 3, 2, 3]


@given(
    frm=st.sampled_from(sorted(SHAPES.values())),
    to=st.sampled_from(sorted(SHAPES.values())),
    size=st.sampled_from([(4, 4), (2, 8), (8, 2), (1, 2)]),
    heads=st.sampled_from([1, 2, 3]),
    layers=st.integers(1, 3),
    positions=st.tuples(st.integers(0, 23), st.integers(0, 23)).map(sorted),
    skipped=st.integers(0, 2),
    max_bytes=st.integers(8, 300),
    max_spans=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_prefix_hits_and_small_pieces(
    frm: str,
    to: str,
    size: tuple[int, int],
    heads: int,
    layers: int,
    positions: list[int],
    skipped: int,
    max_bytes: int,
    max_spans: int,
    seed: int,
) -> None:
    """Either side may list its pages from any page on: positions match, not indices."""
    geometry = Geometry(layers, heads, 4, BF16, page_size=size[0])
    src = make(frm, geometry, 30, seed)
    dst = make(to, dataclasses.replace(geometry, page_size=size[1]), 30, seed + 1)
    start, stop = positions
    runs = []
    for page_size in size:
        first = max(0, start // page_size - skipped) * page_size
        count = -(-(24 - first) // page_size)
        runs.append(Run(pages(count, 30, seed + page_size), first))
    check(src, dst, runs[0], runs[1], start, stop, max_bytes=max_bytes, max_spans=max_spans)


def test_packed_pages_move_whole_and_only_to_the_same_packing() -> None:
    packed = dataclasses.replace(BASE, packing="amx")
    src = make("PHKTD", packed, 8, 1)
    for tp_size, rank in ((1, 0), (2, 1)):
        there = dataclasses.replace(packed, tp_rank=rank, tp_size=tp_size)
        dst = make("PHKTD", there, 8, 2)
        plan = make_plan(
            src.layout, Run(pages(3, 8, 1)), dst.layout, Run(pages(3, 8, 2)), start=5, stop=9
        )
        # Positions 5 to 8 touch the second page and the third.
        assert plan.nbytes == 8 * there.token_nbytes
        check(src, dst, Run(pages(3, 8, 1)), Run(pages(3, 8, 2)), 4, 12)
    assert packed.difference(BASE) == "packing is 'amx' here and '' there"
    with pytest.raises(ValueError, match="stride of 16 bytes over rows of 8"):
        make("PTHD", packed, 8, 1)


def test_layers_can_be_made_one_at_a_time() -> None:
    for axes in SHAPES.values():
        src, dst = make(axes, BASE, 8, 1), make("PTHD", BASE, 8, 2)
        ours, theirs = pages(3, 8, 1), pages(3, 8, 2)
        plan = make_plan(
            src.layout, Run(ours), dst.layout, Run(theirs), start=1, stop=11, by_layer=True
        )
        move(plan, src, dst, layers=range(1, 2))
        moved = dst.snapshot()
        fresh = make("PTHD", BASE, 8, 2)
        oracle(src, ours, 0, fresh, theirs, 0, 1, 11, BASE.heads, range(1, 2))
        assert all(torch.equal(a, b) for a, b in zip(moved, fresh.snapshot(), strict=True))


@pytest.mark.parametrize(
    ("axes", "num_spans"),
    [
        ("KPTHD", 4),  # one span for each layer and part
        ("KPHTD", 4),
        ("PKTHD", 2),  # one for each layer
        ("PHTKD", 2),
        ("PLKTHD", 1),  # all in one
        ("LKPTHD", 4),
    ],
)
def test_neighbouring_pages_are_merged(axes: str, num_spans: int) -> None:
    src, dst = make(axes, BASE, 8, 1), make(axes, BASE, 8, 2)
    run = Run(np.arange(2, 6))
    plan = check(src, dst, run, Run(run.pages + 1), 0, 16)
    assert plan.num_spans == num_spans
    if axes == "KPTHD":
        # Partial pages at both ends merge with the full ones between.
        assert check(src, dst, run, run, 3, 14).num_spans == num_spans


def test_descending_pages_are_not_merged() -> None:
    src, dst = make("KPTHD", BASE, 8, 1), make("KPTHD", BASE, 8, 2)
    run = Run(np.arange(4)[::-1].copy())
    assert check(src, dst, run, run, 0, 16).num_spans == 4 * 4
    assert check(src, dst, Run(np.arange(4)), run, 0, 16).num_spans == 4 * 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_layers": 3}, "num_layers is 2 here and 3 there"),
        ({"num_parts": 1}, "num_parts is 2 here and 1 there"),
        ({"num_kv_heads": 4}, "num_kv_heads is 2 here and 4 there"),
        ({"head_dim": 8}, "head_dim is 4 here and 8 there"),
        ({"dtype": torch.float16}, "dtype is torch.bfloat16 here and torch.float16 there"),
        ({"packing": "vnni"}, "packing is '' here and 'vnni' there"),
        ({"page_size": 6}, "page_size is 4 here and 6 there: one has to divide the other"),
        ({"num_parts": 1, "head_dim": 8}, "num_parts is 2 here and 1 there"),
    ],
)
def test_first_difference_is_named_and_nothing_is_planned(
    change: dict[str, object], why: str
) -> None:
    other = dataclasses.replace(BASE, **change)  # type: ignore[arg-type]
    assert BASE.difference(other) == why
    src, dst = (
        make("PTHD", BASE, 8, 1),
        make("PTHD", other, 8, 2) if "packing" not in change else (make("PHTD", other, 8, 2)),
    )
    with pytest.raises(ValueError, match="can't be converted"):
        make_plan(src.layout, Run(np.arange(2)), dst.layout, Run(np.arange(2)), start=0, stop=4)


def test_packed_pages_of_different_sizes_are_refused() -> None:
    a = dataclasses.replace(BASE, packing="amx")
    assert "can't be cut" in a.difference(dataclasses.replace(a, page_size=8))


@pytest.mark.parametrize(
    ("src_run", "dst_run", "start", "stop", "why"),
    [
        (Run(np.array([0, 8])), Run(np.arange(2)), 0, 8, "page 8 does not exist"),
        (Run(np.array([0, -1])), Run(np.arange(2)), 0, 8, "page -1 does not exist"),
        (Run(np.arange(2)), Run(np.array([1, 99])), 0, 8, "page 99 does not exist"),
        (Run(np.arange(2)), Run(np.array([1, 1])), 0, 8, "named twice"),
        (Run(np.arange(2)), Run(np.arange(2)), 0, 9, "hold positions 0 to 8, not 0 to 9"),
        (Run(np.arange(2), 4), Run(np.arange(3)), 0, 9, "hold positions 4 to 12"),
        (Run(np.arange(2), 3), Run(np.arange(3)), 4, 8, "not a page's first"),
        (Run(np.arange(2)), Run(np.arange(2)), -1, 8, "expected 0 or more"),
        (Run(np.arange(2)), Run(np.arange(2)), 8, 7, "expected 0 or more"),
        (Run(np.arange(0)), Run(np.arange(2)), 0, 1, "hold positions 0 to 0"),
        (Run(np.arange(2)), Run(np.arange(2)), 0, 1 << 40, "hold positions 0 to 8"),
    ],
)
def test_pages_that_do_not_fit_are_refused(
    src_run: Run, dst_run: Run, start: int, stop: int, why: str
) -> None:
    src, dst = make("PTHD", BASE, 8, 1), make("PTHD", BASE, 8, 2)
    with pytest.raises(ValueError, match=why):
        make_plan(src.layout, src_run, dst.layout, dst_run, start=start, stop=stop)


def test_heads_that_one_side_lacks_are_refused() -> None:
    half = dataclasses.replace(BASE, tp_size=2)
    src, dst = make("PTHD", half, 8, 1), make("PTHD", BASE, 8, 2)
    with pytest.raises(ValueError, match="share"):
        make_plan(
            src.layout, Run(np.arange(2)), dst.layout, Run(np.arange(2)),
            start=0, stop=8, heads=range(2),
        )  # fmt: skip


def test_ranks_without_common_heads_move_nothing() -> None:
    src = make("PTHD", dataclasses.replace(BASE, tp_size=2), 8, 1)
    dst = make("PTHD", dataclasses.replace(BASE, tp_size=2, tp_rank=1), 8, 2)
    plan = make_plan(src.layout, Run(np.arange(2)), dst.layout, Run(np.arange(2)), start=0, stop=8)
    assert plan.nbytes == 0 == move(plan, src, dst)


@pytest.mark.parametrize(
    "change",
    [
        {"tp_size": 3},
        {"tp_size": 8192},
        {"tp_rank": 1},
        {"num_layers": 0},
        {"num_layers": 5000},
        {"num_parts": 3},
        {"page_size": 0},
    ],
)
def test_impossible_geometry_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the field is named, see the others
        dataclasses.replace(BASE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_pages": 9}, "pages reach"),
        ({"num_pages": 0}, "num_pages"),
        ({"page_stride": 8}, "overlap"),
        ({"head_stride": -8}, "strides"),
        ({"token_stride": 1 << 61}, "pages reach"),
        ({"page_stride": 1 << 70}, "strides"),
        ({"page_stride": 1 << 61}, "pages reach"),
        ({"region_nbytes": ()}, "0 regions"),
        ({"region_nbytes": (1 << 63,) * 4}, "pages reach"),
        ({"regions": np.array([[0, 1], [2, 4]])}, "region 4"),
        ({"regions": np.array([[0, 1], [2, -1]])}, "region -1"),
        ({"regions": np.zeros((2, 2), np.int64)}, "same place"),
        ({"regions": np.zeros((2, 3), np.int64)}, "shape"),
        ({"offsets": np.full((2, 2), -8)}, "pages reach"),
        ({"offsets": np.full((2, 2), 2**62)}, "pages reach"),
    ],
)
def test_layout_beyond_its_regions_is_refused(change: dict[str, object], why: str) -> None:
    good = make("PTHD", BASE, 8, 1).layout
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(good, **change)  # type: ignore[arg-type]


def test_tensors_that_are_no_cache_are_refused() -> None:
    one = torch.zeros(8, 4, 2, 4)
    for tensors, axes, why in [
        ([one], "PTH", "axes="),
        ([one], "PPTD", "axes="),
        ([one], "XPTHD", "axes="),
        ([one], "KPTHD", "does not fit"),
        ([], "PTHD", "one or more"),
        ([[one, one.clone()], [one]], "PTHD", "each a pair"),
        ([one, one], "PTHD", "same place"),
        ([one, one.half()], "PTHD", "dtype"),
        ([one, torch.zeros(8, 4, 2, 5)], "PTHD", "shape"),
        ([one, torch.zeros(4, 8, 2, 4).transpose(0, 1)], "PTHD", "strides"),
        ([one.transpose(2, 3)], "PTHD", "adjacent"),
        ([one[:1].expand(8, 4, 2, 4)], "PTHD", "overlap"),
        ([one, one.clone()], "LTPD", "has an L"),
        ([[one, one.clone()]], "KTPD", "has a K"),
    ]:
        with pytest.raises(ValueError, match=why):
            describe(tensors, axes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="have 2 heads; rank 0 of 1 holds 4"):
        describe([one], "PTHD", num_kv_heads=4)


def big(axes: str, page_size: int, num_pages: int) -> Layout:
    geometry = Geometry(30, 3, 64, BF16, page_size)
    size = {"K": 2, "P": num_pages, "T": page_size, "H": 3, "D": 64}
    strides, step = {}, 2
    for axis in reversed(axes):
        strides[axis] = step
        step *= size[axis]
    each = np.arange(30)[:, None] * 0 + np.arange(2) * strides["K"]
    regions = np.repeat(np.arange(30)[:, None], 2, axis=1)
    return Layout(
        geometry, num_pages, regions, each, strides["P"], strides["T"], strides["H"], (step,) * 30
    )


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("axes", "other"), [("KPTHD", "KPTHD"), ("KPTHD", "KPHTD")])
def test_100000_pages_are_planned_in_50_ms(axes: str, other: str, scattered: bool) -> None:
    num = 100_000
    # NHD to HND has 48 runs a page: as many runs in all.
    tokens = num * 16 if axes == other else num // 48 * 16
    order = pages(num, num, 1) if scattered else np.arange(num)
    src, dst = big(axes, 16, num), big(other, 16, num)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        plan = make_plan(src, Run(order), dst, Run(order[::1].copy()), start=0, stop=tokens)
        best = min(best, time.perf_counter() - began)
    assert plan.nbytes == tokens * src.geometry.token_nbytes
    assert best < 0.050
