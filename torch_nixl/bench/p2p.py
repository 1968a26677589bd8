"""Point to point between the first two ranks: ours against Gloo or NCCL and bare NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from torch_nixl.bench.raw import NAME as RAW
from torch_nixl.bench.raw import RawAgent
from torch_nixl.bench.report import OURS
from torch_nixl.bench.session import Case, Contestant, Session
from torch_nixl.p2p.protocol import EAGER_NBYTES

SIZES = (8, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
FULL_SIZES = (*SIZES, 256 << 20)

CHANNEL_SIZES = range(64 << 10, (64 << 20) + 1)
"""Sizes at which channels are measured: they are for what is large and comes again and again."""

FEW_CHANNEL_SIZES = (64 << 10, 1 << 20)
"""Those of them that are measured in any case."""

MANY = 64
MANY_NBYTES = 1 << 20
"""A channel of so many tensors is measured up to this size: beyond, bytes are what takes time."""

SMALL = 8

BATCH = 20
"""Calls in a row that wait for nobody: so few messages always find room."""


def suite(session: Session) -> list[Case]:
    """Round trips, channels, and what a message and a call cost; in full, a tree, too."""
    sizes = session.options.sizes
    full = session.options.full or bool(session.options.only)
    trips = _Trips(session)
    cases = [Case("half a round trip", size, partial(trips.make, size), 2.0) for size in sizes]
    for size in sizes:
        if size in CHANNEL_SIZES and (full or size in FEW_CHANNEL_SIZES):
            cases.append(Case("step of a channel", size, partial(_channel, session, size, 1), 2.0))
            if size <= MANY_NBYTES and (full or size == MANY_NBYTES):
                what = f"step of a channel, {MANY} tensors"
                cases.append(Case(what, size, partial(_channel, session, size, MANY), 2.0))
    if full:
        cases.append(
            Case(f"tree of {NUM_WEIGHTS} tensors", WEIGHTS_NBYTES, partial(_tree, session), 2.0)
        )
    return [
        *cases,
        Case("isend, one of many", SMALL, partial(_many, session), contestants=2),
        Case("call of send", SMALL, partial(_calls, session, sends=True), contestants=1),
        Case("call of recv, message there", SMALL, partial(_calls, session, sends=False), 1.0, 1),
    ]


def _bytes(session: Session, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), session.rank % 251, dtype=torch.uint8, device=session.device)


class _Trips:
    """Round trips of one buffer, which is registered once for all sizes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._buffer: torch.Tensor | None = None
        self._raw: RawAgent | None = None

    def make(self, nbytes: int) -> dict[str, Contestant]:
        session = self._session
        if self._buffer is None:
            self._buffer = _bytes(session, max(session.options.sizes))
            if session.takes_part(RAW):
                self._raw = RawAgent(session, self._buffer)
        part = self._buffer[:nbytes]
        contestants = {OURS: one_by_one(session, [part])}
        for name, group in session.rivals().items():
            contestants[name] = one_by_one(session, [part], group)
        if self._raw is not None:
            contestants[RAW] = _raw(session, self._raw, nbytes)
        return contestants


