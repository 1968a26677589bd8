"""What NIXL's own progress thread costs and gives: the measurement behind the default.

    python benchmarks/progress.py [--json FILE]

Two processes on one host. For NIXL's thread off, and on with a delay of 1 ms and of 10 ms:
latency of an 8-byte message, bandwidth of a 64 MiB READ, CPU time when idle, and how long a peer
waits for a target that holds the GIL for two seconds without a pause.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

import torch
from engine import HUGE, LARGE, TEST_FRAME, OurAgent, cpu_seconds
from pair import Side, arguments, median, percentile, run_pair, write_json
from rich.console import Console
from rich.table import Table

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.offer import Offer

ROUNDS = 3000
IDLE_SECONDS = 5
GIL_SECONDS = 2.0


def hold_the_gil(seconds: float) -> None:
    """Run one long C call: no other Python thread gets a turn."""
    started = time.perf_counter()
    sum(range(1 << 22))
    rate = (1 << 22) / (time.perf_counter() - started)
    sum(range(int(rate * seconds)))


def latency(side: Side, ours: OurAgent) -> tuple[float, float]:
    """8-byte messages there and back, half a round trip: p50 and p99."""
    assert ours.remote is not None
    connection, remote = ours.connection, ours.remote

    def send() -> None:
        frame = connection.codec.pack_raw(TEST_FRAME, bytes(8), to=remote.name)
        connection.contacts.send_raw(remote, frame)

    side.exchange(None)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        if side.rank == 0:
            send()
            ours.wait_message()
        else:
            ours.wait_message()
            send()
        seconds.append((time.perf_counter() - started) / 2)
    return percentile(seconds[100:], 0.5) * 1e6, percentile(seconds[100:], 0.99) * 1e6


def bandwidth(side: Side, ours: OurAgent) -> float:
    """A 64 MiB READ while the other side waits, and so polls, too."""
    side.exchange(None)
    if side.rank == 1:
        side.wait_while(ours.connection.progress.step)
        return 0.0
    figures = []
    for _ in range(15):
        started = time.perf_counter()
        ours.move(Direction.READ, LARGE)
        figures.append(LARGE / (time.perf_counter() - started) / 1e9)
    side.pipe.send(None)
    return median(figures)


def idle(side: Side) -> float:
    side.exchange(None)
    before = cpu_seconds()
    time.sleep(IDLE_SECONDS)
    return (cpu_seconds() - before) / IDLE_SECONDS * 100


def wait_for_a_busy_target(side: Side, ours: OurAgent) -> float:
    """How long a claimed READ of 1 MiB takes if its owner holds the GIL from before it is claimed.

    The grant takes the owner's Python in any case; the bytes over TCP take its progress.
    """
    connection = ours.connection
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    if side.rank == 1:
        exposed = connection.expose(Direction.READ, [tensor_memory(data)])
        side.exchange(exposed.offer().pack(key=None))
        hold_the_gil(GIL_SECONDS)
        exposed.wait()
        return 0.0
    packed = side.exchange(None)
    assert isinstance(packed, bytes)
    offer = Offer.unpack(packed, key=None, parse_metadata=connection.adapter.inspect)
    time.sleep(0.2)
    started = time.perf_counter()
    connection.claim(offer, [tensor_memory(data)]).wait()
    return time.perf_counter() - started


def one_sided_write_to_a_busy_target(side: Side, ours: OurAgent) -> float:
    """How long a 1 MiB WRITE that was granted before takes if its target holds the GIL."""
    side.exchange(None)
    if side.rank == 1:
        hold_the_gil(GIL_SECONDS)
        side.exchange(None)
        return 0.0
    time.sleep(0.2)
    started = time.perf_counter()
    ours.move(Direction.WRITE, 1 << 20)
    seconds = time.perf_counter() - started
    side.exchange(None)
    return seconds


def body(delay: float | None, side: Side) -> None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    buffer = torch.zeros(HUGE, dtype=torch.uint8)
    ours = OurAgent(f"ours{side.rank}", buffer, progress_thread=delay)
    ours.meet(side)
    p50, p99 = latency(side, ours)
    gbytes = bandwidth(side, ours)
    cpu = idle(side)
    write = one_sided_write_to_a_busy_target(side, ours)
    read = wait_for_a_busy_target(side, ours)
    if side.rank == 0:
        side.figures = [p50, p99, gbytes, cpu, write * 1e3, read * 1e3]
    side.exchange(None)
    ours.connection.close()


COLUMNS: dict[str, str] = {
    "8 B, p50": "us",
    "8 B, p99": "us",
    "64 MiB READ": "GB/s",
    "idle": "% of a core",
    "granted WRITE, target holds the GIL": "ms",
    "claimed READ, target holds the GIL": "ms",
}


def main() -> None:
    options = arguments(__doc__ or "")
    table = Table(title=f"NIXL's progress thread (load average {os.getloadavg()[0]:.1f})")
    for column in ("path", "NIXL's thread", *(f"{k} ({v})" for k, v in COLUMNS.items())):
        table.add_column(column, justify="right")
    results = []
    for path, transports in (("cma", None), ("tcp", "tcp,self")):
        if transports is not None:
            os.environ["UCX_TLS"] = transports
        for delay in (None, 0.001, 0.010):
            run: Callable[[Side], None] = functools.partial(body, delay)
            figures = run_pair(run, 120)[0].figures
            name = "off" if delay is None else f"{delay * 1e3:.0f} ms"
            table.add_row(path, name, *(f"{figure:.3g}" for figure in figures))
            results.append(
                {"path": path, "thread": name, **dict(zip(COLUMNS, figures, strict=True))}
            )
    Console(width=160).print(table)
    write_json(options.json, {"rows": results})


if __name__ == "__main__":
    main()
