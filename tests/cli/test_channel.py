"""The frames between two doctors: whatever a stranger sends, it ends, and in time."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from torch_nixl.cli.doctor.channel import MAX_NBYTES, Channel, RemoteFailure, greet
from torch_nixl.errors import MetadataError

SOON_S = 20.0
REFUSALS = (EOFError, MetadataError, OSError, RemoteFailure)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _meet(
    ends: tuple[socket.socket, socket.socket], first: str, second: str
) -> list[Channel | Exception]:
    """Have both ends greet each other; return their channels or errors."""
    results: list[Channel | Exception] = [TimeoutError(), TimeoutError()]

    def run(index: int, secret: str) -> None:
        try:
            deadline = time.monotonic() + SOON_S
            results[index] = greet(ends[index], deadline, serves=index == 1, secret=secret)
        except REFUSALS as error:
            results[index] = error
            ends[index].close()

    threads = [
        threading.Thread(target=run, args=(index, secret), daemon=True)
        for index, secret in enumerate((first, second))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S + 5)
    return results


def _channels(ends: tuple[socket.socket, socket.socket], secret: str) -> tuple[Channel, Channel]:
    first, second = _meet(ends, secret, secret)
    assert isinstance(first, Channel)
    assert isinstance(second, Channel)
    return first, second


@pytest.mark.parametrize("secret", ["", "a secret"])
def test_frames_arrive_in_order_and_whole(
    ends: tuple[socket.socket, socket.socket], secret: str
) -> None:
    first, second = _channels(ends, secret)
    assert (first.key is None) is (second.key is None) is (not secret)
    payloads = [b"", b"x", bytes(100_000)]
    for payload in payloads:
        first.send(payload)
        assert second.ready()
        second.send(payload)
        assert second.receive() == first.receive() == payload
    assert not first.ready()
    first.send_failure("no bytes")
    with pytest.raises(RemoteFailure, match="no bytes"):
        second.receive()


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", ""), ("", "b")])
def test_ends_with_different_secrets_refuse_each_other(
    ends: tuple[socket.socket, socket.socket], first: str, second: str
) -> None:
    results = _meet(ends, first, second)
    assert all(isinstance(result, REFUSALS) for result in results)
    assert any("TORCH_NIXL_SECRET" in str(result) for result in results)


def _flip(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


@pytest.mark.parametrize("alter", [_flip, lambda frame: frame[:4] + b"\x01" + frame[5:]])
def test_altered_frame_is_refused(
    ends: tuple[socket.socket, socket.socket], alter: Callable[[bytes], bytes]
) -> None:
    first, second = _channels(ends, "a secret")
    first.send(b"payload")
    frame = ends[1].recv(1000)
    ends[0].sendall(alter(frame))
    with pytest.raises(MetadataError, match="not authenticated"):
        second.receive()


def test_repeated_and_reflected_frames_are_refused(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    first, second = _channels(ends, "a secret")
    first.send(b"payload")
    frame = ends[1].recv(1000)
    ends[0].sendall(frame + frame)
    assert second.receive() == b"payload"
    with pytest.raises(MetadataError, match="not authenticated"):
        second.receive()
    ends[1].sendall(frame)
    with pytest.raises(MetadataError, match="not authenticated"):
        first.receive()


@pytest.mark.parametrize("length", [0, 32, 34 + MAX_NBYTES, (1 << 32) - 1])
def test_length_that_no_frame_has_is_refused_before_it_is_awaited(
    ends: tuple[socket.socket, socket.socket], length: int
) -> None:
    channel = Channel(ends[0], time.monotonic() + SOON_S)
    ends[1].sendall(struct.pack("<IB", length, 0))
    with pytest.raises(MetadataError, match="none of the doctor's"):
        channel.receive()


def _fill(channel: Channel) -> None:
    for _ in range(100):
        channel.send(bytes(MAX_NBYTES))


def test_silence_ends_at_the_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        Channel(ends[0], time.monotonic() + 0.05).receive()
    with pytest.raises(TimeoutError):
        greet(ends[0], time.monotonic() + 0.05, serves=False, secret="")
    # One byte now and then does not extend it.
    ends[1].sendall(b"\x00")
    with pytest.raises(TimeoutError):
        Channel(ends[0], time.monotonic() + 0.05).receive()
    with pytest.raises(TimeoutError):
        _fill(Channel(ends[0], time.monotonic() + 0.2))


def test_end_of_the_other_is_noticed(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    with pytest.raises((EOFError, OSError)):
        greet(ends[0], time.monotonic() + SOON_S, serves=False, secret="")


@pytest.mark.parametrize("secret", ["", "a secret"])
def test_whatever_a_stranger_sends_is_refused(secret: str) -> None:
    source = random.Random(7)
    for _ in range(300):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            start = b"torch_nixl doctor 1\n" if source.random() < 0.5 else b""
            theirs.sendall(start + source.randbytes(source.randrange(200)))
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(REFUSALS):
                greet(ours, time.monotonic() + SOON_S, serves=True, secret=secret)
