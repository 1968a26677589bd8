"""A Connection against bare NIXL calls on the same buffers, in one run.

    python benchmarks/engine.py [--json FILE]

Two ranks on one host. The rival is NIXL's own bindings, with the lock mode RW and without
NIXL's progress thread, as a Connection uses them, polled by the thread that waits.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rows import Row, Rows, main, row

from torch_nixl.bench.raw import NAME as RAW
from torch_nixl.bench.raw import RawAgent
from torch_nixl.bench.report import OURS, percentile
from torch_nixl.bench.session import Case, Contestant, Session
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

    def meet(self, session: Session) -> None:
        """Exchange offers of the whole buffer and learn the other's regions."""
        exposed = self.connection.expose(Direction.WRITE, [tensor_memory(self.buffer)])
        theirs = session.exchange(exposed.offer().pack(key=None))[1 - session.rank]
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


def latency(session: Session, raw: RawAgent, ours: OurAgent) -> Rows:
    """Ping-pong of a 4 KiB write with a notification, half a round trip."""
    reused = raw.prepare(True, SMALL, b"x")
    prepared = f"{RAW}, one request, posted again and again: we make ours anew"
    contestants = {
        OURS: session.pinged(ours.write_with_message, ours.wait_message),
        RAW: session.pinged(lambda: raw.move(True, SMALL, b"x"), raw.await_message),
        prepared: session.pinged(lambda: raw.run(reused, b"x"), raw.await_message),
    }
    what = "write + notification"
    measured = session.measure(Case(what, SMALL, lambda: contestants, share=2.0))
    yield row(measured, RAW, 1.5)
    yield row(measured, prepared, 1.5)
    tails = measured.tail(OURS), measured.tail(RAW)
    if tails[0] is not None and tails[1] is not None:
        yield Row(
            f"{what}, 4 KiB, p99",
            tails[0] * 1e6,
            "us",
            10.0,
            tails[1] * 1e6,
            note=f"{RAW}; no limit set in the issue",
        )


def bandwidth(session: Session, raw: RawAgent, ours: OurAgent) -> Rows:
    """A 64 MiB READ; the other side polls every half millisecond."""
    request = raw.prepare(False, LARGE, b"")

    def poll() -> None:
        raw.poll()
        ours.connection.progress.step()

    def while_polled(run: Callable[[], object]) -> Contestant:
        timed = session.timed(run)

        def contestant(count: int) -> Any:
            if session.rank == 1:
                session.wait_while(poll, 0.0005)
                return [0.0]
            taken = timed(count)
            session.barrier()
            return taken

        return contestant

    contestants = {
        OURS: while_polled(lambda: ours.move(Direction.READ, LARGE)),
        RAW: while_polled(lambda: raw.run(request, b"")),
    }
    yield row(session.measure(Case("READ", LARGE, lambda: contestants)), RAW, 0.97)


def polls_while_moving(session: Session, ours: OurAgent) -> Rows:
    """Polls from a second thread while 256 MiB move."""
    session.barrier()
    if session.rank == 1:
        session.wait_while(ours.connection.progress.step, 0.0005)
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
    session.barrier()
    p99 = percentile(seconds, 0.99) * 1e3
    yield Row("poll from another thread while 256 MiB move, p99", p99, "ms", 2.0)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def idle(session: Session, ours: OurAgent) -> Rows:
    """Process CPU time over 10 s: with a peer known and memory exposed, then waiting for it."""
    session.barrier()
    before = cpu_seconds()
    time.sleep(10)
    used = (cpu_seconds() - before) / 10 * 100
    session.barrier()
    if session.rank == 1:
        time.sleep(10.5)
        return
    yield Row("idle: memory exposed, a peer known", used, "% of a core", 2.0)
    deadline = time.monotonic() + 10
    before = cpu_seconds()
    ours.connection.progress.wait_until(lambda: False, deadline)
    used = (cpu_seconds() - before) / 10 * 100
    yield Row("waiting for a silent peer", used, "% of a core", 5.0)


def late_answer(session: Session, ours: OurAgent) -> Rows:
    """How long an answer that comes after a long silence takes to reach the waiter."""
    delays = []
    for _ in range(30):
        session.barrier()
        if session.rank == 1:
            assert ours.remote is not None
            time.sleep(0.2)
            stamp = time.monotonic()
            ours.connection.contacts.send_raw(ours.remote, ours.message())
        else:
            ours.wait_message()
            stamp = time.monotonic()
        arrived, sent = session.exchange(stamp)
        delays.append(arrived - sent)
    if session.rank == 0:
        yield Row("answer after 0.2 s of silence, p50", percentile(delays, 0.5) * 1e3, "ms", 1.0)


def registrations(session: Session, ours: OurAgent) -> Rows:
    """10,000 views of one storage, registered and released 60 times over."""
    if session.rank == 1:
        return
    connection = ours.connection
    storage = torch.zeros(10_000, 64)
    before = connection.statistics().registrations
    loops = []
    for _ in range(60):
        started = time.perf_counter()
        held = [connection.register(tensor_memory(part)) for part in storage]
        for one in held:
            connection.registry.release(one)
        loops.append(time.perf_counter() - started)
    made = connection.statistics().registrations - before
    yield Row("NIXL registrations for 10,000 views", made, "", 1)
    first, last = median(loops[:5]), median(loops[-5:])
    yield Row(
        "60 loops of 10,000 views: last 5 against first 5", last * 1e3, "ms", 1.2, first * 1e3
    )


def body(session: Session) -> Rows:
    buffer = torch.zeros(HUGE, dtype=torch.uint8)
    raw, ours = RawAgent(session, buffer), OurAgent(f"ours{session.rank}", buffer)
    ours.meet(session)
    yield from latency(session, raw, ours)
    yield from bandwidth(session, raw, ours)
    yield from polls_while_moving(session, ours)
    yield from late_answer(session, ours)
    yield from idle(session, ours)
    yield from registrations(session, ours)
    session.barrier()
    ours.connection.close()


if __name__ == "__main__":
    main("Connection against raw NIXL", body, __doc__ or "")
