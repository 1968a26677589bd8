"""Random programs of two ranks with streams of different speed, against a model without streams.

A program keeps the rules of streams: what is used on another stream than before is ordered by an
event, and a tensor that is being sent or received is used only after the stream has waited. Then it
must compute what it would if every step ran at once, in the order of the program. Nothing else is
synchronised until its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from torch_nixl.engine.connection import Connection
from torch_nixl.p2p import protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.work import Work
from torch_nixl.testing import FakeDevice, FakeStream, LoopbackFabric

NUM_STREAMS = 2
NUM_BUFFERS = 3
LARGE = protocol.EAGER_NBYTES // 8 + 100
KINDS = ("small", "strided", "large", "small host", "large host")
MODULUS = 1 << 40

# Which rank, which of its buffers, on which of its streams.
Where: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """Multiplies and adds on a buffer, which tells in which order kernels have run."""

    where: Where
    value: int
    milliseconds: int


@dataclass(frozen=True)
class Message:
    """From a buffer of one rank to one of the other, with a tag; received first or sent first."""

    source: Where
    target: Where
    tag: int
    receive_first: bool


Step: TypeAlias = Kernel | Message

places = st.tuples(
    st.integers(0, 1), st.integers(0, NUM_BUFFERS - 1), st.integers(0, NUM_STREAMS - 1)
)
kernels = st.builds(Kernel, places, st.integers(1, 1000), st.sampled_from([0, 0, 1, 5]))
messages = st.builds(
    lambda source, buffer, stream, tag, first: Message(
        source, (1 - source[0], buffer, stream), tag, first
    ),
    places,
    st.integers(0, NUM_BUFFERS - 1),
    st.integers(0, NUM_STREAMS - 1),
    st.integers(0, 1),
    st.booleans(),
)
# A producer and its message, mostly: what a message has to wait for is what all this is about.
produced = st.builds(
    lambda message, value, milliseconds: [Kernel(message.source, value, milliseconds), message],
    messages,
    st.integers(1, 1000),
    st.sampled_from([0, 1, 5]),
)
programs = st.tuples(
    st.lists(st.sampled_from(KINDS), min_size=2 * NUM_BUFFERS, max_size=2 * NUM_BUFFERS),
    st.lists(
        st.one_of(produced, produced, kernels.map(lambda one: [one])), min_size=2, max_size=6
    ).map(lambda groups: [step for group in groups for step in group]),
)


@dataclass
class Buffer:
    """A tensor, the stream that used it last, and what is under way with it."""

    tensor: torch.Tensor
    stream: FakeStream | None
    works: list[Work] = field(default_factory=list)


def make_buffer(device: FakeDevice, kind: str) -> Buffer:
    match kind:
        case "small":
            return Buffer(device.zeros(4, dtype=torch.int64), None)
        case "strided":
            return Buffer(device.zeros(4, 3, dtype=torch.int64)[:, 1], None)
        case "large":
            return Buffer(device.zeros(LARGE, dtype=torch.int64), None)
        case "small host":
            return Buffer(torch.zeros(4, dtype=torch.int64), None)
        case _:
            return Buffer(torch.zeros(LARGE, dtype=torch.int64), None)


class Pair:
    """Two ranks, each with a device of its own."""

    def __init__(self) -> None:
        fabric, store = LoopbackFabric(), HashStore()
        self.ranks = [
            Communicator(store, rank, 2, connection=Connection(fabric.adapter(f"r{rank}")))
            for rank in range(2)
        ]
        self.devices = [FakeDevice(f"fake:{rank}") for rank in range(2)]
        self.streams = [
            [device.new_stream() for _ in range(NUM_STREAMS)] for device in self.devices
        ]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for rank in self.ranks:
            rank.connection.close()

    def run(self, kinds: list[str], steps: list[Step]) -> list[list[int]]:
        """Run a program; return the first element of each buffer, by rank."""
        buffers = [
            [make_buffer(device, kinds[rank * NUM_BUFFERS + n]) for n in range(NUM_BUFFERS)]
            for rank, device in enumerate(self.devices)
        ]
        for step in steps:
            match step:
                case Kernel():
                    self._compute(buffers, step)
                case Message():
                    halves = [self._receive, self._send]
                    for half in halves if step.receive_first else reversed(halves):
                        half(buffers, step)
        for rank, row in enumerate(buffers):
            for buffer in row:
                for work in buffer.works:
                    work.synchronize()
            for stream in self.streams[rank]:
                stream.synchronize()
        for row in buffers:
            for buffer in row:
                assert bool((buffer.tensor == buffer.tensor[0]).all()), "torn"
        return [[int(buffer.tensor[0]) for buffer in row] for row in buffers]

    def _use(self, buffers: list[list[Buffer]], where: Where) -> tuple[Buffer, FakeStream]:
        """Make a buffer usable on a stream, as a correct program does."""
        rank, number, index = where
        buffer, stream = buffers[rank][number], self.streams[rank][index]
        with self.devices[rank].stream(stream):
            for work in buffer.works:
                work.wait()
        buffer.works.clear()
        if buffer.stream is not None and buffer.stream is not stream:
            stream.wait_event(buffer.stream.record())
        buffer.stream = stream
        return buffer, stream

    def _compute(self, buffers: list[list[Buffer]], step: Kernel) -> None:
        buffer, stream = self._use(buffers, step.where)
        tensor, value = buffer.tensor, step.value

        def kernel() -> None:
            tensor.mul_(3).add_(value).remainder_(MODULUS)

        if kind_is_host(buffer):
            kernel()
        else:
            stream.launch(kernel, seconds=step.milliseconds / 1000)

    def _send(self, buffers: list[list[Buffer]], step: Message) -> None:
        buffer, stream = self._use(buffers, step.source)
        rank = step.source[0]
        with self.devices[rank].stream(stream):
            work = self.ranks[rank].isend(buffer.tensor, 1 - rank, tag=step.tag)
        buffer.works.append(work)

    def _receive(self, buffers: list[list[Buffer]], step: Message) -> None:
        buffer, stream = self._use(buffers, step.target)
        rank = step.target[0]
        with self.devices[rank].stream(stream):
            work = self.ranks[rank].irecv(1 - rank, out=buffer.tensor, tag=step.tag)
        buffer.works.append(work)


def kind_is_host(buffer: Buffer) -> bool:
    from torch_nixl.engine.streams import device_of

    return device_of(buffer.tensor) is None


def expected(steps: list[Step]) -> list[list[int]]:
    """What the program computes if every step runs at once."""
    values = [[0] * NUM_BUFFERS for _ in range(2)]
    for step in steps:
        match step:
            case Kernel((rank, buffer, _), value):
                values[rank][buffer] = (values[rank][buffer] * 3 + value) % MODULUS
            case Message((source, sent, _), (target, received, _)):
                values[target][received] = values[source][sent]
    return values


def possible(kinds: list[str], steps: list[Step]) -> list[Step]:
    """Drop what no program may do: messages between buffers of different size.

    And receives into host memory in the middle: what uses it next blocks the host, which has both
    ranks to run here.
    """

    def kind(where: Where) -> str:
        return kinds[where[0] * NUM_BUFFERS + where[1]]

    return [
        step
        for step in steps
        if isinstance(step, Kernel)
        or (
            ("large" in kind(step.source)) is ("large" in kind(step.target))
            and not (step.receive_first and "host" in kind(step.target))
        )
    ]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(program=programs)
@pytest.mark.timeout(240)
def test_random_program_computes_what_the_model_does(
    pair: Pair, program: tuple[list[str], list[Step]]
) -> None:
    kinds, steps = program
    steps = possible(kinds, steps)
    assert pair.run(kinds, steps) == expected(steps)
