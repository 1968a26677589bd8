"""Each mistake that the reference lists gets the exception that dynamo 1.6.1 answers with."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from connect.behaviour import RAISES, Raises

pytestmark = pytest.mark.timeout(120)


@dataclass(slots=True)
class Stage:
    """Two connectors with one readable and one writable operation on the first."""

    library: Any
    owner: Any
    other: Any
    readable: Any
    writable: Any
    connection: Any
    other_connection: Any

    def descriptor(self, num_bytes: int = 64) -> Any:
        return self.library.Descriptor(bytearray(num_bytes))

    def begin_read(self, metadata: Any, descriptors: Any) -> Any:
        return asyncio.run(self.other.begin_read(metadata, descriptors))

    def begin_write(self, descriptors: Any, metadata: Any) -> Any:
        return asyncio.run(self.other.begin_write(descriptors, metadata))

    def create(self, role: str, descriptors: Any) -> Any:
        return asyncio.run(getattr(self.owner, f"create_{role}")(descriptors))


@pytest.fixture(scope="module")
def stage(connect: ModuleType) -> Iterator[Stage]:
    owner, other = connect.Connector(), connect.Connector()
    readable = asyncio.run(owner.create_readable(connect.Descriptor(bytearray(64))))
    writable = asyncio.run(owner.create_writable(connect.Descriptor(bytearray(64))))
    theirs = asyncio.run(other.create_readable(connect.Descriptor(bytearray(64))))
    yield Stage(connect, owner, other, readable, writable, readable.connection, theirs.connection)
    for operation in (readable, writable, theirs):
        operation.__exit__(None, None, None)
    for connector in (owner, other):
        close = getattr(connector, "close", None)
        if close is not None:
            close()


def results_too_early(s: Stage) -> None:
    # While its driver is held the owner grants nothing. dynamo begins at the first look at status.
    engine = getattr(s.connection, "engine", None)
    held = contextlib.nullcontext() if engine is None else engine.progress._driving
    with held, s.begin_read(s.readable.metadata(), s.descriptor()) as reading:
        reading.results()


def register(s: Stage, *connections: Any) -> None:
    descriptor = s.descriptor()
    for connection in connections:
        descriptor.register_with_connector(connection)


def deregister_elsewhere(s: Stage) -> None:
    descriptor = s.descriptor()
    descriptor.register_with_connector(s.connection)
    descriptor.deregister_with_connector(s.other_connection)


def set_attribute(target: Any, name: str, value: Any) -> None:
    setattr(target, name, value)


def with_kind(s: Stage, name: str, *args: Any) -> Any:
    return getattr(s.library, name)(s.other_connection, *args)


def without_nixl_metadata(s: Stage) -> Any:
    return s.writable.metadata().model_copy(update={"nixl_metadata": ""})


CASES: dict[str, Callable[[Stage], Any]] = {
    "connection_connector_type": lambda s: s.library.Connection("name", 1),
    "connection_number_type": lambda s: s.library.Connection(s.owner, "1"),
    "connection_number_zero": lambda s: s.library.Connection(s.owner, 0),
    "connection_number_negative": lambda s: s.library.Connection(s.owner, -3),
    "connector_worker_id_type": lambda s: s.library.Connector(7),
    "connector_worker_id_uuid": lambda s: s.library.Connector(uuid.uuid4()),
    "connector_worker_id_empty": lambda s: s.library.Connector(""),
    "begin_read_metadata_type": lambda s: s.begin_read({}, s.descriptor()),
    "begin_read_descriptors_type": lambda s: s.begin_read(s.readable.metadata(), b"bytes"),
    "begin_read_list_of_others": lambda s: s.begin_read(s.readable.metadata(), [1, 2]),
    "begin_read_of_writable": lambda s: s.begin_read(s.writable.metadata(), s.descriptor()),
    "begin_read_empty_list": lambda s: s.begin_read(s.readable.metadata(), []),
    "begin_read_size_differs": lambda s: s.begin_read(s.readable.metadata(), s.descriptor(65)),
    "begin_read_count_differs": lambda s: s.begin_read(
        s.readable.metadata(), [s.descriptor(32), s.descriptor(32)]
    ),
    "begin_write_metadata_type": lambda s: s.begin_write(s.descriptor(), "{}"),
    "begin_write_descriptors_type": lambda s: s.begin_write(None, s.writable.metadata()),
    "begin_write_of_readable": lambda s: s.begin_write(s.descriptor(), s.readable.metadata()),
    "create_readable_type": lambda s: s.create("readable", b"bytes"),
    "create_readable_empty_list": lambda s: s.create("readable", []),
    "create_writable_type": lambda s: s.create("writable", None),
    "create_writable_empty_list": lambda s: s.create("writable", []),
    "descriptor_none": lambda s: s.library.Descriptor(None),
    "descriptor_other_type": lambda s: s.library.Descriptor(3.5),
    "descriptor_tuple_of_one": lambda s: s.library.Descriptor((1,)),
    "descriptor_tuple_array_device_type": lambda s: s.library.Descriptor((np.zeros(3), 3)),
    "descriptor_tuple_pointer_device_type": lambda s: s.library.Descriptor((4096, 2, 3)),
    "descriptor_tuple_bad_device": lambda s: s.library.Descriptor((np.zeros(3), "disk")),
    "from_serialized_type": lambda s: s.library.Descriptor.from_serialized({"ptr": 1}),
    "register_type": lambda s: register(s, s.owner),
    "register_null_pointer": lambda s: s.library.Descriptor((0, 8, "cpu")).register_with_connector(
        s.connection
    ),
    "register_elsewhere": lambda s: register(s, s.connection, s.other_connection),
    "deregister_type": lambda s: s.descriptor().deregister_with_connector("connection"),
    "deregister_elsewhere": deregister_elsewhere,
    "device_none": lambda s: s.library.Device(None),
    "device_type": lambda s: s.library.Device(3),
    "device_unknown": lambda s: s.library.Device("disk"),
    "device_number": lambda s: s.library.Device("cuda:x"),
    "abstract_operation": lambda s: s.library.AbstractOperation(
        s.connection, s.library.OperationKind.READ, s.descriptor(), None, None
    ),
    "active_operation": lambda s: s.library.ActiveOperation(
        None, s.library.OperationKind.READ, s.descriptor(), s.descriptor(), "key"
    ),
    "passive_operation": lambda s: s.library.PassiveOperation(
        s.connection, s.library.OperationKind.READ, s.descriptor()
    ),
    "writable_connection_type": lambda s: s.library.WritableOperation(s.owner, s.descriptor()),
    "writable_descriptors_type": lambda s: s.library.WritableOperation(s.connection, b"bytes"),
    "readable_connection_type": lambda s: s.library.ReadableOperation(s.owner, s.descriptor()),
    "readable_descriptors_type": lambda s: s.library.ReadableOperation(s.connection, b"bytes"),
    "write_connection_type": lambda s: s.library.WriteOperation(
        s.other, s.descriptor(), s.writable.metadata()
    ),
    "write_metadata_type": lambda s: with_kind(s, "WriteOperation", s.descriptor(), "{}"),
    "write_of_readable": lambda s: with_kind(
        s, "WriteOperation", s.descriptor(), s.readable.metadata()
    ),
    "write_no_nixl_metadata": lambda s: with_kind(
        s, "WriteOperation", s.descriptor(), without_nixl_metadata(s)
    ),
    "write_descriptors_type": lambda s: with_kind(
        s, "WriteOperation", b"bytes", s.writable.metadata()
    ),
    "read_connection_type": lambda s: s.library.ReadOperation(
        s.other, s.readable.metadata(), s.descriptor()
    ),
    "read_metadata_type": lambda s: with_kind(s, "ReadOperation", "{}", s.descriptor()),
    "read_of_writable": lambda s: with_kind(
        s, "ReadOperation", s.writable.metadata(), s.descriptor()
    ),
    "read_descriptors_type": lambda s: with_kind(
        s, "ReadOperation", s.readable.metadata(), b"bytes"
    ),
    "results_too_early": results_too_early,
    "remote_connection_type": lambda s: s.library.Remote(s.owner, b"blob"),
    "remote_metadata_type": lambda s: s.library.Remote(s.connection, 5),
    "remote_metadata_empty": lambda s: s.library.Remote(s.connection, ""),
    "remote_metadata_not_hex": lambda s: s.library.Remote(s.connection, "zz"),
    "to_descriptors_empty": lambda s: s.library.RdmaMetadata().to_descriptors(),
    "rdma_extra_field": lambda s: s.library.RdmaMetadata(operation_kind=1, secret="x"),
    "rdma_not_json": lambda s: s.library.RdmaMetadata.model_validate_json('{"operation'),
    "rdma_frozen": lambda s: set_attribute(s.readable.metadata(), "operation_kind", 2),
    "rdma_operation_kind": lambda s: s.library.RdmaMetadata(operation_kind=9),
    "validate_operation_kind": lambda s: s.library.RdmaMetadata.validate_operation_kind(0),
    "serialized_extra_field": lambda s: s.library.SerializedDescriptor(ptr=1, offset=0),
    "serialized_device": lambda s: s.library.SerializedDescriptor(device="disk", ptr=1),
    "serialized_null_ptr": lambda s: s.library.SerializedDescriptor(ptr=0, size=1),
    "serialized_negative_size": lambda s: s.library.SerializedDescriptor(ptr=1, size=-1),
    "validate_device": lambda s: s.library.SerializedDescriptor.validate_device("disk"),
    "validate_ptr": lambda s: s.library.SerializedDescriptor.validate_ptr(0),
    "validate_size": lambda s: s.library.SerializedDescriptor.validate_size(-1),
}


def test_every_row_has_a_case_and_every_case_a_row() -> None:
    assert sorted(CASES) == sorted(row.case for row in RAISES)


@pytest.mark.parametrize("row", RAISES, ids=lambda row: row.case)
def test_exception(stage: Stage, row: Raises) -> None:
    with pytest.raises(row.exception):
        CASES[row.case](stage)
