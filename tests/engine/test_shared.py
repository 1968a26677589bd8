"""Registrations under shared device ids, and how they are found, against the linear rule."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nixl.engine.adapter import MemoryKind, Region, Registration
from torch_nixl.engine.extents import Extents
from torch_nixl.engine.shared import SharedRegistrations
from torch_nixl.errors import RegistrationError

bounded = settings(deadline=None, max_examples=400)  # A busy machine is no failure.

extents = st.tuples(st.integers(1, 12), st.integers(1, 16))
# An extent to ask for and add, or which of the live ones to give up.
steps = st.lists(st.one_of(extents, st.integers(0, 99)), max_size=60)


@dataclass(slots=True, eq=False)
class Registered:
    region: Region
    users: int = 1


class Linear:
    """The rule, one live registration after the other, the oldest first."""

    def __init__(self) -> None:
        self.live: list[Registered] = []

    def find(self, region: Region, *, strict: bool) -> Registered | None:
        start, end = region.address, region.address + region.nbytes
        for one in self.live:
            live = one.region
            if (live.kind, live.device_id) != (region.kind, region.device_id):
                continue
            live_end = live.address + live.nbytes
            if live.address <= start and end <= live_end:
                one.users += 1
                return one
            if strict and live.address < end and start < live_end:
                raise RegistrationError("overlaps")
        return None

    def leave(self, one: Registered) -> bool:
        one.users -= 1
        if one.users == 0:
            self.live.remove(one)
        return one.users == 0


def take(
    shared: SharedRegistrations | Linear, region: Region, strict: bool
) -> Registration | Registered | None:
    """Find or add; return None where it is refused."""
    try:
        found = shared.find(region, strict=strict)
    except RegistrationError:
        return None
    if found is None:
        found = Registered(region)
        if isinstance(shared, Linear):
            shared.live.append(found)
        else:
            shared.add(found)
    return found


@bounded
@given(steps, st.integers(1, 3))
def test_the_linear_rule_finds_and_refuses_the_same(
    steps: list[tuple[int, int] | int], num_ids: int
) -> None:
    """Under some ids overlaps are refused, under others not, as `Registry` has it."""
    shared, linear = SharedRegistrations(["UCX"]), Linear()
    held: list[tuple[Registration, Registered]] = []
    turns = itertools.cycle(range(num_ids))
    for step in steps:
        if isinstance(step, tuple):
            device_id = next(turns)
            kind = MemoryKind.VRAM if device_id else MemoryKind.DRAM
            region = Region(kind, *step, device_id)
            found = take(shared, region, strict=device_id > 0)
            expected = take(linear, region, strict=device_id > 0)
            assert (found is None) is (expected is None)
            if found is not None:
                assert isinstance(expected, Registered)
                assert found.region == expected.region
                held.append((found, expected))
        elif held:
            mine, other = held.pop(step % len(held))
            assert isinstance(other, Registered)
            assert shared.leave(mine) is linear.leave(other)
        assert len(shared) == len(linear.live)


@bounded
@given(steps, extents)
def test_extents_agree_with_a_list_and_their_layers_are_right(
    steps: list[tuple[int, int] | int], asked: tuple[int, int]
) -> None:
    tried, plain = Extents(), list[tuple[int, int]]()
    start, end = asked[0], sum(asked)
    for step in steps:
        if isinstance(step, tuple):
            low, high = step[0], sum(step)
            around = [one for one in plain if one[0] <= low and high <= one[1]]
            assert tried.oldest_around(low, high) == next(iter(around), None)
            if not around:
                tried.add(low, high)
                plain.append((low, high))
        elif plain:
            tried.remove(*plain.pop(step % len(plain)))
        around = [one for one in plain if one[0] <= start and end <= one[1]]
        assert tried.oldest_around(start, end) == next(iter(around), None)
        touching = tried.touching(start, end)
        assert touching in [one for one in plain if one[0] < end and start < one[1]] or (
            touching is None and not any(one[0] < end and start < one[1] for one in plain)
        )
        layers = tried._layers
        assert sorted(itertools.chain(*layers)) == sorted(plain)
        assert len(tried) == len(plain)
        for layer in layers:
            assert layer
            for one, other in itertools.pairwise(layer):
                assert one[0] < other[0]
                assert one[1] < other[1]
        for above, below in itertools.pairwise(layers):
            for one in below:
                assert any(outer[0] <= one[0] and one[1] <= outer[1] for outer in above)


def test_what_is_nested_deep_rises_in_turn() -> None:
    tried = Extents()
    for depth in range(50):
        tried.add(100 - depth, 100 + 2 + depth)
    assert tried.oldest_around(100, 101) == (100, 102)
    for depth in reversed(range(50)):
        assert tried.touching(0, 1000) == (100 - depth, 102 + depth)
        assert tried.oldest_around(100 - depth, 101) == (100 - depth, 102 + depth)
        tried.remove(100 - depth, 102 + depth)
    assert tried.oldest_around(100, 101) is tried.touching(0, 1000) is None


def test_what_is_not_in_the_set_is_not_removed() -> None:
    tried = Extents()
    tried.add(10, 20)
    with pytest.raises(KeyError):
        tried.remove(10, 19)
    assert tried.oldest_around(12, 13) == (10, 20)


def test_an_overlap_is_refused_by_name_and_counts_nobody() -> None:
    shared = SharedRegistrations(["UCX", "GDS"])
    first = Registered(Region(MemoryKind.VRAM, 4096, 100, 2))
    shared.add(first)
    with pytest.raises(RegistrationError, match=r"overlap.* 100 bytes at 0x1000 .*UCX, GDS"):
        shared.find(Region(MemoryKind.VRAM, 4090, 10, 2), strict=True)
    assert shared.find(Region(MemoryKind.VRAM, 4090, 10, 3), strict=True) is None
    assert shared.find(Region(MemoryKind.VRAM, 4196, 10, 2), strict=True) is None
    assert shared.leave(first)


@pytest.mark.parametrize("order", ["rising", "falling", "in one large one", "chain"])
def test_20_000_regions_cost_no_look_at_each_other(order: str) -> None:
    """To look at all for each takes 15 s and more, this 0.2 s. CPU time, as machines are busy."""
    count = 20_000
    shared = SharedRegistrations(["UCX"])
    starts = [4096 + 64 * at for at in range(count)]
    if order == "falling":
        starts.reverse()
    nbytes = 96 if order == "chain" else 64
    begin = time.thread_time()
    held = []
    for start in starts:
        region = Region(MemoryKind.DRAM, start, nbytes, 0)
        assert shared.find(region, strict=False) is None
        held.append(Registered(region))
        shared.add(held[-1])
    if order == "in one large one":
        around = Registered(Region(MemoryKind.DRAM, 1, 1 << 40, 0))
        shared.add(around)
        assert shared.find(Region(MemoryKind.DRAM, 2, 2, 0), strict=False) is around
        assert not shared.leave(around)
        assert shared.leave(around)
    for one in held:
        assert shared.find(one.region, strict=False) is one
        assert not shared.leave(one)
        assert shared.leave(one)
    assert len(shared) == 0
    assert time.thread_time() - begin < 5
