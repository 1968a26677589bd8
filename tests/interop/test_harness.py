"""The harness itself: two dynamo processes exchange every kind of memory through it.

What fails here is a fault of the harness or of the environment, not of torch_nixl.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest

from interop.client import Peer, PeerError, PeerGone
from interop.dynamo_peer import KINDS, digest, pattern

pytestmark = pytest.mark.timeout(120)

SHAPES = {"single": [70_001], "list": [1, 4096, 300_000]}
SEED = 11


def expected(sizes: list[int]) -> list[str]:
    return [digest(pattern(SEED + place, size)) for place, size in enumerate(sizes)]


# First in the file: each idle dynamo process keeps a core busy, so a third one starts slowly.
def test_a_killed_peer_fails_every_request(start_dynamo: Callable[[], Peer]) -> None:
    peer = start_dynamo()
    source = peer.call("buffers", kind="torch", sizes=[64], seed=1)["names"]
    waiting = peer.start("wait", op=peer.call("create_readable", buffers=source)["op"])

    os.kill(peer.pid, signal.SIGKILL)

    assert isinstance(waiting.exception(10), PeerGone)
    with pytest.raises(PeerGone):
        peer.call("hello")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_dynamo_reads_from_dynamo(dynamo: Peer, other_dynamo: Peer, shape: str, kind: str) -> None:
    sizes = SHAPES[shape]
    sources = dynamo.call("buffers", kind=kind, sizes=sizes, seed=SEED)["names"]
    targets = other_dynamo.call("buffers", kind="torch", sizes=sizes)["names"]
    owner = dynamo.call("create_readable", buffers=sources, as_list=len(sizes) > 1)
    reader = other_dynamo.call(
        "begin_read", metadata=owner["metadata"], buffers=targets, as_list=len(sizes) > 1
    )

    assert other_dynamo.call("wait", op=reader["op"])["status"] == "COMPLETE"
    assert dynamo.call("wait", op=owner["op"])["status"] == "COMPLETE"
    assert other_dynamo.call("results", op=reader["op"])["sizes"] == sizes
    assert other_dynamo.call("digest", buffers=targets)["digests"] == expected(sizes)
    other_dynamo.call("leave", op=reader["op"])
    dynamo.call("leave", op=owner["op"])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytes"])
def test_dynamo_writes_to_dynamo(dynamo: Peer, other_dynamo: Peer, shape: str, kind: str) -> None:
    sizes = SHAPES[shape]
    targets = dynamo.call("buffers", kind=kind, sizes=sizes)["names"]
    sources = other_dynamo.call("buffers", kind="bytes", sizes=sizes, seed=SEED)["names"]
    owner = dynamo.call("create_writable", buffers=targets, as_list=len(sizes) > 1)
    writer = other_dynamo.call(
        "begin_write", metadata=owner["metadata"], buffers=sources, as_list=len(sizes) > 1
    )

    assert other_dynamo.call("wait", op=writer["op"])["status"] == "COMPLETE"
    assert dynamo.call("wait", op=owner["op"])["status"] == "COMPLETE"
    assert dynamo.call("digest", buffers=targets)["digests"] == expected(sizes)
    other_dynamo.call("leave", op=writer["op"])
    dynamo.call("leave", op=owner["op"])


def test_an_error_in_the_peer_is_told_and_the_peer_lives(dynamo: Peer, other_dynamo: Peer) -> None:
    source = dynamo.call("buffers", kind="torch", sizes=[64], seed=1)["names"]
    target = other_dynamo.call("buffers", kind="torch", sizes=[32])["names"]
    metadata = dynamo.call("create_readable", buffers=source)["metadata"]

    with pytest.raises(PeerError, match="same size") as caught:
        other_dynamo.call("begin_read", metadata=metadata, buffers=target)

    assert caught.value.type == "ValueError"
    assert other_dynamo.call("hello")["pid"] == other_dynamo.pid


def test_a_wait_that_nobody_ends_meets_its_deadline(dynamo: Peer) -> None:
    source = dynamo.call("buffers", kind="torch", sizes=[64], seed=1)["names"]
    operation = dynamo.call("create_readable", buffers=source)["op"]

    with pytest.raises(PeerError) as caught:
        dynamo.call("wait", op=operation, timeout=0.2)

    assert caught.value.type == "TimeoutError"


def test_requests_are_answered_while_another_waits(dynamo: Peer) -> None:
    source = dynamo.call("buffers", kind="torch", sizes=[64], seed=1)["names"]
    operation = dynamo.call("create_readable", buffers=source)["op"]

    waiting = dynamo.start("wait", op=operation, timeout=1.0)

    assert dynamo.call("status", op=operation)["status"] == "INITIALIZED"
    assert not waiting.done()
    assert isinstance(waiting.exception(10), PeerError)


def test_metadata_is_the_json_of_the_reference(dynamo: Peer) -> None:
    buffers = dynamo.call("buffers", kind="bytearray", sizes=[64, 32])["names"]

    plain = json.loads(dynamo.call("create_readable", buffers=buffers[:1])["metadata"])
    listed = json.loads(
        dynamo.call("create_writable", buffers=buffers, as_list=True, hex_encode=True)["metadata"]
    )

    assert list(plain) == ["descriptors", "nixl_metadata", "notification_key", "operation_kind"]
    assert [list(row) for row in plain["descriptors"]] == [["device", "ptr", "size"]]
    assert plain["nixl_metadata"].startswith("b64:")
    assert plain["operation_kind"] == 1
    assert [row["size"] for row in listed["descriptors"]] == [64, 32]
    assert bytes.fromhex(listed["nixl_metadata"])
    assert listed["operation_kind"] == 2
