"""One-sided access to another worker's memory, under the names of dynamo's ``nixl_connect``.

``from torch_nixl import connect as nixl_connect`` serves code written for dynamo. What differs, and
why, is in ``docs/connect.md``.
"""

from __future__ import annotations

from torch_nixl.connect.active import ActiveOperation, ReadOperation, WriteOperation
from torch_nixl.connect.connection import Connection, Remote
from torch_nixl.connect.connector import Connector
from torch_nixl.connect.descriptor import Descriptor
from torch_nixl.connect.device import Device, DeviceKind
from torch_nixl.connect.metadata import RdmaMetadata, SerializedDescriptor
from torch_nixl.connect.operation import AbstractOperation, OperationKind, OperationStatus
from torch_nixl.connect.passive import PassiveOperation, ReadableOperation, WritableOperation
from torch_nixl.connect.store import fetch, publish

__all__ = [
    "AbstractOperation",
    "ActiveOperation",
    "Connection",
    "Connector",
    "Descriptor",
    "Device",
    "DeviceKind",
    "OperationKind",
    "OperationStatus",
    "PassiveOperation",
    "RdmaMetadata",
    "ReadOperation",
    "ReadableOperation",
    "Remote",
    "SerializedDescriptor",
    "WritableOperation",
    "WriteOperation",
    "fetch",
    "publish",
]
