"""One end of an interoperation test: a process that runs connect operations on command.

It is run by the Python that has the library named with ``--module`` (dynamo.nixl_connect, or
torch_nixl.connect to test the tests) and needs numpy and torch besides. Requests are JSON lines
on stdin, replies JSON lines on what was stdout; log lines of the libraries go to stderr.

    {"id": 1, "command": "buffers", "kind": "torch", "sizes": [4096], "seed": 7}
    {"id": 1, "result": {"names": ["b0"]}}     or    {"id": 1, "error": {"type": ..., ...}}

Requests run concurrently, so that one may wait while another cancels. The process cannot hang:
each request has a deadline, the end of stdin ends it, and SIGALRM kills it after ``--lifetime``
seconds even inside a C call.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

KINDS: Final = ("torch", "numpy", "bytes", "bytearray", "pointer")
DEFAULT_TIMEOUT: Final = 20.0
Bytes = npt.NDArray[np.uint8]


def pattern(seed: int, num_bytes: int) -> Bytes:
    """Return bytes that differ from seed to seed and from place to place."""
    places = np.arange(num_bytes, dtype=np.uint64)
    mixed = (places + np.uint64(seed * 7919 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(56)).astype(np.uint8)


def digest(data: Bytes) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one kind: what a Descriptor takes, and the same bytes as an array."""

    data: Any
    view: Bytes

    @classmethod
    def make(cls, kind: str, num_bytes: int, seed: int | None = None) -> Buffer:
        """Allocate ``num_bytes``; filled by `pattern` if a seed is given, else with zeros.

        Raises:
            ValueError: The kind is unknown.
        """
        content = np.zeros(num_bytes, np.uint8) if seed is None else pattern(seed, num_bytes)
        if kind == "torch":
            import torch

            tensor = torch.from_numpy(content)
            return cls(tensor, content)
        if kind == "numpy":
            return cls((content, "cpu"), content)
        if kind == "bytes":
            frozen = content.tobytes()
            return cls(frozen, np.frombuffer(frozen, np.uint8))
        if kind == "bytearray":
            mutable = bytearray(content.tobytes())
            return cls(mutable, np.frombuffer(mutable, np.uint8))
        if kind == "pointer":
            return cls((content.ctypes.data, num_bytes, "cpu", content), content)
        raise ValueError(f"unknown kind of buffer: {kind!r}")


