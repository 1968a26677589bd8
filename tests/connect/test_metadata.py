"""RdmaMetadata: its size, its text, and that whatever is wrong with it moves nothing."""

from __future__ import annotations

import base64
import random
import re
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from connect.pairs import DEADLINE, Pair, pattern
from torch_nixl import connect
from torch_nixl.connect import exchange
from torch_nixl.connect.key import PREFIX, Key, digest
from torch_nixl.connect.metadata import decode_blob, encode_blob
from torch_nixl.engine.blob import MAX_BLOB
from torch_nixl.errors import MetadataError

REFUSED = (ValueError, TypeError, RuntimeError)


@pytest.mark.parametrize("secret", [None, "shared"])
def test_one_descriptor_stays_small_beside_many_registrations(secret: str | None) -> None:
    with connect.Connector("crowded", secret=secret) as connector:
        connection = connector.connection()
        others = [connect.Descriptor(np.zeros(8, np.uint8)) for _ in range(10_000)]
        for one in others:
            one.register_with_connector(connection)
        assert len({one.ptr for one in others}) == 10_000
        assert connector.statistics().live_registrations == 10_000
        exposed = connect.ReadableOperation(connection, connect.Descriptor(torch.zeros(1000)))
        told = [exposed.metadata(hex_encode) for hex_encode in (False, True)]
        assert connector.statistics().live_registrations == 10_001
        assert all(one.is_registered for one in others)
        for metadata in told:
            assert len(metadata.model_dump_json()) < 2048


def test_encodings_are_the_same_to_us(pair: Pair) -> None:
    content = pattern(100)
    for hex_encode in (False, True):
        exposed = pair.readable(content)
        told = exposed.metadata(hex_encode=hex_encode)
        assert told is exposed.metadata(hex_encode)
        assert told.nixl_metadata.startswith("b64:") is not hex_encode
        assert told.notification_key == exposed.metadata(not hex_encode).notification_key
        target = bytearray(100)
        pair.read(told, target).wait(DEADLINE)
        assert target == content.tobytes()


def test_metadata_is_a_field_of_other_models(pair: Pair) -> None:
    class Request(BaseModel):
        number: int
        memory: connect.RdmaMetadata

    with pair.readable(bytearray(8)) as exposed:
        request = Request(number=1, memory=exposed.metadata())
        assert Request.model_validate(request.model_dump()) == request
        assert Request.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize(
    "change",
    [
        {"operation_kind": "1"},
        {"operation_kind": True},
        {"operation_kind": 1.0},
        {"operation_kind": 3},
        {"notification_key": None},
        {"nixl_metadata": b"x"},
        {"descriptors": {}},
        {"descriptors": [{"device": "cpu:0", "ptr": 1, "size": 1}]},
        {"descriptors": [{"device": "cpu", "ptr": 0, "size": 1}]},
        {"descriptors": [{"device": "cpu", "ptr": 2**64, "size": 1}]},
        {"descriptors": [{"device": "cpu", "ptr": 1, "size": -1}]},
        {"descriptors": [{"device": "cpu", "ptr": 1, "size": 1, "offset": 2}]},
        {"version": 1},
    ],
)
def test_fields_are_strict(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "descriptors": [{"device": "cpu", "ptr": 1, "size": 1}],
        "nixl_metadata": "x",
        "notification_key": "x",
        "operation_kind": 1,
    }
    connect.RdmaMetadata.model_validate(fields)
    with pytest.raises((ValueError, TypeError)):
        connect.RdmaMetadata.model_validate({**fields, **change})


def test_text_of_a_blob_is_bounded() -> None:
    blob = pattern(1000).tobytes()
    assert decode_blob(encode_blob(blob)) == decode_blob(encode_blob(blob, hex_encode=True)) == blob
    bomb = zlib.compress(bytes(MAX_BLOB + 1))
    rest = zlib.compress(blob) + b"more"
    for wrong in (bomb, rest, zlib.compress(blob)[:-1], b"", blob):
        with pytest.raises(MetadataError):
            decode_blob("b64:" + base64.b64encode(wrong).decode())
    for text in ("", "b64:", "b64:*", "abc", "zz", "b64:\u00e9", " 00"):
        with pytest.raises(MetadataError):
            decode_blob(text)


