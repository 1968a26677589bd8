from __future__ import annotations

import os
import re
import struct
import threading
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nixl.engine import wire
from torch_nixl.engine.adapter import Direction
from torch_nixl.errors import MetadataError

SOAK = os.environ.get("TORCH_NIXL_SOAK") == "1"
FUZZ = settings(
    max_examples=100_000 if SOAK else 150, derandomize=not SOAK, deadline=None, database=None
)
pytestmark = pytest.mark.timeout(3600 if SOAK else 60)

SECRET = b"correct horse battery staple"
KEY = bytes(range(16))
HOME = wire.Identity(b"h" * 16, 4711, 123456789)
FRAMES: list[wire.Frame] = [
    wire.Hello(b"n" * 16, HOME, 1, 3, b"sealed metadata"),
    wire.Hello(b"n" * 16, HOME, 1, 1, b""),
    wire.HelloAck(b"n" * 16, b"o" * 16, HOME),
    wire.Bye("closing"),
    wire.Bye(""),
    wire.Ping(2**64 - 1),
    wire.Pong(0),
    wire.Claim(KEY, 7, Direction.READ, 2**40, 3),
    wire.Claim(KEY, 7, Direction.WRITE, 0, 0),
    wire.Granted(KEY, 7),
    *(wire.Refuse(KEY, 7, reason, "because") for reason in wire.Reason),
    *(wire.Done(KEY, 7, outcome, "größer") for outcome in wire.Outcome),
    wire.Revoke(KEY, 7, wire.Reason.EXPIRED, ""),
    wire.Assist(KEY, 7, 2**63, b"an offer"),
]
NUMBERS = st.integers(0, 2**64 - 1)
TEXTS = st.text(max_size=200)
SIXTEEN = st.binary(min_size=16, max_size=16)
IDENTITIES = st.builds(wire.Identity, SIXTEEN, st.integers(0, 2**32 - 1), NUMBERS)
ANY_FRAME: st.SearchStrategy[wire.Frame] = st.one_of(
    st.builds(
        wire.Hello, SIXTEEN, IDENTITIES, st.integers(0, 255), st.integers(0, 255), st.binary()
    ),
    st.builds(wire.HelloAck, SIXTEEN, SIXTEEN, IDENTITIES),
    st.builds(wire.Bye, TEXTS),
    st.builds(wire.Ping, NUMBERS),
    st.builds(wire.Pong, NUMBERS),
    st.builds(
        wire.Claim,
        SIXTEEN,
        NUMBERS,
        st.sampled_from(Direction),
        NUMBERS,
        st.integers(0, 2**32 - 1),
    ),
    st.builds(wire.Granted, SIXTEEN, NUMBERS),
    st.builds(wire.Refuse, SIXTEEN, NUMBERS, st.sampled_from(wire.Reason), TEXTS),
    st.builds(wire.Done, SIXTEEN, NUMBERS, st.sampled_from(wire.Outcome), TEXTS),
    st.builds(wire.Revoke, SIXTEEN, NUMBERS, st.sampled_from(wire.Reason), TEXTS),
    st.builds(wire.Assist, SIXTEEN, NUMBERS, NUMBERS, st.binary()),
)


def codec(secret: bytes | None = None, name: str = "", incarnation: int = 5) -> wire.Codec:
    return wire.Codec(incarnation, secret, name=name)


def refused(data: bytes, secret: bytes | None = None, match: str | None = None) -> None:
    with pytest.raises(MetadataError, match=match):
        codec(secret).unpack("a", data)


def with_crc(kind: int, body: bytes, **changes: int) -> bytes:
    """A frame by hand, with a right checksum, whatever else is wrong with it."""
    field = {"version": 1, "key_id": 0, "flags": 0, "zero": 0, "zeros": 0, "nbytes": len(body)}
    field |= changes
    head = struct.pack(
        "<2sBBBBHIIQQ",
        b"TN",
        field["version"],
        kind,
        field["key_id"],
        field["flags"],
        field["zero"],
        field["nbytes"],
        field["zeros"],
        5,
        1,
    )
    checksum = zlib.crc32(head + body[: wire.CHECKED_NBYTES])
    return head + checksum.to_bytes(4, "little") + bytes(12) + body


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("names", [("", ""), ("agent-a", "agent-b")])
def test_every_frame_comes_back_as_it_was(secret: bytes | None, names: tuple[str, str]) -> None:
    sender, receiver = codec(secret, names[0]), codec(secret, names[1])
    for frame in FRAMES:
        data = sender.pack(frame, to=names[1])
        assert receiver.unpack(names[0] or "a", data) == frame


