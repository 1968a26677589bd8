"""A Connection against bare NIXL calls on the same buffers, in one run.

    python benchmarks/engine.py [--json FILE]

Two processes on one host. The rival is NIXL's own bindings, with the lock mode RW and without
NIXL's progress thread, as a Connection uses them, polled by the thread that waits.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from typing import Any

import numpy as np
import torch
from pair import Row, Side, arguments, interleave, median, percentile, report, run_pair

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.offer import Offer, OfferedMemory
from torch_nixl.engine.remotes import Remote
from torch_nixl.engine.transfer import TransferOperation

SMALL = 4096
LARGE = 64 << 20
HUGE = 256 << 20
SIZES = (SMALL, 1 << 20, LARGE, HUGE)
TEST_FRAME = 100


class RawAgent:
    """Bare NIXL, as fast as its bindings allow."""

    def __init__(self, name: str, buffer: torch.Tensor) -> None:
        import nixl  # noqa: F401  # chooses the wheel that fits
        from nixl import _bindings

        self.nixl: Any = _bindings
        config = self.nixl.nixlAgentConfig()
        config.useProgThread = False
        config.syncMode = self.nixl.NIXL_THREAD_SYNC_RW
        self.agent = self.nixl.nixlAgent(name, config)
        self.agent.createBackend("UCX", {})
        self.address = buffer.data_ptr()
        segment = self.nixl.DRAM_SEG
        region = self.nixl.nixlRegDList(segment, [(self.address, buffer.nbytes, 0, "")])
        self.agent.registerMem(region, [])
        self.peer = ""
        self.peer_address = 0

    def meet(self, side: Side) -> None:
        """Exchange metadata."""
        metadata = (bytes(self.agent.getLocalMD()), self.address)
        theirs: Any = side.exchange(metadata)
        self.peer = self.agent.loadRemoteMD(theirs[0]).decode()
        self.peer_address = theirs[1]

    def prepare(self, write: bool, nbytes: int, message: bytes) -> int:
        rows = [
            self.nixl.nixlXferDList(
                self.nixl.DRAM_SEG, np.array([[address, nbytes, 0]], dtype=np.uint64)
            )
            for address in (self.address, self.peer_address)
        ]
        operation = self.nixl.NIXL_WRITE if write else self.nixl.NIXL_READ
        return int(self.agent.createXferReq(operation, *rows, self.peer, message, []))

    def run(self, handle: int, message: bytes) -> None:
        state = self.agent.postXferReq(handle, message)
        while state == self.nixl.NIXL_IN_PROG:
            state = self.agent.getXferStatus(handle)

    def move(self, write: bool, nbytes: int, message: bytes = b"") -> None:
        handle = self.prepare(write, nbytes, message)
        self.run(handle, message)
        self.agent.releaseXferReq(handle)

    def wait_message(self) -> None:
        while not self.agent.getNotifs({}, []):
            pass


class OurAgent:
    """The same through a Connection."""

    def __init__(
        self, name: str, buffer: torch.Tensor, progress_thread: float | None = None
    ) -> None:
        self.connection = Connection.open(name, progress_thread=progress_thread)
        self.buffer = buffer
        self.memories = {n: tensor_memory(buffer[:n]) for n in SIZES}
        self.registered = self.connection.register(tensor_memory(buffer))
        self.num_messages = 0
        self.num_awaited = 0
        self.connection.route(TEST_FRAME, self._on_message)
        self.offer: Offer | None = None
        self.remote: Remote | None = None
        self.targets: dict[int, OfferedMemory] = {}

    def _on_message(self, remote: Remote, body: bytes) -> None:
        self.num_messages += 1

    def meet(self, side: Side) -> None:
        """Exchange offers of the whole buffer and learn the other's regions."""
        exposed = self.connection.expose(Direction.WRITE, [tensor_memory(self.buffer)])
        theirs: Any = side.exchange(exposed.offer().pack(key=None))
        inspect = self.connection.adapter.inspect
        offer = Offer.unpack(theirs, key=None, parse_metadata=inspect)
        self.remote = self.connection.contact(offer.owner, offer.metadata[0])
        assert self.connection.contacts.learn(
            self.remote, offer.metadata, [inspect(blob) for blob in offer.metadata]
        )
        spans = offer.memories[0].spans
        for nbytes in SIZES:
            part = spans.copy()
            part[0, 1] = nbytes
            self.targets[nbytes] = OfferedMemory(offer.memories[0].kind, part, nbytes)

    def move(
        self, direction: Direction, nbytes: int, frame: tuple[int, bytes] | None = None
    ) -> None:
        assert self.remote is not None
        connection = self.connection
        memory = self.memories[nbytes]
        operation = TransferOperation(
            connection,
            self.remote,
            direction,
            [connection.register(memory)],
            [self.targets[nbytes]],
            frame=frame,
        )
        connection.transfer(operation)
        operation.wait()

    def message(self) -> bytes:
        assert self.remote is not None
        return self.connection.codec.pack_raw(TEST_FRAME, b"", to=self.remote.name)

    def write_with_message(self) -> None:
        self.move(Direction.WRITE, SMALL, (TEST_FRAME, b""))

    def wait_message(self) -> None:
        self.num_awaited += 1
        awaited = self.num_awaited
        self.connection.progress.wait_until(
            lambda: self.num_messages >= awaited, time.monotonic() + 10
        )


