"""What the ranks of the NIXL tests run: sent by name to processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence

import torch
from stopping import stop_process

import torch_nixl
from kv.worlds import LAYERS, MODES, PAGE, Decode, Prefill, nothing_held, tensors, until
from torch_nixl.engine.connection import Connection
from torch_nixl.errors import PeerLostError, TransferError, TransferTimeout
from torch_nixl.kv.fetch import Fetch
from torch_nixl.kv.offer import Offer
from torch_nixl.testing import Rank

NUM_PAGES = 48


class Peer:
    """A process with a server and a client, and the way to tell others of tickets."""

    def __init__(self, rank: Rank, num_pages: int = NUM_PAGES) -> None:
        self.store = rank.store()
        self.rank = rank.rank
        self.connection = Connection.open(f"kv{rank.rank}")
        self.prefill = Prefill(self.connection, num_pages=num_pages, seed=rank.rank)
        self.decode = Decode(self.connection, num_pages=num_pages)

    def offer(self, name: str, pages: Sequence[int], num_tokens: int, *, ready: bool) -> Offer:
        offer = self.prefill.server.offer(name, pages, num_tokens, ready=ready)
        self.store.set(f"ticket/{name}", offer.ticket)
        return offer

    def fetch(self, mode: str, name: str, pages: Sequence[int], **options: float) -> Fetch:
        ticket = self.store.get(f"ticket/{name}").decode()
        return self.decode.fetch(mode, ticket, pages, **options)

    def has(self, source: int, src: Sequence[int], dst: Sequence[int], count: int) -> bool:
        """Whether the first tokens of our pages are those of another rank's."""
        theirs = tensors(NUM_PAGES, source)
        return all(
            torch.equal(
                one[:, list(src)].flatten(1, 2)[:, :count],
                mine[:, list(dst)].flatten(1, 2)[:, :count],
            )
            for one, mine in zip(theirs, self.decode.tensors, strict=True)
        )

    def say(self, word: str) -> None:
        self.store.set(f"{word}/{self.rank}", "1")

    def hear(self, word: str, rank: int) -> None:
        self.store.get(f"{word}/{rank}")

    def meet(self, word: str, size: int) -> None:
        """A barrier."""
        self.say(word)
        for rank in range(size):
            self.hear(word, rank)

    def idle(self) -> bool:
        return nothing_held(self.prefill.server.statistics(), self.decode.client.statistics())

    def close(self) -> None:
        self.prefill.server.close()
        self.decode.client.close()
        self.connection.close()


