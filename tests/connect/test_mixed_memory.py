"""Lists of host and device memory: connect's JSON, key and rules, on a fake that serves any kind.

There is no device here. The fake takes a device's address for one of this process, so all but the
last step, NIXL's own copy, is what runs on a machine that has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from connect.pairs import DEADLINE, bounded, over_json, pattern
from torch_nixl import connect
from torch_nixl.connect.key import Key, digest
from torch_nixl.connect.metadata import decode_blob
from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.errors import MetadataError, PeerLostError, TransferCancelled, TransferError
from torch_nixl.testing import LoopbackConnector, LoopbackFabric

Bytes = npt.NDArray[np.uint8]
SIZES = (100, 4096, 7)


class Two:
    """Two Connectors on one fabric."""

    def __init__(self, fabric: LoopbackFabric, secret: str | None) -> None:
        self.fabric = fabric
        self.owner = LoopbackConnector(fabric, "owner", timeout=DEADLINE, secret=secret)
        self.other = LoopbackConnector(fabric, "other", timeout=DEADLINE, secret=secret)

    def expose(self, memories: list[Any], *, reads: bool = True) -> Any:
        role = self.owner.create_readable if reads else self.owner.create_writable
        return bounded(role(memories))

    def begin(self, told: connect.RdmaMetadata, memories: list[Any], *, reads: bool = True) -> Any:
        if reads:
            return bounded(self.other.begin_read(over_json(told), memories))
        return bounded(self.other.begin_write(memories, over_json(told)))


@pytest.fixture(params=["plain", "secret"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    made = Two(LoopbackFabric(), "s" if request.param == "secret" else None)
    yield made
    made.owner.close()
    made.other.close()


def host(array: Bytes) -> connect.Descriptor:
    return connect.Descriptor(array)


def device(array: Bytes, name: str = "cuda:1") -> connect.Descriptor:
    return connect.Descriptor((array.ctypes.data, array.nbytes, name, array))


def mix(arrays: list[Bytes]) -> list[connect.Descriptor]:
    first, second, third = arrays
    return [host(first), device(second), host(third)]


def filled() -> list[Bytes]:
    return [pattern(size, seed) for seed, size in enumerate(SIZES)]


def blank() -> list[Bytes]:
    return [np.zeros(size, np.uint8) for size in SIZES]


def equal(ones: list[Bytes], others: list[Bytes]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
def test_a_list_of_host_and_device_memory_is_exchanged(two: Two, reads: bool) -> None:
    sources, targets = filled(), blank()
    exposed = two.expose(mix(sources if reads else targets), reads=reads)
    told = exposed.metadata()
    assert [one.device for one in told.descriptors] == ["cpu", "cuda:1", "cpu"]
    assert len(told.model_dump_json()) < 2048
    moving = two.begin(told, mix(targets if reads else sources), reads=reads)
    bounded(moving.wait_for_completion())
    bounded(exposed.wait_for_completion())
    assert equal(sources, targets)


@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
def test_the_kinds_of_the_two_sides_need_not_match(two: Two, reads: bool) -> None:
    """KV pages go from a device into host memory and back: kind by kind, entry by entry."""
    sources, targets = filled(), blank()
    exposed = two.expose(mix(sources if reads else targets), reads=reads)
    first, second, third = targets if reads else sources
    theirs = [device(first, "xpu"), host(second), device(third, "cuda:0")]
    two.begin(exposed.metadata(), theirs, reads=reads).wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert equal(sources, targets)


def test_a_list_of_all_forms_of_memory_is_exchanged(two: Two) -> None:
    """Pieces, empty entries, two devices, one allocation twice."""
    grid = torch.arange(60, dtype=torch.uint8).reshape(6, 10)
    large = pattern(1 << 20)
    sources = [
        connect.Descriptor(grid[:, 2:5]),
        device(large[: 1 << 19], "cuda:0"),
        connect.Descriptor(bytearray()),
        device(large[1 << 19 :], "xpu:3"),
        device(large[:0], "cuda:2"),
    ]
    targets = [np.zeros(one.size, np.uint8) for one in sources]
    exposed = two.expose(sources)
    two.begin(exposed.metadata(), [host(one) for one in targets]).wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert targets[0].tolist() == grid[:, 2:5].flatten().tolist()
    assert np.array_equal(np.concatenate((targets[1], targets[3])), large)


@pytest.mark.parametrize("sizes", [(4096, 100, 7), (100, 4096, 8), (100, 4096)])
def test_sizes_are_compared_entry_by_entry(two: Two, sizes: tuple[int, ...]) -> None:
    sources = filled()
    exposed = two.expose(mix(sources))
    targets = [np.zeros(size, np.uint8) for size in sizes]
    with pytest.raises(ValueError, match="don't match"):
        two.begin(exposed.metadata(), [device(one) for one in targets])
    assert not any(one.any() for one in targets)
    good = blank()
    two.begin(exposed.metadata(), mix(good)).wait(DEADLINE)
    assert equal(sources, good)


Change = Callable[[list[connect.SerializedDescriptor]], list[connect.SerializedDescriptor]]


def _as(index: int, name: str) -> Change:
    def change(given: list[connect.SerializedDescriptor]) -> list[connect.SerializedDescriptor]:
        given[index] = given[index].model_copy(update={"device": name})
        return given

    return change


def _swap(given: list[connect.SerializedDescriptor]) -> list[connect.SerializedDescriptor]:
    one, other = given[0], given[1]
    return [
        one.model_copy(update={"device": other.device}),
        other.model_copy(update={"device": one.device}),
        given[2],
    ]


FORGERIES: dict[str, Change] = {
    "device memory called the host's": _as(1, "cpu"),
    "host memory called a device's": _as(0, "cuda:1"),
    "another device": _as(1, "cuda:2"),
    "two kinds exchanged": _swap,
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize("sealed_anew", [False, True], ids=["altered", "sealed anew"])
def test_an_entry_of_another_kind_than_was_exposed_is_refused(
    two: Two, forge: Change, sealed_anew: bool
) -> None:
    """Also when the forger knows how the key vouches for the rest: the regions say otherwise."""
    engine = two.owner.connection().engine
    exposed = two.expose(mix(filled()))
    told = exposed.metadata()
    descriptors = forge(list(told.descriptors))
    key = told.notification_key
    if sealed_anew:
        opened = Key.unpack(key, key=engine.metadata_key)
        forged = digest(1, decode_blob(told.nixl_metadata), descriptors)
        key = replace(opened, digest=forged).pack(key=engine.metadata_key)
    altered = told.model_copy(update={"descriptors": descriptors, "notification_key": key})
    targets = blank()
    with pytest.raises(MetadataError):
        two.begin(altered, mix(targets))
    assert not any(one.any() for one in targets)
    two.begin(told, mix(targets)).wait(DEADLINE)
    exposed.wait(DEADLINE)


def test_an_array_is_not_taken_for_memory_of_a_device() -> None:
    with pytest.raises(ValueError, match="lies on cpu"):
        connect.Descriptor((np.zeros(3), "cuda:0"))


def test_one_blob_of_several_kinds_is_told_to_nobody() -> None:
    """NIXL's blob holds one kind: who knows only `nixl_metadata` gets no memory, not a part."""
    two = Two(LoopbackFabric(), None)
    mixed, single = two.expose(mix(filled())), two.expose([device(pattern(64))])
    connection = two.other.connection()
    assert not connect.Remote(connection, mixed.metadata().nixl_metadata).info.kinds
    assert connect.Remote(connection, single.metadata().nixl_metadata).info.kinds
    two.owner.close()
    two.other.close()