class Peer:
    """State of the process: a Connector, named buffers and named operations."""

    def __init__(self, module: str, worker_id: str | None = None) -> None:
        self.library: Any = importlib.import_module(module)
        self.connector: Any = self.library.Connector(worker_id)
        self.buffers: dict[str, Buffer] = {}
        self.operations: dict[str, Any] = {}
        self.num_names = 0

    def _name(self, prefix: str) -> str:
        self.num_names += 1
        return f"{prefix}{self.num_names}"

    def _descriptors(self, names: Sequence[str], as_list: bool) -> Any:
        found = [self.library.Descriptor(self.buffers[name].data) for name in names]
        return found if as_list else found[0]

    def _keep(self, operation: Any) -> str:
        name = self._name("op")
        self.operations[name] = operation
        return name

    async def do_hello(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "python": sys.version.split()[0]}

    async def do_buffers(
        self, kind: str, sizes: Sequence[int], seed: int | None = None
    ) -> dict[str, Any]:
        names = []
        for place, num_bytes in enumerate(sizes):
            name = self._name("b")
            self.buffers[name] = Buffer.make(
                kind, num_bytes, None if seed is None else seed + place
            )
            names.append(name)
        return {"names": names}

    async def do_fill(self, buffers: Sequence[str], seed: int) -> dict[str, Any]:
        for place, name in enumerate(buffers):
            view = self.buffers[name].view
            view[:] = pattern(seed + place, view.nbytes)
        return {}

    async def do_digest(self, buffers: Sequence[str]) -> dict[str, Any]:
        return {"digests": [digest(self.buffers[name].view) for name in buffers]}

    async def do_create_readable(
        self, buffers: Sequence[str], as_list: bool = False, hex_encode: bool = False
    ) -> dict[str, Any]:
        operation = await self.connector.create_readable(self._descriptors(buffers, as_list))
        metadata = operation.metadata(hex_encode=hex_encode)
        return {"op": self._keep(operation), "metadata": metadata.model_dump_json()}

    async def do_create_writable(
        self, buffers: Sequence[str], as_list: bool = False, hex_encode: bool = False
    ) -> dict[str, Any]:
        operation = await self.connector.create_writable(self._descriptors(buffers, as_list))
        metadata = operation.metadata(hex_encode=hex_encode)
        return {"op": self._keep(operation), "metadata": metadata.model_dump_json()}

    async def do_begin_read(
        self, metadata: str, buffers: Sequence[str], as_list: bool = False
    ) -> dict[str, Any]:
        parsed = self.library.RdmaMetadata.model_validate_json(metadata)
        descriptors = self._descriptors(buffers, as_list)
        return {"op": self._keep(await self.connector.begin_read(parsed, descriptors))}

    async def do_begin_write(
        self, metadata: str, buffers: Sequence[str], as_list: bool = False
    ) -> dict[str, Any]:
        parsed = self.library.RdmaMetadata.model_validate_json(metadata)
        descriptors = self._descriptors(buffers, as_list)
        return {"op": self._keep(await self.connector.begin_write(descriptors, parsed))}

    async def do_wait(self, op: str) -> dict[str, Any]:
        await self.operations[op].wait_for_completion()
        return {"status": self.operations[op].status.name}

    async def do_status(self, op: str) -> dict[str, Any]:
        return {"status": self.operations[op].status.name}

    async def do_cancel(self, op: str) -> dict[str, Any]:
        self.operations[op].cancel()
        return {"status": self.operations[op].status.name}

    async def do_results(self, op: str) -> dict[str, Any]:
        return {"sizes": [descriptor.size for descriptor in self.operations[op].results()]}

    async def do_leave(self, op: str) -> dict[str, Any]:
        """Leave the operation's context and forget it, as `with` and the end of a function do."""
        operation = self.operations.pop(op)
        operation.__exit__(None, None, None)
        return {"status": operation.status.name}

    async def do_inbox(self) -> dict[str, Any]:
        """Return every notification that dynamo's agent holds, as [sender, hexadecimal bytes]."""
        connection = await self.connector._create_connection()
        inbox = connection._nixl.update_notifs()
        return {"inbox": [[who, msg.hex()] for who, all_ in inbox.items() for msg in all_]}

    async def do_remotes(self) -> dict[str, Any]:
        """Return how many operations use each remote that dynamo has loaded."""
        connection = await self.connector._create_connection()
        return {"remotes": dict(connection._remote_refs)}

    async def do_resources(self) -> dict[str, Any]:
        gc.collect()
        return {"num_fds": len(os.listdir("/proc/self/fd")), "num_ops": len(self.operations)}

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one request and return its reply; no request can end the process."""
        number = request.pop("id", None)
        try:
            deadline = float(request.pop("deadline", DEFAULT_TIMEOUT))
            handler = getattr(self, f"do_{request.pop('command')}")
            result = await asyncio.wait_for(handler(**request), deadline)
        except Exception as error:  # noqa: BLE001 - every fault is an answer, the tests judge it
            names = [base.__name__ for base in type(error).__mro__]
            described = {"type": names[0], "bases": names[1:], "message": str(error)}
            return {"id": number, "error": described}
        return {"id": number, "result": result}


async def serve(module: str, worker_id: str | None, replies: int) -> None:
    """Answer requests from stdin on the file descriptor ``replies`` until stdin ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    peer = Peer(module, worker_id)
    tasks: set[asyncio.Task[None]] = set()

    async def reply(request: dict[str, Any]) -> None:
        line = json.dumps(await peer.answer(request)).encode() + b"\n"
        while line:
            line = line[os.write(replies, line) :]

    while line := await reader.readline():
        request = json.loads(line)
        if request.get("command") == "exit":
            break
        task = asyncio.create_task(reply(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main() -> None:
    parser = argparse.ArgumentParser(description="One end of an interoperation test.")
    parser.add_argument("--module", default="dynamo.nixl_connect")
    parser.add_argument("--worker-id")
    parser.add_argument("--lifetime", type=int, default=300, help="seconds until SIGALRM")
    options = parser.parse_args()
    signal.alarm(options.lifetime)
    # Libraries may print: whoever writes to stdout must not break the line protocol.
    replies = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(serve(options.module, options.worker_id, replies))
    # dynamo's finalizers raise at interpreter shutdown; nothing of value is left to free.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
