"""What the ranks of the NIXL test of streams run, with a fake device on each side."""

from __future__ import annotations

import torch

from kv.worlds import LAYERS, Decode, Prefill, nothing_held, until
from torch_nixl.engine.connection import Connection
from torch_nixl.errors import TransferCancelled
from torch_nixl.testing import FakeDevice, Rank

TURNS = 6


def handoffs(rank: Rank, mode: str) -> int:
    """Pages from kernels of one process to kernels of another, whole or layer by layer."""
    store = rank.store()
    with Connection.open(f"kv{rank.rank}") as connection:
        if rank.rank == 0:
            prefill = _Prefill(connection)
            for turn in range(TURNS):
                prefill.hand_over(float(turn + 1), layers=bool(turn % 2), rank=rank)
            prefill.give_up(rank)
            until(lambda: nothing_held(prefill.side.server.statistics()))
        else:
            decode = _Decode(connection)
            for turn in range(TURNS):
                ticket = store.get(f"ticket/{float(turn + 1)}").decode()
                decode.take(mode, ticket, float(turn + 1))
            decode.take_nothing(mode, store.get("ticket/never").decode(), rank)
            until(lambda: nothing_held(decode.side.client.statistics()))
        store.set(f"end/{rank.rank}", "1")
        store.get(f"end/{1 - rank.rank}")
    return rank.rank


class _Prefill:
    def __init__(self, connection: Connection) -> None:
        self.device = FakeDevice()
        self.stream = self.device.new_stream()
        self.side = Prefill(connection, num_pages=8, device=self.device)

    def hand_over(self, value: float, *, layers: bool, rank: Rank) -> None:
        def kernel(pool: list[torch.Tensor]) -> None:
            for one in pool:
                one[:, [3, 1]] = value

        pool = self.side.tensors
        with self.device.stream(self.stream):
            if not layers:
                self.stream.launch(lambda: kernel(pool), seconds=0.01)
            offer = self.side.server.offer("one", [3, 1], 20, ready=not layers)
            rank.store().set(f"ticket/{value}", offer.ticket)
            for layer in range(LAYERS if layers else 0):
                one = pool[layer : layer + 1]
                self.stream.launch(lambda one=one: kernel(one), seconds=0.005)  # type: ignore[misc]
                offer.layer_ready(layer)
        offer.synchronize(20)
        assert offer.wait_released(20)

    def give_up(self, rank: Rank) -> None:
        offer = self.side.server.offer("never", [3, 1], 20, ready=False)
        rank.store().set("ticket/never", offer.ticket)
        rank.store().get("waits")
        offer.cancel()
        assert offer.wait_released(20)


class _Decode:
    def __init__(self, connection: Connection) -> None:
        self.device = FakeDevice()
        self.stream = self.device.new_stream()
        self.side = Decode(connection, num_pages=8, device=self.device)

    def seen_by(self, mode: str, ticket: str) -> list[torch.Tensor]:
        """What a kernel finds that is queued right after `wait`."""
        seen: list[torch.Tensor] = []
        with self.device.stream(self.stream):
            # Work that uses the pages: they are not to be filled before.
            self.stream.launch(lambda: None, seconds=0.005)
            fetch = self.side.fetch(mode, ticket, [4, 5])
            fetch.wait()
            self.stream.launch(
                lambda: seen.extend(
                    one[:, [4, 5]].flatten(1, 2)[:, :20].clone() for one in self.side.tensors
                )
            )
        return seen

    def take(self, mode: str, ticket: str, value: float) -> None:
        seen = self.seen_by(mode, ticket)
        self.stream.synchronize()
        assert all(bool((one == value).all()) for one in seen), (mode, value)
        until(lambda: nothing_held(self.side.client.statistics()))

    def take_nothing(self, mode: str, ticket: str, rank: Rank) -> None:
        seen = self.seen_by(mode, ticket)
        assert not seen
        rank.store().set("waits", "1")
        self.stream.synchronize()
        assert all(bool(one.isnan().all()) for one in seen)
        until(lambda: nothing_held(self.side.client.statistics()))
        ended = self.side.client.poll()[-1]
        assert isinstance(ended.error, TransferCancelled), ended
