"""The span algebra against a slow oracle that lists every byte's address."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import Spans

TOP = 2**64

bounded = settings(deadline=None, max_examples=200)  # A busy machine is no failure.


def make(*rows: tuple[int, int]) -> Spans:
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


def addresses(spans: Spans) -> list[int]:
    """The address of every byte, in order."""
    return [a + i for a, n in spans.tolist() for i in range(n)]


rows = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=12)
full_rows = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), max_size=12)


@st.composite
def equal_totals(draw: st.DrawFn) -> tuple[Spans, Spans]:
    """Two span lists with the same total, cut differently; empty spans among them."""
    total = draw(st.integers(0, 60))

    def cut() -> Spans:
        cuts = sorted(draw(st.lists(st.integers(0, total), max_size=8)))
        sizes = [e - b for b, e in itertools.pairwise([0, *cuts, total])]
        return make(*((draw(st.integers(1, 500)), size) for size in sizes))

    return cut(), cut()


def with_own_devices(spans: Spans) -> Spans:
    """Give each span its row number for a device id."""
    return np.column_stack((spans, np.arange(len(spans), dtype=np.uint64)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    num_dims = draw(st.integers(0, 4))
    shape = draw(st.lists(st.integers(0, 4), min_size=num_dims, max_size=num_dims))
    strides = draw(st.lists(st.integers(-20, 20), min_size=num_dims, max_size=num_dims))
    return shape, strides, draw(st.integers(1, 4))


def strided_addresses(
    address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> list[int]:
    return [
        address + sum(i * s for i, s in zip(index, strides, strict=True)) + byte
        for index in itertools.product(*(range(n) for n in shape))
        for byte in range(itemsize)
    ]


class TestMerge:
    @bounded
    @given(rows)
    def test_keeps_every_byte_in_order_and_leaves_nothing_to_join(
        self, rows: list[tuple[int, int]]
    ) -> None:
        spans = make(*rows)
        merged = algebra.merge(spans)
        assert addresses(merged) == addresses(spans)
        assert merged.dtype == np.uint64
        assert all(n > 0 for _, n in merged.tolist())
        assert all(a + n != b for (a, n), (b, _) in itertools.pairwise(merged.tolist()))

    def test_joins_a_chain_across_empty_spans(self) -> None:
        merged = algebra.merge(make((8, 4), (100, 0), (12, 4), (16, 1), (18, 1)))
        assert merged.tolist() == [[8, 9], [18, 1]]

    def test_joins_no_span_with_one_below_it(self) -> None:
        assert algebra.merge(make((12, 4), (8, 4))).tolist() == [[12, 4], [8, 4]]

    def test_does_not_join_across_the_end_of_the_address_space(self) -> None:
        spans = make((TOP - 8, 8), (0, 8))
        assert algebra.merge(spans).tolist() == spans.tolist()

    @pytest.mark.parametrize("spans", [make(), make((5, 0)), make((5, 0), (6, 0))])
    def test_nothing_stays_nothing(self, spans: Spans) -> None:
        assert algebra.merge(spans).shape == (0, 2)

    def test_leaves_its_argument_alone(self) -> None:
        spans = make((8, 4), (12, 4))
        algebra.merge(spans)
        assert spans.tolist() == [[8, 4], [12, 4]]


# Sizes, and for each side the gap before the span and its device id.
side = st.tuples(st.sampled_from([0, 0, 0, 1, -3]), st.sampled_from([0, 7, 7, 7, 8]))
paired_rows = st.lists(st.tuples(st.integers(1, 9), side, side), max_size=12)


def side_of(rows: list[tuple[int, tuple[int, int]]]) -> Spans:
    spans, end = [], 1000
    for nbytes, (gap, device_id) in rows:
        spans.append((end + gap, nbytes, device_id))
        end += gap + nbytes
    return np.array(spans, dtype=np.uint64).reshape(-1, 3)


def places(spans: Spans) -> list[tuple[int, int]]:
    """Device id and address of every byte, in order."""
    return [(device, address + at) for address, n, device in spans.tolist() for at in range(n)]


class TestMergePairs:
    @bounded
    @given(paired_rows)
    def test_keeps_every_byte_of_both_in_order_and_joins_what_can_be(
        self, rows: list[tuple[int, tuple[int, int], tuple[int, int]]]
    ) -> None:
        a = side_of([(nbytes, one) for nbytes, one, _ in rows])
        b = side_of([(nbytes, other) for nbytes, _, other in rows])
        before = a.tolist(), b.tolist()
        joined_a, joined_b = algebra.merge_pairs(a, b, except_device=0)
        assert (a.tolist(), b.tolist()) == before
        assert joined_a[:, 1].tolist() == joined_b[:, 1].tolist()
        assert places(joined_a) == places(a)
        assert places(joined_b) == places(b)
        # One row more wherever one of the two sides does not go on under its own device id.
        steps = list(itertools.pairwise(zip(a.tolist(), b.tolist(), strict=True)))
        goes_on = [
            all(
                here[0] + here[1] == there[0] and here[2] == there[2] != 0
                for here, there in zip(one, following, strict=True)
            )
            for one, following in steps
        ]
        assert len(joined_a) == len(a) - sum(goes_on)
        assert joined_a.dtype == joined_b.dtype == np.uint64
        assert joined_a.flags.c_contiguous
        assert joined_b.flags.c_contiguous

    def test_what_has_nothing_to_join_is_not_copied(self) -> None:
        a = np.array([(8, 4, 1), (12, 4, 1)], np.uint64)
        b = np.array([(8, 4, 1), (13, 4, 1)], np.uint64)
        for one, other in ((a, b), (b, a), (b, b), (a[:1], a[:1]), (a[:0], a[:0])):
            result = algebra.merge_pairs(one, other, except_device=0)
            assert result[0] is one
            assert result[1] is other

    def test_does_not_join_across_the_end_of_the_address_space(self) -> None:
        a = np.array([(TOP - 8, 8, 1), (0, 8, 1)], np.uint64)
        b = np.array([(64, 8, 1), (72, 8, 1)], np.uint64)
        assert algebra.merge_pairs(a, b, except_device=0)[0] is a
        assert algebra.merge_pairs(b, a, except_device=0)[0] is b


class TestStrided:
    @bounded
    @given(layouts())
    def test_describes_the_elements_in_logical_order(
        self, layout: tuple[list[int], list[int], int]
    ) -> None:
        spans = algebra.strided(1000, *layout)
        assert addresses(spans) == strided_addresses(1000, *layout)
        assert algebra.merge(spans).tolist() == spans.tolist()

    @bounded
    @given(layouts())
    def test_bounds_are_the_lowest_byte_and_one_past_the_highest(
        self, layout: tuple[list[int], list[int], int]
    ) -> None:
        low, high = algebra.bounds(*layout)
        touched = strided_addresses(0, *layout)
        assert (low, high) == ((min(touched), max(touched) + 1) if touched else (0, 0))

    @bounded
    @given(layouts())
    def test_runs_predicts_the_spans_before_merging(
        self, layout: tuple[list[int], list[int], int]
    ) -> None:
        num_runs, run = algebra.runs(*layout)
        spans = algebra.strided(1000, *layout)
        assert num_runs * run == math.prod(layout[0]) * layout[2]
        assert len(spans) <= num_runs

    @bounded
    @given(layouts())
    def test_overlap_is_found_and_disjointness_never_claimed_wrongly(
        self, layout: tuple[list[int], list[int], int]
    ) -> None:
        touched = strided_addresses(1000, *layout)
        shared = len(set(touched)) < len(touched)
        assert algebra.overlaps(algebra.strided(1000, *layout)) == shared
        assert not (shared and algebra.surely_disjoint(*layout))

    def test_a_transpose_and_a_gap_are_surely_disjoint(self) -> None:
        assert algebra.surely_disjoint((3, 4), (4, 12), 4)
        assert algebra.surely_disjoint((3, 4), (-64, 4), 4)

    def test_evenly_spaced_outer_dimensions_cost_no_more_than_one(self) -> None:
        assert algebra.runs((10, 20, 8), (20 * 64, 64, 2), 2) == (200, 16)

    def test_works_at_the_top_of_the_address_space(self) -> None:
        spans = algebra.strided(TOP - 2, (3,), (-4,), 2)
        assert spans.tolist() == [[TOP - 2, 2], [TOP - 6, 2], [TOP - 10, 2]]

    def test_refuses_to_build_more_spans_than_anyone_can_use(self) -> None:
        with pytest.raises(ValueError, match="make a contiguous copy"):
            algebra.strided(4096, (2**27,), (8,), 4)


class TestPair:
    @bounded
    @given(equal_totals())
    def test_cuts_both_sides_alike_and_keeps_every_byte(self, lists: tuple[Spans, Spans]) -> None:
        a, b = lists
        cut_a, cut_b = algebra.pair(a, b)
        assert cut_a[:, 1].tolist() == cut_b[:, 1].tolist()
        assert cut_a[:, 1].all()
        assert addresses(cut_a) == addresses(a)
        assert addresses(cut_b) == addresses(b)
        assert len(cut_a) <= len(a) + len(b)
        assert cut_a.dtype == cut_b.dtype == np.uint64

    @bounded
    @given(rows, rows)
    def test_different_totals_are_refused_with_both_named(
        self, rows_a: list[tuple[int, int]], rows_b: list[tuple[int, int]]
    ) -> None:
        total_a, total_b = sum(n for _, n in rows_a), sum(n for _, n in rows_b)
        if total_a == total_b:
            rows_a, total_a = [*rows_a, (1, 1)], total_a + 1
        with pytest.raises(ValueError, match=f"{total_a} bytes on one side, {total_b} on"):
            algebra.pair(make(*rows_a), make(*rows_b))

    def test_totals_that_are_equal_only_modulo_2_to_the_64_are_refused(self) -> None:
        wrapping = make((1, 2**63), (1, 2**63), (1, 16))
        with pytest.raises(ValueError, match=f"16 bytes on one side, {TOP + 16} on"):
            algebra.pair(make((64, 16)), wrapping)
        with pytest.raises(ValueError, match="fewer than"):
            algebra.pair(wrapping, make((1, 2**63), (1, 16), (1, 2**62), (1, 2**62)))

    def test_nothing_pairs_with_nothing(self) -> None:
        for a, b in [(make(), make()), (make((1, 0)), make((2, 0))), (make((1, 0)), make())]:
            cut_a, cut_b = algebra.pair(a, b)
            assert cut_a.shape == cut_b.shape == (0, 2)

    @bounded
    @given(equal_totals(), st.integers(1, 9))
    def test_device_ids_go_along(self, lists: tuple[Spans, Spans], max_bytes: int) -> None:
        a, b = lists
        cut_a, cut_b = algebra.pair(*map(with_own_devices, lists))
        pieces = algebra.pieces(cut_a, cut_b, max_bytes=max_bytes, max_spans=4)
        for side, whole in enumerate((a, b)):
            rows = [row for piece in pieces for row in piece[side].tolist()]
            moved = [(address + i, device) for address, n, device in rows for i in range(n)]
            expected = [
                (x, row) for row in range(len(whole)) for x in addresses(whole[row : row + 1])
            ]
            assert moved == expected
            assert all(piece[side].flags.c_contiguous for piece in pieces)


class TestClip:
    @bounded
    @given(full_rows.filter(bool), st.data())
    def test_keeps_the_bytes_from_start_to_stop(
        self, rows: list[tuple[int, int]], data: st.DataObject
    ) -> None:
        spans = with_own_devices(make(*rows))
        before = spans.copy()
        whole = [(x, row) for row in range(len(spans)) for x in addresses(spans[row : row + 1, :2])]
        start = data.draw(st.integers(0, len(whole) - 1))
        stop = data.draw(st.integers(start + 1, len(whole)))
        found = algebra.clip(spans, start, stop)
        assert [(x + i, row) for x, n, row in found.tolist() for i in range(n)] == whole[start:stop]
        assert found[:, 1].all()
        assert np.array_equal(spans, before)


class TestPieces:
    @bounded
    @given(full_rows, st.integers(1, 20), st.integers(1, 5))
    def test_pieces_keep_the_bytes_in_order_within_both_limits(
        self, rows: list[tuple[int, int]], max_bytes: int, max_spans: int
    ) -> None:
        a = make(*rows)
        b = make(*((address + 100, nbytes) for address, nbytes in rows))
        pieces = algebra.pieces(a, b, max_bytes=max_bytes, max_spans=max_spans)
        for piece_a, piece_b in pieces:
            assert piece_a[:, 1].tolist() == piece_b[:, 1].tolist()
            assert 1 <= len(piece_a) <= max_spans
            assert 1 <= algebra.total(piece_a) <= max_bytes
        assert [x for piece, _ in pieces for x in addresses(piece)] == addresses(a)
        assert [x for _, piece in pieces for x in addresses(piece)] == addresses(b)

    @bounded
    @given(full_rows, st.integers(1, 20), st.integers(1, 5))
    def test_only_long_spans_are_cut_and_pieces_are_full(
        self, rows: list[tuple[int, int]], max_bytes: int, max_spans: int
    ) -> None:
        pieces = algebra.pieces(make(*rows), make(*rows), max_bytes=max_bytes, max_spans=max_spans)
        num_rows = sum(-(-nbytes // max_bytes) for _, nbytes in rows)
        assert sum(len(piece) for piece, _ in pieces) == num_rows
        for (piece, _), (following, _) in itertools.pairwise(pieces):
            first = int(following[0, 1])
            assert len(piece) == max_spans or algebra.total(piece) + first > max_bytes

    def test_a_small_transfer_is_one_piece_and_not_copied(self) -> None:
        a, b = make((8, 4)), make((64, 4))
        ((piece_a, piece_b),) = algebra.pieces(a, b, max_bytes=4, max_spans=1)
        assert piece_a is a
        assert piece_b is b

    def test_spans_whose_end_is_the_end_of_the_address_space(self) -> None:
        a = make((TOP - 10, 10))
        pieces = algebra.pieces(a, make((16, 10)), max_bytes=4, max_spans=9)
        assert [p.tolist() for p, _ in pieces] == [
            [[TOP - 10, 4]],
            [[TOP - 6, 4]],
            [[TOP - 2, 2]],
        ]

    def test_no_spans_make_no_pieces(self) -> None:
        assert algebra.pieces(make(), make(), max_bytes=1, max_spans=1) == []

    @pytest.mark.parametrize("limits", [(0, 1), (1, 0), (-1, 1)])
    def test_limits_below_one_are_refused(self, limits: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match="expected at least 1"):
            algebra.pieces(make((1, 1)), make((1, 1)), max_bytes=limits[0], max_spans=limits[1])


class TestSmallOnes:
    @bounded
    @given(full_rows)
    def test_overlaps_agrees_with_a_set_of_addresses(self, rows: list[tuple[int, int]]) -> None:
        touched = addresses(make(*rows))
        assert algebra.overlaps(make(*rows)) == (len(set(touched)) < len(touched))

    def test_overlaps_at_the_top_of_the_address_space(self) -> None:
        assert not algebra.overlaps(make((TOP - 4, 4), (TOP - 8, 4)))
        assert algebra.overlaps(make((TOP - 4, 4), (TOP - 8, 5)))

    @bounded
    @given(rows)
    def test_total_is_the_sum(self, rows: list[tuple[int, int]]) -> None:
        assert algebra.total(make(*rows)) == sum(n for _, n in rows)

    def test_total_does_not_wrap(self) -> None:
        assert algebra.total(make((0, TOP - 1), (0, TOP - 1), (0, 3))) == 2 * TOP + 1

    @bounded
    @given(rows, st.integers(0, TOP - 1))
    def test_with_device_appends_a_column(
        self, rows: list[tuple[int, int]], device_id: int
    ) -> None:
        result = algebra.with_device(make(*rows), device_id)
        assert result.tolist() == [[a, n, device_id] for a, n in rows]
        assert result.shape == (len(rows), 3)
        assert result.flags.c_contiguous
        assert result.dtype == np.uint64

    def test_single_is_read_only_and_exact(self) -> None:
        span = algebra.single(TOP - 1, 1)
        assert span.tolist() == [[TOP - 1, 1]]
        assert span.dtype == np.uint64
        with pytest.raises(ValueError, match="read-only"):
            span[0, 0] = 1


class TestCost:
    """Bounds ten and more times above what was measured: they catch a loop over rows."""

    def best(self, function: object) -> float:
        assert callable(function)
        timings = []
        for _ in range(5):
            begin = time.perf_counter()
            function()
            timings.append(time.perf_counter() - begin)
        return min(timings)

    def test_100_000_rows_are_built_without_a_loop_over_them(self) -> None:
        assert self.best(lambda: algebra.strided(4096, (1000, 100, 64), (51200, 512, 1), 1)) < 0.03

    def test_pairing_and_cutting_100_000_rows_loops_over_none(self) -> None:
        a = algebra.strided(4096, (100_000, 64), (512, 1), 1)
        b = algebra.strided(4096, (200_000, 32), (512, 1), 1)
        assert self.best(lambda: algebra.pair(a, b)) < 0.1
        assert self.best(lambda: algebra.pieces(a, a, max_bytes=2**22, max_spans=4096)) < 0.05
        assert self.best(lambda: algebra.pieces(a, a, max_bytes=48, max_spans=4096)) < 1.0

    def test_cutting_one_large_span_is_cheap(self) -> None:
        a, b = make((4096, 2**28)), make((2**40, 2**28))
        assert len(algebra.pieces(a, b, max_bytes=2**22, max_spans=4096)) == 64
        assert self.best(lambda: algebra.pieces(a, b, max_bytes=2**22, max_spans=4096)) < 0.002
