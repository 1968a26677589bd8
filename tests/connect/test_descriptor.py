"""Descriptor and Device: what is taken, what is refused, and what its bytes are."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from connect.pairs import DEADLINE, Pair, pattern
from torch_nixl import connect
from torch_nixl.connect import Descriptor, Device, DeviceKind
from torch_nixl.connect.descriptor import NOWHERE


@pytest.fixture
def connection() -> Iterator[connect.Connection]:
    """A Connection that nothing else is registered with."""
    with connect.Connector() as connector:
        yield connector.connection()


def live(connection: connect.Connection) -> int:
    return connection.connector.statistics().live_registrations


class Interface:
    """An object that shows an array by ``__array_interface__`` only."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__


class Exporter:
    """An object that shows a tensor by DLPack only."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> object:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def test_every_form_names_the_same_bytes() -> None:
    array = np.arange(16, dtype=np.uint8)
    address = array.ctypes.data
    forms = [
        array,
        (array, "cpu"),
        (array, Device("cpu")),
        memoryview(array.data),
        torch.from_numpy(array),
        Interface(array),
        Exporter(torch.from_numpy(array)),
        (address, 16),
        (address, 16, "cpu"),
        (address, 16, Device("host"), array),
    ]
    for form in forms:
        found = Descriptor(form)
        assert (found.ptr, found.size, str(found.device)) == (address, 16, "cpu")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([torch.zeros(2), None], TypeError),
        ("text", TypeError),
        ((1, 2, 3, 4, 5), TypeError),
        ((4096, "8"), TypeError),
        ((4096, -1), ValueError),
        ((True, 8), TypeError),
        ((0, 8), ValueError),
        ((2**64 - 4, 8), ValueError),
        ((4096, 8, "cpu:1"), ValueError),
        ((np.zeros(3), "cuda"), ValueError),
        (np.array([object()]), TypeError),
        (torch.zeros(2, device="meta"), ValueError),
        (torch.zeros(2, dtype=torch.complex64).conj(), ValueError),
        (torch.zeros(2).to_sparse(), ValueError),
    ],
)
def test_what_has_no_plain_bytes_is_refused(bad: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        Descriptor(bad)


@pytest.mark.parametrize(
    "text", ["cudabogus", "cuda:x", "cuda:1:2", "cuda:-1", "hostile", "", "cuda:"]
)
def test_device_strings_are_strict(text: str) -> None:
    with pytest.raises(ValueError, match="device"):
        Device(text)


def test_devices_compare_by_value() -> None:
    assert Device("cuda") == Device((DeviceKind.CUDA, 0)) != Device("cuda:1")
    assert len({Device("cpu"), Device("host"), Device("xpu:1")}) == 2
    assert str(Device((DeviceKind.UNSPECIFIED, 0))) == "<invalid>"
    assert f"{DeviceKind.CUDA:>6}" == "  cuda"


def test_strided_memory_gives_no_address_to_strangers() -> None:
    column = torch.arange(12).view(3, 4)[:, 1]
    found = Descriptor(column)
    assert found.size == 24
    assert not found.is_contiguous
    assert found.metadata.ptr == NOWHERE
    assert found.metadata.size == 24


def test_empty_memory_has_metadata() -> None:
    for data in (torch.empty(0), b"", bytearray(), (np.empty(0), "cpu"), (4096, 0)):
        found = Descriptor(data)
        assert found.size == 0
        assert found.metadata.ptr > 0


@pytest.mark.parametrize(
    "data",
    [
        b"constant",
        memoryview(b"constant"),
        np.broadcast_to(np.uint8(1), 8),
        torch.zeros(1).expand(8),
    ],
)
def test_what_can_not_be_written_is_no_target(pair: Pair, data: Any) -> None:
    size = Descriptor(data).size
    with pytest.raises(ValueError, match="written to"):
        pair.writable(data)
    exposed = pair.readable(bytearray(size))
    with exposed, pytest.raises(ValueError, match="written to"):
        pair.read(exposed.metadata(), data)


def test_read_only_sources_are_read(pair: Pair) -> None:
    for source in (
        b"some bytes",
        memoryview(b"some bytes"),
        np.frombuffer(b"some bytes", np.uint8),
    ):
        target = bytearray(10)
        pair.move(source, target)
        assert target == b"some bytes"


def test_a_mapped_file_is_a_source_and_a_target(pair: Pair) -> None:
    with mmap.mmap(-1, 8192) as mapped:
        content = pattern(8192)
        pair.move(content, mapped)
        assert mapped[:] == content.tobytes()
        target = bytearray(8192)
        pair.move(mapped, target)
        assert target == content.tobytes()
        gc.collect()  # no operation may still hold the buffer when it is closed


def test_registration_is_held_until_it_is_let_go(connection: connect.Connection) -> None:
    found = Descriptor(bytearray(4096))
    found.register_with_connector(connection)
    found.register_with_connector(connection)
    assert (found.is_registered, live(connection)) == (True, 1)
    found.deregister_with_connector(connection)
    assert (found.is_registered, live(connection)) == (False, 0)
    with pytest.raises(RuntimeError, match="not registered"):
        found.deregister_with_connector(connection)


def test_one_registration_serves_descriptors_and_operations(pair: Pair) -> None:
    connection = pair.owner.connection()
    tensor = torch.arange(100.0)
    one, other = Descriptor(tensor), Descriptor(tensor[10:20])
    one.register_with_connector(connection)
    other.register_with_connector(connection)
    one.deregister_with_connector(connection)
    target = torch.zeros(10)
    pair.move(other, target)
    assert torch.equal(target, tensor[10:20])
    assert other.is_registered
    other.deregister_with_connector(connection)


def test_a_dropped_descriptor_lets_go_of_its_registration(connection: connect.Connection) -> None:
    found = Descriptor(bytearray(4096))
    found.register_with_connector(connection)
    assert live(connection) == 1
    del found
    gc.collect()
    progress = connection.engine.progress
    assert progress.wait_until(lambda: live(connection) == 0, time.monotonic() + DEADLINE)


def test_an_operation_registers_for_as_long_as_it_runs(pair: Pair) -> None:
    found = Descriptor(bytearray(64))
    with pair.readable(found) as exposed:
        assert found.is_registered
        pair.read(exposed.metadata(), bytearray(64)).wait(DEADLINE)
        exposed.wait(DEADLINE)
        assert not found.is_registered


def test_a_pool_descriptor_is_made_smaller_for_each_use(pair: Pair) -> None:
    """What dynamo's persistent receiver does: it sets `_data_size` and slices `_data_ref`."""
    pool = Descriptor(torch.zeros(100, dtype=torch.uint8))
    pool.register_with_connector(pair.other.connection())
    for size in (100, 40, 7, 0, 100):
        content = torch.from_numpy(pattern(size, size + 1))
        pool._data_size = size
        assert pool.size == pool.metadata.size == size
        pair.move(content, pool)
        assert isinstance(pool._data_ref, torch.Tensor)
        assert torch.equal(pool._data_ref[:size], content)
    pool._data_size = 101
    with pytest.raises(ValueError, match="_data_size"):
        pool.memory()


def test_a_serialized_descriptor_comes_back_as_it_was() -> None:
    told = connect.SerializedDescriptor(device="cuda:3", ptr=4096, size=64)
    found = told.to_descriptor()
    assert (found.ptr, found.size, found.device) == (4096, 64, Device("cuda:3"))
    assert found.metadata is told
    assert not found.is_registered
