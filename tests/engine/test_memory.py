"""Objects to memory: the bytes that spans name, compared with what torch and numpy read."""

from __future__ import annotations

import array
import ctypes
import gc
import math
import mmap
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.engine.arrays import as_memory, buffer_memory
from torch_nixl.engine.memory import (
    Memory,
    address_memory,
    device_place,
    require_writable,
    tensor_memory,
)

bounded = settings(deadline=None, max_examples=150)  # A busy machine is no failure.

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.int"))
    }
    | {torch.int8, torch.int16, torch.int32, torch.int64},
    key=str,
)
RAW = torch.arange(4096).to(torch.uint8) ^ 0x5A
RAW_BYTES = bytes(RAW.tolist())

Array = npt.NDArray[np.generic]


def read(memory: Memory) -> bytes:
    """The bytes that a transfer would read, fetched span by span."""
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in memory.spans.tolist())


def check(memory: Memory) -> None:
    """What holds for every Memory."""
    assert memory.spans.dtype == np.uint64
    assert memory.spans.ndim == 2
    assert memory.spans.shape[1] == 2
    assert not memory.spans.flags.writeable
    assert memory.nbytes == algebra.total(memory.spans)
    assert algebra.merge(memory.spans) is memory.spans
    for address, nbytes in memory.spans.tolist():
        assert memory.base <= address and address + nbytes <= memory.base + memory.extent
    assert memory.writable == (memory.reason == "")
    if memory.anchor is not None:
        weakref.ref(memory.anchor)
    assert "owner" not in repr(memory)


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.dtype, list[int], list[int], int]:
    """A dtype, shape, strides and offset in elements, which fit into RAW."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    strides = [draw(st.integers(0, 17)) for _ in shape]
    if draw(st.booleans()):  # Dense, with permuted dimensions.
        step = 1
        for dim in draw(st.permutations(range(len(shape)))):
            strides[dim] = step
            step *= max(shape[dim], 1)
    reach = sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True)) + 1
    room = len(RAW_BYTES) // dtype.itemsize - reach
    return dtype, shape, strides, draw(st.integers(0, max(room, 0)))


class TestTensors:
    @bounded
    @given(views())
    def test_spans_name_the_elements_in_logical_order(
        self, view: tuple[torch.dtype, list[int], list[int], int]
    ) -> None:
        dtype, shape, strides, offset = view
        size = dtype.itemsize
        tensor = RAW.view(dtype).as_strided(shape, strides, offset)
        elements = torch.arange(len(RAW_BYTES) // size).as_strided(shape, strides, offset)
        order = elements.reshape(-1).tolist()
        memory = tensor_memory(tensor)
        check(memory)
        assert read(memory) == b"".join(RAW_BYTES[i * size : (i + 1) * size] for i in order)
        assert memory.nbytes == tensor.nbytes
        assert memory.writable == (len(set(order)) == len(order))
        if order:
            storage = RAW.untyped_storage()
            assert (memory.base, memory.extent) == (storage.data_ptr(), len(RAW_BYTES))
            assert memory.anchor is storage
            assert memory.owner is storage

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda x: x, id="contiguous"),
            pytest.param(lambda x: x[1:], id="rows"),
            pytest.param(lambda x: x[:, 1:3], id="columns"),
            pytest.param(lambda x: x.mT, id="transposed"),
            pytest.param(lambda x: x.permute(2, 0, 1), id="permuted"),
            pytest.param(lambda x: x[..., ::2], id="stepped"),
            pytest.param(lambda x: x.unsqueeze(0).expand(3, -1, -1, -1), id="expanded"),
            pytest.param(lambda x: x[1, 2, 3], id="0-dim"),
            pytest.param(lambda x: x.unfold(2, 3, 1), id="windows"),
            pytest.param(
                lambda x: x.unsqueeze(0).contiguous(memory_format=torch.channels_last),
                id="channels last",
            ),
            pytest.param(lambda x: x.requires_grad_(), id="requires grad"),
            pytest.param(lambda x: torch.nn.Parameter(x), id="parameter"),
        ],
    )
    def test_reads_what_contiguous_reads(
        self, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        tensor = change(torch.rand(4, 5, 6))
        memory = tensor_memory(tensor)
        check(memory)
        assert read(memory) == tensor.detach().contiguous().numpy().tobytes()
        assert (memory.kind, memory.device_id) == (MemoryKind.DRAM, 0)

    def test_a_column_slice_is_its_elements_and_nothing_between(self) -> None:
        column = torch.arange(4).view(2, 2)[:, 1]
        memory = tensor_memory(column)
        assert np.frombuffer(read(memory), dtype=np.int64).tolist() == [1, 3]
        assert memory.spans.tolist() == [[column.data_ptr(), 8], [column.data_ptr() + 16, 8]]

    def test_contiguous_rows_are_one_span(self) -> None:
        assert len(tensor_memory(torch.zeros(8, 9, 10)[2:5]).spans) == 1
        assert len(tensor_memory(torch.zeros(8, 9, 10)[:, 2:5]).spans) == 8

    @pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
    def test_no_elements_are_no_spans(self, shape: tuple[int, ...]) -> None:
        freed = torch.empty(4)
        freed.untyped_storage().resize_(0)
        for tensor in (torch.empty(shape), torch.empty(4, 4).mT[:0], freed[:0]):
            memory = tensor_memory(tensor)
            check(memory)
            assert len(memory.spans) == 0
            require_writable(memory, "buffer")

    @pytest.mark.filterwarnings("ignore:ComplexHalf")
    def test_every_dtype_moves_as_bytes(self) -> None:
        names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
        assert {"bool", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint64"} <= names
        assert {"complex32", "complex64", "complex128", "uint16", "uint32", "int8"} <= names
        for dtype in DTYPES:
            assert tensor_memory(torch.empty(6, dtype=dtype)).nbytes == 6 * dtype.itemsize

    def test_a_plain_subclass_is_taken_by_its_data(self) -> None:
        class Labelled(torch.Tensor):
            @classmethod
            def __torch_function__(cls, *_args: object, **_kwargs: object) -> object:
                raise AssertionError("asked the subclass")

        tensor = torch.arange(6.0).view(2, 3)
        memory = tensor_memory(tensor.as_subclass(Labelled))
        assert memory.spans.tolist() == [[tensor.data_ptr(), 24]]

    def test_resolved_views_and_real_parts_of_complex_tensors_are_taken(self) -> None:
        tensor = torch.randn(3, 2, dtype=torch.complex64)
        for part in (tensor.real, tensor.imag, tensor.conj().real, tensor.conj().resolve_conj()):
            assert read(tensor_memory(part)) == part.contiguous().numpy().tobytes()


class TestTensorsAreRefused:
    @pytest.mark.parametrize(
        ("make", "error", "words"),
        [
            (lambda: torch.zeros(2, dtype=torch.cfloat).conj(), ValueError, r"\.resolve_conj\(\)"),
            (lambda: torch.zeros(2, dtype=torch.cfloat).conj().imag, ValueError, r"resolve_neg"),
            (lambda: torch.eye(2).to_sparse(), ValueError, r"sparse_coo.*to_dense"),
            (lambda: torch.eye(2).to_mkldnn(), ValueError, r"_mkldnn.*to_dense"),
            (lambda: torch.zeros(2, device="meta"), ValueError, r"meta.*no data"),
            (lambda: torch._efficientzerotensor((3,)), TypeError, r"without data"),
            (lambda: torch._to_functional_tensor(torch.zeros(2)), TypeError, r"without data"),
            (lambda: torch.nn.UninitializedParameter(), TypeError, r"Uninit.*isn't initialised"),
            (lambda: FakeTensorMode().from_tensor(torch.zeros(2)), TypeError, r"[Ff]ake"),
            (lambda: torch.zeros(2).numpy(), TypeError, r"expected a torch.Tensor, got ndarray"),
            (lambda: torch.Tensor, TypeError, r"expected a torch.Tensor, got the class Tensor"),
        ],
    )
    def test_by_name_with_what_to_do(
        self, make: Callable[[], torch.Tensor], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=f"(?s)^weights: .*{words}"):
            tensor_memory(make(), name="weights")

    @pytest.mark.filterwarnings("ignore:Sparse CSR")
    def test_sparse_rows(self) -> None:
        with pytest.raises(ValueError, match="sparse_csr"):
            tensor_memory(torch.eye(2).to_sparse_csr())

    @pytest.mark.filterwarnings("ignore")
    def test_quantised(self) -> None:
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
        with pytest.raises(ValueError, match="int_repr"):
            tensor_memory(tensor)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize(
        ("layout", "error"), [(torch.strided, ValueError), (torch.jagged, TypeError)]
    )
    def test_nested(self, layout: torch.layout, error: type[Exception]) -> None:
        tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        with pytest.raises(error, match=r"nested|\.values\(\)"):
            tensor_memory(tensor)

    def test_inside_a_transform(self) -> None:
        caught = []

        def describe(tensor: torch.Tensor) -> torch.Tensor:
            with pytest.raises(TypeError, match=r"torch\.func") as info:
                tensor_memory(tensor)
            caught.append(info)
            return tensor.sum()

        torch.vmap(describe)(torch.ones(2, 2))
        torch.func.grad(describe)(torch.ones(2))
        assert len(caught) == 2

    def test_a_wrapper_subclass(self) -> None:
        class Wrapper(torch.Tensor):
            @staticmethod
            def __new__(cls, inner: torch.Tensor) -> Wrapper:
                return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

            @classmethod
            def __torch_dispatch__(cls, *_args: object) -> object:
                raise AssertionError("asked the subclass")

        with pytest.raises(TypeError, match="without data"):
            tensor_memory(Wrapper(torch.ones(2)))

    @pytest.fixture
    def alone(self) -> Iterator[None]:
        dist.init_process_group(
            "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
        )
        yield
        dist.destroy_process_group()

    @pytest.mark.usefixtures("alone")
    def test_a_dtensor_is_refused_and_its_local_part_taken(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"DTensor.*\.to_local\(\)"):
            tensor_memory(tensor)
        assert tensor_memory(tensor.to_local()).nbytes == 16

    @pytest.mark.parametrize("nbytes", [0, 8, 12])
    @pytest.mark.parametrize("strided", [False, True])
    def test_a_storage_that_was_shrunk(self, nbytes: int, strided: bool) -> None:
        whole = torch.ones(2, 2)
        tensor = whole.mT if strided else whole
        whole.untyped_storage().resize_(nbytes)
        with pytest.raises(ValueError, match=f"over 16 bytes but the storage holds {nbytes}.*FSDP"):
            tensor_memory(tensor)

    @pytest.mark.parametrize("device", ["mps", "hpu", "xla"])
    def test_a_device_that_is_not_supported(self, device: str) -> None:
        with pytest.raises(ValueError, match=f"x: a tensor on {device}.*expected cpu, cuda or xpu"):
            device_place(torch.device(device), "x")

    @pytest.mark.parametrize("device", ["cuda:1", "xpu:1"])
    def test_but_accelerators_are_device_memory(self, device: str) -> None:
        assert device_place(torch.device(device), "x") == (MemoryKind.VRAM, 1)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_cuda_tensors_and_arrays_lie_on_their_device(self) -> None:
        index = torch.cuda.device_count() - 1
        tensor = torch.arange(12, device=f"cuda:{index}").view(3, 4)[:, 1:]
        only = SimpleNamespace(__cuda_array_interface__=tensor.__cuda_array_interface__)
        for memory in (tensor_memory(tensor), buffer_memory(only)):
            assert (memory.kind, memory.device_id) == (MemoryKind.VRAM, index)
            start = tensor.data_ptr()
            assert memory.spans.tolist() == [[start + 32 * i, 24] for i in range(3)]


class TestLifetime:
    def test_memory_keeps_the_bytes_when_the_tensor_is_gone_or_shows_others(self) -> None:
        tensor = torch.full((1000,), 7, dtype=torch.uint8)
        ended: list[int] = []
        finalizer = weakref.finalize(tensor.untyped_storage(), ended.append, 1)
        memory = tensor_memory(tensor)
        tensor.set_(torch.zeros(1, dtype=torch.uint8))  # type: ignore[call-overload]
        del tensor
        gc.collect()
        assert finalizer.alive
        assert read(memory) == b"\x07" * 1000
        del memory
        gc.collect()
        assert ended == [1]

    def test_views_share_one_anchor(self) -> None:
        tensor = torch.zeros(4, 4)
        anchors = {id(tensor_memory(view).anchor) for view in (tensor, tensor[1], tensor.mT)}
        assert anchors == {id(tensor.untyped_storage())}

    def test_an_array_view_is_anchored_in_the_array_that_owns(self) -> None:
        whole = np.arange(20).reshape(4, 5)
        view = whole[1:, ::2][::-1]
        memory = buffer_memory(view)
        owner = whole.base
        assert owner is not None
        assert memory.anchor is owner
        assert (memory.base, memory.extent) == (whole.ctypes.data, whole.nbytes)
        reference = weakref.ref(owner)
        expected = view.tobytes()
        del whole, view, owner
        gc.collect()
        assert read(memory) == expected
        del memory
        gc.collect()
        assert reference() is None

    def test_arrays_over_tensors_are_anchored_in_the_storage(self) -> None:
        tensor = torch.arange(20)
        for data in (tensor.numpy()[3:], memoryview(cast(bytes, tensor.numpy()))[3:]):
            memory = buffer_memory(data)
            assert memory.anchor is tensor.untyped_storage()
            assert (memory.base, memory.extent) == (tensor.data_ptr(), 160)

    def test_a_bytearray_cannot_be_resized_meanwhile(self) -> None:
        data = bytearray(b"abcd")
        memory = buffer_memory(data)
        with pytest.raises(BufferError):
            data.extend(b"efgh")
        assert read(memory) == b"abcd"
        del memory
        data.extend(b"efgh")

    def test_a_mapped_file_registers_only_what_moves(self) -> None:
        mapped = mmap.mmap(-1, 1 << 16)
        memory = buffer_memory(np.frombuffer(mapped, dtype=np.uint8)[100:200])
        assert memory.anchor is None
        assert memory.extent == 100

    def test_dlpack_memory_outlives_the_exporter(self) -> None:
        exporter = Exporter(torch.full((64,), 3, dtype=torch.uint8))
        memory = buffer_memory(exporter)
        del exporter
        gc.collect()
        assert read(memory) == b"\x03" * 64


class Exporter:
    """Shows an array by DLPack only."""

    def __init__(self, inner: object, *, versioned: bool = True) -> None:
        self.inner = inner
        self.versioned = versioned

    def __dlpack__(self, **options: object) -> object:
        if not self.versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.inner.__dlpack__(**options)  # type: ignore[attr-defined]

    def __dlpack_device__(self) -> object:
        return self.inner.__dlpack_device__()  # type: ignore[attr-defined]


def cuda_array(*, device: tuple[int, int] | None = (2, 1), **changes: object) -> SimpleNamespace:
    """Something in device memory, as CuPy would show it. Nothing lies at the address."""
    interface = {
        "shape": (4, 3),
        "typestr": "<f4",
        "data": (0x7000_0000_0000, False),
        "strides": None,
        "version": 3,
    } | changes
    shown = SimpleNamespace(__cuda_array_interface__=interface)
    if device is not None:
        shown.__dlpack_device__ = lambda: device
    return shown


class TestBuffers:
    @bounded
    @given(
        st.lists(st.integers(0, 4), min_size=1, max_size=3),
        st.data(),
        st.sampled_from(["u1", "<i2", ">f8", "c16", "S3", "M8[s]", "i4,f8", "V5", "f2"]),
    )
    def test_spans_of_array_views_name_the_elements_in_order(
        self, shape: list[int], data: st.DataObject, dtype: str
    ) -> None:
        itemsize = np.dtype(dtype).itemsize
        whole = np.frombuffer(RAW_BYTES[: math.prod(shape) * itemsize], dtype=dtype)
        view = whole.copy().reshape(shape)
        for axis in data.draw(st.lists(st.integers(0, len(shape) - 1), max_size=2)):
            step = data.draw(st.sampled_from([-2, -1, 1, 2]))
            view = np.moveaxis(view, axis, 0)[::step]
        memory = buffer_memory(view)
        check(memory)
        assert read(memory) == view.tobytes()
        assert memory.writable

    def test_every_kind_of_buffer(self) -> None:
        numbers = array.array("i", [1, 2, 3])
        cases: list[tuple[object, bytes, bool]] = [
            (b"abc", b"abc", False),
            (bytearray(b"abc"), b"abc", True),
            (memoryview(b"abcdef")[1:4], b"bcd", False),
            (memoryview(bytearray(b"abcdef"))[::-2], b"fdb", True),
            (memoryview(bytearray(b"abcdef")).toreadonly(), b"abcdef", False),
            (numbers, numbers.tobytes(), True),
            ((ctypes.c_int16 * 2)(1, 2), b"\1\0\2\0", True),
            (
                memoryview(cast(bytes, np.arange(6).reshape(2, 3).T)),
                np.arange(6).reshape(2, 3).T.tobytes(),
                True,
            ),
            (np.array(7, dtype=np.uint8), b"\7", True),
            (np.ones((2, 2), dtype=np.uint8, order="F"), b"\1" * 4, True),
            (np.array([1.5], np.float32).view(np.recarray), np.float32(1.5).tobytes(), True),
            (Exporter(torch.arange(4)[::2]), np.array([0, 2]).tobytes(), True),
            (Exporter(torch.arange(4), versioned=False), np.arange(4).tobytes(), True),
            (torch.arange(3), np.arange(3).tobytes(), True),
        ]
        for data, expected, writable in cases:
            memory = as_memory(data)
            check(memory)
            assert read(memory) == expected, type(data)
            assert memory.writable is writable, type(data)

    @pytest.mark.parametrize(
        "data",
        [b"", bytearray(), memoryview(b"")[::2], np.empty(0), np.empty((2, 0)), np.empty(3, "V0")],
    )
    def test_no_bytes_are_no_spans(self, data: object) -> None:
        memory = buffer_memory(data)
        check(memory)
        assert len(memory.spans) == 0

    def test_array_interface_is_shared_and_never_copied(self) -> None:
        class Foreign:
            def __init__(self) -> None:
                self.inner = np.arange(6, dtype=np.int16)
                self.__array_interface__ = {**self.inner.__array_interface__, "shape": (2, 3)}

            def __array__(self, *_args: object, **_kwargs: object) -> Array:
                raise AssertionError("asked for a copy")

        foreign = Foreign()
        memory = buffer_memory(foreign)
        check(memory)
        assert memory.spans.tolist() == [[foreign.inner.ctypes.data, 12]]
        scalar = SimpleNamespace(__array_interface__={**foreign.inner.__array_interface__})
        scalar.__array_interface__["shape"] = ()
        assert buffer_memory(scalar).spans.tolist() == [[foreign.inner.ctypes.data, 2]]
        reference = weakref.ref(foreign)
        expected = foreign.inner.tobytes()
        del foreign
        gc.collect()
        assert reference() is not None
        assert read(memory) == expected

    @pytest.mark.parametrize("interface", [{}, {"data": None}])
    def test_array_interface_over_the_objects_own_buffer(self, interface: dict[str, None]) -> None:
        class Buffer(bytearray):
            pass

        data = Buffer(b"abcdef")
        interface = {"shape": (3,), "typestr": "<u2", "version": 3, **interface}  # type: ignore[dict-item]
        shown = memoryview(data)
        wrapped = SimpleNamespace(__array_interface__=dict(interface, data=shown))
        assert read(buffer_memory(wrapped)) == b"abcdef"
        data.__array_interface__ = interface  # type: ignore[attr-defined]
        assert read(buffer_memory(data)) == b"abcdef"

    def test_as_memory_returns_a_memory_as_it_is(self) -> None:
        memory = tensor_memory(torch.ones(2))
        assert as_memory(memory) is memory


class TestBuffersAreRefused:
    @pytest.mark.parametrize(
        "data", [[1, 2], (1, 2), (4096, 8), "text", 4096, None, 1.5, object(), True, {"a": 1}]
    )
    def test_what_has_no_memory_to_share(self, data: object) -> None:
        words = f"(?s)^page: expected a tensor, a numpy array or .*got {type(data).__name__}"
        with pytest.raises(TypeError, match=words):
            as_memory(data, name="page")

    @pytest.mark.parametrize("data", [np.ndarray, torch.Tensor, Exporter, bytes, np.float32])
    def test_a_class_in_place_of_its_instance(self, data: type) -> None:
        with pytest.raises(TypeError, match=r"^page: "):
            as_memory(data, name="page")

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (np.array([object()]), "Python objects"),
            (np.zeros(2, dtype=[("a", "i4"), ("b", "O")]), "Python objects"),
            (memoryview(cast(bytes, np.array([object()]))), "Python objects"),
            (np.float32(1), "scalar"),
            (np.ma.MaskedArray([1, 2], mask=[False, True]), "mask"),
            (Exporter(object()), "DLPack"),
            (Exporter(torch.ones(2, requires_grad=True)), "DLPack"),
            (SimpleNamespace(__array_interface__=7), "expected a dict, got int"),
            (SimpleNamespace(__cuda_array_interface__=[7]), "expected a dict, got list"),
            (cuda_array(typestr="|O"), "Python objects"),
        ],
    )
    def test_of_the_wrong_type(self, data: object, words: str) -> None:
        with pytest.raises(TypeError, match=f"^page: .*{words}"):
            buffer_memory(data, name="page")

    def array_interface(self, **changes: object) -> SimpleNamespace:
        interface = {"shape": (2,), "typestr": "<i4", "data": (4096, False), "version": 3}
        return SimpleNamespace(__array_interface__=interface | changes)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"data": (0, False)}, "(null pointer|NULL)"),
            ({"data": (2**64 - 7, False)}, "address space"),
            ({"strides": (-8192,)}, "address space"),
            ({"typestr": "nonsense"}, "invalid"),
            ({"shape": (-1,)}, "invalid"),
            ({"shape": 1.5}, "invalid"),
            ({"strides": (4, 4)}, "invalid"),
            ({"data": (-1, False)}, "address space|invalid"),
            ({"data": 7}, "invalid"),
            ({"data": (2**64, False)}, "invalid"),
            ({"mask": object()}, "mask"),
        ],
    )
    @pytest.mark.parametrize("cuda", [False, True])
    def test_descriptions_that_cannot_be_true(
        self, changes: dict[str, object], words: str, cuda: bool
    ) -> None:
        data = self.array_interface(**changes)
        if cuda:
            data = cuda_array(**data.__array_interface__)
        with pytest.raises(ValueError, match=f"(?s)^page: .*({words})"):
            buffer_memory(data, name="page")

    def test_more_spans_than_anyone_can_use(self) -> None:
        everywhere = torch.ones(1).expand(2**27)
        with pytest.raises(ValueError, match=r"^page: 134217728 separate spans.*contiguous copy"):
            _ = as_memory(everywhere, name="page").spans


class TestCudaArrays:
    start = 0x7000_0000_0000

    def test_contiguous(self) -> None:
        data = cuda_array()
        memory = buffer_memory(data)
        check(memory)
        assert (memory.kind, memory.device_id) == (MemoryKind.VRAM, 1)
        assert memory.spans.tolist() == [[self.start, 48]]
        assert (memory.base, memory.extent) == (self.start, 48)
        assert memory.owner is data
        assert memory.anchor is None
        assert memory.writable

    def test_strided_and_read_only(self) -> None:
        memory = buffer_memory(
            cuda_array(strides=(-16, 4), data=(self.start, True), typestr="<V2", stream=1)
        )
        check(memory)
        assert len(memory.spans) == 12
        assert memory.spans[:4].tolist() == [
            [self.start, 2],
            [self.start + 4, 2],
            [self.start + 8, 2],
            [self.start - 16, 2],
        ]
        assert memory.base == self.start - 48
        with pytest.raises(ValueError, match="read-only"):
            require_writable(memory, "out")

    def test_0_dim_and_empty(self) -> None:
        assert buffer_memory(cuda_array(shape=())).spans.tolist() == [[self.start, 4]]
        empty = buffer_memory(cuda_array(shape=(0,), data=(0, False)))
        assert (empty.kind, empty.device_id, empty.nbytes) == (MemoryKind.VRAM, 1, 0)

    def test_host_memory_that_cuda_can_see_is_host_memory(self) -> None:
        memory = buffer_memory(cuda_array(device=(3, 0)))
        assert (memory.kind, memory.device_id) == (MemoryKind.DRAM, 0)

    def test_unknown_devices_are_refused(self) -> None:
        with pytest.raises(ValueError, match="page: DLPack device type 8"):
            buffer_memory(cuda_array(device=(8, 0)), name="page")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="torch can tell the device")
    def test_without_cuda_nobody_knows_the_device(self) -> None:
        with pytest.raises(ValueError, match="page: can't tell which device"):
            buffer_memory(cuda_array(device=None), name="page")


class TestTargets:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"abc", "read-only"),
            (np.broadcast_to(np.ones(1), (3,)), "read-only"),
            (memoryview(b"abc"), "read-only"),
            (torch.ones(1).expand(3), "share memory"),
            (torch.ones(2, 1).expand(2, 3), "share memory"),
            (torch.ones(5).as_strided((2, 3), (2, 1)), "share memory"),
            (torch.ones(5).unfold(0, 3, 1), "share memory"),
            (np.lib.stride_tricks.as_strided(np.ones(3), (2, 2), (8, 8)), "share memory"),
        ],
    )
    def test_read_only_and_overlapping_memory_can_be_read_only(
        self, data: object, words: str
    ) -> None:
        memory = as_memory(data)
        check(memory)
        assert memory.nbytes == len(read(memory))
        with pytest.raises(ValueError, match=f"^out: expected memory that can be .*{words}"):
            require_writable(memory, "out")

    def test_read_only_by_dlpack(self) -> None:
        inner = np.arange(3)
        inner.flags.writeable = False
        memory = buffer_memory(Exporter(inner))
        assert read(memory) == inner.tobytes()
        with pytest.raises(ValueError, match="read-only"):
            require_writable(memory, "out")

    @pytest.mark.parametrize("as_array", [False, True])
    def test_what_is_never_moved_in_pieces_costs_no_spans(self, as_array: bool) -> None:
        large = torch.ones(1 << 12, 1 << 10).t()
        tracemalloc.start()
        try:
            memory = as_memory(large.numpy() if as_array else large)
            require_writable(memory, "large")
            assert memory.num_spans == 1 << 22
            assert tracemalloc.get_traced_memory()[1] < 1 << 16
        finally:
            tracemalloc.stop()
        assert len(memory.spans) == 1 << 22
        assert memory.spans is memory.spans

    def test_interleaved_memory_that_does_not_overlap_is_a_target(self) -> None:
        woven = torch.ones(12).as_strided((2, 3), (3, 2))  # Elements 0 2 4 and 3 5 7.
        for tensor in (woven, torch.ones(4, 5).mT, torch.ones(4, 5)[:, 1:3]):
            require_writable(tensor_memory(tensor), "out")


class TestAddresses:
    def test_host_and_device(self) -> None:
        owner = object()
        memory = address_memory(4096, 10, kind=MemoryKind.VRAM, device_id=3, owner=owner)
        check(memory)
        assert (memory.kind, memory.device_id) == (MemoryKind.VRAM, 3)
        assert memory.spans.tolist() == [[4096, 10]]
        assert (memory.base, memory.extent, memory.nbytes) == (4096, 10, 10)
        assert memory.owner is owner
        assert memory.anchor is None

    def test_the_last_byte_of_the_address_space(self) -> None:
        memory = address_memory(2**64 - 1, 1, kind=MemoryKind.DRAM)
        assert memory.spans.tolist() == [[2**64 - 1, 1]]

    def test_numpy_integers_and_nothing_at_all(self) -> None:
        memory = address_memory(
            cast(int, np.uint64(4096)), cast(int, np.int32(2)), kind=MemoryKind.DRAM
        )
        assert memory.spans.tolist() == [[4096, 2]]
        assert len(address_memory(0, 0, kind=MemoryKind.DRAM).spans) == 0

    @pytest.mark.parametrize(
        ("address", "nbytes", "device_id", "error", "words"),
        [
            (0, 1, 0, ValueError, "null pointer"),
            (-1, 1, 0, ValueError, "address: expected 0 or more, got -1"),
            (1, -1, 0, ValueError, "nbytes: expected 0 or more, got -1"),
            (1, 1, -1, ValueError, "device_id: expected 0 or more, got -1"),
            (1, 1, 1, ValueError, "device_id: expected 0 for host memory, got 1"),
            (2**64 - 1, 2, 0, ValueError, "address space"),
            (2**64 + 1, 0, 0, ValueError, "address space"),
            (2**70, 1, 0, ValueError, "address space"),
            (True, 1, 0, TypeError, "address: expected an int, got bool"),
            (1, True, 0, TypeError, "nbytes: expected an int, got bool"),
            (1, 1, False, TypeError, "device_id: expected an int, got bool"),
            (1.0, 1, 0, TypeError, "address: expected an int, got float"),
            ("1", 1, 0, TypeError, "address: expected an int, got str"),
            (1, None, 0, TypeError, "nbytes: expected an int, got NoneType"),
        ],
    )
    def test_numbers_that_are_none_or_out_of_range(
        self, address: int, nbytes: int, device_id: int, error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=f"^page: .*{words}"):
            address_memory(address, nbytes, kind=MemoryKind.DRAM, device_id=device_id, name="page")

    def test_kinds_that_are_none_or_not_memory(self) -> None:
        for kind in (cast(MemoryKind, "DRAM"), MemoryKind.FILE):
            with pytest.raises(ValueError, match=r"page: kind: expected .*DRAM or VRAM, got"):
                address_memory(1, 1, kind=kind, name="page")


class TestCost:
    """Bounds several times above what was measured, for a busy machine."""

    def best(self, function: Callable[[], object], number: int) -> float:
        timings = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(number):
                function()
            timings.append((time.perf_counter() - begin) / number)
        return min(timings)

    def test_a_contiguous_tensor_costs_microseconds(self) -> None:
        tensor = torch.zeros(1024)
        assert self.best(lambda: tensor_memory(tensor), 2000) < 12e-6

    def test_100_000_rows_cost_milliseconds(self) -> None:
        tensor = torch.zeros(100_000, 8, dtype=torch.uint8)[:, :4]
        assert len(tensor_memory(tensor).spans) == 100_000
        assert self.best(lambda: tensor_memory(tensor), 3) < 0.04
