"""What metadata travels in: a header of 48 bytes that says how long it is and who sealed it.

NIXL can crash on metadata that was cut or altered, so nothing reaches it that was not in an intact
envelope. Layout: `docs/wire.md`. Pure: no I/O.

[Note: keys] One secret, shared by a job's processes out of band, gives one key for each purpose
(`derive`). A process with a secret accepts nothing unauthenticated; a process without one accepts
nothing authenticated, because it could not tell a forgery from the real thing.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from typing import Final

from torch_nixl.errors import MetadataError

MAX_METADATA: Final = 4 << 20
"""Most bytes that one envelope carries."""

MAGIC: Final = b"TE"
VERSION: Final = 1

# magic, version, key id, flags, three zero bytes, nbytes, crc32, mac
_HEADER: Final = struct.Struct("<2sBBB3sII32s")
_CRC_AT: Final = 12
_MAC_AT: Final = 16
_NO_MAC: Final = bytes(32)


def derive(secret: bytes, label: str) -> bytes:
    """Derive the 32-byte key for one purpose from a shared secret.

    Args:
        secret: What the processes share; at least one byte, better 16 or more random ones.
        label: The purpose, such as ``"frames"`` or ``"metadata"``. Keys of different labels tell
            nothing about each other.

    Raises:
        ValueError: The secret is empty.
    """
    if not secret:
        raise ValueError("the shared secret is empty; pass None to go without one")
    return hmac.digest(secret, b"torch_nixl 1 " + label.encode(), "sha256")


def key_id(key: bytes | None) -> int:
    """Return the number, 1 to 255, by which both ends notice that their keys differ; 0 for None."""
    return 0 if key is None else 1 + hmac.digest(key, b"key id", "sha256")[0] % 255


def check_key_id(found: int, ours: int, what: str) -> None:
    """Refuse bytes whose key id is not ours, in words that help a user and nobody else.

    Raises:
        MetadataError: One side has a secret and the other none, or the two secrets differ.
    """
    if found == ours:
        return
    if ours == 0:
        raise MetadataError(
            f"{what} is authenticated, but this process has no secret to check it with: set "
            "TORCH_NIXL_SECRET, or pass secret=, in every process or in none"
        )
    if found == 0:
        raise MetadataError(
            f"{what} is not authenticated, and this process has a secret: set TORCH_NIXL_SECRET, "
            "or pass secret=, to the same value in every process"
        )
    raise MetadataError(
        f"{what} was authenticated with another secret than this process's: set "
        "TORCH_NIXL_SECRET, or pass secret=, to the same value in every process"
    )


def seal(blob: bytes, *, key: bytes | None) -> bytes:
    """Wrap `blob` so that `unseal` with the same key gives it back, and with another refuses it.

    Args:
        blob: At most `MAX_METADATA` bytes. It is not encrypted.
        key: From `derive`, or None: then accidents are caught and forgeries are not.

    Raises:
        ValueError: The blob is too large.
    """
    if len(blob) > MAX_METADATA:
        raise ValueError(f"metadata of {len(blob)} bytes is over the limit of {MAX_METADATA}")
    head = bytearray(_HEADER.size)
    _HEADER.pack_into(head, 0, MAGIC, VERSION, key_id(key), 0, b"", len(blob), 0, _NO_MAC)
    struct.pack_into("<I", head, _CRC_AT, zlib.crc32(blob, zlib.crc32(head[:_CRC_AT])))
    if key is not None:
        head[_MAC_AT:] = _mac(key, head[:_MAC_AT], blob)
    return bytes(head) + blob


def unseal(data: bytes, *, key: bytes | None) -> bytes:
    """Return what was sealed, after every check that this layer can make.

    Raises:
        MetadataError: The envelope is cut, altered, of another version, over the limit, or not
            authenticated as `key` demands.
    """
    if len(data) < _HEADER.size:
        raise MetadataError(
            f"metadata envelope is cut: {len(data)} bytes, its header alone has {_HEADER.size}"
        )
    magic, version, found_id, flags, zeros, nbytes, crc, mac = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise MetadataError("not a metadata envelope: its first two bytes differ")
    if version != VERSION:
        raise MetadataError(
            f"metadata envelope has version {version}; this process speaks {VERSION}"
        )
    if flags or zeros != b"\0\0\0":
        raise MetadataError("metadata envelope has bits set that version 1 keeps at zero")
    if nbytes > MAX_METADATA:
        raise MetadataError(f"metadata envelope claims {nbytes} bytes; the limit is {MAX_METADATA}")
    if nbytes != len(data) - _HEADER.size:
        raise MetadataError(
            f"metadata envelope claims {nbytes} bytes and carries {len(data) - _HEADER.size}"
        )
    check_key_id(found_id, key_id(key), "metadata")
    blob = data[_HEADER.size :]
    if key is None:
        genuine = mac == _NO_MAC
    else:
        genuine = hmac.compare_digest(mac, _mac(key, data[:_MAC_AT], blob))
    if not genuine:
        raise MetadataError(f"metadata envelope of {nbytes} bytes failed authentication")
    if zlib.crc32(blob, zlib.crc32(data[:_CRC_AT])) != crc:
        raise MetadataError(f"metadata envelope of {nbytes} bytes is damaged: checksums differ")
    return blob


def _mac(key: bytes, head: bytes | bytearray, blob: bytes) -> bytes:
    mac = hmac.new(key, head, hashlib.sha256)
    mac.update(blob)
    return mac.digest()
