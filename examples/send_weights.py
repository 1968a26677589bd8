"""Move a real model's weights from rank 0 to rank 1 and check every tensor.

    torchrun --nproc-per-node=2 examples/send_weights.py

Rank 0 reads SmolLM2-135M-Instruct, exposes all its tensors as one readable operation and puts the
operation's offer into torchrun's store. Rank 1 allocates tensors of the same shapes, claims the
offer, and reads straight into them. The store carries descriptions only; NIXL moves the bytes.
"""

from __future__ import annotations

import json
import sys
import time
import zlib

import torch
import torch.distributed as dist
from smollm2 import load_weights
from tqdm import tqdm

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.offer import Offer


def checksum(tensor: torch.Tensor) -> int:
    """CRC of a tensor's bytes."""
    return zlib.crc32(tensor.view(torch.uint8).numpy().tobytes())


def send(connection: Connection, store: dist.Store) -> None:
    """Expose the weights until rank 1 has read them."""
    weights = load_weights()
    exposed = connection.expose(Direction.READ, [tensor_memory(t) for t in weights.values()])
    manifest = [(name, list(tensor.shape), checksum(tensor)) for name, tensor in weights.items()]
    store.set("manifest", json.dumps(manifest))
    store.set("offer", exposed.offer().pack(key=connection.metadata_key).hex())
    exposed.wait()


def receive(connection: Connection, store: dist.Store) -> None:
    """Read the weights, check them, and say how it went."""
    manifest = json.loads(store.get("manifest"))
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape, _ in manifest}
    offer = Offer.unpack(
        bytes.fromhex(store.get("offer").decode()),
        key=connection.metadata_key,
        parse_metadata=connection.adapter.inspect,
    )
    nbytes = sum(memory.nbytes for memory in offer.memories)

    started = time.perf_counter()
    active = connection.claim(offer, [tensor_memory(tensor) for tensor in weights.values()])
    with tqdm(
        total=nbytes, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        while not active.done:
            connection.progress.wait_until(lambda: active.done, time.monotonic() + 0.1)
            bar.update(active.moved_nbytes - bar.n)
    active.wait()
    seconds = time.perf_counter() - started

    wrong = [name for name, _, crc in manifest if checksum(weights[name]) != crc]
    if wrong:
        raise SystemExit(f"{len(wrong)} tensors differ: {', '.join(wrong[:5])}")
    assert active.remote is not None
    print(
        f"{len(weights)} tensors, {nbytes:,} bytes in {seconds:.3f} s: "
        f"{nbytes / seconds / 1e9:.2f} GB/s over {connection.path(active.remote)}, "
        "all checksums equal"
    )


def main() -> None:
    """Run one rank."""
    store, rank, _ = next(dist.rendezvous("env://"))
    with Connection.open(f"rank{rank}") as connection:
        send(connection, store) if rank == 0 else receive(connection, store)


if __name__ == "__main__":
    main()
