"""Registrations under device ids that others use, too. See [Note: device ids] in `registry.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch_nixl.engine.adapter import MemoryKind, Region, Registration
from torch_nixl.engine.extents import Extent, Extents
from torch_nixl.errors import RegistrationError


@dataclass(slots=True)
class _Shared:
    """A registration, and how many entries of the registry use it."""

    registration: Registration
    users: int


class SharedRegistrations:
    """The live ones of one registry, whose lock is held in each call.

    Args:
        backends: Names for the message that refuses an overlap.
    """

    def __init__(self, backends: Sequence[str]) -> None:
        self._backends = backends
        self._all: dict[Region, _Shared] = {}
        self._extents: defaultdict[tuple[MemoryKind, int], Extents] = defaultdict(Extents)

    def __len__(self) -> int:
        return len(self._all)

    def find(self, region: Region, *, strict: bool) -> Registration | None:
        """Find a registration that encloses a region, the oldest first, and count a user.

        It serves as well as one of its own: NIXL would not find what lies behind a region that
        nests in another. Of nested ones the inner is the older, and what NIXL finds.

        Args:
            region: What is to be reachable.
            strict: Refuse to enclose or overlap a live registration: transfers of our own look
                memory up under this id.

        Raises:
            RegistrationError: `strict` refuses; nothing is counted.
        """
        extents = self._extents[region.kind, region.device_id]
        start, end = _extent(region)
        around = extents.oldest_around(start, end)
        if around is not None:
            shared = self._all[_region(region, around)]
            shared.users += 1
            return shared.registration
        touching = extents.touching(start, end) if strict else None
        if touching is not None:
            live = _region(region, touching)
            raise RegistrationError(
                f"{region.nbytes} bytes at {region.address:#x} overlap a registration of "
                f"{live.nbytes} bytes at {live.address:#x} that is in use. With these "
                f"backends ({', '.join(self._backends)}) NIXL could then not find all of it: "
                "release the other first, or register the larger one first"
            )
        return None

    def add(self, registration: Registration) -> None:
        """Add one for which `find` found none, with its first user."""
        region = registration.region
        self._all[region] = _Shared(registration, 1)
        self._extents[region.kind, region.device_id].add(*_extent(region))

    def leave(self, registration: Registration) -> bool:
        """Count a user less; return whether it was the last, and the registration is no more."""
        region = registration.region
        shared = self._all[region]
        shared.users -= 1
        if shared.users:
            return False
        del self._all[region]
        self._extents[region.kind, region.device_id].remove(*_extent(region))
        return True

    def clear(self) -> None:
        """Forget all."""
        self._all.clear()
        self._extents.clear()


def _extent(region: Region) -> Extent:
    return region.address, region.address + region.nbytes


def _region(like: Region, extent: Extent) -> Region:
    """The region at an extent, of another one's kind and device id."""
    start, end = extent
    return Region(like.kind, start, end - start, like.device_id)
