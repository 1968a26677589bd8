"""The public surface of dynamo.nixl_connect, as data: what `torch_nixl.connect` must offer.

Taken from the API reference in the seed and checked by introspection of ai-dynamo-runtime 1.6.1.
Where the two differ, 1.6.1 wins and the row has a ``note``. The words are ours.

How strict a row is: names, order, kinds and defaults of the listed parameters are binding. An
implementation may add parameters that have defaults, properties and methods. ``equality`` and
``hashable`` say what 1.6.1 does; equality by value where 1.6.1 compares identities is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class Required:
    """Default of a parameter that has none."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = Required()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument; ``kind`` is the name of an ``inspect.Parameter`` kind."""

    name: str
    default: object = REQUIRED
    kind: str = "POSITIONAL_OR_KEYWORD"


@dataclass(frozen=True, slots=True)
class Method:
    """A public method; ``binding`` is instance, static or class. `self` and `cls` are left out."""

    name: str
    parameters: tuple[Parameter, ...] = ()
    returns: str = "None"
    is_async: bool = False
    binding: str = "instance"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Property:
    """An attribute that can be read and has no setter."""

    name: str
    type: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """An enum member: its value and its ``str()``, which f-strings show as well."""

    name: str
    value: int
    text: str


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a pydantic model, in the order in which it appears in the JSON."""

    name: str
    type: str
    default: object
    note: str = ""


@dataclass(frozen=True, slots=True)
class Class:
    """One of the 17 classes. ``bases`` are the public direct bases."""

    name: str
    bases: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    methods: tuple[Method, ...] = ()
    properties: tuple[Property, ...] = ()
    members: tuple[Member, ...] = ()
    fields: tuple[Field, ...] = ()
    is_abstract: bool = False
    is_context_manager: bool = False
    equality: str = "identity"
    hashable: bool = True
    note: str = ""


def _args(*names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name) for name in names)


_WAIT = Method(
    "wait_for_completion",
    is_async=True,
    note="Listed by the seed on every concrete operation; abstract above them.",
)
_CANCEL = Method(
    "cancel",
    note="The seed: no effect on an operation that is final. 1.6.1 marks a COMPLETE one "
    "CANCELLED and raises RuntimeError on an ERRORED one; here the seed's words are kept.",
)
_STATUS = Property(
    "status", "OperationStatus", note="Not in the seed's list of methods, but public in 1.6.1."
)
_KIND_AND_CONNECTION = (
    Property("connection", "Connection"),
    Property("operation_kind", "OperationKind"),
)

CLASSES: Final[tuple[Class, ...]] = (
    Class(
        "AbstractOperation",
        parameters=_args(
            "connection",
            "operation_kind",
            "local_descriptors",
            "remote_descriptors",
            "notification_key",
        ),
        methods=(_WAIT,),
        properties=_KIND_AND_CONNECTION,
        is_abstract=True,
        is_context_manager=True,
        note="notification_key None stands for a fresh random key.",
    ),
    Class(
        "ActiveOperation",
        bases=("AbstractOperation",),
        parameters=_args(
            "remote",
            "operation_kind",
            "local_descriptors",
            "remote_descriptors",
            "notification_key",
        ),
        methods=(_CANCEL, _WAIT),
        properties=(*_KIND_AND_CONNECTION, Property("remote", "Remote"), _STATUS),
        is_abstract=True,
        is_context_manager=True,
        note="A list of one descriptor counts as that descriptor, on either side.",
    ),
    Class(
        "Connection",
        parameters=_args("connector", "number"),
        methods=(
            Method("acquire_remote_ref", _args("name")),
            Method(
                "release_remote_ref",
                _args("name"),
                returns="bool",
                note="True when the last reference went; False for an unknown name too.",
            ),
            Method("initialize", is_async=True, note="Does nothing that a caller could see."),
        ),
        properties=(
            Property("connector", "Connector"),
            Property("metadata", "bytes", note="NIXL's blob, neither compressed nor encoded."),
            Property("name", "str", note="In 1.6.1 '<worker id>-<number>', also its str()."),
        ),
    ),
    Class(
        "Connector",
        parameters=(Parameter("worker_id", None),),
        methods=(
            Method(
                "begin_read",
                _args("remote_metadata", "local_descriptors"),
                returns="ReadOperation",
                is_async=True,
            ),
            Method(
                "begin_write",
                _args("local_descriptors", "remote_metadata"),
                returns="WriteOperation",
                is_async=True,
                note="Arguments in the other order than begin_read. The seed speaks of metadata "
                "of a readable operation; it must be that of a writable one.",
            ),
            Method(
                "create_readable",
                _args("local_descriptors"),
                returns="ReadableOperation",
                is_async=True,
            ),
            Method(
                "create_writable",
                _args("local_descriptors"),
                returns="WritableOperation",
                is_async=True,
            ),
            Method("initialize", is_async=True, note="Deprecated; does nothing."),
        ),
        properties=(
            Property("hostname", "str"),
            Property(
                "is_cuda_available",
                "bool",
                note="Raises NameError in 1.6.1 where CuPy is missing; here it answers.",
            ),
            Property("name", "str", note="The worker id, also its str()."),
        ),
        equality="worker id",
        hashable=False,
        note="worker_id is a non-empty str or None. The seed's text says uuid.UUID, but 1.6.1 "
        "refuses a UUID with TypeError. None gives 32 hexadecimal digits.",
    ),
    Class(
        "Descriptor",
        parameters=_args("data"),
        methods=(
            Method("from_serialized", _args("serialized"), returns="Descriptor", binding="static"),
            Method("deregister_with_connector", _args("connection")),
            Method(
                "register_with_connector",
                _args("connection"),
                note="Takes a Connection in spite of its name; a second call is a no-op.",
            ),
        ),
        properties=(
            Property("device", "Device"),
            Property("is_registered", "bool"),
            Property("metadata", "SerializedDescriptor", note="The same object each time."),
            Property("ptr", "int"),
            Property("size", "int", note="Bytes."),
        ),
        note="The tuple form may leave out device and reference: (pointer, size). bytearray is "
        "taken like bytes.",
    ),
    Class(
        "Device",
        parameters=_args("metadata"),
        properties=(Property("id", "int"), Property("kind", "DeviceKind")),
        note="1.6.1 looks at prefixes only (cudabogus is cuda:0); here strings are strict.",
    ),
    Class(
        "DeviceKind",
        bases=("IntEnum",),
        members=(
            Member("UNSPECIFIED", 0, "<invalid>"),
            Member("HOST", 1, "cpu"),
            Member("CUDA", 2, "cuda"),
            Member("XPU", 3, "xpu"),
        ),
        properties=(Property("nixl_mem_type", "str", note="DRAM for HOST, VRAM for all others."),),
        equality="int",
    ),
    Class(
        "OperationKind",
        bases=("IntEnum",),
        members=(
            Member("UNSPECIFIED", 0, "<invalid>"),
            Member("READ", 1, "READ"),
            Member("WRITE", 2, "WRITE"),
        ),
        equality="int",
    ),
    Class(
        "OperationStatus",
        bases=("IntEnum",),
        members=(
            Member("UNINITIALIZED", 0, "<invalid>"),
            Member("INITIALIZED", 1, "INIT"),
            Member("IN_PROGRESS", 2, "PROC"),
            Member("COMPLETE", 3, "DONE"),
            Member("CANCELLED", 4, "STOP"),
            Member("ERRORED", 5, "ERR"),
        ),
        equality="int",
    ),
    Class(
        "PassiveOperation",
        bases=("AbstractOperation",),
        parameters=_args("connection", "operation_kind", "local_descriptors"),
        methods=(
            Method(
                "metadata",
                (Parameter("hex_encode", False),),
                returns="RdmaMetadata",
                note="1.6.1 keeps the first answer: hex_encode of later calls is ignored.",
            ),
            _WAIT,
        ),
        properties=(*_KIND_AND_CONNECTION, _STATUS),
        is_abstract=True,
        is_context_manager=True,
    ),
    Class(
        "RdmaMetadata",
        bases=("BaseModel",),
        methods=(
            Method("to_descriptors", returns="Descriptor | list[Descriptor]"),
            Method(
                "validate_operation_kind",
                _args("v"),
                returns="int",
                binding="class",
                note="1.6.1 lets 3 through, which is no OperationKind; only 1 and 2 are bound.",
            ),
        ),
        fields=(
            Field("descriptors", "list[SerializedDescriptor]", []),
            Field("nixl_metadata", "str", ""),
            Field("notification_key", "str", ""),
            Field("operation_kind", "int", 0, note="The default is not validated."),
        ),
        equality="value",
        hashable=False,
        note="Extra fields are refused, instances are frozen. hash() fails on the list inside.",
    ),
    Class(
        "ReadOperation",
        bases=("ActiveOperation",),
        parameters=_args("connection", "remote_metadata", "local_descriptors"),
        methods=(
            _CANCEL,
            Method(
                "results",
                returns="list[Descriptor]",
                note="The text says a single descriptor if there was one; 1.6.1 always returns "
                "a list, of one entry then.",
            ),
            _WAIT,
        ),
        properties=(*_KIND_AND_CONNECTION, Property("remote", "Remote"), _STATUS),
        is_context_manager=True,
    ),
    Class(
        "ReadableOperation",
        bases=("PassiveOperation",),
        parameters=_args("connection", "local_descriptors"),
        methods=(Method("metadata", (Parameter("hex_encode", False),), "RdmaMetadata"), _WAIT),
        properties=(*_KIND_AND_CONNECTION, _STATUS),
        is_context_manager=True,
    ),
    Class(
        "Remote",
        parameters=_args("connection", "nixl_metadata"),
        properties=(
            Property("connection", "Connection"),
            Property("name", "str", note="The far agent's name, also its str()."),
        ),
        is_context_manager=True,
        note="bytes are NIXL's blob as it is; a str is 'b64:' and base64 of the compressed blob, "
        "or its hexadecimal digits without a prefix.",
    ),
    Class(
        "SerializedDescriptor",
        bases=("BaseModel",),
        methods=(
            Method("to_descriptor", returns="Descriptor"),
            Method("validate_device", _args("v"), returns="str", binding="class"),
            Method("validate_ptr", _args("v"), returns="int", binding="class"),
            Method("validate_size", _args("v"), returns="int", binding="class"),
        ),
        fields=(
            Field("device", "str", "cpu", note="cpu, cuda:N or xpu:N; 'cpu:0' is refused."),
            Field("ptr", "int", 0, note="0 is refused when given; the default passes."),
            Field("size", "int", 0),
        ),
        equality="value",
        note="Extra fields are refused, instances are frozen.",
    ),
    Class(
        "WritableOperation",
        bases=("PassiveOperation",),
        parameters=_args("connection", "local_descriptors"),
        methods=(Method("metadata", (Parameter("hex_encode", False),), "RdmaMetadata"), _WAIT),
        properties=(*_KIND_AND_CONNECTION, _STATUS),
        is_context_manager=True,
    ),
    Class(
        "WriteOperation",
        bases=("ActiveOperation",),
        parameters=_args("connection", "local_descriptors", "remote_metadata"),
        methods=(_CANCEL, _WAIT),
        properties=(*_KIND_AND_CONNECTION, Property("remote", "Remote"), _STATUS),
        is_context_manager=True,
        note="Arguments in the other order than ReadOperation.",
    ),
)