def test_the_checksum_covers_the_beginning_and_a_mac_the_whole_of_a_long_body() -> None:
    body = bytes(wire.CHECKED_NBYTES + 100)
    for at in (wire.CHECKED_NBYTES - 1, wire.CHECKED_NBYTES, len(body) - 1):
        for secret in (None, SECRET):
            data = bytearray(codec(secret).pack_raw(40, body))
            data[wire.HEADER_NBYTES + at] ^= 1
            if secret is None and at >= wire.CHECKED_NBYTES:
                assert codec(secret).unpack("a", bytes(data)).body[at] == 1  # type: ignore[union-attr]
            else:
                refused(bytes(data), secret, "damaged")


@FUZZ
@given(ANY_FRAME, st.sampled_from([None, SECRET]))
def test_any_frame_comes_back_as_it_was(frame: wire.Frame, secret: bytes | None) -> None:
    assert codec(secret).unpack("a", codec(secret).pack(frame)) == frame


@FUZZ
@given(st.integers(32, 127), st.binary(max_size=300), st.sampled_from([None, SECRET]))
def test_raw_frames_carry_bodies_of_other_layers(
    kind: int, body: bytes, secret: bytes | None
) -> None:
    data = codec(secret).pack_raw(kind, body)
    assert codec(secret).unpack("a", data) == wire.RawFrame(kind, body)


def test_layout_is_the_documented_one() -> None:
    data = codec().pack(wire.Done(KEY, 0x0102030405060708, wire.Outcome.FAILED, "ab"))
    assert len(data) == 48 + 27
    assert data[:32].hex() == "544e0109000000001b0000000000000005000000000000000000000000000000"
    assert data[36:48] == bytes(12)
    assert data[48:] == KEY + bytes([8, 7, 6, 5, 4, 3, 2, 1, 2]) + b"ab"


def test_the_documented_example_is_true() -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    rows = re.findall(r"^((?:[0-9a-f]{2} +)+)  ", text, re.MULTILINE)
    data = codec().pack(wire.Done(KEY, 7, wire.Outcome.FAILED, "ab"))
    assert bytes.fromhex("".join(rows)) == data


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_frame_cut_at_any_length_is_refused(secret: bytes | None) -> None:
    for frame in FRAMES:
        data = codec(secret).pack(frame)
        for end in range(len(data)):
            refused(data[:end], secret)
        refused(data + b"\0", secret)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_frame_with_any_one_bit_flipped_is_refused(secret: bytes | None) -> None:
    for frame in FRAMES:
        data = bytearray(codec(secret).pack(frame))
        for at in range(len(data)):
            for bit in range(8):
                data[at] ^= 1 << bit
                refused(bytes(data), secret)
                data[at] ^= 1 << bit


@FUZZ
@given(st.binary(max_size=400), st.sampled_from([None, SECRET]))
def test_random_bytes_are_refused(data: bytes, secret: bytes | None) -> None:
    refused(data, secret)
    refused(b"TN\x01" + data, secret)


@FUZZ
@given(st.integers(0, 255), st.binary(max_size=120))
def test_random_bodies_of_any_kind_are_read_or_refused(kind: int, body: bytes) -> None:
    data = with_crc(kind, body)
    try:
        frame = codec().unpack("a", data)
    except MetadataError:
        return
    if isinstance(frame, wire.RawFrame):
        assert (frame.kind, frame.body) == (kind, body)
    else:
        # Nothing of an accepted body was overlooked.
        assert codec().pack(frame)[48:] == body


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"version": 2}, "version 2"),
        ({"version": 0}, "version 0"),
        ({"flags": 2}, "zero"),
        ({"flags": 1}, "binds"),
        ({"zero": 1}, "zero"),
        ({"zeros": 1}, "zero"),
        ({"nbytes": 9}, "claims"),
        ({"nbytes": 2**32 - 1}, "claims"),
        ({"key_id": 1}, "TORCH_NIXL_SECRET"),
    ],
)
def test_a_header_that_version_1_does_not_know_is_refused(
    changes: dict[str, int], match: str
) -> None:
    assert codec().unpack("a", with_crc(4, bytes(8))) == wire.Ping(0)
    refused(with_crc(4, bytes(8), **changes), match=match)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (0, b""),
        (11, b""),
        (31, b""),
        (128, b""),
        (255, b""),
        (4, bytes(7)),
        (4, bytes(9)),
        (3, b"\xff"),
        (3, bytes(1025)),
        (6, bytes(37)),
        (8, bytes(24) + b"\x0a"),
        (8, bytes(25)),
        (9, bytes(24) + b"\x06"),
        (11, bytes(31)),
        (9, bytes(24) + b"\x01\xc3"),
        (1, bytes(46 + (256 << 10) + 1)),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(kind: int, body: bytes) -> None:
    refused(with_crc(kind, body), match=f"kind {kind}")


