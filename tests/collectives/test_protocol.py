"""Signatures, tags and frames of collectives, without I/O."""

from __future__ import annotations

import tracemalloc

import pytest

from torch_nixl.collectives import choice, protocol
from torch_nixl.collectives.protocol import number_of, parse_call, parse_fail, sign, tag_of
from torch_nixl.errors import (
    ClosedError,
    LeaseExpired,
    MetadataError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p.tensors import MismatchError


def test_tags_are_below_zero_distinct_and_fit_their_field() -> None:
    marks = (0, (1 << 30) - 1, sign("barrier", "").mark)
    tags = {
        tag_of(number, mark, phase)
        for number in (0, 1, 12345, (1 << 31) - 1)
        for mark in marks
        for phase in range(protocol.MAX_PHASE + 1)
    }
    assert len(tags) == 4 * 3 * 4
    assert all(-(1 << 63) <= tag < 0 for tag in tags)


@pytest.mark.parametrize("number", [0, 7, (1 << 31) - 1, 1 << 31, (1 << 40) + 5])
def test_number_of_a_tag_is_found_near_another_number(number: int) -> None:
    tag = tag_of(number, 99, 1)
    for near in (number - 1000, number, number + 1000):
        assert number_of(tag, max(0, near)) == number


def test_signatures_differ_in_any_detail() -> None:
    one = sign("all_reduce", "[3] of torch.float32, op=sum")
    assert one == sign("all_reduce", "[3] of torch.float32, op=sum")
    assert one.mark != sign("all_reduce", "[3] of torch.float32, op=max").mark
    assert one.mark != sign("reduce", "[3] of torch.float32, op=sum").mark


def test_long_signatures_are_cut_and_still_differ() -> None:
    one, other = (sign("all_reduce", "[3] " * 2000 + end) for end in ("[4]", "[5]"))
    assert one.text != other.text
    assert len(one.text) < protocol.MAX_TEXT
    assert parse_call(protocol.pack_call(1, 2, one.text)) == (2, one.text)


def test_long_signatures_are_not_kept() -> None:
    tracemalloc.start()
    try:
        for count in range(50):
            assert sign("all_reduce", "[3] " * 50_000 + str(count)) is not None
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frames_are_read_as_they_were_written() -> None:
    assert parse_call(protocol.pack_call(1, 1 << 40, "é")) == (1 << 40, "é")
    long = "x" * 10_000
    assert parse_call(protocol.pack_call(1, 2, long)) == (2, long[: protocol.MAX_TEXT])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TransferTimeout("a"), TransferTimeout),
        (MismatchError("a"), MismatchError),
        (PeerLostError("a"), PeerLostError),
        (TransferCancelled("a"), TransferCancelled),
        (ClosedError("a"), ClosedError),
        (TransferError("a"), TransferError),
        (LeaseExpired("a"), TransferError),
    ],
)
def test_type_of_an_error_travels(error: Exception, kind: type[Exception]) -> None:
    assert parse_fail(protocol.pack_fail(1, 5, error)) == (5, kind, "a")


@pytest.mark.parametrize("body", [b"", b"\0" * 11, b"\0" * 12 + b"\xff", b"\0" * 5000])
def test_garbage_is_refused(body: bytes) -> None:
    with pytest.raises(MetadataError):
        parse_call(body)


@pytest.mark.parametrize("body", [b"", b"\0" * 12, b"\0" * 12 + b"\x63", b"\0" * 13 + b"\xff"])
def test_garbage_of_a_failure_is_refused(body: bytes) -> None:
    with pytest.raises(MetadataError):
        parse_fail(body)


@pytest.mark.parametrize("size", [2, 3, 4, 16, 100])
@pytest.mark.parametrize("segment", [1 << 20, 3 << 20, 64 << 20])
def test_chunks_of_all_ranks_fit_in_the_output(size: int, segment: int) -> None:
    for output in (segment, size * segment):
        count = choice.num_chunks(segment, output, size)
        chunk = -(-segment // count)
        received = min(count, 2) * (size - 1) * chunk
        # Of bfloat16, accumulated in float32.
        total = 4 * choice.total_numel(chunk // 2)
        least = (2 * (size - 1) + 1) * choice.MIN_CHUNK_NBYTES
        assert received + total <= max(output + 1024, least)