def latency(side: Side, raw: RawAgent, ours: OurAgent) -> None:
    """Ping-pong of a 4 KiB write with a notification, half a round trip."""
    reused = raw.prepare(True, SMALL, b"x")

    def ping_pong(send: Any, wait: Any) -> tuple[float, float]:
        side.exchange(None)
        seconds = []
        for _ in range(500):
            started = time.perf_counter()
            if side.rank == 0:
                send()
                wait()
            else:
                wait()
                send()
            seconds.append((time.perf_counter() - started) / 2)
        seconds = seconds[50:]
        p99.setdefault(send, []).append(percentile(seconds, 0.99) * 1e6)
        return percentile(seconds, 0.5) * 1e6, 0.0

    p99: dict[Any, list[float]] = {}
    contestants = {
        "raw": lambda: raw.move(True, SMALL, b"x"),
        "raw, prepared": lambda: raw.run(reused, b"x"),
        "ours": ours.write_with_message,
    }
    waits = {"raw": raw.wait_message, "raw, prepared": raw.wait_message, "ours": ours.wait_message}
    figures = interleave(
        {
            name: lambda name=name: ping_pong(contestants[name], waits[name])[0]  # type: ignore[misc]
            for name in contestants
        },
        rounds=9,
    )
    if side.rank == 0:
        for rival, note in (
            ("raw", "createXferReq for each write"),
            ("raw, prepared", "one request, posted again and again: we make ours anew"),
        ):
            side.rows.append(
                Row(
                    "4 KiB write + notification, p50",
                    median(figures["ours"]),
                    "us",
                    1.5,
                    median(figures[rival]),
                    note=note,
                )
            )
        side.rows.append(
            Row(
                "the same, p99",
                median(p99[contestants["ours"]]),
                "us",
                10.0,
                median(p99[contestants["raw"]]),
                note="no limit set in the issue",
            )
        )


def bandwidth(side: Side, raw: RawAgent, ours: OurAgent) -> None:
    """A 64 MiB READ; the other side polls every half millisecond."""
    side.exchange(None)
    if side.rank == 1:

        def poll() -> None:
            raw.agent.getNotifs({}, [])
            ours.connection.progress.step()

        side.wait_while(poll, 0.0005)
        return
    handle = raw.prepare(False, LARGE, b"")

    def timed(run: Any) -> float:
        started = time.perf_counter()
        run()
        return LARGE / (time.perf_counter() - started) / 1e9

    figures = interleave(
        {
            "raw": lambda: timed(lambda: raw.run(handle, b"")),
            "ours": lambda: timed(lambda: ours.move(Direction.READ, LARGE)),
        },
        rounds=25,
    )
    side.pipe.send(None)
    side.rows.append(
        Row(
            "64 MiB READ",
            median(figures["ours"]),
            "GB/s",
            0.97,
            median(figures["raw"]),
            lower_is_better=False,
            note="raw: one post",
        )
    )


