"""Whether UCX's part of NIXL's metadata, worker addresses and remote keys, has a sound structure.

UCX trusts both: it aborts on an address of another version, and walks off the end of one that
lacks its last marks. The layouts are UCX's own, known from its published source (`address.c`,
`ucp_rkey.c`) and compared with what UCX 1.23 writes: address versions 1 and 2, host memory, the
transports self, tcp, sysv, posix and cma, also between namespaces. Pure: no I/O.

What a sound structure can't rule out: ports, process ids and segment ids that lead nowhere or to
another process, capability flags that no transport has, and, for transports that could not be
tried (InfiniBand, CUDA IPC and others), transport addresses and keys of the wrong size. Only a
shared secret, checked by `envelope.py`, keeps those out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from torch_nixl.errors import MetadataError

_U64: Final = struct.Struct("<Q")


class _Take:
    """Takes bytes from the front of a UCX address and never beyond its end."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not taken yet."""
        return len(self._data) - self._at

    def bytes(self, nbytes: int) -> bytes:
        if nbytes > self.left:
            raise MetadataError("NIXL metadata has a UCX address that is cut")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def byte(self) -> int:
        return self.bytes(1)[0]

    def extended(self, mask: int, extends: bool) -> tuple[int, int]:
        """Take a byte and the number under its mask, or in the next byte where that is full."""
        byte = self.byte()
        number = byte & mask
        if extends and number == mask:
            number = self.byte()
        return byte, number


# [Note: remote key] UCX packs: u64 bitmap of memory domains; u8 memory type; for each set bit u8
# size and that many bytes; then, if there is any domain, u8 system device and 3 bytes (device,
# latency, bandwidth) for each distance. A region of zero bytes has bitmap 0 and type 0.
_NUM_UCX_MEMORY_TYPES: Final = 9
_MAX_DISTANCES: Final = 64


def check_remote_key(key: bytes) -> tuple[int, ...]:
    """Check a UCX remote key and return the offsets of the bytes that shape it.

    Raises:
        MetadataError: UCX would not write it.
    """
    if len(key) < 9:
        raise MetadataError(f"NIXL metadata has a remote key of {len(key)} bytes")
    if key[8] >= _NUM_UCX_MEMORY_TYPES:
        raise MetadataError("NIXL metadata has a remote key of a memory type that does not exist")
    shape = list(range(9))
    at = 9
    for _ in range(_U64.unpack_from(key)[0].bit_count()):
        if at >= len(key):
            raise MetadataError("NIXL metadata has a remote key that is cut")
        shape.append(at)
        at += 1 + key[at]
    rest = len(key) - at
    if rest < 0 or (rest and (rest - 1) % 3) or rest > 1 + 3 * _MAX_DISTANCES:
        raise MetadataError("NIXL metadata has a remote key whose parts don't add up")
    if at == 9 and rest:
        raise MetadataError("NIXL metadata has a remote key for no memory domain")
    return tuple(shape)


def check_remote_keys(keys: npt.NDArray[np.uint8]) -> None:
    """Check equally long remote keys, ``[n, nbytes]``: as one where they have one shape.

    Raises:
        MetadataError: UCX would not write one of them.
    """
    shape = list(check_remote_key(keys[0].tobytes()))
    if bool(np.all(keys[:, shape] == keys[0, shape])):
        return
    for key in {row.tobytes() for row in keys}:
        check_remote_key(key)


# [Note: ucx address] UCX packs, in version 1: u8 (low half 0, high half flags: 1 name, 2 uuid,
# 4 client id); uuid u64; client id u64; name with u8 length; then devices. In version 2 the low
# half of the first byte is 1, the high half the release modulo 16, and a byte of flags follows.
# A device: u8 domain index (0x80: nothing follows its address); u8 address length (0x80: last;
# 0x40: u8 number of paths follows; 0x20: u8 system device follows); the address; then transports.
# A transport: u16 checksum of its name; attributes (v1: three floats and u32, v2: 8 bytes);
# u8 address length (0x80: last of this device; 0x40: endpoint addresses, which only UCX's own
# wire-up messages carry); the address. In version 2 a length or index with all bits set is in the
# next byte. Version 1 ends with a device without address whose index is the release modulo 16.
_UUID, _CLIENT_ID, _DEBUG_NAME = 2, 4, 1
_MAX_TRANSPORTS: Final = 128
_MAX_DOMAINS: Final = 64
_FLOATS: Final = struct.Struct("<fff")