def one_by_one(
    session: Session, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> Contestant:
    """A round trip of tensors, each a message: ours, or a process group's."""
    other = 1 - session.rank
    if group is not None:
        return session.pinged(
            lambda: [dist.send(tensor, other, group=group) for tensor in tensors],
            lambda: [dist.recv(tensor, other, group=group) for tensor in tensors],
        )
    communicator = session.communicator

    def send() -> None:
        if len(tensors) == 1:
            communicator.send(tensors[0], other)
            return
        for work in [communicator.isend(tensor, other) for tensor in tensors]:
            work.wait()

    return session.pinged(
        send, lambda: [communicator.recv(other, out=tensor) for tensor in tensors]
    )


def _raw(session: Session, raw: RawAgent, nbytes: int) -> Contestant:
    """A notification where ours is eager; above, one that says so and a one-sided READ."""
    eager = nbytes <= EAGER_NBYTES
    message = b"x" * nbytes if eager else b"go"

    def send() -> None:
        raw.notify(message)
        if not eager:
            raw.await_message()

    def receive() -> None:
        raw.await_message()
        if not eager:
            raw.move(False, nbytes, b"done")

    return session.pinged(send, receive)


def _channel(session: Session, nbytes: int, num_tensors: int) -> dict[str, Contestant]:
    tree = list(_bytes(session, nbytes).chunk(num_tensors))
    contestants: dict[str, Contestant] = {}
    communicator = session.communicator
    if session.rank < 2:
        # Each size has a channel of its own, and no two are of one size and number.
        tag = nbytes * 2 + (num_tensors > 1)
        channel = communicator.channel(1 - session.rank, like=tree, tag=tag)
        session.stack.callback(channel.close)
        contestants[OURS] = session.pinged(channel.send, channel.recv)
    else:
        contestants[OURS] = session.pinged(_nothing, _nothing)
    contestants["send and recv"] = one_by_one(session, tree)
    for name, group in session.rivals().items():
        contestants[name] = one_by_one(session, tree, group)
    return _without(session, contestants)


NUM_WEIGHTS, WEIGHTS_NBYTES = 272, 269_030_016
"""Of `weights`."""


def weights(device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the shapes of SmolLM2-135M's: 272, each with memory of its own, 269 MB."""
    hidden, inner, keys = 576, 1536, 192
    shapes = {"token_embd": (49152, hidden), "output_norm": (hidden,)}
    for layer in range(30):
        shapes |= {
            f"blk.{layer}.attn_norm": (hidden,),
            f"blk.{layer}.attn_q": (hidden, hidden),
            f"blk.{layer}.attn_k": (keys, hidden),
            f"blk.{layer}.attn_v": (keys, hidden),
            f"blk.{layer}.attn_output": (hidden, hidden),
            f"blk.{layer}.ffn_norm": (hidden,),
            f"blk.{layer}.ffn_gate": (inner, hidden),
            f"blk.{layer}.ffn_up": (inner, hidden),
            f"blk.{layer}.ffn_down": (hidden, inner),
        }
    return {
        name: torch.zeros(shape, dtype=torch.bfloat16, device=device)
        for name, shape in shapes.items()
    }


def _tree(session: Session) -> dict[str, Contestant]:
    """A model's weights as one message, against one tensor of their size, and one by one."""
    tree = weights(session.device)
    assert len(tree) == NUM_WEIGHTS
    assert sum(tensor.nbytes for tensor in tree.values()) == WEIGHTS_NBYTES
    communicator, other = session.communicator, 1 - session.rank
    contestants = {
        OURS: session.pinged(
            lambda: communicator.send_tree(tree, other),
            lambda: communicator.recv_tree(other, out=tree),
        ),
        "one tensor": one_by_one(session, [_bytes(session, WEIGHTS_NBYTES)]),
    }
    for name, group in session.rivals().items():
        contestants[name] = one_by_one(session, list(tree.values()), group)
    return _without(session, contestants)


def _many(session: Session) -> dict[str, Contestant]:
    """Messages sent without waiting for each, and received one by one: the time of one."""
    communicator, other = session.communicator, 1 - session.rank
    small = _bytes(session, SMALL)

    def flood(isend: Callable[[], object], receive: Callable[[], object]) -> Contestant:
        def contestant(count: int) -> list[float]:
            started = time.perf_counter()
            if session.rank == 0:
                for work in [isend() for _ in range(count)]:
                    work.wait()  # type: ignore[attr-defined]  # a Work, ours or c10d's
            elif session.rank == 1:
                for _ in range(count):
                    receive()
            return [(time.perf_counter() - started) / count]

        return contestant

    contestants = {
        OURS: flood(
            lambda: communicator.isend(small, other),
            lambda: communicator.recv(other, out=small),
        )
    }
    for name, group in session.rivals().items():
        contestants[name] = flood(
            partial(dist.isend, small, other, group=group),
            partial(dist.recv, small, other, group=group),
        )
    return contestants


def _calls(session: Session, *, sends: bool) -> dict[str, Contestant]:
    """Time inside a call that waits for nobody."""
    communicator, other = session.communicator, 1 - session.rank
    small = _bytes(session, SMALL)
    send = session.timed(lambda: communicator.send(small, other))
    receive = session.timed(lambda: communicator.recv(other, out=small))
    counts = session.rank == (0 if sends else 1)

    def contestant(count: int) -> list[float]:
        taken: list[float] = []
        for _ in range(-(-count // BATCH)):
            sent = send(BATCH) if session.rank == 0 else []
            session.barrier()
            if session.rank == 1:
                communicator.iprobe(other)  # takes in what has arrived
            received = receive(BATCH) if session.rank == 1 else []
            session.barrier()
            taken += (sent if sends else received) if counts else [0.0] * BATCH
        return taken[:count]

    return {OURS: contestant}


def _without(session: Session, contestants: Mapping[str, Contestant]) -> dict[str, Contestant]:
    return {name: run for name, run in contestants.items() if session.takes_part(name)}


def _nothing() -> None:
    pass
