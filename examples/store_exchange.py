"""Every rank exposes a tensor and reads its neighbour's; torch's store exchanges the metadata.

    torchrun --nproc-per-node=4 examples/store_exchange.py

No process group is needed, only a store that all ranks reach. The key goes with the operation.
"""

from __future__ import annotations

import os

import torch
from torch.distributed import TCPStore

from torch_nixl.connect import (
    Connector,
    Descriptor,
    ReadableOperation,
    ReadOperation,
    fetch,
    publish,
)

TIMEOUT = 60.0


def main() -> None:
    """Be one rank."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's own agent serves the store at that port.
    store = TCPStore(host, port, world_size, is_master=False)
    neighbour = (rank + 1) % world_size
    mine, theirs = torch.full((1000,), float(rank)), torch.zeros(1000)

    with Connector(f"rank{rank}") as connector:
        connection = connector.connection()
        with ReadableOperation(connection, Descriptor(mine)) as exposed:
            publish(store, f"example/{rank}", exposed)
            metadata = fetch(store, f"example/{neighbour}", timeout=TIMEOUT)
            ReadOperation(connection, metadata, Descriptor(theirs)).wait(TIMEOUT)
            exposed.wait(TIMEOUT)
    assert bool((theirs == neighbour).all())
    print(f"rank {rank}: read {theirs.nbytes} bytes of rank {neighbour}", flush=True)


if __name__ == "__main__":
    main()