def all_to_all(rank: Rank, count: int) -> dict[str, int]:
    """Every rank offers to every rank, in both modes, ready or layer by layer, several at once."""
    peer = Peer(rank)
    rng = random.Random(rank.rank)
    size = rank.world_size
    for turn in range(count):
        offers = []
        for target in range(size):
            for index, mode in enumerate(MODES):
                tokens = rng.randint(1, 4 * PAGE)
                src = rng.sample(range(NUM_PAGES), -(-tokens // PAGE))
                name = f"{turn}/{rank.rank}/{target}/{mode}"
                peer.store.set(f"what/{name}", json.dumps((src, tokens)))
                offers.append(peer.offer(name, src, tokens, ready=index == turn % 2))
        fetches = []
        free = list(range(NUM_PAGES))
        rng.shuffle(free)
        for source in range(size):
            for mode in MODES:
                name = f"{turn}/{source}/{rank.rank}/{mode}"
                src, tokens = json.loads(peer.store.get(f"what/{name}"))
                dst = [free.pop() for _ in src]
                fetches.append((source, src, dst, tokens, peer.fetch(mode, name, dst)))
        for layer in range(LAYERS):
            for offer in offers:
                if offer.num_ready == layer:
                    offer.layer_ready(layer)
        for source, src, dst, tokens, fetch in fetches:
            fetch.wait(30)
            assert peer.has(source, src, dst, tokens), (turn, source)
        for offer in offers:
            assert offer.wait_released(30) and offer.error is None
        until(peer.idle)
        peer.meet(f"turn{turn}", size)
    paths = dict(peer.decode.client.statistics().paths)
    peer.meet("end", size)
    peer.close()
    return paths


def over_a_communicator(rank: Rank) -> int:
    """The ticket goes through the Communicator, whose connection moves the pages, too."""
    with torch_nixl.Communicator(rank.store(), rank.rank, 2, timeout=30) as communicator:
        if rank.rank == 0:
            cache = tensors(NUM_PAGES, 0)
            server = torch_nixl.KVCacheServer(communicator, torch_nixl.KVCache(cache, model="m"))
            offer = server.offer("one", [3, 1], 20)
            communicator.send_object(offer.ticket, 1)
            offer.wait(20)
            assert offer.wait_released(20)
            server.close()
            return int(communicator.recv(1))
        cache = tensors(NUM_PAGES)
        client = torch_nixl.KVCacheClient(communicator, torch_nixl.KVCache(cache, model="m"))
        ticket = communicator.recv_object(0)
        assert isinstance(ticket, str)
        fetch = client.pull(ticket, [5, 6])
        fetch.wait(20)
        client.close()
        same = torch.equal(cache[3][:, 5], tensors(NUM_PAGES, 0)[3][:, 3])
        communicator.send(torch.tensor(int(same)), 0)
        return int(same)


def _in_the_middle(peer: Peer, other: int) -> list[Offer | Fetch]:
    """Four requests with another rank, each half through: both roles, both modes."""
    mine: list[Offer | Fetch] = []
    offers = []
    for index, mode in enumerate(MODES):
        name = f"{peer.rank}-{other}-{mode}"
        offers.append(peer.offer(name, [10 + index, 20 + index], 32, ready=False))
    fetches = []
    for index, mode in enumerate(MODES):
        name = f"{other}-{peer.rank}-{mode}"
        pages = [30 + 2 * index, 31 + 2 * index]
        fetches.append(peer.fetch(mode, name, pages, timeout=60.0))
    for layer in range(2):
        for offer in offers:
            offer.layer_ready(layer)
        for fetch in fetches:
            fetch.wait_layer(layer, 20)
    mine += offers
    mine += fetches
    return mine


def _errors(requests: Sequence[Offer | Fetch], seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    names = []
    for request in requests:
        until(lambda: request.done, max(0.1, deadline - time.monotonic()))  # noqa: B023
        names.append(type(request.error).__name__)
    return names


def _third(peer: Peer, other: int, word: str) -> None:
    """A request in each direction between two that live, in the course of which others fail."""
    mine = peer.offer(f"{word}{peer.rank}", [40, 41], 32, ready=True)
    theirs = peer.fetch("pull", f"{word}{other}", [42, 43])
    theirs.wait(20)
    mine.wait(20)
    assert peer.has(other, [40, 41], [42, 43], 32)


def killed(rank: Rank) -> str:
    """Rank 1 is killed with four requests half through, one given up; ranks 0 and 2 go on."""
    peer = Peer(rank)
    if rank.rank == 2:
        _third(peer, 0, "before")
        peer.hear("dead", 0)
        _third(peer, 0, "after")
        peer.meet("end", 1)
        return "alive"
    if rank.rank == 0:
        _third(peer, 2, "before")
    requests = _in_the_middle(peer, 1 - rank.rank)
    if rank.rank == 1:
        waiting = peer.prefill.server.offer("never", [5], 16)
        peer.store.set("ticket/never", waiting.ticket)
        peer.store.set("pid", str(os.getpid()))
        peer.hear("dead", 0)  # It is, by then.
    pid = int(peer.store.get("pid"))
    stop_process(pid)
    requests[3].cancel()  # It wrote to these pages, and can't say any more that it has stopped.
    assert not requests[3].wait_released(0.2)
    os.kill(pid, signal.SIGKILL)
    names = _errors(requests, 15.0)
    assert names == ["PeerLostError"] * 3 + ["TransferCancelled"], names
    for request in requests:
        assert request.wait_released(10), request
    until(peer.idle)
    peer.say("dead")
    # A ticket of the dead one, as a proxy may still send it.
    try:
        peer.fetch("pull", "never", [1], timeout=10.0).wait()
    except (PeerLostError, TransferTimeout):
        pass
    else:
        raise AssertionError("a dead server served")
    until(peer.idle)
    _third(peer, 2, "after")
    peer.meet("end", 1)
    return "alive"


def killed_while_bytes_move(rank: Rank) -> None:
    """Rank 1 is killed while both move 64 MiB each way in each mode, over TCP."""
    count = 8192
    peer = Peer(rank, 2 * count)
    halves = [range(count), range(count, 2 * count)]
    offers = [
        peer.offer(f"{peer.rank}-{mode}", half, count * PAGE, ready=True)
        for half, mode in zip(halves, MODES, strict=True)
    ]
    other = 1 - peer.rank
    # The caches meet first.
    peer.offer(f"{peer.rank}-warm", [0], 1, ready=True)
    peer.fetch("pull", f"{other}-warm", [0]).wait(20)
    peer.store.set(f"pid/{peer.rank}", str(os.getpid()))
    peer.meet("warm", 2)
    fetches = [
        peer.fetch(mode, f"{other}-{mode}", half) for half, mode in zip(halves, MODES, strict=True)
    ]
    if peer.rank == 1:
        peer.hear("never", 0)
    transfers = peer.connection.operations.transfers
    until(lambda: any(one.in_flight for one in transfers))
    pid = int(peer.store.get("pid/1"))
    stop_process(pid)
    assert any(one.in_flight for one in transfers)
    os.kill(pid, signal.SIGKILL)
    taken: list[Offer | Fetch] = [*fetches, *(offer for offer in offers if offer.handoffs)]
    names = _errors(taken, 15.0)
    assert "PeerLostError" in names and set(names) <= {"PeerLostError", "NoneType"}, names
    for fetch in fetches:
        if fetch.error is not None:
            assert sum(map(len, fetch.failed_pages)) == count
    for offer in offers:
        offer.cancel()  # What it was stopped too early to take is still on offer.
    assert all(one.wait_released(10) for one in (*offers, *fetches))
    until(peer.idle)
    # This process goes on, with the same pages.
    after = peer.prefill.server.offer("after", [5], PAGE)
    peer.decode.client.pull(after.ticket, [6]).wait(20)
    assert torch.equal(peer.decode.tensors[0][:, 6], peer.prefill.tensors[0][:, 5])
    peer.close()


def left(rank: Rank) -> None:
    """Rank 1's program ends with four requests half through, and closes nothing."""
    peer = Peer(rank)
    requests = _in_the_middle(peer, 1 - rank.rank)
    peer.meet("half", 2)
    if rank.rank == 1:
        atexit._run_exitfuncs()
        os._exit(0)
    names = _errors(requests, 20.0)
    # Not with its farewell, after the time that open requests are given to end.
    assert names == ["TransferCancelled"] * 4, names
    for request in requests:
        assert request.wait_released(10), request
    until(peer.idle)
    peer.close()


def stopped(rank: Rank) -> list[str]:
    """Rank 1 stands still with four requests half through; later it goes on."""
    peer = Peer(rank)
    requests = _in_the_middle(peer, 1 - rank.rank)
    if rank.rank == 1:
        peer.store.set("pid", str(os.getpid()))
        peer.hear("awake", 0)
        _errors(requests, 15.0)
        for request in requests:
            assert request.wait_released(10), request
        until(peer.idle)
        peer.meet("end", 2)
        peer.close()
        return []
    pid = int(peer.store.get("pid"))
    stop_process(pid)
    try:
        for request in requests[:2]:
            request.cancel()
        for request in requests[2:]:  # Not before: on a busy machine the half may take as long.
            with contextlib.suppress(TransferTimeout):
                request.wait(1.0)
        names = _errors(requests, 15.0)
        # Who was read by prefill's peer, or is written to, is held: nobody can vouch for a stopped
        # process. The other two moved the bytes themselves.
        freed = [requests[index].wait_released(10) for index in (1, 2)]
        held = [not requests[index].wait_released(0.2) for index in (0, 3)]
        assert freed == held == [True, True], (freed, held)
    finally:
        os.kill(pid, signal.SIGCONT)
    peer.say("awake")
    for request in requests:
        assert request.wait_released(10), request
    until(peer.idle)
    peer.meet("end", 2)
    peer.close()
    return names


def restarted(rank: Rank) -> int:
    """Prefill closes and comes back as another agent; tickets of the first are refused."""
    peer = Peer(rank)
    if rank.rank == 0:
        peer.offer("old", [3], 16, ready=True)
        peer.hear("met", 1)
        peer.close()
        peer = Peer(rank)
        peer.offer("new", [3], 16, ready=True)
        peer.meet("end", 2)
        peer.close()
        return 0
    first = peer.fetch("pull", "old", [3])
    first.wait(20)
    peer.say("met")
    ticket = peer.store.get("ticket/new").decode()
    refused = 0
    try:
        peer.fetch("push", "old", [5], timeout=5.0).wait()
    except TransferError:
        refused += 1
    until(peer.idle)
    peer.decode.client.pull(ticket, [6]).wait(20)
    assert peer.has(0, [3], [6], 16)
    peer.meet("end", 2)
    peer.close()
    return refused