@pytest.mark.parametrize("num_moved", [0, 2], ids=["at once", "between two kinds"])
def test_a_failure_among_kinds_ends_both_sides(num_moved: int) -> None:
    two = Two(LoopbackFabric(), None)
    exposed = two.expose(mix(filled()))
    told = exposed.metadata()
    warm = two.expose([device(pattern(8))])
    two.begin(warm.metadata(), [host(np.zeros(8, np.uint8))]).wait(DEADLINE)
    adapter: Any = two.other.connection().engine.adapter
    posts = 0
    post = adapter.post

    def post_some(transfer: object, notification: bytes = b"") -> bool:
        nonlocal posts
        posts += 1
        if posts > num_moved:
            two.fabric.fail_next(adapter, "post", TransferError("scripted: device went away"))
        return bool(post(transfer, notification))

    adapter.post = post_some
    moving = two.begin(told, mix(blank()))
    with pytest.raises(TransferError, match="device went away"):
        moving.wait(DEADLINE)
    with pytest.raises(TransferError, match="device went away"):
        exposed.wait(DEADLINE)
    adapter.post = post
    assert moving.wait_released(DEADLINE) and exposed.wait_released(DEADLINE)
    sources, targets = filled(), blank()
    exposed = two.expose(mix(sources))
    two.begin(exposed.metadata(), mix(targets)).wait(DEADLINE)
    assert equal(sources, targets)
    two.owner.close()
    two.other.close()


def test_withdrawn_and_used_metadata_of_mixed_lists_is_refused(two: Two) -> None:
    exposed = two.expose(mix(filled()))
    told = exposed.metadata()
    exposed.cancel()
    with pytest.raises(TransferCancelled):
        two.begin(told, mix(blank())).wait(DEADLINE)
    exposed = two.expose(mix(filled()))
    told = exposed.metadata()
    two.begin(told, mix(blank())).wait(DEADLINE)
    exposed.wait(DEADLINE)
    with pytest.raises(TransferError):
        two.begin(told, mix(blank())).wait(DEADLINE)


def test_the_owner_of_a_mixed_list_dies() -> None:
    two = Two(LoopbackFabric(), None)
    exposed = two.expose(mix(filled()))
    told = exposed.metadata()
    two.fabric.kill(two.owner.connection().name)
    targets = blank()
    with pytest.raises(PeerLostError):
        two.begin(told, mix(targets)).wait(DEADLINE)
    assert not any(one.any() for one in targets)
    two.other.close()
    two.owner.abort()


def test_dynamos_kind_of_peer_finds_device_memory_under_the_devices_number() -> None:
    two = Two(LoopbackFabric(), None)
    source = pattern(64)
    exposed = two.expose([device(source)])
    remote = connect.Remote(two.other.connection(), exposed.metadata().nixl_metadata)
    assert remote.info.regions(MemoryKind.VRAM).tolist() == [[source.ctypes.data, 64, 1]]
    two.owner.close()
    two.other.close()
