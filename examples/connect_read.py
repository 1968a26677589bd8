"""One process exposes a tensor, another reads it; the metadata goes as JSON over a pipe.

    python examples/connect_read.py

It could as well go by HTTP. Code written for dynamo's nixl_connect looks the same.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.connection import Connection as Pipe

import torch

from torch_nixl import connect as nixl_connect

SHAPE = (1024, 1024)
TIMEOUT = 60.0


async def expose(pipe: Pipe) -> None:
    """Let the peer at the pipe's other end read a tensor."""
    weights = torch.arange(1024 * 1024, dtype=torch.float32).view(SHAPE)
    connector = nixl_connect.Connector("owner")
    with await connector.create_readable(nixl_connect.Descriptor(weights)) as operation:
        pipe.send(operation.metadata().model_dump_json())
        await operation.wait_for_completion(timeout=TIMEOUT)
    print(f"owner:  {operation.status.name}")
    connector.close()


async def read(pipe: Pipe) -> None:
    """Read the tensor that the peer exposes."""
    target = torch.zeros(SHAPE)
    connector = nixl_connect.Connector("reader")
    metadata = nixl_connect.RdmaMetadata.model_validate_json(pipe.recv())
    with await connector.begin_read(metadata, nixl_connect.Descriptor(target)) as operation:
        await operation.wait_for_completion(timeout=TIMEOUT)
    print(f"reader: {target.nbytes} bytes from {operation.remote.name}, last {target[-1, -1]:.0f}")
    connector.close()


def main() -> None:
    """Run both sides."""
    context = multiprocessing.get_context("spawn")  # NIXL can't be used across a fork
    ours, theirs = context.Pipe()
    (reader := context.Process(target=run_reader, args=(theirs,))).start()
    asyncio.run(expose(ours))
    reader.join()


def run_reader(pipe: Pipe) -> None:
    """Be the second process."""
    asyncio.run(read(pipe))


if __name__ == "__main__":
    main()
