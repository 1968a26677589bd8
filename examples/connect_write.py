"""One process exposes buffers, another writes into them; the metadata goes as JSON over a socket.

    python examples/connect_write.py

Without an event loop: `wait` blocks a thread. Only number and sizes of the buffers have to match.
"""

from __future__ import annotations

import multiprocessing
import socket

import numpy as np
import torch

from torch_nixl.connect import (
    Connector,
    Descriptor,
    RdmaMetadata,
    WritableOperation,
    WriteOperation,
)

TIMEOUT = 60.0


def receive(listener: socket.socket) -> None:
    """Let the peer write into a matrix, column by column, and into some bytes."""
    matrix, tail = torch.zeros(3, 4), bytearray(5)
    with Connector("receiver") as connector, listener.accept()[0] as sock:
        memory = [Descriptor(matrix.t()), Descriptor(tail)]
        with WritableOperation(connector.connection(), memory) as operation:
            sock.sendall(operation.metadata().model_dump_json().encode() + b"\n")
            operation.wait(TIMEOUT)
    print(f"receiver: column by column: {matrix.t().flatten().tolist()}, and {bytes(tail)!r}")


def send(port: int) -> None:
    """Write into what the peer exposes."""
    values, tail = np.arange(12, dtype=np.float32), b"bytes"
    with Connector("sender") as connector, socket.create_connection(("127.0.0.1", port)) as sock:
        metadata = RdmaMetadata.model_validate_json(sock.makefile().readline())
        memory = [Descriptor(values), Descriptor(tail)]
        operation = WriteOperation(connector.connection(), memory, metadata)
        operation.wait(TIMEOUT)
        print(f"sender:   wrote {values.nbytes + len(tail)} bytes to {operation.remote.name}")


def main() -> None:
    """Run both sides."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = multiprocessing.get_context("spawn")  # NIXL can't be used across a fork
        (sender := context.Process(target=send, args=(listener.getsockname()[1],))).start()
        receive(listener)
        sender.join()


if __name__ == "__main__":
    main()
