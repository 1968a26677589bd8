"""Field reports, group I: error reporting and malformed metadata."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from connect.pairs import DEADLINE, Pair, pattern

from torch_nixl import connect
from torch_nixl.errors import PeerLostError

REFUSED = (ValueError, TypeError)


def test_i1_metadata_cut_at_every_length_or_altered(pair: Pair) -> None:
    """What then still reads as metadata is tried on a peer in connect/test_metadata.py."""
    with pair.readable(pattern(64)) as exposed:
        told = exposed.metadata()
    text = told.model_dump_json()
    for length in range(len(text)):
        with pytest.raises(REFUSED):
            connect.RdmaMetadata.model_validate_json(text[:length])
    connection = pair.other.connection()
    blob = exposed.connection.engine.metadata(())[0]
    random.seed(3)
    for length in range(len(blob)):
        with pytest.raises(REFUSED):
            connect.Remote(connection, blob[:length])
    for _ in range(1000):
        with pytest.raises(REFUSED):
            connect.Remote(connection, random.randbytes(random.randint(1, 600)))
    serialized = told.descriptors[0].model_dump_json()
    for length in range(len(serialized)):
        with pytest.raises(REFUSED):
            connect.SerializedDescriptor.model_validate_json(serialized[:length])


def test_i4_what_is_no_memory_is_named(pair: Pair) -> None:
    connection = pair.owner.connection()
    tensor = torch.zeros(2)
    for bad in ([tensor, None], "x", [tensor.numpy()]):
        with pytest.raises(TypeError, match="data"):
            connect.Descriptor(bad)
    with pytest.raises(ValueError, match="nbytes"):
        connect.Descriptor((4096, -1))
    with pytest.raises(TypeError, match=r"local_descriptors\[1\]"):
        connect.ReadableOperation(connection, [connect.Descriptor(tensor), None])  # type: ignore[list-item]


_WRONG_TRANSPORT = """
from torch_nixl import connect
from torch_nixl.errors import BackendError
try:
    connect.Connector().connection()
except BackendError as error:
    print(error)
"""


def test_i5_a_transport_that_does_not_exist_is_named() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", _WRONG_TRANSPORT],
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "UCX_TLS": "nonsense",
        },
        check=True,
    )
    assert "UCX_TLS=nonsense" in finished.stdout, "the setting that is wrong"
    assert "UCX_TLS must include tcp" in finished.stdout, "what to do"


def test_i5_a_peer_that_can_not_be_reached_is_named(pair: Pair) -> None:
    with connect.Connector("worker-17") as gone:
        exposed = connect.ReadableOperation(gone.connection(), connect.Descriptor(bytearray(8)))
        told = exposed.metadata()
        name = gone.connection().name
    with pytest.raises(PeerLostError, match=name):
        pair.read(told, bytearray(8)).wait(DEADLINE)
