"""Frames between the doctor's two ends, over a stream socket: bounded, with deadlines, no pickle.

[Note: doctor's channel] Both ends of a channel between hosts first send a greeting of 38 bytes:
20 bytes that name this protocol and its version, 1 byte key id, 1 byte role (0 connects, 1 serves),
16 random bytes. A frame is then u32 length (little endian, of what follows), 1 byte kind (0 data,
1 failure), the payload, and 32 bytes MAC over direction, frame number, kind and payload, under a
key made of the shared secret and both ends' random bytes; zeros if there is no secret. So nothing
can be forged, repeated, or sent back to where it came from. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Final

from torch_nixl.engine.envelope import check_key_id, derive, key_id
from torch_nixl.errors import MetadataError

MAX_NBYTES: Final = 1 << 20
"""Most bytes of one frame's payload."""

_GREETING: Final = struct.Struct("<20sBB16s")
_PROTOCOL: Final = b"torch_nixl doctor 1\n"
_DATA, _FAILURE = 0, 1
_HEAD: Final = struct.Struct("<IB")
_MAC_NBYTES: Final = 32
_NO_MAC: Final = bytes(_MAC_NBYTES)


class RemoteFailure(RuntimeError):
    """The other end has failed, and says why."""


@dataclass(slots=True)
class Channel:
    """One end of a connected stream socket.

    Attributes:
        connection: The socket. Whoever made it closes it.
        deadline: Of all that is to come, by `time.monotonic`.
        key: What authenticates frames; None: nothing does.
        serves: Which of the two ends this is.
        num_sent: Frames sent so far.
        num_received: Frames received so far.
    """

    connection: socket.socket
    deadline: float
    key: bytes | None = None
    serves: bool = False
    num_sent: int = 0
    num_received: int = 0

    def send(self, payload: bytes) -> None:
        """Send a frame.

        Raises:
            TimeoutError: The other end takes nothing, and the deadline has passed.
            OSError: The connection is broken.
        """
        self._send(_DATA, payload)

    def send_failure(self, reason: str) -> None:
        """Tell the other end that this one gives up. Raises as `send` does."""
        self._send(_FAILURE, reason.encode()[:1000])

    def _send(self, kind: int, payload: bytes) -> None:
        assert len(payload) <= MAX_NBYTES
        self._allow()
        mac = self._mac(self.serves, self.num_sent, kind, payload)
        head = _HEAD.pack(1 + len(payload) + _MAC_NBYTES, kind)
        self.connection.sendall(head + payload + mac)
        self.num_sent += 1

    def receive(self) -> bytes:
        """Return the next frame's payload.

        Raises:
            EOFError: The other end has ended.
            MetadataError: The frame is too long, of no known kind, or not authenticated.
            OSError: The connection is broken.
            RemoteFailure: The other end gives up.
            TimeoutError: The deadline has passed.
        """
        length, kind = _HEAD.unpack(self._take(_HEAD.size))
        nbytes = length - 1 - _MAC_NBYTES
        if not 0 <= nbytes <= MAX_NBYTES or kind not in (_DATA, _FAILURE):
            raise MetadataError(
                f"a frame of {length} bytes and kind {kind} is none of the doctor's"
            )
        payload, mac = self._take(nbytes), self._take(_MAC_NBYTES)
        expected = self._mac(not self.serves, self.num_received, kind, payload)
        if not hmac.compare_digest(mac, expected):
            raise MetadataError("a frame is not authenticated as the shared secret demands")
        self.num_received += 1
        if kind == _FAILURE:
            raise RemoteFailure(payload.decode(errors="replace"))
        return payload

    def ready(self) -> bool:
        """Say whether something has arrived, be it the end."""
        return bool(select.select([self.connection], [], [], 0)[0])

    def _allow(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end did not answer in time")
        self.connection.settimeout(left)

    def _take(self, nbytes: int) -> bytes:
        received = b""
        while len(received) < nbytes:
            self._allow()
            try:
                piece = self.connection.recv(nbytes - len(received))
            except TimeoutError:
                raise TimeoutError("the other end did not answer in time") from None
            if not piece:
                raise EOFError("the other process ended")
            received += piece
        return received

    def _mac(self, from_server: bool, number: int, kind: int, payload: bytes) -> bytes:
        if self.key is None:
            return _NO_MAC
        head = struct.pack("<BQB", from_server, number, kind)
        return hmac.digest(self.key, head + payload, "sha256")


def greet(connection: socket.socket, deadline: float, *, serves: bool, secret: str) -> Channel:
    """Exchange greetings and a first frame, which proves that both know the secret.

    See [Note: doctor's channel].

    Args:
        connection: A connected socket.
        deadline: Of the channel.
        serves: Which of the two ends this is.
        secret: Shared by both; empty: there is none.

    Raises:
        EOFError: The other end has ended.
        MetadataError: The other end is no doctor, or has another secret, or none.
        OSError: The connection is broken, or the deadline has passed.
        RemoteFailure: The other end gives up.
    """
    root = derive(secret.encode(), "doctor") if secret else None
    ours = secrets.token_bytes(16)
    channel = Channel(connection, deadline, serves=serves)
    channel._allow()
    connection.sendall(_GREETING.pack(_PROTOCOL, key_id(root), serves, ours))
    protocol, theirs_id, theirs_serves, theirs = _GREETING.unpack(channel._take(_GREETING.size))
    if protocol != _PROTOCOL or theirs_serves == serves:
        raise MetadataError("the other end is no `torch-nixl doctor` of this version")
    check_key_id(theirs_id, key_id(root), "the other doctor's greeting")
    if root is not None:
        channel.key = hmac.digest(root, theirs + ours if serves else ours + theirs, "sha256")
    channel.send(b"")
    channel.receive()
    return channel
