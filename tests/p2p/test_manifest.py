"""Manifests of trees, driven with whatever Hypothesis thinks of, and what is built of them."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_nixl.errors import MetadataError
from torch_nixl.p2p.bundles import ONE_PIECE, arrange, choose_num_apart
from torch_nixl.p2p.description import Bundle, Description, Form, describe
from torch_nixl.p2p.description import parse as parse_content
from torch_nixl.p2p.fitting import build, fill, match
from torch_nixl.p2p.manifest import MAX_DEPTH, MAX_MANIFEST, Packed, parse
from torch_nixl.p2p.tensors import MismatchError

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Batch:
    ids: Any
    step: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    value: Any


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 300), 1 << 300),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None)),
    st.binary(),
)
TENSORS = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
KEYS = st.one_of(
    st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.floats(allow_nan=False)
)
TREES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Batch, inner, inner),
    ),
    max_leaves=20,
)


def plain(tree: Any) -> Any:
    """What a tree is without the receiver's types, in a form that compares."""
    if isinstance(tree, torch.Tensor):
        return ("tensor", tree.dtype, tuple(tree.shape))
    if isinstance(tree, dict):
        return ("dict", [(type(key), key, plain(value)) for key, value in tree.items()])
    if dataclasses.is_dataclass(tree):
        names = [field.name for field in dataclasses.fields(tree)]
        return ("dict", [(str, name, plain(getattr(tree, name))) for name in names])
    if isinstance(tree, (list, tuple)):
        name = "list" if isinstance(tree, list) else "tuple"
        return (name, [plain(value) for value in tree])
    if isinstance(tree, float):
        return struct.pack("<d", tree)
    if isinstance(tree, complex):
        return struct.pack("<dd", tree.real, tree.imag)
    return (type(tree), tree)


@given(TREES)
def test_tree_survives_the_wire(tree: Any) -> None:
    packed = Packed(tree, "tree")
    root, descriptions = parse(packed.manifest)
    assert [str(one) for one in descriptions] == [str(one) for one in packed.descriptions]
    built = build(root, packed.tensors)
    assert plain(built) == plain(tree)


@given(TREES)
def test_tree_fits_itself_and_is_built_of_its_own_types(tree: Any) -> None:
    packed = Packed(tree, "tree")
    root, descriptions = parse(packed.manifest)
    for name in ("like", "out"):
        found = match(root, descriptions, tree, name=name)
        assert [id(one) for one in found] == [id(one) for one in packed.tensors]
    again = build(root, packed.tensors, tree)
    assert type(again) is type(tree)
    assert Packed(again, "tree").manifest == packed.manifest
    fill(root, tree)
    assert Packed(tree, "tree").manifest == packed.manifest


@given(TREES, st.data())
def test_manifest_that_is_cut_or_changed_is_refused_or_still_a_tree(
    tree: Any, data: st.DataObject
) -> None:
    manifest = Packed(tree, "tree").manifest
    cut = data.draw(st.integers(0, len(manifest) - 1))
    with pytest.raises(MetadataError):
        parse(manifest[:cut])
    with pytest.raises(MetadataError):
        parse(manifest + b"\0")
    changed = bytearray(manifest)
    changed[cut] ^= data.draw(st.integers(1, 255))
    try:
        root, descriptions = parse(bytes(changed))
    except MetadataError:
        return
    tensors = [torch.empty(0)] * len(descriptions)
    build(root, tensors)


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_nothing_else_is_raised(data: bytes) -> None:
    for call in (lambda: parse(data), lambda: parse_content(b"\xff" + data, 0)):
        try:
            call()
        except MetadataError:
            pass


@given(st.sampled_from(list(Form)), st.binary(max_size=100), st.integers(0, (1 << 63) - 1))
def test_description_of_a_bundle_survives_the_wire(form: Form, manifest: bytes, n: int) -> None:
    limit = n if form is Form.TREE else 0
    sent = Bundle(form, manifest if form is Form.TREE else b"", limit, n)
    parsed = parse_content(b"ab" + sent.packed + b"payload", 2)
    assert isinstance(parsed, Bundle)
    assert (parsed.form, parsed.manifest, parsed.num_apart, parsed.nbytes, parsed.packed) == (
        sent.form,
        sent.manifest,
        sent.num_apart,
        sent.nbytes,
        sent.packed,
    )
    for cut in range(len(sent.packed)):
        with pytest.raises(MetadataError):
            parse_content(sent.packed[:cut], 0)


def test_what_no_manifest_says_is_refused() -> None:
    def counted(kind: int, count: int) -> bytes:
        return bytes([kind]) + count.to_bytes(4, "little")

    deep = counted(9, 1) * MAX_DEPTH
    assert parse(deep + b"\0")
    for manifest, why in (
        (b"", "cut"),
        (b"\x63", "kind"),
        (counted(9, 1 << 31), "cut"),
        (counted(9, 1) * (MAX_DEPTH + 1) + b"\0", "nested"),
        (counted(11, 2) + (b"\x01\0" * 2), "twice"),
        (counted(11, 1) + b"\x08\0", "key"),
        (counted(3, 2) + b"\x01\x00", "shortest"),
        (counted(6, 1) + b"\xff", "text"),
        (b"\0" * (MAX_MANIFEST + 1), "limit"),
        (b"\x08\x0b\x00\x01\x00" + b"\xff" * 8, "2.63"),
    ):
        with pytest.raises(MetadataError, match=why):
            parse(manifest)
    with pytest.raises(MetadataError, match="object"):
        parse_content(Bundle(Form.OBJECT, b"x", 0, 0).packed, 0)


