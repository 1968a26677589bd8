"""The receiver's side of a tree or an object, where it differs from a tensor's."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

from torch_nixl.engine.starting import register_all
from torch_nixl.engine.streams import Landing as LandsOn
from torch_nixl.engine.streams import StreamDevice, device_of
from torch_nixl.errors import TransferError
from torch_nixl.p2p.bundles import fits_frame
from torch_nixl.p2p.description import Content
from torch_nixl.p2p.device_receiving import DeviceReceive
from torch_nixl.p2p.landing import ObjectLanding, Pickle, TreeLanding
from torch_nixl.p2p.layout import Layout
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.tensors import Target

if TYPE_CHECKING:
    from torch_nixl.engine.streams import StreamOrder
    from torch_nixl.p2p.exchange import Exchange


class TreeReceive(DeviceReceive):
    """A receive of a tree. Registers the receiver's own tensors when it is made."""

    __slots__ = ("_prepared", "_tree")

    def __init__(
        self,
        exchange: Exchange,
        source: int | None,
        tag: int,
        landing: TreeLanding,
        deadline: float | None,
        order: StreamOrder | None = None,
        lands: LandsOn | None = None,
    ) -> None:
        super().__init__(exchange, source, tag, landing, deadline, lands)
        self._tree = landing
        self.put_in_order(order, landing.own_tensors)
        # Now, while the message is on its way, or not even sent.
        held = register_all(self._connection, landing.own_memories)
        self._memories = tuple(held)
        self._prepared = {id(one.memory): one for one in held}

    def _landing_device(self, content: Content) -> StreamDevice | None:
        if self.order is not None:
            return self.order.devices[0]
        return self._tree.device_of(content)

    def keep(self) -> None:
        for tensor in self._tree.tensors if self.landed_on is not None else ():
            device = device_of(tensor)
            if device is not None:
                device.keep(tensor, device.current())

    def _release(self) -> None:
        super()._release()
        self._prepared = {}

    def _hold(self, target: Target) -> Layout:
        prepared = self._prepared
        new = [memory for memory in target.memories if id(memory) not in prepared]
        held = register_all(self._connection, new)
        with self._connection.lock:
            self._memories += tuple(held)
        every = {**prepared, **{id(one.memory): one for one in held}}
        used = [every[id(memory)] for memory in target.memories]
        if not fits_frame(None, used):
            raise TransferError(f"{self}: its {len(used)} regions can't be told in one frame")
        return Layout.of(used)


class ObjectReceive(ReceiveOperation):
    """A receive of a pickled object. Unpickled by the thread that asks for it, never before."""

    __slots__ = ("_loading",)

    def __init__(
        self, exchange: Exchange, source: int | None, tag: int, deadline: float | None
    ) -> None:
        super().__init__(exchange, source, tag, ObjectLanding(), deadline)
        self._loading = threading.Lock()

    def results(self) -> list[Any]:
        return []  # Unpickling is for whoever asks for the object itself.

    def received(self) -> Any:
        with self._loading:
            if isinstance(self.result, Pickle):
                self.result = pickle.loads(self.result)  # noqa: S301 - asked for by name
            return self.result
