"""The rest of the reference: text forms, and which exception answers which mistake.

Rows are data only; `test_exceptions.py` holds the call that provokes each of them, found by the
row's ``case``. ``source`` is "seed" for what the documentation promises and "1.6.1" for what only
the running library shows. Where the texts differ, the row has a ``note``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Raises:
    """``subject`` raises ``exception`` (or a subclass) in the situation named by ``case``."""

    case: str
    subject: str
    exception: type[Exception]
    source: str = "1.6.1"
    note: str = ""


@dataclass(frozen=True, slots=True)
class DeviceForm:
    """What ``Device(text)`` gives, and how it prints."""

    text: str
    kind: str
    id: int
    shown: str


DEVICE_FORMS: Final[tuple[DeviceForm, ...]] = (
    DeviceForm("cpu", "HOST", 0, "cpu"),
    DeviceForm("host", "HOST", 0, "cpu"),
    DeviceForm(" CPU ", "HOST", 0, "cpu"),
    DeviceForm("cuda", "CUDA", 0, "cuda:0"),
    DeviceForm("cuda:3", "CUDA", 3, "cuda:3"),
    DeviceForm("gpu", "CUDA", 0, "cuda:0"),
    DeviceForm("gpu:1", "CUDA", 1, "cuda:1"),
    DeviceForm("xpu", "XPU", 0, "xpu:0"),
    DeviceForm("XPU:2", "XPU", 2, "xpu:2"),
)

RAISES: Final[tuple[Raises, ...]] = (
    Raises("connection_connector_type", "Connection", TypeError, "seed"),
    Raises("connection_number_type", "Connection", TypeError, "seed"),
    Raises("connection_number_zero", "Connection", ValueError, "seed"),
    Raises("connection_number_negative", "Connection", ValueError, "seed"),
    Raises(
        "connector_worker_id_type",
        "Connector",
        TypeError,
        "seed",
        note="The seed asks for uuid.UUID; 1.6.1 takes str only.",
    ),
    Raises("connector_worker_id_uuid", "Connector", TypeError, note="Against the seed's text."),
    Raises("connector_worker_id_empty", "Connector", TypeError),
    Raises("begin_read_metadata_type", "Connector.begin_read", TypeError, "seed"),
    Raises("begin_read_descriptors_type", "Connector.begin_read", TypeError, "seed"),
    Raises("begin_read_list_of_others", "Connector.begin_read", TypeError, "seed"),
    Raises(
        "begin_read_of_writable",
        "Connector.begin_read",
        RuntimeError,
        note="ReadOperation itself raises ValueError for the same mistake.",
    ),
    Raises("begin_read_empty_list", "Connector.begin_read", ValueError),
    Raises("begin_read_size_differs", "Connector.begin_read", ValueError),
    Raises("begin_read_count_differs", "Connector.begin_read", ValueError),
    Raises("begin_write_metadata_type", "Connector.begin_write", TypeError),
    Raises("begin_write_descriptors_type", "Connector.begin_write", TypeError),
    Raises("begin_write_of_readable", "Connector.begin_write", RuntimeError),
    Raises("create_readable_type", "Connector.create_readable", TypeError),
    Raises("create_readable_empty_list", "Connector.create_readable", ValueError),
    Raises("create_writable_type", "Connector.create_writable", TypeError),
    Raises("create_writable_empty_list", "Connector.create_writable", ValueError),
    Raises("descriptor_none", "Descriptor", ValueError, "seed"),
    Raises("descriptor_other_type", "Descriptor", TypeError, "seed"),
    Raises("descriptor_tuple_of_one", "Descriptor", TypeError, "seed"),
    Raises("descriptor_tuple_array_device_type", "Descriptor", TypeError, "seed"),
    Raises("descriptor_tuple_pointer_device_type", "Descriptor", TypeError, "seed"),
    Raises("descriptor_tuple_bad_device", "Descriptor", ValueError),
    Raises("from_serialized_type", "Descriptor.from_serialized", TypeError),
    Raises("register_type", "Descriptor.register_with_connector", TypeError),
    Raises("register_null_pointer", "Descriptor.register_with_connector", ValueError),
    Raises("register_elsewhere", "Descriptor.register_with_connector", RuntimeError),
    Raises("deregister_type", "Descriptor.deregister_with_connector", TypeError),
    Raises("deregister_elsewhere", "Descriptor.deregister_with_connector", RuntimeError),
    Raises("device_none", "Device", ValueError),
    Raises("device_type", "Device", TypeError),
    Raises("device_unknown", "Device", ValueError),
    Raises("device_number", "Device", ValueError),
    Raises("abstract_operation", "AbstractOperation", TypeError),
    Raises("active_operation", "ActiveOperation", TypeError),
    Raises("passive_operation", "PassiveOperation", TypeError),
    Raises("writable_connection_type", "WritableOperation", TypeError, "seed"),
    Raises("writable_descriptors_type", "WritableOperation", TypeError, "seed"),
    Raises("readable_connection_type", "ReadableOperation", TypeError),
    Raises("readable_descriptors_type", "ReadableOperation", TypeError),
    Raises(
        "write_connection_type",
        "WriteOperation",
        TypeError,
        "seed",
        note="The seed's text says connector; the argument is a Connection.",
    ),
    Raises("write_metadata_type", "WriteOperation", TypeError, "seed"),
    Raises("write_of_readable", "WriteOperation", ValueError, "seed"),
    Raises("write_no_nixl_metadata", "WriteOperation", ValueError, "seed"),
    Raises("write_descriptors_type", "WriteOperation", TypeError, "seed"),
    Raises("read_connection_type", "ReadOperation", TypeError),
    Raises("read_metadata_type", "ReadOperation", TypeError),
    Raises("read_of_writable", "ReadOperation", ValueError),
    Raises("read_descriptors_type", "ReadOperation", TypeError),
    Raises("results_too_early", "ReadOperation.results", RuntimeError),
    Raises("remote_connection_type", "Remote", TypeError),
    Raises("remote_metadata_type", "Remote", TypeError),
    Raises("remote_metadata_empty", "Remote", ValueError),
    Raises("remote_metadata_not_hex", "Remote", ValueError),
    Raises("to_descriptors_empty", "RdmaMetadata.to_descriptors", ValueError),
    Raises("rdma_extra_field", "RdmaMetadata", ValueError),
    Raises("rdma_not_json", "RdmaMetadata.model_validate_json", ValueError),
    Raises("rdma_frozen", "RdmaMetadata", ValueError),
    Raises(
        "rdma_operation_kind",
        "RdmaMetadata",
        TypeError,
        note="Out of a validator, so it reaches the caller as it is, not as ValidationError.",
    ),
    Raises("validate_operation_kind", "RdmaMetadata.validate_operation_kind", TypeError),
    Raises("serialized_extra_field", "SerializedDescriptor", ValueError),
    Raises("serialized_device", "SerializedDescriptor", ValueError),
    Raises("serialized_null_ptr", "SerializedDescriptor", ValueError),
    Raises("serialized_negative_size", "SerializedDescriptor", ValueError),
    Raises("validate_device", "SerializedDescriptor.validate_device", ValueError),
    Raises("validate_ptr", "SerializedDescriptor.validate_ptr", ValueError),
    Raises("validate_size", "SerializedDescriptor.validate_size", ValueError),
)
