"""What Python code of torch sees when it asks a group for the backend of a device."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import ErrorType

from torch_nixl.collectives.group import group_of
from torch_nixl.errors import PeerLostError, TransferTimeout

if TYPE_CHECKING:
    from torch_nixl.process_group.group import NixlProcessGroup


@dataclass(slots=True)
class BackendOptions:
    """Options that `split_group` copies from parent to child; a C++ options object can't be.

    Its attributes have the names that torch reads and sets.
    """

    backend: str
    _timeout: datetime.timedelta
    global_ranks_in_group: list[int]
    group_name: str


class BackendView:
    """The attributes of a c10d Backend that device meshes, FSDP and others ask for.

    C++ sees another object: see [Note: the registered backend] in `group`.
    """

    supports_coalescing = False  # A batch of sends and receives needs no start and end.
    supports_time_estimate = False
    supports_shrinking = False
    supports_splitting = True

    def __init__(self, group: NixlProcessGroup) -> None:
        self._group = group

    def name(self) -> str:
        return self._group.name()

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    @property
    def options(self) -> BackendOptions:
        group = self._group
        return BackendOptions(group.name(), group.default_timeout, [], group.group_name)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: ranks meet when they first need each other."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a new group have no part in making it."""

    def get_error(self) -> ErrorType:
        """What the group's collectives have failed with, as far as c10d has words for it."""
        communicator = self._group.communicator
        error = group_of(communicator).failed or communicator._exchange.poisoned
        if error is None:
            return ErrorType.SUCCESS
        if isinstance(error, TransferTimeout):
            return ErrorType.TIMEOUT
        lost = isinstance(error, PeerLostError)
        return ErrorType.REMOTE_ERROR if lost else ErrorType.COMM_ERROR

    def _set_sequence_number_for_group(self) -> None:
        pass

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        self._group.abort()

    def shutdown(self) -> None:
        self._group.shutdown()
