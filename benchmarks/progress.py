"""What NIXL's own progress thread costs and gives: the measurement behind the default.

    python benchmarks/progress.py [--json FILE]

Two ranks on one host. For NIXL's thread off, and on with a delay of 1 ms and of 10 ms:
latency of an 8-byte message, bandwidth of a 64 MiB READ, CPU time when idle, and how long a peer
waits for a target that holds the GIL for two seconds without a pause.
"""

from __future__ import annotations

import os
import time
from statistics import median

import torch
from engine import HUGE, LARGE, TEST_FRAME, OurAgent, cpu_seconds
from rows import Row, Rows, be_a_rank, from_ranks, parser, renamed, show

from torch_nixl.bench.launch import is_rank
from torch_nixl.bench.report import percentile
from torch_nixl.bench.session import Session
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.offer import Offer

ROUNDS = 3000
IDLE_SECONDS = 5
GIL_SECONDS = 2.0
DELAY = "TORCH_NIXL_BENCH_DELAY"
"""Seconds between polls of NIXL's thread; empty for no thread."""


def hold_the_gil(seconds: float) -> None:
    """Run one long C call: no other Python thread gets a turn."""
    started = time.perf_counter()
    sum(range(1 << 22))
    rate = (1 << 22) / (time.perf_counter() - started)
    sum(range(int(rate * seconds)))


def latency(session: Session, ours: OurAgent) -> tuple[float, float]:
    """8-byte messages there and back, half a round trip: p50 and p99."""
    assert ours.remote is not None
    connection, remote = ours.connection, ours.remote

    def send() -> None:
        frame = connection.codec.pack_raw(TEST_FRAME, bytes(8), to=remote.name)
        connection.contacts.send_raw(remote, frame)

    session.barrier()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        if session.rank == 0:
            send()
            ours.wait_message()
        else:
            ours.wait_message()
            send()
        seconds.append((time.perf_counter() - started) / 2)
    return percentile(seconds[100:], 0.5) * 1e6, percentile(seconds[100:], 0.99) * 1e6


def bandwidth(session: Session, ours: OurAgent) -> float:
    """A 64 MiB READ while the other side waits, and so polls, too."""
    session.barrier()
    if session.rank == 1:
        session.wait_while(ours.connection.progress.step)
        return 0.0
    figures = []
    for _ in range(15):
        started = time.perf_counter()
        ours.move(Direction.READ, LARGE)
        figures.append(LARGE / (time.perf_counter() - started) / 1e9)
    session.barrier()
    return median(figures)


def idle(session: Session) -> float:
    session.barrier()
    before = cpu_seconds()
    time.sleep(IDLE_SECONDS)
    return (cpu_seconds() - before) / IDLE_SECONDS * 100


def wait_for_a_busy_target(session: Session, ours: OurAgent) -> float:
    """How long a claimed READ of 1 MiB takes if its owner holds the GIL from before it is claimed.

    The grant takes the owner's Python in any case; the bytes over TCP take its progress.
    """
    connection = ours.connection
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    if session.rank == 1:
        exposed = connection.expose(Direction.READ, [tensor_memory(data)])
        session.exchange(exposed.offer().pack(key=None))
        hold_the_gil(GIL_SECONDS)
        exposed.wait()
        return 0.0
    packed = session.exchange(None)[1]
    offer = Offer.unpack(packed, key=None, parse_metadata=connection.adapter.inspect)
    time.sleep(0.2)
    started = time.perf_counter()
    connection.claim(offer, [tensor_memory(data)]).wait()
    return time.perf_counter() - started


def one_sided_write_to_a_busy_target(session: Session, ours: OurAgent) -> float:
    """How long a 1 MiB WRITE that was granted before takes if its target holds the GIL."""
    session.barrier()
    if session.rank == 1:
        hold_the_gil(GIL_SECONDS)
        session.barrier()
        return 0.0
    time.sleep(0.2)
    started = time.perf_counter()
    ours.move(Direction.WRITE, 1 << 20)
    seconds = time.perf_counter() - started
    session.barrier()
    return seconds


def body(session: Session) -> Rows:
    delay = float(os.environ[DELAY]) if os.environ[DELAY] else None
    buffer = torch.zeros(HUGE, dtype=torch.uint8)
    ours = OurAgent(f"ours{session.rank}", buffer, progress_thread=delay)
    ours.meet(session)
    p50, p99 = latency(session, ours)
    gbytes = bandwidth(session, ours)
    cpu = idle(session)
    write = one_sided_write_to_a_busy_target(session, ours)
    read = wait_for_a_busy_target(session, ours)
    if session.rank == 0:
        yield Row("8 B, p50", p50, "us", None)
        yield Row("8 B, p99", p99, "us", None)
        yield Row("64 MiB READ", gbytes, "GB/s", None)
        yield Row("idle", cpu, "% of a core", None)
        yield Row("granted WRITE, target holds the GIL", write * 1e3, "ms", None)
        yield Row("claimed READ, target holds the GIL", read * 1e3, "ms", None)
    session.barrier()
    ours.connection.close()


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    found: list[Row] = []
    for path, transports in (("cma", {}), ("tcp", {"UCX_TLS": "tcp,self"})):
        for name, delay in (("off", ""), ("1 ms", "0.001"), ("10 ms", "0.010")):
            measured = from_ranks(__file__, environment={DELAY: delay, **transports})
            found += [renamed(one, f"{path}, NIXL's thread {name}: ") for one in measured]
    show("NIXL's progress thread", found, options.json)


if __name__ == "__main__":
    if is_rank():
        be_a_rank(body)
    else:
        main()
