"""For tests of torch_nixl and of programs that use it.

- `loopback_pair` and `LoopbackFabric`: agents in one process, with scripted faults;
  `LoopbackConnector`: the same below `torch_nixl.connect`.
- `FakeDevice`: device tensors and streams without a device, with real delays.
- `run_ranks` and `RankPool`: functions on several ranks, each a process, with hard deadlines.
- `conformance_checks`: what an adapter must do, to be run on any implementation.
"""

from __future__ import annotations

from torch_nixl._testing.conformance import Check, conformance_checks
from torch_nixl._testing.connector import LoopbackConnector
from torch_nixl._testing.harness import (
    PEER_BYTES,
    PEER_DEVICE_ID,
    Harness,
    LoopbackHarness,
    NixlHarness,
    Peer,
    nixl_harness,
)
from torch_nixl._testing.rank_worker import Rank
from torch_nixl._testing.ranks import RankPool, RanksFailed, run_ranks
from torch_nixl.engine.fake_streams import FakeDevice, FakeEvent, FakeGate, FakeStream
from torch_nixl.engine.loopback import LoopbackAdapter, LoopbackFabric

__all__ = [
    "PEER_BYTES",
    "PEER_DEVICE_ID",
    "Check",
    "FakeDevice",
    "FakeEvent",
    "FakeGate",
    "FakeStream",
    "Harness",
    "LoopbackAdapter",
    "LoopbackConnector",
    "LoopbackFabric",
    "LoopbackHarness",
    "NixlHarness",
    "Peer",
    "Rank",
    "RankPool",
    "RanksFailed",
    "conformance_checks",
    "loopback_pair",
    "nixl_harness",
    "run_ranks",
]


def loopback_pair(
    first: str = "a", second: str = "b"
) -> tuple[LoopbackFabric, LoopbackAdapter, LoopbackAdapter]:
    """Return a fabric and two agents on it that know how to reach each other.

    They have not been in contact yet: as with NIXL, the first message or transfer needs both to
    make progress. No memory is registered.
    """
    fabric = LoopbackFabric()
    one, two = fabric.adapter(first), fabric.adapter(second)
    one.add_remote(two.metadata([], connection=True))
    two.add_remote(one.metadata([], connection=True))
    return fabric, one, two