def check_address(address: bytes) -> None:
    """Check a UCX worker address.

    Raises:
        MetadataError: UCX would not write it.
    """
    take = _Take(address)
    first = take.byte()
    if first & 15 > 1:
        raise MetadataError("NIXL metadata has a UCX address of an unknown version")
    second = first & 15 == 1
    flags = take.byte() if second else first >> 4
    if flags & ~(_UUID | _CLIENT_ID | _DEBUG_NAME) or not flags & _UUID:
        raise MetadataError("NIXL metadata has a UCX address with unknown flags")
    take.bytes(8)
    if flags & _CLIENT_ID:
        take.bytes(8)
    if flags & _DEBUG_NAME:
        take.bytes(take.byte())
    num_transports = 0
    last_device = False
    while not last_device:
        domain_byte, domain = take.extended(0x7F if second else 0x1F, second)
        if domain >= _MAX_DOMAINS:
            raise MetadataError("NIXL metadata has a UCX address with a bad domain index")
        length_byte, length = take.extended(0x1F, second)
        last_device = bool(length_byte & 0x80)
        if length_byte & 0x40 and take.byte() == 0:
            raise MetadataError("NIXL metadata has a UCX device without paths")
        if length_byte & 0x20:
            take.byte()
        device = take.bytes(length)
        if domain_byte & 0x80:
            if second or not last_device or length_byte != 0x80 or domain_byte & 0x70:
                raise MetadataError("NIXL metadata has a UCX device without transports")
            break
        last_transport = False
        while not last_transport:
            num_transports += 1
            if num_transports > _MAX_TRANSPORTS:
                raise MetadataError("NIXL metadata has a UCX address with too many transports")
            last_transport = _check_transport(take, device, second)
    if num_transports == 0:
        raise MetadataError("NIXL metadata has a UCX address without transports")
    if take.left:
        raise MetadataError(f"NIXL metadata has a UCX address with {take.left} bytes too many")


def _check_transport(take: _Take, device: bytes, second: bool) -> bool:
    """Check one transport of a UCX address and return whether it is its device's last."""
    checksum = int.from_bytes(take.bytes(2), "little")
    if second:
        take.bytes(8)
    else:
        overhead, bandwidth, latency = _FLOATS.unpack(take.bytes(_FLOATS.size))
        # Seconds and bytes a second, with which UCX plans; written so that NaN fails too.
        if not (0 <= overhead < 1 and 0 <= latency < 1 and 0 <= bandwidth < 1e18):
            raise MetadataError("NIXL metadata has a UCX transport with impossible figures")
        take.bytes(4)
    length_byte, length = take.extended(0x3F, second)
    if length_byte & 0x40:
        raise MetadataError("NIXL metadata has a UCX address with endpoint addresses")
    address = take.bytes(length)
    check = _TRANSPORTS.get(checksum)
    if check is not None and not check(device, address):
        raise MetadataError("NIXL metadata has a UCX transport address of the wrong size or family")
    return bool(length_byte & 0x80)


def _self_ok(device: bytes, address: bytes) -> bool:
    return len(device) == 0 and len(address) == 8


def _tcp_ok(device: bytes, address: bytes) -> bool:
    # u8 flags (1: loopback), u8 family, then an IPv4 or IPv6 address, or the host's and its
    # network namespace's id in 12 bytes. The transport's address is the port.
    if len(address) != 2 or len(device) < 2:
        return False
    expected = {(0, 2): 6, (0, 10): 18, (1, 2): 14, (1, 10): 14}.get((device[0], device[1]))
    return len(device) == expected


def _host_ok(device: bytes) -> bool:
    # The host's id in 8 bytes; with the top bit set, 4 bytes of the namespace's id follow.
    return len(device) >= 8 and len(device) == (12 if device[7] & 0x80 else 8)


def _sysv_ok(device: bytes, address: bytes) -> bool:
    return _host_ok(device) and len(address) == 8


def _posix_ok(device: bytes, address: bytes) -> bool:
    # Bit 60: 4 bytes of the process id namespace's id follow. A directory's name may be last.
    if not _host_ok(device) or len(address) < 8:
        return False
    return len(address) >= (12 if address[7] & 0x10 else 8)


def _cma_ok(device: bytes, address: bytes) -> bool:
    if not _host_ok(device) or len(address) < 4:
        return False
    return len(address) == (8 if address[3] & 0x80 else 4)


_TRANSPORTS: Final[dict[int, Callable[[bytes, bytes], bool]]] = {
    0x7563: _self_ok,
    0x19CF: _tcp_ok,
    0x538D: _sysv_ok,
    0xD3A7: _posix_ok,
    0x8B47: _cma_ok,
}
