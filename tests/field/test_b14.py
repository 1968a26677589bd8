"""Field report B14: an operation is given up while its bytes move. Here: descriptors."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
import torch
from connect.pairs import DEADLINE, Pair

from field.two import until
from torch_nixl import connect
from torch_nixl.connect import OperationStatus
from torch_nixl.errors import TransferTimeout
from torch_nixl.testing import LoopbackAdapter, LoopbackConnector, LoopbackFabric


@pytest.mark.parametrize("who", ["active", "owner"])
def test_b14_what_was_cancelled_is_written_to_no_more(
    monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Over TCP, where bytes are under way for a while, and releasing a transfer stops none."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def cancel() -> None:
        """Who gives up is the one whose memory is written to."""
        exposed = pair.writable(target) if who == "owner" else pair.readable(source)
        told = exposed.metadata()
        moving = pair.write(source, told) if who == "owner" else pair.read(told, target)
        until(lambda: moving._operation.in_flight or moving._operation.done)
        given_up = exposed if who == "owner" else moving
        given_up.cancel(timeout=DEADLINE)
        assert given_up.wait_released(DEADLINE)

    with connect.Connector() as owner, connect.Connector() as other:
        pair = Pair(owner, other)
        pair.move(torch.ones(10), torch.zeros(10))
        for _ in range(5):
            cancel()
            target.fill_(7)
            pair.move(torch.ones(10), torch.zeros(10))
            time.sleep(0.02)
            assert bool((target == 7).all())


class Slow:
    """A transfer of a MiB that is under way as over TCP, a byte at a time.

    Attributes:
        mine: The memory of the side that is to give up.
        theirs: That of the other side.
        ends: The operations of both sides.
    """

    def __init__(self, fabric: LoopbackFabric, pair: Pair, who: str, reads: bool) -> None:
        self.fabric, self.pair = fabric, pair
        pair.move(np.ones(10), np.zeros(10))
        fabric.delay(1)
        source, target = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
        exposed = pair.readable(source) if reads else pair.writable(target)
        told = exposed.metadata()
        moving = pair.read(told, target) if reads else pair.write(source, told)
        until(lambda: target[0] == 1)
        self.mine, self.theirs = (source, target) if reads is (who == "owner") else (target, source)
        self.ends = {"active": moving, "owner": exposed}

    def let_go_on(self) -> None:
        self.fabric.delay(None)

    def has_ended(self) -> bool:
        """Whether the library moves no byte any more, of whatever transfer."""
        adapter = self.pair.other.connection().engine.adapter
        assert isinstance(adapter, LoopbackAdapter)
        return not adapter.agent.jobs


@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
@pytest.mark.parametrize("who", ["active", "owner"])
def test_b14_cancelled_memory_is_held_while_bytes_move(who: str, reads: bool) -> None:
    fabric = LoopbackFabric(mode="tcp")
    with LoopbackConnector(fabric) as owner, LoopbackConnector(fabric) as other:
        slow = Slow(fabric, Pair(owner, other), who, reads)
        cancelled = slow.ends[who]
        with pytest.raises(TransferTimeout):
            cancelled.cancel(timeout=0.1)
        assert cancelled.status is OperationStatus.CANCELLED
        assert not cancelled.wait_released(0.1)
        slow.let_go_on()
        assert cancelled.wait_released(DEADLINE)
        slow.mine[:] = 7
        until(slow.has_ended)
        assert bool((slow.mine == 7).all())
        assert not (slow.theirs == 7).any()


@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
@pytest.mark.parametrize("who", ["active", "owner"])
def test_b14_dropped_memory_is_held_while_bytes_move(who: str, reads: bool) -> None:
    fabric = LoopbackFabric(mode="tcp")
    with LoopbackConnector(fabric) as owner, LoopbackConnector(fabric) as other:
        slow = Slow(fabric, Pair(owner, other), who, reads)
        kept = weakref.ref(slow.mine)
        del slow.mine, slow.ends[who]
        gc.collect()
        if who == "owner":  # To drop it is to withdraw it.
            until(lambda: slow.ends["active"].status is OperationStatus.CANCELLED)
        slow.pair.move(np.ones(10), np.zeros(10))
        assert kept() is not None
        slow.let_go_on()
        until(lambda: kept() is None)
        assert slow.has_ended()
        if who == "active":  # To drop it is to let it go on.
            slow.ends["owner"].wait(DEADLINE)
            assert bool((slow.theirs == 1).all())


def test_b14_cancelled_or_dropped_at_once(pair: Pair) -> None:
    source = torch.ones(1 << 26, dtype=torch.uint8)
    for turn in range(20):
        target = torch.zeros_like(source)
        exposed = pair.readable(source)
        reading = pair.read(exposed.metadata(), target)
        if turn % 2:
            reading.cancel(timeout=DEADLINE)
        del reading, target
        gc.collect()
        assert exposed.wait_released(DEADLINE)
    target = torch.zeros(10)
    pair.move(torch.ones(10), target)
    assert bool(target.all())
