"""One side of reads through `torch_nixl.connect` or dynamo's `nixl_connect`, as a program.

It is run by path, with the Python of an environment that has the library, and needs nothing else
of torch_nixl: so that both libraries are measured by the same program. It is told what to do by
lines of JSON on its standard input, and answers so on its standard output:

    {"key": HEX, "host": HOST, "port": PORT}   PORT 0 at the owner, which tells the one it took
    {"nbytes": N, "count": C}                  C rounds; the answer has this side's seconds

A round is: create_readable, its metadata as JSON to the other side, begin_read, both sides
complete; the two talk over TCP. The connection is warm: rounds before the counted ones, and the
last operation is kept until the next one exists, since dynamo forgets the remote, connection
included, when its last operation goes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import socket
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Final, TextIO

WARMUPS: Final = 2


class Side:
    """The owner's or the reader's part."""

    def __init__(self, library: Any, pipe: Connection, owns: bool) -> None:
        self._library = library
        self._connector = library.Connector()
        self._pipe = pipe
        self._owns = owns
        self._tensors: dict[int, Any] = {}
        self._kept: Any = None
        self._number = 0

    async def rounds(self, nbytes: int, count: int) -> list[float]:
        """Do rounds on one tensor, as a training loop has; return the seconds of each."""
        import torch

        # On a virtual machine, memory that was never touched costs more than the transfer.
        if nbytes not in self._tensors:
            self._tensors[nbytes] = torch.zeros(nbytes, dtype=torch.uint8)
        tensor = self._tensors[nbytes]
        taken = []
        for _ in range(WARMUPS + count):
            self._number += 1
            expected = self._number % 251
            if self._owns:
                tensor.fill_(expected)
            self._barrier()
            started = time.perf_counter()
            await (self._own(tensor) if self._owns else self._read(tensor))
            taken.append(time.perf_counter() - started)
            if int(tensor.min()) != expected or int(tensor.max()) != expected:
                raise RuntimeError(f"wrong data in a round of {nbytes} bytes")
        return taken[WARMUPS:]

    async def _own(self, tensor: Any) -> None:
        descriptor = self._library.Descriptor(tensor)
        with await self._connector.create_readable(descriptor) as operation:
            self._pipe.send_bytes(operation.metadata().model_dump_json().encode())
            await operation.wait_for_completion()
        self._kept = operation

    async def _read(self, tensor: Any) -> None:
        descriptor = self._library.Descriptor(tensor)
        metadata = self._library.RdmaMetadata.model_validate_json(self._pipe.recv_bytes())
        with await self._connector.begin_read(metadata, descriptor) as operation:
            await operation.wait_for_completion()
        self._kept = operation

    def _barrier(self) -> None:
        self._pipe.send_bytes(b"here")
        if self._pipe.recv_bytes() != b"here":
            raise RuntimeError("the two sides are out of step")

    def close(self) -> None:
        """Let go of everything."""
        self._kept = None
        with contextlib.suppress(AttributeError):  # dynamo's connector can't be closed
            self._connector.close()


def _meet(owns: bool, answer: TextIO) -> Connection:
    """Connect the two sides."""
    told = json.loads(input())
    key = bytes.fromhex(told["key"])
    if owns:
        with Listener((told["host"], 0), family="AF_INET", authkey=key) as listener:
            print(json.dumps({"port": listener.address[1]}), file=answer, flush=True)
            pipe = listener.accept()
    else:
        pipe = Client((told["host"], told["port"]), family="AF_INET", authkey=key)
    # Two messages in a row would else wait for an answer to the first.
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return pipe


async def _serve(side: Side, answer: TextIO) -> None:
    loop = asyncio.get_running_loop()
    while True:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        if not line:
            return
        taken = await side.rounds(**json.loads(line))
        print(json.dumps(taken), file=answer, flush=True)


def main() -> None:
    """Serve until standard input ends."""
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("role", choices=["owner", "reader"])
    options = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    # What libraries print must not mix with our answers.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        library = importlib.import_module(options.module)
        import torch
    except Exception as error:  # noqa: BLE001 - whatever an import raises, the library is not there
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}), file=answer, flush=True)
        return
    # As under torchrun: idle OpenMP threads spin on the other side's core.
    torch.set_num_threads(1)
    print(json.dumps({}), file=answer, flush=True)
    owns = options.role == "owner"
    pipe = _meet(owns, answer)
    side = Side(library, pipe, owns)
    asyncio.run(_serve(side, answer))
    side.close()
    sys.stderr.flush()
    os._exit(0)  # dynamo's finalizers raise at interpreter shutdown


if __name__ == "__main__":
    main()