def test_notification_keys_say_what_they_were_made_of() -> None:
    pieces = {1: np.array([[16, 4], [32, 4]], np.uint64), 7: np.array([[64, 1]], np.uint64)}
    key = Key(bytes(range(16)), b"d" * 16, pieces, (b"blob", b"other"))
    for secret in (None, b"k" * 32):
        text = key.pack(key=secret)
        assert text.startswith(PREFIX)
        assert text.isprintable()
        found = Key.unpack(text, key=secret)
        assert (found.key, found.digest, found.blobs) == (key.key, key.digest, key.blobs)
        assert {index: rows.tolist() for index, rows in found.pieces.items()} == {
            index: rows.tolist() for index, rows in pieces.items()
        }
        with pytest.raises(MetadataError):
            Key.unpack(text, key=b"other" if secret is None else None)


@pytest.mark.parametrize(
    "pieces",
    [
        {0: np.array([[2**64 - 1, 2]], np.uint64)},
        {0: np.array([[1, 0]], np.uint64)},
        {5: np.array([[1, 1]], np.uint64), 2: np.array([[1, 1]], np.uint64)},
    ],
)
def test_pieces_that_can_not_be_are_refused(pieces: Any) -> None:
    text = Key(bytes(16), bytes(16), pieces, ()).pack(key=None)
    with pytest.raises(MetadataError):
        Key.unpack(text, key=None)


def test_truncated_and_flipped_keys_are_refused() -> None:
    key = Key(bytes(16), bytes(16), {0: np.array([[1, 1], [3, 1]], np.uint64)}, (b"blob",))
    sealed = base64.b64decode(key.pack(key=None)[len(PREFIX) :])
    for cut in range(len(sealed)):
        with pytest.raises(MetadataError):
            Key.unpack(PREFIX + base64.b64encode(sealed[:cut]).decode(), key=None)
    for bit in range(len(sealed) * 8):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MetadataError):
            Key.unpack(PREFIX + base64.b64encode(flipped).decode(), key=None)


def test_digest_covers_every_field() -> None:
    one = connect.SerializedDescriptor(ptr=1, size=2)
    found = {
        digest(1, b"blob", [one]),
        digest(2, b"blob", [one]),
        digest(1, b"blob2", [one]),
        digest(1, b"blob", [one, one]),
        digest(1, b"blob", [connect.SerializedDescriptor(ptr=1, size=3)]),
        digest(1, b"blob", [connect.SerializedDescriptor(ptr=2, size=2)]),
        digest(1, b"blob", [connect.SerializedDescriptor(device="cuda:0", ptr=1, size=2)]),
    }
    assert len(found) == 7


def attempt(pair: Pair, text: str, target: bytearray) -> bool:
    """Try to read by a JSON text; return whether that was refused, before or after it began."""
    try:
        metadata = connect.RdmaMetadata.model_validate_json(text)
        pair.read(metadata, target).wait(DEADLINE)
    except REFUSED:
        return True
    return False


def says(text: str) -> object:
    """Return what a JSON text says; None if it is no metadata.

    ``CPU`` is ``cpu``, and zlib ignores the bits between its last block and its checksum.
    """
    try:
        told = connect.RdmaMetadata.model_validate_json(text)
        return told.model_copy(update={"nixl_metadata": decode_blob(told.nixl_metadata)})
    except (ValueError, TypeError):
        return None


