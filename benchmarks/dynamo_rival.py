"""Measure connect operations between two processes: the rival's half of `benchmarks/connect.py`.

Run it with the Python of an environment that has ai-dynamo-runtime 1.6.1, torch and nixl; it needs
nothing of torch_nixl. One process exposes a tensor and tells its RdmaMetadata as JSON over a pipe,
the other reads the tensor, and each takes the time until its own side is complete:

    python benchmarks/dynamo_rival.py --sizes 4096,1048576,67108864 --iterations 30

prints one JSON object; times are milliseconds, gb_per_s is 10^9 bytes over the reader's p50.
``--module torch_nixl.connect`` runs the same program over ours.

Both clocks start when both processes have left a barrier. The connection is warm: rounds before
the counted ones, and the last operation is kept until the next one exists, since dynamo forgets
the remote, connection included, when its last operation goes (``--cold`` drops it in between).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, Final

NUM_WARMUPS: Final = 5
DEADLINE_S: Final = 120.0


async def own(
    library: Any, connector: Any, pipe: Connection, sizes: list[int], rounds: int, cold: bool
) -> dict[int, list[float]]:
    """Expose a tensor ``rounds`` times per size; return the seconds that each took."""
    import torch

    torch.set_num_threads(1)  # As under torchrun: idle OpenMP threads spin on the other's core.
    taken: dict[int, list[float]] = {}
    operation = None
    for num_bytes in sizes:
        taken[num_bytes] = []
        # One tensor for all rounds, as a training loop has: on a virtual machine, memory that was
        # never touched costs more than the transfer.
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        for number in range(rounds):
            tensor.fill_(number % 251)
            if cold:
                operation = None
                gc.collect()
            await barrier(pipe)
            start = time.perf_counter()
            with await connector.create_readable(library.Descriptor(tensor)) as operation:
                pipe.send_bytes(operation.metadata().model_dump_json().encode())
                await operation.wait_for_completion()
                taken[num_bytes].append(time.perf_counter() - start)
    await barrier(pipe)
    return taken


async def read(
    library: Any, connector: Any, pipe: Connection, sizes: list[int], rounds: int, cold: bool
) -> dict[int, list[float]]:
    """Read what `own` exposes; return the seconds that each round took, metadata included."""
    import torch

    torch.set_num_threads(1)
    taken: dict[int, list[float]] = {}
    operation = None
    for num_bytes in sizes:
        taken[num_bytes] = []
        target = torch.zeros(num_bytes, dtype=torch.uint8)
        for number in range(rounds):
            if cold:
                operation = None
                gc.collect()
            await barrier(pipe)
            start = time.perf_counter()
            descriptor = library.Descriptor(target)
            metadata = library.RdmaMetadata.model_validate_json(pipe.recv_bytes())
            with await connector.begin_read(metadata, descriptor) as operation:
                await operation.wait_for_completion()
                taken[num_bytes].append(time.perf_counter() - start)
            if int(target.min()) != number % 251 or int(target.max()) != number % 251:
                raise RuntimeError(f"wrong data in round {number} of {num_bytes} bytes")
    await barrier(pipe)
    return taken


async def barrier(pipe: Connection) -> None:
    """Wait until the other process is here too."""
    pipe.send_bytes(b"here")
    if pipe.recv_bytes() != b"here":
        raise RuntimeError("the processes are out of step")


def work(
    role: str,
    module: str,
    pipe: Connection,
    results: Connection,
    sizes: list[int],
    rounds: int,
    cold: bool,
) -> None:
    """Run one of the two processes and send its times, {size: seconds}, to the parent."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.dup2(2, 1)  # what the libraries print must not mix with our JSON
    library = importlib.import_module(module)

    async def main() -> dict[int, list[float]]:
        connector = library.Connector()
        half = own if role == "owner" else read
        taken = await half(library, connector, pipe, sizes, rounds, cold)
        with contextlib.suppress(AttributeError):
            connector.close()
        return taken

    results.send(asyncio.run(main()))
    sys.stderr.flush()
    os._exit(0)  # dynamo's finalizers raise at interpreter shutdown


def measure(
    module: str, sizes: list[int], iterations: int, cold: bool
) -> dict[str, dict[int, list[float]]]:
    """Run both processes and return {role: {size: seconds of each counted round}}."""
    context = multiprocessing.get_context("spawn")
    ends = dict(zip(("owner", "reader"), context.Pipe(), strict=True))
    taken: dict[str, dict[int, list[float]]] = {}
    workers = {}
    rounds = NUM_WARMUPS + iterations
    for role, end in ends.items():
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=work, args=(role, module, end, sender, sizes, rounds, cold))
        worker.start()
        sender.close()
        end.close()
        workers[role] = (worker, receiver)
    deadline = time.monotonic() + DEADLINE_S
    try:
        for role, (_, receiver) in workers.items():
            if not receiver.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the {role} gave no result in {DEADLINE_S} s")
            found = receiver.recv()
            taken[role] = {size: times[NUM_WARMUPS:] for size, times in found.items()}
    finally:
        for worker, _ in workers.values():
            worker.join(5)
            if worker.is_alive():
                worker.kill()
    return taken


def summarise(seconds: list[float]) -> dict[str, float]:
    """Return minimum, median and 99th percentile in milliseconds."""
    ordered = sorted(1e3 * value for value in seconds)
    last = min(len(ordered) - 1, round(0.99 * len(ordered)))
    return {
        "min_ms": round(ordered[0], 4),
        "p50_ms": round(statistics.median(ordered), 4),
        "p99_ms": round(ordered[last], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time readable operations between two processes.")
    parser.add_argument("--module", default="dynamo.nixl_connect")
    parser.add_argument("--sizes", default="4096,1048576,67108864", help="bytes, by commas")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--cold", action="store_true", help="let go of the remote between rounds")
    options = parser.parse_args()
    sizes = [int(text) for text in options.sizes.split(",")]
    taken = measure(options.module, sizes, options.iterations, options.cold)
    rows = []
    for size in sizes:
        reader = summarise(taken["reader"][size])
        gigabytes = size / 1e9
        rows.append(
            {
                "size": size,
                "reader": reader,
                "owner": summarise(taken["owner"][size]),
                "gb_per_s": round(gigabytes / (reader["p50_ms"] / 1e3), 6),
            }
        )
    report = {
        "module": options.module,
        "cold": options.cold,
        "iterations": options.iterations,
        "python": sys.version.split()[0],
        "results": rows,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
