"""What one side tells of exposed memory, and what the other side understands of it.

[Note: two kinds of peers] A peer of torch_nixl is known by its notification key, `key.PREFIX`. It
finds the memory under the owner's own device ids, in the key's blobs, and asks before it touches.
All others count as dynamo's: they find the memory under device id 0, in `nixl_metadata`, ask
nobody, and are told nothing but their key at the end. Which of the two it is, is decided here,
before anything is sent: a dynamo process that receives one frame that isn't UTF-8 is broken for
ever. With a secret, others are refused, and told of no memory.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch_nixl.connect.device import Device
from torch_nixl.connect.key import PREFIX, Key, digest
from torch_nixl.connect.metadata import SerializedDescriptor, encode_blob
from torch_nixl.engine import spans as algebra
from torch_nixl.engine.adapter import Direction, MemoryKind, Spans
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.offer import Offer, OfferedMemory
from torch_nixl.engine.registry import PUBLIC_DEVICE_ID, RegisteredMemory
from torch_nixl.engine.remotes import Contact
from torch_nixl.errors import MetadataError, PeerLostError, TransferError

if TYPE_CHECKING:
    from torch_nixl.connect.descriptor import Descriptor
    from torch_nixl.engine.connection import Connection as Engine
    from torch_nixl.engine.passive import PassiveOperation

OPERATION_KINDS: Final = {Direction.READ: 1, Direction.WRITE: 2}
"""How the JSON names what a peer may do."""

MAX_CACHED: Final = 256
MAX_CACHED_BYTES: Final = 4096

# The end of an engine's name: its number in its process, and what is random. (The last groups of
# a UUID are four digits and twelve.)
_OUR_NAME: Final = re.compile(r"-[1-9]\d{0,2}-[0-9a-f]{12}\Z")

_NO_SPANS: Final = algebra.with_device(algebra.EMPTY, 0)


class PublicBlobs:
    """NIXL's blobs for `RdmaMetadata.nixl_metadata`, those made lately remembered.

    The same memory is mostly exposed again and again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._made: OrderedDict[bytes, tuple[bytes, str]] = OrderedDict()

    def get(self, memories: Sequence[RegisteredMemory]) -> tuple[bytes, str]:
        """Return the blob of memories, which are all of one kind, and the same as text."""
        # A region's own blob differs from that of any other region, by its device id.
        regions = b"".join([held.blob for held in memories])
        with self._lock:
            found = self._made.get(regions)
        if found is None:
            blob = self._engine.public_metadata(memories)
            found = blob, encode_blob(blob)
            if len(regions) <= MAX_CACHED_BYTES:
                with self._lock:
                    self._made[regions] = found
                    while len(self._made) > MAX_CACHED:
                        self._made.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of exposed memory.

    Attributes:
        blob: NIXL's, for `RdmaMetadata.nixl_metadata`.
        text: The same as text.
        key: The notification key.
    """

    blob: bytes
    text: str
    key: str


def serialize(descriptors: Sequence[Descriptor]) -> list[SerializedDescriptor]:
    """Describe memory for the JSON.

    Memory of no bytes is said to lie where the first other memory does: dynamo's peers have NIXL
    look up that, too.
    """
    serialized = [one.metadata for one in descriptors]
    if all(one.size for one in serialized):
        return serialized
    somewhere = next((one for one in serialized if one.size), None)
    if somewhere is None:
        return serialized
    return [
        one if one.size else one.model_copy(update={"ptr": somewhere.ptr}) for one in serialized
    ]


def tell(
    engine: Engine,
    blobs: PublicBlobs,
    operation: PassiveOperation,
    descriptors: Sequence[SerializedDescriptor],
) -> Told:
    """Say what a peer needs to know of exposed memory.

    Raises:
        TransferError: The operation has ended.
    """
    memories = operation.memories
    if operation.done or operation.released:
        raise TransferError(f"{operation}: has ended and offers nothing any more")
    kinds = {held.memory.kind for held in memories if held.entry is not None}
    pieces = {
        index: held.memory.spans
        for index, held in enumerate(memories)
        if len(held.memory.spans) > 1
    }
    # Others than torch_nixl's peers understand neither mixed kinds nor memory in pieces.
    public = engine.metadata_key is None and len(kinds) <= 1
    blob, encoded = blobs.get(memories if public else ())
    own = {held.blob for held in memories if held.entry is not None}
    private = tuple(own) if len(own) == 1 else engine.metadata(memories, connection=False)
    kind = OPERATION_KINDS[operation.direction]
    key = Key(operation.key, digest(kind, blob, descriptors), pieces, private)
    text = key.pack(key=engine.metadata_key)
    if public and not operation.foreign_key:
        engine.accept_key(operation, text.encode())
    return Told(blob, encoded, text)


@dataclass(frozen=True, slots=True)
class Understood:
    """What a peer exposes, and which kind of peer it is.

    Attributes:
        offer: For the engine.
        foreign: It isn't torch_nixl's: see [Note: two kinds of peers].
    """

    offer: Offer
    foreign: bool


def understand(
    engine: Engine,
    direction: Direction,
    blob: bytes,
    descriptors: Sequence[SerializedDescriptor],
    notification_key: str,
) -> Understood:
    """Make what a peer told into an offer, or refuse it. Nothing is sent, and NIXL sees nothing.

    Raises:
        MetadataError: It is altered, not authenticated as the secret demands, or names memory
            that its own metadata does not tell.
    """
    if not notification_key:
        raise MetadataError("notification_key is empty")
    if not notification_key.startswith(PREFIX):
        if engine.metadata_key is not None:
            raise MetadataError(
                "the metadata is not authenticated, and this process has a secret: it is of a "
                "worker that isn't torch_nixl's, or was altered"
            )
        info = engine.adapter.inspect(blob)
        if _OUR_NAME.search(info.agent):
            raise MetadataError(
                f"the metadata was altered: {info.agent!r} is a worker of torch_nixl, whose "
                f"notification keys begin with {PREFIX!r}"
            )
        message = notification_key.encode()
        memories = _memories(descriptors, [info], {}, public=True)
        return Understood(Offer(info.agent, message, direction, memories, (blob,)), foreign=True)
    key = Key.unpack(notification_key, key=engine.metadata_key)
    kind = OPERATION_KINDS[direction]
    if digest(kind, blob, descriptors) != key.digest:
        raise MetadataError("the metadata was altered: its notification_key is of other fields")
    # What it tells under the public device id would nest and overlap with what was told before
    # (see registry.py, [Note: device ids]); the owner's own ids never do.
    metadata = key.blobs or (blob,)
    infos = [engine.adapter.inspect(one) for one in metadata]
    owner = infos[0].agent
    if any(info.agent != owner for info in infos):
        raise MetadataError("notification_key has metadata of several agents")
    if any(index >= len(descriptors) for index in key.pieces):
        raise MetadataError("notification_key has pieces of a descriptor that isn't there")
    memories = _memories(descriptors, infos, key.pieces, public=False)
    return Understood(Offer(owner, key.key, direction, memories, metadata), foreign=False)


def meet(engine: Engine, understood: Understood, blob: bytes, info: BlobInfo) -> None:
    """Make contact with an offer's owner, by the rules of its kind.

    Args:
        engine: This process's end.
        understood: From `understand`.
        blob: Metadata with connection information.
        info: The same, inspected.

    Raises:
        MetadataError: The owner is known as the other kind of peer, or NIXL refused the metadata.
        PeerLostError: It can't be reached, or was restarted and transfers to the dead one are
            still to end.
        ClosedError: The connection is closed.
    """
    owner, foreign = understood.offer.owner, understood.foreign
    if info.agent != owner:
        raise MetadataError(f"metadata of {info.agent!r} was handed over for {owner!r}")
    known = engine.contacts.get(owner)
    if known is not None and known.contact is Contact.FOREIGN and foreign:
        if known.reach != info.reach:
            # dynamo's agents have the same name after a restart.
            why = f"{owner} was restarted"
            engine.contacts.lose(known, PeerLostError(why, remote=owner))
    try:
        remote = engine.contact(owner, blob, foreign=foreign)
    except PeerLostError as error:
        if error.remote == owner:
            raise
        # NIXL's refusal does not say whom it concerns.
        raise PeerLostError(f"{owner}: {error}", remote=owner) from error
    if foreign is not (remote.contact is Contact.FOREIGN) and remote.lost_error is None:
        raise MetadataError(
            f"{owner!r} is known as {'a' if foreign else 'no'} worker of torch_nixl, and the "
            "notification_key says otherwise"
        )


class _Regions:
    """The regions of one kind of memory that a peer told, to be looked up by address."""

    def __init__(self, infos: Sequence[BlobInfo], kind: MemoryKind) -> None:
        parts = [info.regions(kind) for info in infos]
        self._rows = sorted(tuple(row) for part in parts for row in part.tolist())
        self._starts = [row[0] for row in self._rows]

    def find(self, start: int, end: int, device_id: int | None) -> int:
        """Return the device id of a region that all addresses from `start` to `end` lie in.

        Args:
            start: First address.
            end: First address behind it, any value.
            device_id: Which it has to be; None for any.

        Raises:
            MetadataError: There is none.
        """
        last = bisect.bisect_right(self._starts, start)
        for base, nbytes, found in reversed(self._rows[:last]):
            if device_id in (None, found):
                if end <= base + nbytes:
                    return int(found)
                if device_id is not None:
                    break  # NIXL looks no further than the one that begins last.
        raise MetadataError("the metadata names memory that lies in none of the regions it tells")


def _memories(
    descriptors: Sequence[SerializedDescriptor],
    infos: Sequence[BlobInfo],
    pieces: Mapping[int, Spans],
    *,
    public: bool,
) -> tuple[OfferedMemory, ...]:
    regions: dict[MemoryKind, _Regions] = {}
    result = []
    for index, serialized in enumerate(descriptors):
        device = Device(serialized.device)
        kind = device.memory_kind
        rows = pieces.get(index)
        if rows is not None and sum(rows[:, 1].tolist()) != serialized.size:
            raise MetadataError(f"descriptors[{index}]: its pieces don't add up to its size")
        if serialized.size == 0:
            result.append(OfferedMemory(kind, _NO_SPANS, 0))
            continue
        if kind not in regions:
            regions[kind] = _Regions(infos, kind)
        number = device.id if kind is MemoryKind.VRAM else PUBLIC_DEVICE_ID if public else None
        start, end = serialized.ptr, serialized.ptr + serialized.size
        if rows is not None:
            start, end = int(rows[:, 0].min()), int((rows[:, 0] + rows[:, 1]).max())
        found = regions[kind].find(start, end, number)
        spans = (
            algebra.row(start, serialized.size, found)
            if rows is None
            else algebra.with_device(rows, found)
        )
        result.append(OfferedMemory(kind, spans, serialized.size))
    return tuple(result)