def test_json_truncated_or_altered_anywhere_moves_nothing(pair: Pair) -> None:
    """A field report, I1: bounded here by 1,000 random changes, each refused."""
    source = pattern(64, 3).tobytes()
    target = bytearray(64)
    random.seed(7)
    with pair.readable(source) as exposed:
        text = exposed.metadata().model_dump_json()
        said = says(text)
        for cut in random.sample(range(len(text)), 200):
            assert attempt(pair, text[:cut], target)
        for _ in range(800):
            place = random.randrange(len(text))
            changed = (
                text[:place] + chr(ord(text[place]) ^ 1 << random.randrange(7)) + text[place + 1 :]
            )
            assert says(changed) == said or attempt(pair, changed, target)
        assert target == bytes(64)
        assert not attempt(pair, text, target)
        exposed.wait(DEADLINE)
    assert target == source


def test_forged_addresses_are_refused_before_anything_is_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a stranger's metadata: nothing but the regions vouches for the addresses.
    monkeypatch.setattr(exchange, "_OUR_NAME", re.compile("(?!)"))
    with pair.readable(pattern(64)) as exposed:
        told = exposed.metadata()
        before = pair.owner.statistics().frames_received
        for ptr, size in (
            (told.descriptors[0].ptr - 1, 64),
            (told.descriptors[0].ptr, 65),
            (1, 64),
        ):
            forged = told.model_copy(
                update={
                    "descriptors": [connect.SerializedDescriptor(ptr=ptr, size=size)],
                    "notification_key": "a stranger's",
                }
            )
            with pytest.raises(MetadataError, match="none of the regions"):
                pair.read(forged, bytearray(size))
        assert pair.owner.statistics().frames_received == before


def test_metadata_of_two_workers_is_not_mixed(pair: Pair) -> None:
    with (
        pair.readable(pattern(64)) as ours,
        connect.ReadableOperation(
            pair.other.connection(), connect.Descriptor(pattern(64, 2))
        ) as theirs,
    ):
        mine, other = ours.metadata(), theirs.metadata()
        for field in ("nixl_metadata", "notification_key", "descriptors"):
            mixed = mine.model_copy(update={field: getattr(other, field)})
            with pytest.raises(MetadataError):
                pair.read(mixed, bytearray(64))


def test_our_metadata_without_our_key_is_refused(pair: Pair) -> None:
    """A torch_nixl worker is never taken for another kind, which would go unasked."""
    with pair.readable(bytearray(64)) as exposed:
        stripped = exposed.metadata().model_copy(update={"notification_key": "a UUID, say"})
        with pytest.raises(MetadataError, match="altered"):
            pair.read(stripped, bytearray(64))


def test_a_secret_refuses_whoever_has_none_or_another(pair: Pair) -> None:
    guarded = connect.Connector("guarded", secret="one secret")
    other = connect.Connector("other guarded", secret="another secret")
    same = connect.Connector("same", secret=b"one secret")
    source, target = pattern(64), bytearray(64)
    try:
        exposed = connect.ReadableOperation(guarded.connection(), connect.Descriptor(source))
        told = exposed.metadata()
        for stranger in (pair.other, other):
            with pytest.raises(MetadataError):
                connect.ReadOperation(stranger.connection(), told, connect.Descriptor(target))
        with pair.readable(bytearray(64)) as open_to_all, pytest.raises(MetadataError):
            connect.ReadOperation(
                guarded.connection(), open_to_all.metadata(), connect.Descriptor(target)
            )
        assert target == bytes(64)
        connect.ReadOperation(same.connection(), told, connect.Descriptor(target)).wait(DEADLINE)
        assert target == source.tobytes()
    finally:
        for connector in (guarded, other, same):
            connector.abort()


def test_a_secret_tells_strangers_of_no_memory() -> None:
    guarded = connect.Connector("guarded", secret="one secret")
    try:
        exposed = connect.ReadableOperation(guarded.connection(), connect.Descriptor(bytearray(64)))
        blob = decode_blob(exposed.metadata().nixl_metadata)
        assert guarded.connection().engine.adapter.inspect(blob).sections == ()
    finally:
        guarded.abort()
