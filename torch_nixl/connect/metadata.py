"""What travels between workers as JSON: the seed's two models, and NIXL's blob as text in them.

The models take dynamo's JSON and write the same. They are strict: no numbers in strings, no unknown
fields, nothing out of range, nothing without a bound.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
import zlib
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from torch_nixl.engine.blob import MAX_BLOB
from torch_nixl.engine.offer import MAX_MEMORIES
from torch_nixl.errors import MetadataError

if TYPE_CHECKING:
    from torch_nixl.connect.descriptor import Descriptor

MAX_TEXT: Final = 2 * MAX_BLOB + (1 << 16)
"""Most characters of a text in the JSON: `MAX_BLOB` bytes that don't compress, in hexadecimal."""

MAX_REMEMBERED: Final = 4096
"""Most characters of a text whose decoding is remembered: few workers tell the same few regions.

And most bytes of what it is decoded to: a text of zeros, compressed, becomes a thousand times as
long.
"""

_B64: Final = "b64:"
_DEVICE: Final = re.compile(r"cpu|(?:cuda|xpu)(?::\d{1,4})?")
_ADDRESS_LIMIT: Final = 1 << 64
_ZLIB_LEVEL: Final = 1
"""The blobs are small: more effort costs more than the few bytes that it saves."""


class SerializedDescriptor(BaseModel):
    """A stretch of memory, as the far side is told of it.

    Attributes:
        device: ``"cpu"``, ``"cuda:N"`` or ``"xpu:N"``.
        ptr: Its address there; not 0.
        size: Bytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    device: str = "cpu"
    ptr: int = 0
    size: int = 0

    def to_descriptor(self) -> Descriptor:
        """Return it as a Descriptor of the far side's memory."""
        from torch_nixl.connect.descriptor import Descriptor

        return Descriptor.from_serialized(self)

    @field_validator("device")
    @classmethod
    def validate_device(cls, v: str) -> str:
        """Check and normalise a device's name."""
        if not isinstance(v, str):
            raise TypeError(f"device: expected a str, got {type(v).__name__}")
        text = v.strip().lower()
        if _DEVICE.fullmatch(text) is None:
            raise ValueError(f"device: expected cpu, cuda:N or xpu:N, got {v[:32]!r}")
        return text

    @field_validator("ptr")
    @classmethod
    def validate_ptr(cls, v: int) -> int:
        """Check an address."""
        if not 0 < v < _ADDRESS_LIMIT:
            raise ValueError("ptr: expected an address above 0 and below 2**64")
        return v

    @field_validator("size")
    @classmethod
    def validate_size(cls, v: int) -> int:
        """Check a size."""
        if not 0 <= v < _ADDRESS_LIMIT:
            raise ValueError("size: expected 0 or more bytes, and fewer than 2**64")
        return v


class RdmaMetadata(BaseModel):
    """All that a worker needs to read or write what another exposes.

    Attributes:
        descriptors: The memory, in order.
        nixl_metadata: NIXL's blob, compressed: ``"b64:"`` and base64, or hexadecimal digits.
        notification_key: What the owner is to be told at the end. Between torch_nixl workers it
            holds what they need besides, and begins with ``"tn1:"``.
        operation_kind: 1 if the memory may be read, 2 if it may be written.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    descriptors: Annotated[list[SerializedDescriptor], Field(max_length=MAX_MEMORIES)] = []
    nixl_metadata: Annotated[str, Field(max_length=MAX_TEXT)] = ""
    notification_key: Annotated[str, Field(max_length=MAX_TEXT)] = ""
    operation_kind: int = 0

    def to_descriptors(self) -> Descriptor | list[Descriptor]:
        """Return the far side's memory: a Descriptor, or a list if there are several.

        Raises:
            ValueError: There are none.
        """
        if not self.descriptors:
            raise ValueError("descriptors: the metadata describes no memory")
        found = [serialized.to_descriptor() for serialized in self.descriptors]
        return found[0] if len(found) == 1 else found

    @field_validator("operation_kind")
    @classmethod
    def validate_operation_kind(cls, v: int) -> int:
        """Check an operation's kind: 1 (READ) or 2 (WRITE).

        Raises:
            TypeError: It is another. dynamo raises TypeError, past pydantic, and so do we.
        """
        if v not in (1, 2):
            raise TypeError(f"operation_kind: expected 1 (READ) or 2 (WRITE), got {v}")
        return v


def encode_blob(blob: bytes, *, hex_encode: bool = False) -> str:
    """Return NIXL's blob as text for `RdmaMetadata.nixl_metadata`."""
    compressed = zlib.compress(blob, _ZLIB_LEVEL)
    if hex_encode:
        return compressed.hex()
    return _B64 + base64.b64encode(compressed).decode()


def decode_base64(text: str) -> bytes:
    """Undo `base64.b64encode`, of nothing else: Python's own decoder ignores the last bits.

    Raises:
        ValueError: It isn't what `base64.b64encode` writes.
    """
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data) != text.encode():
        raise ValueError("not canonical base64")
    return data


def decode_blob(text: str) -> bytes:
    """Undo `encode_blob`; at most `MAX_BLOB` bytes, however well they were compressed.

    The blob itself is not looked at.

    Raises:
        MetadataError: It is empty, too large, or not such a text.
    """
    known = _decode_short(text) if len(text) <= MAX_REMEMBERED else None
    return _decode(text) if known is None else known


@functools.lru_cache(maxsize=256)
def _decode_short(text: str) -> bytes | None:
    """The blob; None if it is too long to be remembered."""
    blob = _decode(text)
    return blob if len(blob) <= MAX_REMEMBERED else None


def _decode(text: str) -> bytes:
    if not text:
        raise MetadataError("nixl_metadata is empty")
    try:
        if text.startswith(_B64):
            compressed = decode_base64(text[len(_B64) :])
        else:
            compressed = binascii.unhexlify(text)
        inflater = zlib.decompressobj()
        blob = inflater.decompress(compressed, MAX_BLOB + 1)
    except (ValueError, zlib.error) as error:
        raise MetadataError(f"nixl_metadata can't be decoded: {error}") from error
    if len(blob) > MAX_BLOB:
        raise MetadataError(f"nixl_metadata has more than {MAX_BLOB} bytes once decompressed")
    if not inflater.eof or inflater.unused_data:
        raise MetadataError("nixl_metadata is cut, or has bytes after its end")
    return blob
