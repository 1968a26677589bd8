"""`torch_nixl.connect` against the reference table: every name, argument, default and text form."""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from connect.behaviour import DEVICE_FORMS, DeviceForm
from connect.reference import CLASSES, REQUIRED, Class, Member, Method, Parameter, Property

pytestmark = pytest.mark.timeout(120)

each_class = pytest.mark.parametrize("row", CLASSES, ids=lambda row: row.name)


def pairs(kind: str) -> list[Any]:
    """Return one test case for each entry of ``kind`` of each class."""
    return [
        pytest.param(row, entry, id=f"{row.name}.{entry.name}")
        for row in CLASSES
        for entry in getattr(row, kind)
    ]


def check_parameters(signature: inspect.Signature, expected: tuple[Parameter, ...]) -> None:
    """Assert that the expected parameters come first and that further ones can be left out."""
    found = list(signature.parameters.values())
    for want, got in zip(expected, found, strict=False):
        assert got.name == want.name
        assert got.kind.name == want.kind
        default = REQUIRED if got.default is inspect.Parameter.empty else got.default
        assert default == want.default or (default is REQUIRED and want.default is REQUIRED)
    assert len(found) >= len(expected), f"missing: {expected[len(found) :]}"
    for extra in found[len(expected) :]:
        optional = extra.default is not inspect.Parameter.empty
        variadic = extra.kind in (extra.VAR_POSITIONAL, extra.VAR_KEYWORD)
        assert optional or variadic, f"{extra.name} is required, dynamo has no such argument"


def test_the_table_has_the_seventeen_classes() -> None:
    assert len({row.name for row in CLASSES}) == len(CLASSES) == 17


@each_class
def test_class_is_exported(connect: ModuleType, row: Class) -> None:
    found = getattr(connect, row.name)
    assert inspect.isclass(found)
    assert found.__name__ == row.name
    if hasattr(connect, "__all__"):
        assert row.name in connect.__all__


@each_class
def test_class_has_its_bases(connect: ModuleType, row: Class) -> None:
    names = [base.__name__ for base in getattr(connect, row.name).__mro__]
    for base in row.bases:
        assert base in names


# Enums and models are made of members and fields, which have tests of their own.
@pytest.mark.parametrize(
    "row",
    [row for row in CLASSES if not (row.fields or row.members)],
    ids=lambda row: row.name,
)
def test_constructor(connect: ModuleType, row: Class) -> None:
    check_parameters(inspect.signature(getattr(connect, row.name)), row.parameters)


@each_class
def test_abstract_or_not(connect: ModuleType, row: Class) -> None:
    assert inspect.isabstract(getattr(connect, row.name)) is row.is_abstract


@each_class
def test_context_manager(connect: ModuleType, row: Class) -> None:
    found = getattr(connect, row.name)
    if row.is_context_manager:
        assert callable(found.__enter__)
        check_parameters(
            inspect.signature(found.__exit__),
            tuple(map(Parameter, ("self", "exc_type", "exc_value", "traceback"))),
        )


@pytest.mark.parametrize(("row", "method"), pairs("methods"))
def test_method(connect: ModuleType, row: Class, method: Method) -> None:
    cls = getattr(connect, row.name)
    found = getattr(cls, method.name)
    parameters = method.parameters
    if method.binding == "instance":
        parameters = (Parameter("self"), *parameters)
    assert inspect.iscoroutinefunction(found) is method.is_async
    if not (method.name == "wait_for_completion" and row.is_abstract):
        check_parameters(inspect.signature(found), parameters)
    if method.binding == "class":
        assert inspect.ismethod(found)
        assert found.__self__ is cls
    if method.binding == "static":
        assert isinstance(inspect.getattr_static(cls, method.name), staticmethod | classmethod)


@pytest.mark.parametrize(("row", "entry"), pairs("properties"))
def test_property(connect: ModuleType, row: Class, entry: Property) -> None:
    found = inspect.getattr_static(getattr(connect, row.name), entry.name)
    assert isinstance(found, property | functools.cached_property)