def test_what_can_not_be_sent_is_refused_by_path() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for tree, error, message in (
        ({"a": [1, object()]}, TypeError, r"tree: a\.1: a object"),
        ({"a": {2: {3}}}, TypeError, r"tree: a\.2: a set"),
        ({("k", 1): 1}, TypeError, r"tree: .*a key of type tuple"),
        ({"a": torch.zeros(1, device="meta")}, ValueError, r"tree: a: .*meta"),
        (loop, ValueError, "contains itself"),
        ("x" * MAX_MANIFEST, ValueError, "in parts"),
    ):
        with pytest.raises(error, match=message):
            Packed(tree, "tree")


def test_first_difference_is_named_by_its_path() -> None:
    def sent(tree: Any) -> tuple[Any, Any]:
        return parse(Packed(tree, "tree").manifest)

    weight = torch.zeros(3, 5)
    for tree, out, message in (
        (
            {"layers": [{"weight": weight}]},
            {"layers": [{"weight": torch.zeros(4, 5)}]},
            r"out: layers\.0\.weight: float32 \[4, 5\] expected, float32 \[3, 5\] sent",
        ),
        ({"a": weight}, {"a": weight.half()}, r"out: a: float16 .* expected, float32 .* sent"),
        ({"a": weight}, {"a": 1}, r"out: a: a int expected, float32 \[3, 5\] sent"),
        ({"a": 1}, {"a": weight}, r"out: a: float32 \[3, 5\] expected, 1 sent"),
        ({"a": 1}, {}, r"out: a: nothing expected, an entry"),
        ({}, {"a": 1}, r"out: a: an entry of that name expected, none sent"),
        ([1, 2], [1], r"out: \(root\): 1 entries expected, 2 sent"),
        ([1], (1,), r"out: \(root\): a tuple expected, a list sent"),
        (Point(1, 2), (1, 2), r"a tuple expected, a namedtuple sent"),
        ({"ids": 1, "step": 1}, Batch(1, 1), r"a Batch expected, a dict sent"),
        ((1,), (2,), r"out: 0: 2, which can't be replaced where it is, expected, 1 sent"),
        ({"f": Fixed(1)}, {"f": Fixed(True)}, r"out: f\.value: True, which can't"),
    ):
        root, descriptions = sent(tree)
        with pytest.raises(MismatchError, match=message):
            match(root, descriptions, out, name="out")


def test_scalars_are_replaced_where_that_is_possible() -> None:
    class Named(dict[str, Any]):
        pass

    out = {"step": 1, "rate": 0.1, "batch": Batch(None, [1, 2]), "fixed": Fixed([5])}
    sent = {"step": 2, "rate": math.inf, "batch": Batch("x", [3, None]), "fixed": Fixed([6])}
    root, descriptions = parse(Packed(sent, "tree").manifest)
    match(root, descriptions, out, name="out")
    fill(root, out)
    assert out == sent
    like: Any = OrderedDict(a=Named(b=Fixed(1)))
    like.note = "kept"
    root, _ = parse(Packed({"a": {"b": Fixed(2)}}, "tree").manifest)
    built = build(root, [], like)
    assert (type(built), type(built["a"]), built["a"]["b"]) == (OrderedDict, Named, Fixed(2))
    assert built.note == "kept"
    assert like["a"]["b"] == Fixed(1)


@given(st.lists(st.integers(0, 100_000), max_size=50), st.integers(0, 60))
def test_arrangement_has_every_byte_once(sizes: list[int], num_apart: int) -> None:
    descriptions = [describe(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    for chosen in (num_apart, ONE_PIECE, choose_num_apart(descriptions)):
        found = arrange(descriptions, chosen)
        side_by_side = [index for piece in found.pieces for index in piece.indices]
        assert sorted(side_by_side + found.apart) == [i for i, n in enumerate(sizes) if n]
        for piece in found.pieces:
            ends = [
                at + sizes[index] for at, index in zip(piece.offsets, piece.indices, strict=True)
            ]
            assert all(at % 16 == 0 for at in piece.offsets)
            assert all(end <= at for end, at in zip(ends, piece.offsets[1:], strict=False))
            assert ends[-1] <= piece.nbytes
        total = sum(piece.nbytes for piece in found.pieces)
        assert found.nbytes == total + sum(sizes[index] for index in found.apart)


def test_device_memory_is_never_put_into_a_frame() -> None:
    def on(device: str, size: int) -> Description:
        return Description(torch.uint8, (size,), device, b"")

    assert choose_num_apart([on("cpu", 8), on("cpu", 20_000)]) == ONE_PIECE
    assert choose_num_apart([on("cpu", 8), on("cuda", 0)]) == ONE_PIECE
    assert choose_num_apart([on("cpu", 8), on("cuda", 8)]) == 0
    assert choose_num_apart([on("cuda", 20_000), on("cuda", 8)]) == 1
    pieces = arrange([on("cuda", 8), on("cpu", 8), on("cuda", 24)], 0).pieces
    assert [(one.device, one.indices) for one in pieces] == [("cpu", [1]), ("cuda", [0, 2])]
