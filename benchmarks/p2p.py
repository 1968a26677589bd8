"""Communicator.send and recv against Gloo's dist.send/recv and bare NIXL, in one run.

    python benchmarks/p2p.py [--json FILE]

Two ranks on one host, each a process; ping-pong, half a round trip. The raw rival is NIXL's own
bindings, polled by the thread that waits: a notification where ours is eager, a one-sided READ
of prepared memory with a notification at its end where ours is not.
"""

from __future__ import annotations

import datetime
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import RawAgent
from pair import Row, Side, arguments, interleave, median, percentile, report, run_pair

import torch_nixl
from torch_nixl.p2p.protocol import EAGER_NBYTES

SIZES = (8, 8 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
LARGEST = SIZES[-1]
CHANNELS = ((1, 64 << 10), (1, 1 << 20), (1, 64 << 20), (64, 16 << 10))
RATE_MESSAGES = 2000
ROUNDS = 7

STORE = Path(tempfile.gettempdir())


class Raw:
    """Sends and receives with bare NIXL: no matching, no shapes, one message at a time."""

    def __init__(self, side: Side, buffer: torch.Tensor) -> None:
        self.agent = RawAgent(f"raw{side.rank}", buffer)
        self.agent.meet(side)
        self.num_waiting = 0
        self.payloads = {size: b"x" * size for size in SIZES if size <= EAGER_NBYTES}

    def send(self, nbytes: int) -> None:
        agent = self.agent
        agent.agent.genNotif(agent.peer, self.payloads.get(nbytes, b"go"), [])
        if nbytes > EAGER_NBYTES:
            self.wait_message()

    def wait_message(self) -> None:
        while not self.num_waiting:
            for messages in self.agent.agent.getNotifs({}, []).values():
                self.num_waiting += len(messages)
        self.num_waiting -= 1

    def receive(self, nbytes: int) -> None:
        self.wait_message()
        if nbytes > EAGER_NBYTES:
            self.agent.move(False, nbytes, b"d")


def half_round_trips(
    side: Side, send: Callable[[], object], receive: Callable[[], object], count: int
) -> list[float]:
    side.exchange(None)
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        if side.rank == 0:
            send()
            receive()
        else:
            receive()
            send()
        seconds.append((time.perf_counter() - started) / 2)
    return seconds


def latency(side: Side, raw: Raw, buffer: torch.Tensor) -> None:
    """Ping-pong at each size."""
    other = 1 - side.rank
    communicator = torch_nixl.get_communicator()
    for nbytes in SIZES:
        part = buffer[:nbytes]
        count = max(4, min(400, (256 << 20) // nbytes))
        all_seconds: dict[str, list[float]] = {}

        def measure(name: str, send: Any, receive: Any) -> float:
            seconds = half_round_trips(side, send, receive, count)  # noqa: B023
            seconds = seconds[len(seconds) // 8 :]
            all_seconds.setdefault(name, []).extend(seconds)  # noqa: B023
            return percentile(seconds, 0.5)

        contestants = {
            "ours": lambda: measure(
                "ours",
                lambda: communicator.send(part, other),  # noqa: B023
                lambda: communicator.recv(other, out=part),  # noqa: B023
            ),
            "gloo": lambda: measure(
                "gloo",
                lambda: dist.send(part, other),  # noqa: B023
                lambda: dist.recv(part, other),  # noqa: B023
            ),
            "raw": lambda: measure(
                "raw",
                lambda: raw.send(nbytes),  # noqa: B023
                lambda: raw.receive(nbytes),  # noqa: B023
            ),
        }
        figures = interleave(contestants, rounds=ROUNDS if nbytes < LARGEST else 3)
        if side.rank:
            continue
        ours, gloo, bare = (median(figures[name]) for name in ("ours", "gloo", "raw"))
        what, large = _name(nbytes), nbytes >= 16 << 20
        if large:
            side.rows.append(
                Row(
                    f"{what}, bandwidth",
                    nbytes / ours / 1e9,
                    "GB/s",
                    2.0,
                    nbytes / gloo / 1e9,
                    lower_is_better=False,
                    note="Gloo",
                )
            )
            side.rows.append(
                Row(
                    f"{what}, bandwidth",
                    nbytes / ours / 1e9,
                    "GB/s",
                    1.4,
                    nbytes / bare / 1e9,
                    lower_is_better=False,
                    note="raw NIXL, one-sided READ",
                )
            )
            continue
        limit = {8: 0.3, 1 << 20: 0.4}.get(nbytes, 0.6)
        side.rows.append(Row(f"{what}, p50", ours * 1e6, "us", limit, gloo * 1e6, note="Gloo"))
        side.rows.append(Row(f"{what}, p50", ours * 1e6, "us", 2.0, bare * 1e6, note="raw NIXL"))
        p99 = percentile(all_seconds["ours"], 0.99)
        side.rows.append(
            Row(f"{what}, p99", p99 * 1e6, "us", 10.0, ours * 1e6, note="rival: our own p50")
        )


def channels(side: Side, buffer: torch.Tensor) -> None:
    """A step of a channel against the same tensors sent one by one, by us and by Gloo."""
    other = 1 - side.rank
    communicator = torch_nixl.get_communicator()
    for tag, (num_tensors, nbytes) in enumerate(CHANNELS):
        tree = list(buffer[: num_tensors * nbytes].clone().chunk(num_tensors))
        channel = communicator.channel(other, like=tree, tag=tag)
        count = max(4, min(400, (256 << 20) // (num_tensors * nbytes)))

        def measure(send: Any, receive: Any) -> float:
            seconds = half_round_trips(side, send, receive, count)  # noqa: B023
            return percentile(seconds[len(seconds) // 8 :], 0.5)

        def one_by_one(call: Any) -> Any:
            return lambda: [call(tensor) for tensor in tree]  # noqa: B023

        def send_all() -> None:
            for work in [communicator.isend(tensor, other) for tensor in tree]:  # noqa: B023
                work.wait()

        figures = interleave(
            {
                "channel": lambda: measure(channel.send, channel.recv),  # noqa: B023
                "ours": lambda: measure(
                    (lambda: communicator.send(tree[0], other))  # noqa: B023
                    if num_tensors == 1  # noqa: B023
                    else send_all,
                    one_by_one(lambda tensor: communicator.recv(other, out=tensor)),
                ),
                "gloo": lambda: measure(
                    one_by_one(lambda tensor: dist.send(tensor, other)),
                    one_by_one(lambda tensor: dist.recv(tensor, other)),
                ),
            },
            rounds=5,
        )
        channel.close()
        if side.rank:
            continue
        what = f"channel, {num_tensors} x {_name(nbytes)}, p50"
        step, ours, gloo = (median(figures[name]) * 1e6 for name in ("channel", "ours", "gloo"))
        side.rows.append(Row(what, step, "us", 1.0, ours, note="send and recv"))
        side.rows.append(Row(what, step, "us", 0.6, gloo, note="Gloo"))


def rate(side: Side) -> None:
    """Messages of 8 bytes each second, from isend, with all receives posted one by one."""
    other = 1 - side.rank
    small, got = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    communicator = torch_nixl.get_communicator()

    def run(isend: Callable[[], Any], receive: Callable[[], object]) -> float:
        side.exchange(None)
        started = time.perf_counter()
        if side.rank == 0:
            works = [isend() for _ in range(RATE_MESSAGES)]
            for work in works:
                work.wait()
        else:
            for _ in range(RATE_MESSAGES):
                receive()
        side.exchange(None)
        return RATE_MESSAGES / (time.perf_counter() - started)

    figures = interleave(
        {
            "ours": lambda: run(
                lambda: communicator.isend(small, other),
                lambda: communicator.recv(other, out=got),
            ),
            "gloo": lambda: run(lambda: dist.isend(small, other), lambda: dist.recv(got, other)),
        },
        rounds=5,
    )
    if side.rank == 0:
        side.rows.append(
            Row(
                "8 B isends",
                median(figures["ours"]) / 1e3,
                "k/s",
                3.0,
                median(figures["gloo"]) / 1e3,
                lower_is_better=False,
                note="Gloo",
            )
        )


def weights() -> dict[str, torch.Tensor]:
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
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def tree(side: Side) -> None:
    """A model's weights as one tree, against one tensor of the same size; ping-pong, in place."""
    communicator, other = torch_nixl.get_communicator(), 1 - side.rank
    many = weights()
    nbytes = sum(one.nbytes for one in many.values())
    single = torch.zeros(nbytes, dtype=torch.uint8)

    def measure(send: Callable[[], object], receive: Callable[[], object]) -> float:
        return percentile(half_round_trips(side, send, receive, 2), 0.0)

    figures = interleave(
        {
            "tree": lambda: measure(
                lambda: communicator.send_tree(many, other),
                lambda: communicator.recv_tree(other, out=many),
            ),
            "tensor": lambda: measure(
                lambda: communicator.send(single, other),
                lambda: communicator.recv(other, out=single),
            ),
        },
        rounds=21,
    )
    if side.rank == 0:
        ours, rival = median(figures["tree"]), median(figures["tensor"])
        side.rows.append(
            Row(
                f"tree {len(many)}, {nbytes / 1e6:.0f} MB",
                nbytes / ours / 1e9,
                "GB/s",
                0.9,
                nbytes / rival / 1e9,
                lower_is_better=False,
                note="one tensor of that size",
            )
        )


def overhead(side: Side) -> None:
    """Time inside Python for a message that waits for nobody: to this rank itself, and isend."""
    communicator = torch_nixl.get_communicator()
    small, got = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    other = 1 - side.rank

    def per_call(call: Callable[[], object], count: int = 20) -> float:
        started = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - started) / count * 1e6

    side.exchange(None)
    if side.rank == 0:
        sends = [per_call(lambda: communicator.send(small, other)) for _ in range(5)]
    side.exchange(None)
    if side.rank == 1:
        time.sleep(0.05)
        communicator.iprobe(other)
        receives = [per_call(lambda: communicator.recv(other, out=got)) for _ in range(5)]
        side.exchange(median(receives))
        return
    theirs = side.exchange(None)
    assert isinstance(theirs, float)
    side.rows.append(Row("send call, 8 B", median(sends), "us", 10.0, note="NIXL's part included"))
    side.rows.append(Row("recv call, 8 B", theirs, "us", 10.0, note="the message is there"))


def _name(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def body(side: Side) -> None:
    torch.set_num_threads(1)
    path = side.exchange(None) if side.rank else tempfile.mkdtemp(prefix="torch_nixl_p2p_")
    if side.rank == 0:
        side.exchange(path)
    store = dist.FileStore(f"{path}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=side.rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    buffer = torch.zeros(LARGEST, dtype=torch.uint8)
    buffer.fill_(side.rank)
    raw = Raw(side, buffer)
    with torch_nixl.init():
        latency(side, raw, buffer)
        tree(side)
        channels(side, buffer)
        rate(side)
        overhead(side)
        side.exchange(None)
    dist.destroy_process_group()


if __name__ == "__main__":
    options = arguments(__doc__ or "")
    sys.path.insert(0, str(Path(__file__).parent))
    report("p2p, 2 ranks", run_pair(body, timeout=300), options.json)