def test_frames_have_to_be_as_authenticated_as_the_receiver_is() -> None:
    ping = wire.Ping(1)
    refused(codec().pack(ping), SECRET, "not authenticated")
    refused(codec(SECRET).pack(ping), None, "no secret")
    refused(codec(b"another secret").pack(ping), SECRET, "another secret")


def test_a_forged_mac_is_refused_even_with_the_right_key_id() -> None:
    data = bytearray(codec(SECRET).pack(wire.Ping(1)))
    data[32:48] = bytes(16)
    refused(bytes(data), SECRET, "damaged")


def test_bound_frames_are_good_only_from_and_for_whom_they_say() -> None:
    secret = SECRET
    a, b, c = (codec(secret, name) for name in "abc")
    data = a.pack(wire.Ping(1), to="b")
    with pytest.raises(MetadataError, match="from or for"):
        c.unpack("a", data)
    with pytest.raises(MetadataError, match="from or for"):
        b.unpack("x", data)
    with pytest.raises(MetadataError, match="binds"):
        codec(secret).unpack("a", data)
    with pytest.raises(MetadataError, match="binds"):
        b.unpack("a", codec(secret).pack(wire.Ping(1)))
    assert b.unpack("a", data) == wire.Ping(1)


def test_names_cannot_be_shifted_between_sender_and_receiver() -> None:
    data = codec(SECRET, "ab").pack(wire.Ping(1), to="c")
    with pytest.raises(MetadataError, match="from or for"):
        codec(SECRET, "bc").unpack("a", data)


def test_a_codec_with_a_name_wants_to_know_whom_a_frame_is_for() -> None:
    with pytest.raises(ValueError, match="whom"):
        codec(None, "a").pack(wire.Ping(1))
    with pytest.raises(ValueError, match="whom"):
        codec(None).pack(wire.Ping(1), to="b")


def test_without_a_secret_names_and_replays_are_not_looked_at() -> None:
    """They would prove nothing: anyone can make a frame of anyone."""
    receiver = codec(None, "b")
    data = codec(None, "a").pack(wire.Ping(1), to="c")
    assert receiver.unpack("x", data) == receiver.unpack("x", data) == wire.Ping(1)


def test_a_frame_is_accepted_once() -> None:
    receiver = codec(SECRET)
    data = codec(SECRET).pack(wire.Ping(1))
    receiver.unpack("a", data)
    with pytest.raises(MetadataError, match="seen before"):
        receiver.unpack("a", data)
    receiver.unpack("b", data)
    receiver.forget("a")
    receiver.unpack("a", data)


def test_a_refused_frame_does_not_use_up_its_number() -> None:
    receiver, data = codec(SECRET), codec(SECRET).pack(wire.Ping(1))
    broken = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(MetadataError):
        receiver.unpack("a", broken)
    assert receiver.unpack("a", data) == wire.Ping(1)


def test_frames_of_an_earlier_incarnation_are_refused() -> None:
    receiver = codec(SECRET)
    old, new = codec(SECRET, incarnation=5), codec(SECRET, incarnation=6)
    receiver.unpack("a", old.pack(wire.Ping(1)))
    receiver.unpack("a", new.pack(wire.Ping(2)))
    with pytest.raises(MetadataError, match="seen before"):
        receiver.unpack("a", old.pack(wire.Ping(3)))
    receiver.unpack("a", new.pack(wire.Ping(4)))


def test_the_number_of_remembered_senders_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.Codec, "MAX_SENDERS", 3)
    receiver, data = codec(SECRET), codec(SECRET).pack(wire.Ping(1))
    for sender in "abcd":
        receiver.unpack(sender, data)
    receiver.unpack("a", data)
    with pytest.raises(MetadataError):
        receiver.unpack("d", data)


