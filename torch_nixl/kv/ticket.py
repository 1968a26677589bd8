"""What travels with a request from prefill to decode: which lease, and how to reach its owner.

JSON of less than 2 KiB, for `kv_transfer_params` and the like; pages aren't in it, they are asked
for. It is sealed (see [Note: keys] in `engine.envelope`): altered ones are refused, and with a
shared secret forged ones, too.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from torch_nixl.connect.metadata import decode_base64, decode_blob, encode_blob
from torch_nixl.engine.envelope import seal, unseal
from torch_nixl.errors import MetadataError
from torch_nixl.kv.compatibility import MAX_GROUPS, MAX_NAME, Compatibility
from torch_nixl.kv.frames import MAX_POSITION
from torch_nixl.kv.layout import Geometry
from torch_nixl.kv.leases import MAX_GENERATION, LeaseId
from torch_nixl.p2p.description import DTYPES

MAX_TICKET: Final = 2047
"""Most bytes of a ticket, as UTF-8."""

MAX_REQUEST: Final = 256
"""Most characters of a request's name in a ticket: it is for people to read."""

_U32: Final = (1 << 32) - 1

_Number: TypeAlias = Annotated[int, Field(ge=0, le=_U32)]
_Name: TypeAlias = Annotated[str, Field(max_length=MAX_NAME)]
_Group: TypeAlias = tuple[
    _Number, _Number, _Number, _Number, _Name, _Number, _Name, tuple[_Number, ...] | None
]
Description: TypeAlias = tuple[
    _Name, _Name, Annotated[tuple[_Group, ...], Field(max_length=MAX_GROUPS)]
]
"""Version, model, and for each group of layers: L, K, heads, D, dtype, T, packing, and the model's
numbers of its layers; None for 0, 1, ...: see the legend in `layout`."""

_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class Ticket(BaseModel):
    """A lease that prefill gives away.

    Attributes:
        torch_nixl_kv: Version of the ticket.
        server: Name of the agent that the pages are registered with.
        service: Its number for the cache that they lie in.
        slot: First part of the lease's name.
        generation: Second part.
        request: What prefill calls the request, cut to `MAX_REQUEST` characters.
        num_tokens: Positions 0 to this are on offer.
        tp_rank: Of the server's tensor-parallel group.
        tp_size: Its size.
        lease_ms: How long the lease lasts from its beginning, or from a heartbeat.
        compatibility: What the cache holds, as `describe` returns it; None where that is too long.
        metadata: How to reach the agent.
        seal: Over all other fields.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    torch_nixl_kv: Literal[1] = 1
    server: Annotated[str, Field(min_length=1, max_length=255)]
    service: Annotated[int, Field(ge=0, le=_U32)]
    slot: Annotated[int, Field(ge=0, le=_U32)]
    generation: Annotated[int, Field(ge=1, le=MAX_GENERATION)]
    request: Annotated[str, Field(max_length=MAX_REQUEST)] = ""
    num_tokens: Annotated[int, Field(ge=0, lt=MAX_POSITION)]
    tp_rank: Annotated[int, Field(ge=0, le=_U32)] = 0
    tp_size: Annotated[int, Field(ge=1, le=_U32)] = 1
    lease_ms: Annotated[int, Field(ge=0, le=_U32)] = 0
    compatibility: Description | None = None
    metadata: Annotated[str, Field(min_length=1, max_length=MAX_TICKET)] = Field(repr=False)
    seal: Annotated[str, Field(max_length=256)] = Field(default="", repr=False)

    @property
    def lease(self) -> LeaseId:
        """The lease's name."""
        return LeaseId(self.slot, self.generation)

    @property
    def connection_blob(self) -> bytes:
        """NIXL's metadata of how to reach the server.

        Raises:
            MetadataError: It can't be decoded.
        """
        return decode_blob(self.metadata)

    def is_same(self, other: Ticket) -> bool:
        """Whether both name the same lease."""
        ours = (self.server, self.service, self.lease)
        return ours == (other.server, other.service, other.lease)

    def difference(self, ours: Compatibility) -> str:
        """Say what keeps pages from moving to a cache of ours, as far as the ticket tells.

        Empty where nothing does, and where only the handshake can find it out.
        """
        if self.compatibility is None:
            return ""
        version, model, groups = self.compatibility
        try:
            theirs = Compatibility(
                model,
                tuple(self._geometry(*group) for group in groups),
                tuple(tuple(range(group[0])) if group[7] is None else group[7] for group in groups),
                version,
            )
        except (KeyError, ValueError):  # It may be of a dtype that this PyTorch doesn't know.
            return ""
        return ours.difference(theirs)

    def _geometry(
        self,
        num_layers: int,
        num_parts: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        page_size: int,
        packing: str,
        _: object,
    ) -> Geometry:
        return Geometry(
            num_layers,
            num_kv_heads,
            head_dim,
            _DTYPES[dtype],
            page_size,
            num_parts,
            packing,
            self.tp_rank,
            self.tp_size,
        )

    def pack(self, *, key: bytes | None) -> str:
        """Return the ticket as JSON, sealed; without `compatibility` if it is too long with it.

        Args:
            key: From `engine.envelope.derive`, or None.

        Raises:
            ValueError: It is too long: the server has a long name, or many interfaces.
        """
        sealed = base64.b64encode(seal(self._digest(), key=key)).decode()
        text = json.dumps({**self.model_dump(), "seal": sealed}, separators=(",", ":"))
        if len(text) > MAX_TICKET and self.compatibility is not None:
            return self.model_copy(update={"compatibility": None}).pack(key=key)
        if len(text) > MAX_TICKET:
            raise ValueError(f"the ticket has {len(text)} bytes, more than {MAX_TICKET}")
        return text

    @classmethod
    def unpack(cls, text: str | bytes, *, key: bytes | None) -> Ticket:
        """Check a ticket and read it.

        Args:
            text: From `pack`. Space, order of fields and way of escaping may have changed, as they
                do when JSON passes through a proxy.
            key: As for `pack`.

        Raises:
            MetadataError: It is no ticket, too long, altered, or not authenticated as `key`
                demands.
        """
        if len(text) > 2 * MAX_TICKET:
            raise MetadataError(f"ticket of {len(text)} bytes is over the limit of {MAX_TICKET}")
        try:
            ticket = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "JSON"
            raise MetadataError(f"not a ticket: {where}: {first['msg']}") from None
        try:
            sealed = decode_base64(ticket.seal)
        except ValueError:
            raise MetadataError("the ticket's seal is not base64") from None
        if unseal(sealed, key=key) != ticket._digest():
            raise MetadataError("the ticket was altered: its seal is of other fields")
        return ticket

    @staticmethod
    def encode(blob: bytes) -> str:
        """Return NIXL's metadata as a ticket's `metadata`."""
        return encode_blob(blob)

    def _digest(self) -> bytes:
        fields = self.model_dump(exclude={"seal"})
        text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).digest()


def describe(compatibility: Compatibility) -> Description:
    """Return what a cache holds as a ticket has it."""
    groups = []
    for geometry, layers in zip(compatibility.geometries, compatibility.layers, strict=True):
        groups.append(
            (
                geometry.num_layers,
                geometry.num_parts,
                geometry.num_kv_heads,
                geometry.head_dim,
                str(geometry.dtype).removeprefix("torch."),
                geometry.page_size,
                geometry.packing,
                None if layers == tuple(range(len(layers))) else layers,
            )
        )
    return compatibility.version, compatibility.model, tuple(groups)
