"""The frames of channels: they go over whole, and garbage is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.errors import MetadataError
from torch_nixl.p2p import terms
from torch_nixl.p2p.description import Description, describe
from torch_nixl.p2p.place import PlacedRegion, pack_place
from torch_nixl.p2p.protocol import Outcome
from torch_nixl.p2p.terms import Role

TENSOR = describe(torch.zeros(2, 3))
EMPTY = describe(torch.zeros(0, dtype=torch.int8))
PLACE = pack_place(
    [PlacedRegion(MemoryKind.DRAM, 7, 1, b"blob")], np.array([[4096, 24, 5]], np.uint64)
)
CHANNEL = terms.pack_channel(9, 11, 13, [("['w'][0]", TENSOR, PLACE), ("", EMPTY, b"")])


def test_a_channel_comes_whole() -> None:
    theirs = terms.parse_channel(CHANNEL)
    assert (theirs.number, theirs.tag) == (11, 13)
    first, second = theirs.leaves
    assert (first.path, str(first.description)) == ("['w'][0]", str(TENSOR))
    assert first.place is not None and first.place.regions[0] == (MemoryKind.DRAM, 7, 1, b"blob")
    assert (second.path, second.place) == ("", None)


def test_a_channel_that_is_cut_or_altered_is_refused_or_makes_sense() -> None:
    for size in range(len(CHANNEL)):
        with pytest.raises(MetadataError):
            terms.parse_channel(CHANNEL[:size])
    with pytest.raises(MetadataError, match="behind"):
        terms.parse_channel(CHANNEL + b"\0")
    rng = random.Random(1)
    for _ in range(3000):
        body = bytearray(CHANNEL)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            for leaf in terms.parse_channel(bytes(body)).leaves:
                nbytes = 0 if leaf.place is None else leaf.place.nbytes
                assert nbytes == leaf.description.nbytes
        except MetadataError:
            continue


def test_short_frames_come_whole() -> None:
    assert terms.parse_agree(terms.pack_agree(1, 2, 3, reads=True)) == (2, 3, True)
    ready = terms.pack_ready(1, 2, 3, Role.RECEIVE, terms.SPLIT)
    assert terms.parse_ready(ready) == (2, 3, Role.RECEIVE, terms.SPLIT)
    assert terms.parse_moved(terms.pack_moved(1, 2, 3)) == (2, 3)
    ended = terms.pack_break(1, 2, 3, Outcome.CANCELLED, "why")
    assert terms.parse_break(ended) == (2, 3, Outcome.CANCELLED, "why")
    assert len(terms.parse_break(terms.pack_break(1, 2, 3, Outcome.FAILED, "é" * 2000))[3]) == 512


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (terms.parse_agree, terms.pack_agree(1, 2, 3, reads=True)[:-1] + b"\2"),
        (terms.parse_agree, b""),
        (terms.parse_ready, terms.pack_ready(1, 2, 3, Role.SEND, 0)[:-1] + b"\4"),
        (terms.parse_ready, terms.pack_ready(1, 2, 3, Role.SEND, 0)[:-2] + b"\2\0"),
        (terms.parse_ready, b"x"),
        (terms.parse_moved, b"x" * 50),
        (terms.parse_break, b""),
        (terms.parse_break, terms.pack_break(1, 2, 3, Outcome.COMPLETE, "")),
        (terms.parse_break, terms.pack_break(1, 2, 3, Outcome.PART, "")),
        (terms.parse_break, terms.pack_break(1, 2, 3, Outcome.FAILED, "") + b"\xff"),
        (terms.parse_break, terms.pack_break(1, 2, 3, Outcome.FAILED, "") + b"x" * 1025),
    ],
)
def test_frames_that_can_not_be_are_refused(parse: object, body: bytes) -> None:
    assert callable(parse)
    with pytest.raises(MetadataError):
        parse(body)


def tree(**tensors: torch.Tensor) -> list[tuple[str, Description]]:
    return [(name, describe(tensor)) for name, tensor in tensors.items()]


def test_the_first_difference_is_named() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    assert terms.difference(tree(x=a, y=b), tree(y=b, x=a)) == ""
    assert "x: [2] of torch.float32 here, [3]" in terms.difference(tree(x=a), tree(x=b))
    assert "y: nothing here" in terms.difference(tree(x=a), tree(x=a, y=b))
    assert "y: [3] of torch.float32 here, nothing" in terms.difference(tree(x=a, y=b), tree(x=a))
    assert "float64 there" in terms.difference(tree(x=a), tree(x=a.double()))
    assert "the tensor: " in terms.difference([("", describe(a))], [("", describe(b))])