@FUZZ
@given(st.lists(st.integers(0, 600), max_size=60))
def test_the_guard_accepts_what_it_has_not_seen_within_its_window(counters: list[int]) -> None:
    guard = wire.ReplayGuard()
    seen: set[int] = set()
    for counter in counters:
        highest = max(seen, default=0)
        new = counter > 0 and counter not in seen and counter > highest - guard.WINDOW
        assert guard.accept(9, counter) is new
        if new:
            seen.add(counter)


def test_many_threads_number_their_frames_without_repeats() -> None:
    sender, receiver = codec(SECRET), codec(SECRET)
    packed: list[list[bytes]] = [[] for _ in range(4)]
    start = threading.Barrier(4)

    def pack(mine: list[bytes]) -> None:
        start.wait(20)
        mine.extend(sender.pack(wire.Ping(i)) for i in range(50))

    threads = [threading.Thread(target=pack, args=(mine,)) for mine in packed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    frames = [data for mine in packed for data in mine]
    assert len({receiver.unpack("a", data) is not None and data[24:32] for data in frames}) == 200


def test_texts_are_cut_between_characters() -> None:
    frame = codec().unpack("a", codec().pack(wire.Bye("ü" * 2000 + "\ud800")))
    assert frame == wire.Bye("ü" * 512)
    frame = codec().unpack("a", codec().pack(wire.Bye("x" + "ü" * 2000)))
    assert frame == wire.Bye("x" + "ü" * 511)
    assert codec().unpack("a", codec().pack(wire.Bye("\ud800"))) == wire.Bye("?")


@pytest.mark.parametrize(
    "frame",
    [
        wire.Granted(b"short", 1),
        wire.Granted(bytes(17), 1),
        wire.Granted(KEY, -1),
        wire.Ping(2**64),
        wire.HelloAck(KEY, KEY, wire.Identity(b"", 1, 1)),
        wire.Hello(KEY, HOME, 1, 256, b""),
        wire.Hello(KEY, HOME, 1, 1, bytes((256 << 10) + 1)),
        wire.Assist(KEY, 1, -1, b""),
        wire.Assist(KEY, 1, 0, bytes((64 << 10) + 1)),
    ],
)
def test_values_that_do_not_fit_are_refused_when_packing(frame: wire.Frame) -> None:
    with pytest.raises(ValueError, match=type(frame).__name__):
        codec().pack(frame)


def test_raw_frames_are_bounded_when_packing() -> None:
    for kind in (0, 10, 31, 128):
        with pytest.raises(ValueError, match="kind"):
            codec().pack_raw(kind, b"")
    with pytest.raises(ValueError, match="limit"):
        codec().pack_raw(32, bytes(wire.MAX_BODY + 1))
    largest = codec().pack_raw(32, bytes(wire.MAX_BODY))
    assert len(largest) == wire.MAX_FRAME
    codec().unpack("a", largest)
    refused(largest + b"\0", match="has to be")


@pytest.mark.parametrize(("incarnation", "secret"), [(0, None), (2**64, None), (1, b"")])
def test_a_codec_refuses_impossible_arguments(incarnation: int, secret: bytes | None) -> None:
    with pytest.raises(ValueError, match=r"incarnation|secret"):
        wire.Codec(incarnation, secret)


def test_refusals_neither_quote_bytes_nor_allocate() -> None:
    payload = b"PASSWORD" * 1000
    cases = [payload, with_crc(3, payload), with_crc(4, payload, nbytes=2**32 - 1)]
    receiver = codec()
    tracemalloc.start()
    try:
        for data in cases:
            with pytest.raises(MetadataError) as caught:
                receiver.unpack("a", data)
            assert "PASSWORD" not in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_frames_to_many_receivers_are_numbered_without_a_table_of_them() -> None:
    sender = codec(SECRET, "a")
    receivers = [codec(SECRET, f"b{index}") for index in range(300)]
    for _ in range(3):
        for index, receiver in enumerate(receivers):
            data = sender.pack_raw(40, b"body", to=f"b{index}")
            assert receiver.open("a", data) == (40, b"body")
            with pytest.raises(MetadataError, match="seen before"):
                receiver.open("a", data)
    sizes = [len(one) for one in vars(sender).values() if isinstance(one, dict | set | list)]
    assert sum(sizes) == 0
