"""The notification key of torch_nixl: all that its peers need besides dynamo's four fields.

dynamo's models forbid further fields, but take any text as the key, and send it back unchanged. So
what a torch_nixl peer needs travels in it, sealed, as ``"tn1:"`` and base64 of an envelope (see
`engine.envelope`: intact, and authentic where a secret is set) with this inside, little-endian::

    magic "TM"  version u8 = 1  number of blobs u8  number of pieces-tables u32
    key 16      the engine's name for the exposed memory
    digest 16   BLAKE2b of the other fields of the RdmaMetadata: see `digest`
    per table:  index of the descriptor u32, number of spans u32
    all spans of all tables: address u64, nbytes u64
    per blob:   nbytes u32
    the blobs:  NIXL's, of the regions under the owner's own device ids, by kind of memory

Pure: no I/O, and no allocation that the text's own length does not bound.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torch_nixl.connect.metadata import SerializedDescriptor, decode_base64
from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import Spans
from torch_nixl.engine.envelope import seal, unseal
from torch_nixl.engine.frames import KEY_NBYTES
from torch_nixl.engine.offer import MAX_BLOBS, MAX_MEMORIES
from torch_nixl.errors import MetadataError

PREFIX: Final = "tn1:"

_DIGEST_NBYTES: Final = 16
_SPAN_NBYTES: Final = 16
_HEADER: Final = struct.Struct(f"<2sBBI{KEY_NBYTES}s{_DIGEST_NBYTES}s")
_MAGIC: Final = b"TM"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """What a notification key says.

    Attributes:
        key: The engine's name for what is exposed.
        digest: Of the fields that it goes with.
        pieces: Spans ``[n, 2]`` of the descriptors that aren't one stretch, by their index.
        blobs: NIXL metadata of the regions around the memory; none if all is empty.
    """

    key: bytes
    digest: bytes
    pieces: Mapping[int, Spans]
    blobs: tuple[bytes, ...]

    def pack(self, *, key: bytes | None) -> str:
        """Return the text of the notification key.

        Args:
            key: From `engine.envelope.derive`, or None.

        Raises:
            ValueError: It would be too large to be sealed.
        """
        header = _HEADER.pack(
            _MAGIC, _VERSION, len(self.blobs), len(self.pieces), self.key, self.digest
        )
        tables = b"".join(
            struct.pack("<II", index, len(rows)) for index, rows in self.pieces.items()
        )
        rows = b"".join(rows.astype("<u8").tobytes() for rows in self.pieces.values())
        sizes = b"".join(struct.pack("<I", len(blob)) for blob in self.blobs)
        sealed = seal(b"".join((header, tables, rows, sizes, *self.blobs)), key=key)
        return PREFIX + base64.b64encode(sealed).decode()

    @classmethod
    def unpack(cls, text: str, *, key: bytes | None) -> Key:
        """Read a notification key that begins with `PREFIX`.

        The blobs and spans are only cut out: whether they are acceptable is the caller's to check.

        Raises:
            MetadataError: It is cut, altered, or not authenticated as `key` demands.
        """
        try:
            sealed = decode_base64(text[len(PREFIX) :])
        except ValueError as error:
            raise MetadataError(f"notification_key can't be decoded: {error}") from error
        body = unseal(sealed, key=key)
        if len(body) < _HEADER.size:
            raise MetadataError(f"notification_key is cut: {len(body)} bytes")
        magic, version, num_blobs, num_tables, name, digest = _HEADER.unpack_from(body)
        if magic != _MAGIC or version != _VERSION:
            raise MetadataError("notification_key is of another version of torch_nixl")
        if num_blobs > MAX_BLOBS or num_tables > MAX_MEMORIES:
            raise MetadataError("notification_key has a count over its limit")
        at = _HEADER.size + 8 * num_tables
        if at > len(body):
            raise MetadataError(f"notification_key is cut: {len(body)} bytes")
        tables: list[list[int]] = []
        num_spans = 0
        if num_tables:  # Mostly there are none, and numpy need not be asked.
            numbers = np.frombuffer(body, "<u4", 2 * num_tables, _HEADER.size).reshape(-1, 2)
            num_spans = int(numbers[:, 1].sum(dtype=np.uint64))
            tables = numbers.tolist()
        sizes_at = at + _SPAN_NBYTES * num_spans
        blobs_at = sizes_at + 4 * num_blobs
        if blobs_at > len(body):
            raise MetadataError(f"notification_key is cut: {len(body)} bytes")
        sizes = struct.unpack_from(f"<{num_blobs}I", body, sizes_at)
        if blobs_at + sum(sizes) != len(body):
            raise MetadataError("notification_key has parts that don't add up to it")
        pieces: dict[int, Spans] = {}
        if num_tables:
            rows = np.frombuffer(body, "<u8", 2 * num_spans, at).reshape(-1, 2).astype(np.uint64)
            pieces = _cut(tables, rows)
        blobs = []
        for size in sizes:
            blobs.append(body[blobs_at : blobs_at + size])
            blobs_at += size
        return cls(name, digest, pieces, tuple(blobs))


def digest(operation_kind: int, blob: bytes, descriptors: Sequence[SerializedDescriptor]) -> bytes:
    """Digest the fields that a notification key goes with.

    So that a key, which is sealed, vouches for the rest, too.

    Args:
        operation_kind: 1 or 2.
        blob: What `nixl_metadata` holds, decoded: its two encodings are the same to us.
        descriptors: As in the metadata.
    """
    state = hashlib.blake2b(digest_size=_DIGEST_NBYTES, person=b"tn1 metadata")
    state.update(struct.pack("<III", operation_kind, len(descriptors), len(blob)))
    state.update("".join([f"{d.device} {d.ptr} {d.size}\n" for d in descriptors]).encode())
    state.update(blob)
    return state.digest()


def _cut(tables: Sequence[Sequence[int]], rows: Spans) -> dict[int, Spans]:
    pieces: dict[int, Spans] = {}
    start = 0
    last = -1
    for index, count in tables:
        if index <= last:
            raise MetadataError("notification_key has its descriptors out of order")
        last = index
        part = rows[start : start + count]
        start += count
        address, nbytes = part[:, 0], part[:, 1]
        # No sum of them, and no end, may wrap.
        ends_late = address > np.uint64(algebra.ADDRESS_LIMIT - 1) - nbytes
        if not nbytes.all() or bool(ends_late.any()):
            raise MetadataError("notification_key has a span that is empty or wraps around")
        pieces[index] = part
    return pieces
