"""Conformance: registering memory, telling of it, and finding it again."""

from __future__ import annotations

import numpy as np

from torch_nixl._testing.harness import Harness
from torch_nixl._testing.sides import DRAM, Side, pair, raises, spans, until
from torch_nixl.engine.adapter import Direction, Region
from torch_nixl.errors import MetadataError, RegistrationError

READ, WRITE = Direction.READ, Direction.WRITE


def check_write_and_read_move_exactly_the_bytes(harness: Harness) -> None:
    a, b = pair(harness)
    a.buffer[:] = np.arange(len(a.buffer), dtype=np.uint8)
    a.run(a.transfer(WRITE, a.span(100, 70_000), b.span(5, 70_000), "b"), b)
    assert b.buffer[5:70_005].tobytes() == a.buffer[100:70_100].tobytes()
    assert not b.buffer[70_005:].any()
    b.buffer[:] = 9
    a.run(a.transfer(READ, a.span(1, 3), b.span(0, 3), "b"), b)
    assert a.buffer[:6].tolist() == [0, 9, 9, 9, 4, 5]


def check_many_spans_of_any_size_even_none(harness: Harness) -> None:
    a, b = pair(harness)
    a.buffer[:] = np.arange(len(a.buffer), dtype=np.uint8) | 1
    end = len(a.buffer)
    places = [(0, 1), (10, 0), (4096, 4096), (end, 0), (end - 7, 7)]
    mine = np.concatenate([a.span(offset, size) for offset, size in places])
    theirs = np.concatenate([b.span(offset, size) for offset, size in places])
    a.run(a.transfer(WRITE, mine, theirs, "b"), b, notification=b"x")
    until(lambda: b.inbox, a, b)
    expected = np.zeros_like(b.buffer)
    expected[0] = a.buffer[0]
    expected[4096:8192] = a.buffer[4096:8192]
    expected[-7:] = a.buffer[-7:]
    assert (b.buffer == expected).all()


def check_nothing_but_empty_spans_completes_and_notifies(harness: Harness) -> None:
    a, b = pair(harness)
    a.run(a.transfer(WRITE, a.span(0, 0), b.span(0, 0), "b"), b, notification=b"empty")
    until(lambda: b.inbox == [("a", b"empty")], a, b)


def check_unregistered_memory_is_refused_by_side(harness: Harness) -> None:
    a, b = pair(harness)
    stray = harness.buffer(64)
    elsewhere = spans((stray.ctypes.data, 64, a.device_id))
    raises(RegistrationError, a.transfer, WRITE, elsewhere, b.span(0, 64), "b")
    raises(MetadataError, a.transfer, WRITE, a.span(0, 64), elsewhere, "b")
    raises(RegistrationError, a.adapter.prepare_list, DRAM, elsewhere, None)
    raises(MetadataError, a.adapter.prepare_list, DRAM, elsewhere, "b")
    raises(MetadataError, a.transfer, WRITE, a.span(0, 64), b.span(0, 64), "stranger")
    raises(MetadataError, a.adapter.prepare_list, DRAM, b.span(0, 64), "stranger")


def check_another_device_id_is_other_memory(harness: Harness) -> None:
    a, b = pair(harness)
    wrong = b.span(0, 8)
    wrong[:, 2] += 1
    raises(MetadataError, a.transfer, WRITE, a.span(0, 8), wrong, "b")


def check_inner_region_hides_the_outer_one(harness: Harness) -> None:
    a, b = pair(harness)
    inner = a.adapter.register(Region(DRAM, a.region.address + 8192, 4096, a.device_id))
    raises(RegistrationError, a.transfer, WRITE, a.span(65_536, 64), b.span(0, 64), "b")
    a.adapter.release(a.transfer(WRITE, a.span(0, 64), b.span(0, 64), "b"))
    a.adapter.release(a.transfer(WRITE, a.span(8192, 64), b.span(0, 64), "b"))
    a.adapter.deregister(inner)
    a.adapter.release(a.transfer(WRITE, a.span(65_536, 64), b.span(0, 64), "b"))


def check_told_inner_region_hides_the_outer_one_for_good(harness: Harness) -> None:
    a, b = pair(harness)
    inner = b.adapter.register(Region(DRAM, b.region.address + 8192, 4096, b.device_id))
    a.adapter.add_remote(b.adapter.metadata([inner], connection=False))
    b.adapter.deregister(inner)
    raises(MetadataError, a.transfer, WRITE, a.span(0, 64), b.span(65_536, 64), "b")


def check_partly_overlapping_regions_both_serve(harness: Harness) -> None:
    a, b = pair(harness)
    buffer = harness.buffer(8192)
    address = buffer.ctypes.data
    a.adapter.register(Region(DRAM, address, 6000, 3))
    a.adapter.register(Region(DRAM, address + 2000, 6000, 3))
    for offset, size in ((0, 6000), (1990, 20), (3000, 100), (7900, 100)):
        place = spans((address + offset, size, 3))
        a.adapter.release(a.transfer(WRITE, place, b.span(0, size), "b"))
    raises(RegistrationError, a.transfer, WRITE, spans((address, 8000, 3)), b.span(0, 8000), "b")


