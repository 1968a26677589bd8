"""Processes that are killed or stopped at every stage of a request. On the loopback adapter."""

from __future__ import annotations

import pytest

from kv.conftest import Open
from kv.worlds import Decode, Prefill, arrived, nothing_held, until
from torch_nixl.errors import PeerLostError, TransferError
from torch_nixl.kv.fetch import Fetch
from torch_nixl.kv.offer import Offer
from torch_nixl.testing import LoopbackFabric

STAGES = ("offered", "meeting", "granted", "moving")
"""The ticket is out; MEET is under way; all but the layers; bytes are under way."""

SECONDS = 0.3
"""After so long requests time out on the side that is left."""


class Pair:
    """A request between two, of whom one is going to fail, at a stage of it."""

    def __init__(self, fabric: LoopbackFabric, connect: Open, stage: str, mode: str) -> None:
        self.fabric = fabric
        self.prefill = Prefill(connect("p"), timeout=SECONDS)
        self.decode = Decode(connect("d"), timeout=SECONDS)
        self.stage, self.mode = stage, mode
        self.fetch: Fetch | None = None
        if stage in ("granted", "moving"):
            warm = self.prefill.server.offer("warm", [9], 16)
            self.decode.fetch(mode, warm.ticket, [9], timeout=10.0).wait(10)
            assert warm.wait_released(10)
        self.offer: Offer = self.prefill.server.offer(
            "one", [3, 1], 32, ready=stage != "granted", lease=SECONDS
        )
        if stage == "offered":
            return
        if stage == "meeting":
            self.decode.connection.contact("p", self.prefill.connection.metadata()[0])
            fabric.cut("p", "d")
        elif stage == "moving":
            fabric.delay(8)
        fetch = self.take()
        if stage == "granted":
            self.offer.layer_ready(0)
            fetch.wait_layer(0, 10)
        elif stage == "moving":
            mover = self.decode if mode == "pull" else self.prefill
            transfers = mover.connection.operations.transfers
            until(lambda: any(one.in_flight for one in transfers))

    def take(self) -> Fetch:
        self.fetch = self.decode.fetch(self.mode, self.offer.ticket, [4, 5])
        return self.fetch

    def go_on(self) -> None:
        """Let the network be as it should."""
        self.fabric.heal("p", "d")
        self.fabric.delay(None)

    def end(self, side: str) -> Offer | Fetch | None:
        """What the side that is left has of the request, once it has ended there."""
        if side == "d":  # Decode has failed.
            until(lambda: self.offer.done)
            return self.offer
        try:
            fetch = self.fetch or self.take()
        except PeerLostError:
            return None
        until(lambda: fetch.done)
        return fetch

    def check(self, left: Offer | Fetch | None) -> None:
        """It ended with a reason, or well and then with the right bytes."""
        if left is None:
            return
        if left.error is not None:
            assert isinstance(left.error, TransferError), left.error
            assert left is self.offer or left.failed_pages == ((4, 5),)
        elif left is self.fetch:
            assert arrived(self.prefill.tensors, [3, 1], self.decode.tensors, [4, 5], 0, 32)


def others_go_on(pair: Pair, connect: Open, fails: str) -> None:
    """The side that is left goes on with others."""
    if fails == "d":
        again = pair.prefill.server.offer("two", [7], 16)
        other = Decode(connect("o"))
        other.client.pull(again.ticket, [6]).wait(10)
        assert arrived(pair.prefill.tensors, [7], other.tensors, [6], 0, 16)
    else:
        source = Prefill(connect("o"), seed=7)
        again = source.server.offer("two", [7], 16)
        pair.decode.client.pull(again.ticket, [6], timeout=10).wait(10)
        assert arrived(source.tensors, [7], pair.decode.tensors, [6], 0, 16)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("fails", ["p", "d"])
@pytest.mark.parametrize("stage", STAGES)
def test_killed(fabric: LoopbackFabric, connect: Open, stage: str, fails: str, mode: str) -> None:
    pair = Pair(fabric, connect, stage, mode)
    fabric.kill(fails)
    pair.go_on()
    others_go_on(pair, connect, fails)
    pair.check(pair.end(fails))
    # Of one process, like everything here: it counts as alive until it says otherwise.
    survivor = pair.prefill if fails == "d" else pair.decode
    for request in (pair.offer, *([pair.fetch] if pair.fetch else [])):
        for handoff in request.handoffs:
            if handoff.remote is not None and handoff.remote.name == fails:
                handoff.remote.closed = True
    service = survivor.server if isinstance(survivor, Prefill) else survivor.client
    until(lambda: nothing_held(service.statistics()))


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("fails", ["p", "d"])
@pytest.mark.parametrize("stage", STAGES)
def test_stopped_and_going_on(
    fabric: LoopbackFabric, connect: Open, stage: str, fails: str, mode: str
) -> None:
    pair = Pair(fabric, connect, stage, mode)
    fabric.stop(fails)
    pair.fabric.heal("p", "d")
    others_go_on(pair, connect, fails)
    pair.check(pair.end(fails))
    fabric.resume(fails)
    pair.go_on()
    until(lambda: nothing_held(pair.prefill.server.statistics(), pair.decode.client.statistics()))
    # The two are as before.
    again = pair.prefill.server.offer("three", [2], 16)
    fetch = pair.decode.fetch(mode, again.ticket, [8], timeout=10.0)
    fetch.wait(10)
    assert arrived(pair.prefill.tensors, [2], pair.decode.tensors, [8], 0, 16)