@pytest.mark.parametrize(("row", "member"), pairs("members"))
def test_enum_member(connect: ModuleType, row: Class, member: Member) -> None:
    found = getattr(connect, row.name)[member.name]
    assert isinstance(found, enum.IntEnum)
    assert found.value == member.value == found
    assert str(found) == f"{found}" == member.text


@pytest.mark.parametrize("row", [row for row in CLASSES if row.members], ids=lambda row: row.name)
def test_enum_has_no_other_members(connect: ModuleType, row: Class) -> None:
    assert [m.name for m in getattr(connect, row.name)] == [m.name for m in row.members]


@pytest.mark.parametrize("row", [row for row in CLASSES if row.fields], ids=lambda row: row.name)
def test_model_fields(connect: ModuleType, row: Class) -> None:
    model = getattr(connect, row.name)
    assert list(model.model_fields) == [field.name for field in row.fields]
    assert model().model_dump() == {field.name: field.default for field in row.fields}
    assert model.model_config["extra"] == "forbid"
    assert model.model_config["frozen"] is True


@each_class
def test_hashable_and_equality(connect: ModuleType, row: Class) -> None:
    found = getattr(connect, row.name)
    if row.equality == "worker id":
        assert found("a") == found("a") != found("b")
        assert found.__hash__ is None or hash(found("a")) == hash(found("a"))
    elif row.equality == "value":
        assert found() == found()
    if row.hashable:
        assert found.__hash__ is not None


@pytest.mark.parametrize("form", DEVICE_FORMS, ids=lambda form: form.text.strip())
def test_device_string(connect: ModuleType, form: DeviceForm) -> None:
    device = connect.Device(form.text)
    assert (device.kind.name, device.id) == (form.kind, form.id)
    assert str(device) == form.shown
    same = connect.Device((connect.DeviceKind[form.kind], form.id))
    assert str(same) == form.shown
    assert repr(same) == f"Device(kind={device.kind}, id={form.id})"


def test_nixl_memory_types(connect: ModuleType) -> None:
    names = {kind.name: kind.nixl_mem_type for kind in connect.DeviceKind}
    assert names == {"UNSPECIFIED": "VRAM", "HOST": "DRAM", "CUDA": "VRAM", "XPU": "VRAM"}


def test_descriptor_text_and_attributes(connect: ModuleType) -> None:
    tensor = torch.zeros(6, dtype=torch.float32)
    descriptor = connect.Descriptor(tensor)
    address = tensor.data_ptr()
    assert str(descriptor) == f"ptr={address:#x}, size=24, device=cpu"
    assert repr(descriptor) == f"Descriptor({descriptor})"
    assert (descriptor.ptr, descriptor.size, str(descriptor.device)) == (address, 24, "cpu")
    assert descriptor.is_registered is False
    assert descriptor.metadata is descriptor.metadata
    assert descriptor.metadata.model_dump() == {"device": "cpu", "ptr": address, "size": 24}
    back = connect.Descriptor.from_serialized(descriptor.metadata)
    assert (back.ptr, back.size, str(back.device)) == (address, 24, "cpu")


def test_descriptor_takes_each_documented_form(connect: ModuleType) -> None:
    array = np.zeros(5, np.int16)
    address = array.ctypes.data
    forms: list[tuple[Any, int]] = [
        ((array, "cpu"), 10),
        ((array, connect.Device("cpu")), 10),
        ((address, 10), 10),
        ((address, 10, "cpu"), 10),
        ((address, 10, connect.Device("cpu"), array), 10),
        (b"abc", 3),
        (bytearray(4), 4),
        (torch.zeros(2, 3), 24),
    ]
    for data, size in forms:
        assert connect.Descriptor(data).size == size
    assert connect.Descriptor((address, 10)).ptr == connect.Descriptor((array, "cpu")).ptr


def test_connector_text_and_attributes(connect: ModuleType) -> None:
    connector = connect.Connector("worker-7")
    assert str(connector) == connector.name == "worker-7"
    assert repr(connector) == f"Connector(worker_id='worker-7', hostname={connector.hostname})"
    assert len(connect.Connector().name) == 32
    assert connect.Connector().name != connect.Connector().name
    assert asyncio.run(connector.initialize()) is None