def check_span_across_two_regions_is_in_neither(harness: Harness) -> None:
    a, b = pair(harness)
    buffer = harness.buffer(8192)
    address = buffer.ctypes.data
    for offset in (0, 4096):
        a.adapter.register(Region(DRAM, address + offset, 4096, 3))
    across = spans((address + 4000, 200, 3))
    raises(RegistrationError, a.transfer, WRITE, across, b.span(0, 200), "b")


def check_device_ids_of_their_own_keep_regions_apart(harness: Harness) -> None:
    a, b = pair(harness)
    if DRAM not in a.adapter.capabilities.free_device_ids:
        return
    inner = b.adapter.register(Region(DRAM, b.region.address + 8192, 4096, 1001))
    overlapping = b.adapter.register(Region(DRAM, b.region.address + 100, 200_000, 1002))
    a.adapter.add_remote(b.adapter.metadata([inner, overlapping], connection=False))
    a.buffer[:] = 1
    a.run(a.transfer(WRITE, a.span(0, 64), b.span(65_536, 64), "b"), b)
    for device_id, offset in ((1001, 8192), (1002, 150_000)):
        target = spans((b.region.address + offset, 64, device_id))
        a.run(a.transfer(WRITE, a.span(0, 64), target, "b"), b)
        assert b.buffer[offset : offset + 64].all()


def check_region_registered_twice_needs_two_deregistrations(harness: Harness) -> None:
    a, b = pair(harness)
    a.adapter.deregister(a.adapter.register(a.region))
    a.adapter.release(a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b"))
    a.adapter.deregister(a.registration)
    raises(RegistrationError, a.transfer, WRITE, a.span(0, 8), b.span(0, 8), "b")


def check_refused_registration_registers_nothing(harness: Harness) -> None:
    a = Side(harness, "a")
    raises(RegistrationError, a.adapter.register, Region(DRAM, 0, 4096, 1))


def check_deregistering_revokes_nothing(harness: Harness) -> None:
    a, b = pair(harness)
    b.adapter.deregister(b.registration)
    again = b.adapter.register(Region(DRAM, b.region.address, 4096, b.device_id))
    a.adapter.add_remote(b.adapter.metadata([again], connection=True))
    a.buffer[:] = 3
    a.run(a.transfer(WRITE, a.span(0, 64), b.span(500_000, 64), "b"), b)
    assert b.buffer[500_000:500_064].all()


def check_telling_the_same_again_changes_nothing(harness: Harness) -> None:
    a, b = pair(harness)
    for connection in (True, False):
        told = b.adapter.metadata([b.registration], connection=connection)
        assert a.adapter.add_remote(told) == "b"
    a.run(a.transfer(WRITE, a.span(0, 64), b.span(0, 64), "b"), b)


def check_regions_of_a_stranger_need_its_connection_first(harness: Harness) -> None:
    a, b = Side(harness, "a"), Side(harness, "b")
    regions = b.adapter.metadata([b.registration], connection=False)
    raises(MetadataError, a.adapter.add_remote, regions)
    raises(MetadataError, a.adapter.notify, "b", b"x")
    assert a.adapter.add_remote(b.adapter.metadata([], connection=True)) == "b"
    raises(MetadataError, a.transfer, WRITE, a.span(0, 8), b.span(0, 8), "b")
    assert a.adapter.add_remote(regions) == "b"
    a.buffer[:] = 4
    a.run(a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b"), b)
    assert b.buffer[:9].tolist() == [4] * 8 + [0]


def check_unusable_metadata_are_refused(harness: Harness) -> None:
    a = Side(harness, "a")
    for blob in (b"", b"abc", bytes(500)):
        raises(MetadataError, a.adapter.add_remote, blob)
    own = a.adapter.metadata([a.registration], connection=True)
    raises(MetadataError, a.adapter.add_remote, own)


def check_inspection_says_what_metadata_hold(harness: Harness) -> None:
    a, b = Side(harness, "a"), Side(harness, "b")
    more = b.adapter.register(Region(DRAM, b.region.address, 4096, 3))
    info = a.adapter.inspect(b.adapter.metadata([b.registration, more], connection=True))
    assert info.agent == "b"
    assert info.connections
    rows = info.regions(DRAM).tolist()
    assert rows == [[b.region.address, 4096, 3], [b.region.address, b.region.nbytes, 7]]
    info = a.adapter.inspect(b.adapter.metadata([more], connection=False))
    assert (info.agent, info.connections) == ("b", ())
    raises(MetadataError, a.adapter.notify, "b", b"inspecting is not adding")


def check_damaged_metadata_are_found_by_inspection(harness: Harness) -> None:
    a = Side(harness, "a")
    told = a.adapter.metadata([a.registration], connection=True)
    for blob in (b"", told[:-1], told + b"x", told[1:], b"x" * len(told)):
        raises(MetadataError, a.adapter.inspect, blob)


def check_metadata_say_something_of_one_kind(harness: Harness) -> None:
    a = Side(harness, "a")
    raises(ValueError, lambda: a.adapter.metadata([], connection=False))
    assert a.adapter.metadata([], connection=True)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
