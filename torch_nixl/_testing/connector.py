"""A Connector over the loopback fake: connect's JSON, keys and rules without a transfer library."""

from __future__ import annotations

import secrets

from torch_nixl.connect import Connector
from torch_nixl.engine.connection import DEFAULT_TIMEOUT, Connection
from torch_nixl.engine.loopback import LoopbackFabric


class LoopbackConnector(Connector):
    """A Connector whose agent lives on a `LoopbackFabric`, with the faults that it scripts.

    It reaches other such Connectors of the same fabric, all in one process. Memory of any device
    can be named by its address, ``Descriptor((address, nbytes, "cuda:0", owner))``: the fake takes
    the address for one of this process and moves the bytes, so that programs that mix host and
    device memory run where there is no device.

    Args:
        fabric: The network.
        worker_id: As for `Connector`.
        timeout: As for `Connector`.
        peer_timeout: As for `Connector`.
        secret: As for `Connector`.
    """

    def __init__(
        self,
        fabric: LoopbackFabric,
        worker_id: str | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        peer_timeout: float | None = None,
        secret: bytes | str | None = None,
    ) -> None:
        super().__init__(worker_id, timeout=timeout, peer_timeout=peer_timeout, secret=secret)
        self._fabric = fabric

    def open_engine(self) -> Connection:
        return Connection(
            self._fabric.adapter(f"{self.name}-1-{secrets.token_hex(6)}"),
            secret=self._secret,
            timeout=self._timeout,
            peer_timeout=self._peer_timeout,
        )
