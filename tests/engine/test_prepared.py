"""Prepared lists and transfers by index, on the loopback adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torch_nixl.engine import indexed, remotes
from torch_nixl.engine.adapter import Direction, Indices, MemoryKind, Spans
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.indexed import IndexedRows, IndexedTransfer
from torch_nixl.engine.loopback import LoopbackAdapter, LoopbackFabric
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.prepared import PreparedList
from torch_nixl.engine.registry import RegisteredMemory
from torch_nixl.engine.remotes import Contact, Remote
from torch_nixl.errors import ClosedError, PeerLostError, TransferError

NUM_PAGES, PAGE = 16, 256
KIND = 100


class Pages:
    """Pages of one tensor, registered with a connection."""

    def __init__(self, connection: Connection, fill: int = 0) -> None:
        self.tensor = torch.full((NUM_PAGES, PAGE), fill, dtype=torch.uint8)
        self.tensor += torch.arange(NUM_PAGES, dtype=torch.uint8)[:, None]
        self.held: RegisteredMemory = connection.register(tensor_memory(self.tensor))

    @property
    def rows(self) -> Spans:
        made = np.empty((NUM_PAGES, 3), np.uint64)
        made[:, 0] = self.tensor.data_ptr() + PAGE * np.arange(NUM_PAGES)
        made[:, 1] = PAGE
        made[:, 2] = self.held.device_id
        return made


class Pair:
    """Two connections that have met, and pages of each."""

    def __init__(self, fabric: LoopbackFabric) -> None:
        self.fabric = fabric
        self.a = Connection(fabric.adapter("a"), timeout=10)
        self.b = Connection(fabric.adapter("b"), timeout=10)
        self.remote: Remote = self.a.contact("b", self.b.metadata()[0])
        assert self.a.progress.wait_until(lambda: self.remote.contact is Contact.READY, None)
        self.ours, self.theirs = Pages(self.a), Pages(self.b, fill=100)
        self.local = self.a.prepared.local(MemoryKind.DRAM, self.ours.rows, [self.ours.held])
        self.far = self.prepare_far(self.theirs)

    def prepare_far(self, pages: Pages) -> PreparedList:
        return self.a.prepared.remote(self.remote, MemoryKind.DRAM, pages.rows, [pages.held.blob])

    def rows(self, ours: list[int], theirs: list[int]) -> IndexedRows:
        return IndexedRows(self.local, ints(ours), self.far, ints(theirs))

    def move(self, direction: Direction, ours: list[int], theirs: list[int]) -> IndexedTransfer:
        transfer = IndexedTransfer(self.a, direction, [self.rows(ours, theirs)])
        transfer.start()
        return transfer


def ints(values: list[int]) -> Indices:
    return np.array(values, np.int32)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(LoopbackFabric())
    yield made
    made.a.abort()
    made.b.abort()


@pytest.mark.parametrize("direction", list(Direction))
def test_rows_go_where_their_indices_say(pair: Pair, direction: Direction) -> None:
    ours, theirs = [3, 0, 1, 2, 9], [15, 4, 5, 6, 4]
    before = pair.ours.tensor.clone(), pair.theirs.tensor.clone()
    pair.move(direction, ours, theirs).wait()
    expected_ours, expected_theirs = before[0].clone(), before[1].clone()
    if direction is Direction.READ:
        expected_ours[ours] = before[1][theirs]
    else:
        for here, there in zip(ours, theirs, strict=True):
            expected_theirs[there] = before[0][here]
    assert torch.equal(pair.ours.tensor, expected_ours)
    assert torch.equal(pair.theirs.tensor, expected_theirs)


def test_rows_can_be_moved_again_without_a_look_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pair.rows([0, 1, 2], [3, 4, 5])
    for name in ("prepare_list", "prepare", "add_remote", "register"):
        monkeypatch.setattr(pair.a.adapter, name, None)
    for turn in range(3):
        pair.theirs.tensor.fill_(turn)
        transfer = IndexedTransfer(pair.a, Direction.READ, [rows])
        transfer.start()
        transfer.wait()
        assert bool((pair.ours.tensor[:3] == turn).all())


def test_a_frame_follows_the_last_piece(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "LONG_PIECE_BYTES", 3 * PAGE)
    monkeypatch.setattr(indexed, "PIECE_BYTES", 2 * PAGE)
    seen: list[bool] = []
    every = list(range(NUM_PAGES))
    pair.b.route(
        KIND, lambda remote, body: seen.append(torch.equal(pair.ours.tensor, pair.theirs.tensor))
    )
    posts = counted(pair.a.adapter, "prepare_indexed", monkeypatch)
    transfer = IndexedTransfer(
        pair.a, Direction.WRITE, [pair.rows(every, every)], frame=(KIND, b"all")
    )
    transfer.start()
    transfer.wait()
    assert pair.b.progress.wait_until(lambda: bool(seen), None)
    assert seen == [True]
    assert len(posts) == -(-NUM_PAGES // 3)
    assert transfer.nbytes == transfer.moved_nbytes == NUM_PAGES * PAGE


def counted(
    adapter: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []
    method: Callable[..., object] = getattr(adapter, name)

    def call(*args: object) -> object:
        calls.append(args)
        return method(*args)

    monkeypatch.setattr(adapter, name, call)
    return calls


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ints([0]), ints([0, 1])),
        (ints([]), ints([])),
        (ints([NUM_PAGES]), ints([0])),
        (ints([0]), ints([-1])),
        (np.array([0]), ints([0])),
        (ints([0, 1, 2, 3])[::2], ints([0, 1])),
    ],
)
def test_indices_that_can_not_be_are_refused(
    pair: Pair, ours: Indices, theirs: npt.NDArray[np.int32]
) -> None:
    with pytest.raises(ValueError, match=r"expected|differ"):
        IndexedRows(pair.local, ours, pair.far, theirs)


def test_rows_that_can_not_be_are_refused(pair: Pair) -> None:
    rows = pair.ours.rows
    empty = rows.copy()
    empty[3, 1] = 0
    wrongs: list[Any] = [rows[:0], rows[:, :2], rows.astype(np.int64), empty]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="rows: "):
            pair.a.prepared.local(MemoryKind.DRAM, wrong)
    with pytest.raises(ValueError, match="in this order"):
        IndexedRows(pair.far, ints([0]), pair.local, ints([0]))
    with pytest.raises(TransferError, match="one remote"):
        IndexedTransfer(pair.a, Direction.READ, [])


def test_a_list_is_freed_once_the_last_transfer_is_final(pair: Pair) -> None:
    released = counted(pair.a.adapter, "release_list", pytest.MonkeyPatch())
    pair.fabric.delay(1, initiator="a")
    transfer = pair.move(Direction.READ, [0], [0])
    pair.local.close()
    pair.far.close()
    assert not released
    with pytest.raises(ClosedError, match="closed"):
        pair.move(Direction.READ, [0], [0])
    pair.fabric.delay(None, initiator="a")
    transfer.wait()
    assert pair.a.progress.wait_until(lambda: len(released) == 2, None)
    assert len(pair.a.prepared) == 0
    assert pair.ours.held.entry is not None and pair.ours.held.entry.users == 0
    pair.local.close()
    assert len(released) == 2


def test_lists_of_a_lost_remote_are_freed_and_refuse(pair: Pair) -> None:
    rows = pair.rows([0], [0])
    pair.fabric.kill("b")
    transfer = IndexedTransfer(pair.a, Direction.READ, [rows])
    transfer.start()
    with pytest.raises(PeerLostError):
        transfer.wait()
    assert transfer.wait_released(5)
    assert pair.a.progress.wait_until(lambda: len(pair.a.prepared) == 1, None)
    assert pair.far.closed and not pair.local.closed
    with pytest.raises(PeerLostError):
        IndexedTransfer(pair.a, Direction.READ, [rows])


def test_a_list_is_looked_up_anew_where_its_remote_had_to_be_forgotten(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pair.rows([0, 1], [7, 8])
    monkeypatch.setattr(remotes, "MAX_KNOWN_REGIONS", pair.remote.num_known)
    other = Pages(pair.b, fill=50)
    crowding = pair.prepare_far(other)
    assert pair.a.counters.relearned == 1
    for turn in range(2):
        pair.theirs.tensor.fill_(turn + 1)
        transfer = IndexedTransfer(pair.a, Direction.READ, [rows])
        transfer.start()
        transfer.wait()
        assert bool((pair.ours.tensor[:2] == turn + 1).all())
    again = IndexedTransfer(
        pair.a, Direction.READ, [IndexedRows(pair.local, ints([3]), crowding, ints([3]))]
    )
    again.start()
    again.wait()
    assert bool((pair.ours.tensor[3] == 53).all())


def test_closing_the_connection_frees_lists_and_ends_transfers(pair: Pair) -> None:
    adapter = pair.a.adapter
    assert isinstance(adapter, LoopbackAdapter)
    pair.fabric.delay(1, initiator="a")
    transfer = pair.move(Direction.READ, [0], [0])
    pair.a.abort()
    assert isinstance(transfer.error, ClosedError)
    pair.local.close()
    pair.far.close()
    assert len(pair.a.prepared) == 0
