from __future__ import annotations

import os
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nixl.engine.envelope import (
    MAX_METADATA,
    derive,
    key_id,
    seal,
    unseal,
)
from torch_nixl.errors import MetadataError

SOAK = os.environ.get("TORCH_NIXL_SOAK") == "1"
FUZZ = settings(
    max_examples=100_000 if SOAK else 150, derandomize=not SOAK, deadline=None, database=None
)
pytestmark = pytest.mark.timeout(3600 if SOAK else 60)

KEY = derive(b"secret", "metadata")
OTHER = derive(b"another", "metadata")
KEYS = st.sampled_from([None, KEY])


@FUZZ
@given(st.binary(max_size=500), KEYS)
def test_what_was_sealed_comes_back(blob: bytes, key: bytes | None) -> None:
    data = seal(blob, key=key)
    assert len(data) == len(blob) + 48
    assert unseal(data, key=key) == blob


def test_layout_is_the_documented_one() -> None:
    data = seal(b"abc", key=None)
    crc = zlib.crc32(data[:12] + b"abc")
    assert data == b"TE\x01\x00\x00\x00\x00\x00\x03\x00\x00\x00" + struct.pack("<I", crc) + (
        bytes(32) + b"abc"
    )
    assert seal(b"abc", key=KEY)[3] == key_id(KEY) != 0


@pytest.mark.parametrize("key", [None, KEY])
def test_an_envelope_cut_at_any_length_is_refused(key: bytes | None) -> None:
    data = seal(b"some metadata", key=key)
    for end in range(len(data)):
        with pytest.raises(MetadataError):
            unseal(data[:end], key=key)
    with pytest.raises(MetadataError):
        unseal(data + b"\0", key=key)


@pytest.mark.parametrize("key", [None, KEY])
def test_an_envelope_with_any_one_bit_flipped_is_refused(key: bytes | None) -> None:
    data = bytearray(seal(b"some metadata", key=key))
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(MetadataError):
                unseal(bytes(data), key=key)
            data[at] ^= 1 << bit


@FUZZ
@given(st.binary(max_size=300), KEYS, st.sampled_from([b"", b"TE\x01"]))
def test_random_bytes_are_refused(data: bytes, key: bytes | None, start: bytes) -> None:
    with pytest.raises(MetadataError):
        unseal(start + data, key=key)


def test_both_ends_need_the_same_secret() -> None:
    with pytest.raises(MetadataError, match=r"no secret.*TORCH_NIXL_SECRET"):
        unseal(seal(b"x", key=KEY), key=None)
    with pytest.raises(MetadataError, match=r"not authenticated.*TORCH_NIXL_SECRET"):
        unseal(seal(b"x", key=None), key=KEY)
    with pytest.raises(MetadataError, match=r"another secret.*TORCH_NIXL_SECRET"):
        unseal(seal(b"x", key=OTHER), key=KEY)


def test_a_forgery_with_the_right_key_id_and_checksum_is_refused() -> None:
    head = struct.pack("<2sBBB3sI", b"TE", 1, key_id(KEY), 0, b"", 6)
    forged = head + struct.pack("<I", zlib.crc32(head + b"forged")) + bytes(32) + b"forged"
    with pytest.raises(MetadataError, match="authentication"):
        unseal(forged, key=KEY)


def test_the_size_is_bounded_at_both_ends() -> None:
    largest = seal(bytes(MAX_METADATA), key=None)
    assert len(unseal(largest, key=None)) == MAX_METADATA
    with pytest.raises(ValueError, match="limit"):
        seal(bytes(MAX_METADATA + 1), key=None)
    with pytest.raises(MetadataError, match="limit"):
        unseal(b"TE\x01\0\0\0\0\0" + struct.pack("<I", MAX_METADATA + 1) + bytes(36), key=None)


def test_a_claimed_length_allocates_nothing() -> None:
    lie = b"TE\x01\0\0\0\0\0" + struct.pack("<I", MAX_METADATA) + bytes(100)
    tracemalloc.start()
    try:
        with pytest.raises(MetadataError) as caught:
            unseal(lie, key=None)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
    assert str(MAX_METADATA) in str(caught.value)


def test_keys_differ_by_label_and_secret() -> None:
    keys = {derive(secret, label) for secret in (b"a", b"b") for label in ("frames", "metadata")}
    assert len(keys) == 4
    assert all(len(key) == 32 for key in keys)
    with pytest.raises(ValueError, match="empty"):
        derive(b"", "frames")


def test_key_ids_leave_zero_to_those_without_a_secret() -> None:
    ids = {key_id(derive(bytes([i, j]), "x")) for i in range(40) for j in range(40)}
    assert key_id(None) == 0
    assert 0 not in ids
    assert max(ids) <= 255
