"""The group: what it serves, and how it begins and ends."""

from __future__ import annotations

import atexit
import contextlib
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_nixl.collectives.group import group_of
from torch_nixl.errors import ClosedError
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.process_group.backend_view import BackendView
from torch_nixl.process_group.monitored import monitored_barrier
from torch_nixl.process_group.operations import Operations
from torch_nixl.process_group.others import Other, make_other
from torch_nixl.process_group.registration import NAME
from torch_nixl.process_group.work import GroupWork, Together

# [Note: who keeps a group alive]
# C++ knows groups by name and keeps its half of them, not the Python half: once that is gone, a
# functional collective calls into nothing. So a group lives until `shutdown` or `abort`.
_living: dict[int, NixlProcessGroup] = {}

_poison: Any = torch._C._distributed_c10d.FakeProcessGroup


class NixlProcessGroup(Operations, dist.ProcessGroup):  # type: ignore[misc]  # overloaded in C++
    """A process group whose tensors move over NIXL.

    Made by `torch.distributed`: ``init_process_group("nixl")``, ``new_group(backend="nixl")``.

    Args:
        store: The group's own.
        rank: This rank, in the group.
        size: How many there are.
        timeout: After which operations end with `TransferTimeout`.
        devices: Kinds of devices whose tensors move over NIXL.
        others: For other kinds of devices: the backend that serves them. Shut down with the group.
        once: The store is never used for a group again, and is left empty.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout: datetime.timedelta,
        devices: Sequence[str],
        others: Mapping[str, Other],
        once: bool,
    ) -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]  # not in torch's stubs
        self._store = store
        self._devices = tuple(devices)
        self._serves_host = "cpu" in devices
        self._others = dict(others)
        self._num_barriers = 0
        self._coalesced: list[GroupWork] | None = None
        self._destroyed = ""
        self._communicator = Communicator(
            store, rank, size, prefix=NAME, timeout=timeout, once=once
        )
        # Other ranks may ask about a collective before this one has called its first.
        group_of(self._communicator)
        # [Note: the registered backend]
        # The group has no name, and functional collectives can't find it, unless a C++ backend is
        # registered for each device. This one never moves anything: it raises for an operation
        # that reaches it because a method is missing here. The other backends are not registered,
        # so that nothing but this object holds them: Gloo's must end before the interpreter does.
        options = _poison.Options()
        options.error_on_collective = True
        registered = _poison._create_internal(rank, size, options)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in (*devices, *others):
            self._register_backend(
                torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, registered
            )
        _living[id(self)] = self

    # What it is.

    def getBackendName(self) -> str:  # noqa: N802 - c10d's name
        return NAME

    def name(self) -> str:
        return NAME

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def communicator(self) -> Communicator:
        """The ranks below, with their numbers in this group."""
        return self._communicator

    @property
    def default_timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._communicator.timeout or 0.0)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Change the timeout of operations that begin from now on."""
        self._communicator.timeout = timeout.total_seconds()
        for other in self._distinct_others():
            other.set_timeout(timeout)

    def _get_backend(self, device: torch.device) -> Other:
        # Called by Python only: see [Note: the registered backend].
        kind = torch.device(device).type
        if kind in self._devices:
            return BackendView(self)
        if kind in self._others:
            return self._others[kind]
        raise RuntimeError(self._refusal(kind))

    def _other_for(self, tensor: torch.Tensor) -> Other | None:
        if tensor.is_cpu and self._serves_host:
            return None
        kind = tensor.device.type
        if kind in self._devices:
            return None
        other = self._others.get(kind)
        if other is None:
            raise ValueError(self._refusal(kind))
        return other

    def _refusal(self, kind: str) -> str:
        served = [f"{device} by {NAME}" for device in self._devices]
        served += [f"{device} by {other.name()}" for device, other in self._others.items()]
        return (
            f"this group has no backend for tensors on {kind}: it serves {', '.join(served)}; "
            "what serves which device is said when the group is made"
        )

    def _distinct_others(self) -> list[Other]:
        return list({id(other): other for other in self._others.values()}.values())

    # Parts of it.

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> NixlProcessGroup | None:
        """Make a group of some ranks of this one, without the rest taking part.

        Args:
            new_ranks: Their ranks in this group, in the new one's order.
            timeout: Of the new group; this one's by default.
            opts: Unused.
            group_name: Tells it from others: all its ranks give the same, used for no other.
            group_desc: For messages.
            device_types: Which of this group's devices it serves, each by the backend that it has
                here; all by default.

        Returns:
            The group; None where this rank is not in it.

        Raises:
            ValueError: No name, or a device that this group does not serve.
        """
        if self._destroyed:
            raise ClosedError(self._destroyed)
        if self.rank() not in new_ranks:
            return None
        if not group_name:
            raise ValueError("split_group: expected group_name=, the same on all new ranks")
        all_kinds = (*self._devices, *self._others)
        kinds = all_kinds if device_types is None else [one.type for one in device_types]
        for kind in kinds:
            if kind not in all_kinds:
                raise ValueError(self._refusal(kind))
        store = dist.PrefixStore(f"{group_name}/", self._store)
        rank, size = list(new_ranks).index(self.rank()), len(new_ranks)
        timeout = timeout or self.default_timeout
        part = NixlProcessGroup(
            store,
            rank,
            size,
            timeout=timeout,
            devices=[kind for kind in kinds if kind in self._devices],
            others={
                kind: make_other(self._others[kind].name(), kind, store, rank, size, timeout)
                for kind in kinds
                if kind in self._others
            },
            once=True,
        )
        part._set_group_name(dist.distributed_c10d.GroupName(group_name))
        part._set_group_desc(group_desc or f"{self.group_desc}:split")
        return part

    # Several operations as one.

    def _start_coalescing(self, device: torch.device) -> None:
        other = self._others.get(device.type)
        if other is not None:
            other._start_coalescing()
        else:
            self._coalesced = []

    def _end_coalescing(  # type: ignore[override]  # C++ takes no Work as one that has ended.
        self, device: torch.device
    ) -> dist.Work | None:
        other = self._others.get(device.type)
        if other is not None:
            begun: dist.Work | None = other._end_coalescing()
            return begun
        works, self._coalesced = self._coalesced, None
        return GroupWork(Together(works), []) if works else None

    # Barriers.

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have called it; tell which have not.

        `torch.distributed.monitored_barrier` takes groups of Gloo alone: call this on the group.

        Args:
            timeout: How long rank 0 waits; the group's by default.
            wait_all_ranks: Name all who are missing, not the first alone.

        Raises:
            TransferTimeout: Names who did not come; on rank 0, and on all that did.
            PeerLostError: Rank 0 died or left.
        """
        if self._destroyed:
            raise ClosedError(self._destroyed)
        number, self._num_barriers = self._num_barriers, self._num_barriers + 1
        chosen = self._communicator.timeout if timeout is None else timeout.total_seconds()
        monitored_barrier(self._communicator, number, chosen, wait_all_ranks=wait_all_ranks)

    # The end.

    def shutdown(self) -> None:
        """End gracefully: what was sent is received, within seconds. Idempotent."""
        if self._leave("was destroyed"):
            self._communicator.close()
            for other in self._distinct_others():
                other.shutdown()
            self._others.clear()

    def abort(self) -> None:
        """End at once: who waits, in any thread, gets `ClosedError`. Idempotent."""
        if self._leave("was aborted"):
            self._communicator.abort()
            for other in self._distinct_others():
                other.abort()
            self._others.clear()

    def _leave(self, how: str) -> bool:
        if _living.pop(id(self), None) is None:
            return False
        self._destroyed = f"the process group {self.group_name!r} {how}"
        return True

    def __repr__(self) -> str:
        state = f" {self._destroyed}" if self._destroyed else ""
        return f"<NixlProcessGroup rank {self.rank()} of {self.size()}{state}>"


@atexit.register
def _drop_others() -> None:
    # A Gloo backend that outlives the interpreter aborts the process now and then. Our own agent
    # is closed by the engine. One that can't be shut down any more is dropped all the same.
    for group in list(_living.values()):
        for other in group._distinct_others():
            with contextlib.suppress(RuntimeError):
                other.shutdown()
        group._others.clear()