def polls_while_moving(side: Side, ours: OurAgent) -> None:
    """Polls from a second thread while 256 MiB move."""
    side.exchange(None)
    if side.rank == 1:
        side.wait_while(ours.connection.progress.step, 0.0005)
        return
    stop = threading.Event()

    def move() -> None:
        while not stop.is_set():
            ours.move(Direction.READ, HUGE)

    mover = threading.Thread(target=move)
    mover.start()
    seconds = []
    for _ in range(1000):
        started = time.perf_counter()
        ours.connection.progress.step()
        seconds.append(time.perf_counter() - started)
        time.sleep(0.0005)
    stop.set()
    mover.join()
    side.pipe.send(None)
    side.rows.append(
        Row(
            "poll from another thread while 256 MiB move, p99",
            percentile(seconds, 0.99) * 1e3,
            "ms",
            2.0,
        )
    )


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def idle(side: Side, ours: OurAgent) -> None:
    """Process CPU time over 10 s: with a peer known and memory exposed, then waiting for it."""
    side.exchange(None)
    before = cpu_seconds()
    time.sleep(10)
    used = (cpu_seconds() - before) / 10 * 100
    if side.rank == 0:
        side.rows.append(Row("idle: memory exposed, a peer known", used, "% of a core", 2.0))
    side.exchange(None)
    if side.rank == 1:
        time.sleep(10.5)
        return
    deadline = time.monotonic() + 10
    before = cpu_seconds()
    ours.connection.progress.wait_until(lambda: False, deadline)
    used = (cpu_seconds() - before) / 10 * 100
    side.rows.append(Row("waiting for a silent peer", used, "% of a core", 5.0))


def late_answer(side: Side, ours: OurAgent) -> None:
    """How long an answer that comes after a long silence takes to reach the waiter."""
    delays = []
    for _ in range(30):
        side.exchange(None)
        if side.rank == 1:
            assert ours.remote is not None
            time.sleep(0.2)
            stamp = time.monotonic()
            ours.connection.contacts.send_raw(ours.remote, ours.message())
            side.pipe.send(stamp)
        else:
            ours.wait_message()
            arrived = time.monotonic()
            delays.append(arrived - float(side.pipe.recv()))
    if side.rank == 0:
        side.rows.append(
            Row("answer after 0.2 s of silence, p50", percentile(delays, 0.5) * 1e3, "ms", 1.0)
        )


def registrations(side: Side, ours: OurAgent) -> None:
    """10,000 views of one storage, registered and released 60 times over."""
    if side.rank == 1:
        return
    connection = ours.connection
    storage = torch.zeros(10_000, 64)
    before = connection.statistics().registrations
    loops = []
    for _ in range(60):
        started = time.perf_counter()
        held = [connection.register(tensor_memory(row)) for row in storage]
        for one in held:
            connection.registry.release(one)
        loops.append(time.perf_counter() - started)
    made = connection.statistics().registrations - before
    side.rows.append(Row("NIXL registrations for 10,000 views", made, "", 1))
    first, last = median(loops[:5]), median(loops[-5:])
    side.rows.append(
        Row("60 loops of 10,000 views: last 5 against first 5", last * 1e3, "ms", 1.2, first * 1e3)
    )


def body(side: Side) -> None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    buffer = torch.zeros(HUGE, dtype=torch.uint8)
    raw, ours = RawAgent(f"raw{side.rank}", buffer), OurAgent(f"ours{side.rank}", buffer)
    raw.meet(side)
    ours.meet(side)
    latency(side, raw, ours)
    bandwidth(side, raw, ours)
    polls_while_moving(side, ours)
    late_answer(side, ours)
    idle(side, ours)
    registrations(side, ours)
    side.exchange(None)
    ours.connection.close()


if __name__ == "__main__":
    options = arguments(__doc__ or "")
    report("Connection against raw NIXL", run_pair(body, 300), options.json)
