"""Channels on the loopback adapter: bytes, cost, and everything that can go wrong."""

from __future__ import annotations

import gc
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, Store

from p2p.channel_programs import count_calls
from p2p.conftest import World
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.loopback import LoopbackAdapter
from torch_nixl.errors import (
    ClosedError,
    MetadataError,
    PeerLostError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from torch_nixl.p2p import protocol, terms
from torch_nixl.p2p.channel import Channel
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.tensors import MismatchError
from torch_nixl.testing import LoopbackFabric

HUGE = protocol.SPLIT_NBYTES
"""Elements of float32: four times what is split."""

ADAPTER_CALLS = (
    "add_remote",
    "deregister",
    "inspect",
    "metadata",
    "prepare",
    "prepare_list",
    "register",
    "release_list",
    "remove_remote",
)
STORE_CALLS = ("add", "check", "compare_set", "delete_key", "get", "set", "wait")


def pair(
    world: World, like: Callable[[], Any], **options: Any
) -> tuple[Channel[Any], Channel[Any]]:
    """Both ends of a channel between two ranks, which have agreed on it."""
    communicators = world(**options)
    ends = [one.channel(1 - rank, like=like()) for rank, one in enumerate(communicators)]
    for end in ends:
        progress = end._communicator.connection.progress
        assert progress.wait_until(lambda: end._session._agreed, None)  # noqa: B023 - called in this turn
    return ends[0], ends[1]


def both_released(*communicators: Communicator) -> bool:
    """Whether nothing of a channel is left."""

    def clean() -> bool:
        return all(
            not one.connection.prepared
            and one.connection.registry.statistics.live_bytes >= 0
            and not one._exchange.channels.sessions
            and len(one.connection.operations) == len(one._exchange.peers)
            for one in communicators
        )

    return communicators[0].connection.progress.wait_until(clean, None)


def a_tree() -> dict[str, Any]:
    return {
        "w": torch.zeros(1000),
        "layers": [torch.zeros(3, dtype=torch.int64), (torch.zeros(2, 5, dtype=torch.bfloat16),)],
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(0.0),
        "column": torch.zeros(300, 7)[:, 2],
        "rows": torch.zeros(4, 20_000)[:, :10_000],
    }


def adapter_of(communicator: Communicator) -> LoopbackAdapter:
    adapter = communicator.connection.adapter
    assert isinstance(adapter, LoopbackAdapter)
    return adapter


def fill(tree: Any, value: float) -> None:
    if isinstance(tree, torch.Tensor):
        tree.fill_(value)
    else:
        for one in tree.values() if isinstance(tree, dict) else tree:
            fill(one, value)


def holds(tree: Any, value: float) -> bool:
    if isinstance(tree, torch.Tensor):
        return bool((tree == value).all())
    return all(holds(one, value) for one in (tree.values() if isinstance(tree, dict) else tree))


def test_steps_move_a_tree_both_ways(world: World, path: str) -> None:
    a, b = pair(world, a_tree)
    wide = b.like["column"]._base
    for turn in range(1, 6):
        fill(a.like, turn)
        receive = b.irecv()
        a.send()
        receive.wait()
        assert holds(b.like, turn)
        assert int(wide.count_nonzero()) == 300, "columns between were touched"
        fill(b.like, 10 * turn)
        send = b.isend()
        assert a.recv() is a.like
        send.wait()
        assert holds(a.like, 10 * turn)
    assert send.statistics().route == {"cma": "read", "tcp": "write"}[path]
    assert send.statistics().packed
    assert send.result() is None and send.is_success()


def test_dicts_match_however_they_were_filled(world: World) -> None:
    a, b = world()
    x, y = torch.full((4,), 1.0), torch.full((3,), 2)
    got_x, got_y = torch.zeros(4), torch.zeros(3, dtype=torch.int64)
    sender = a.channel(1, like={"x": x, "y": y})
    receiver = b.channel(0, like={"y": got_y, "x": got_x})
    work = sender.isend()
    receiver.recv()
    work.wait()
    assert holds(got_x, 1) and holds(got_y, 2)


def test_large_steps_are_moved_by_both_ends_if_the_sender_waits(world: World, path: str) -> None:
    a, b = pair(world, lambda: [torch.zeros(HUGE), torch.zeros(HUGE + 3)])
    for turn in range(1, 4):
        fill(a.like, turn)
        receive = b.irecv()
        a.send()
        receive.wait()
        assert holds(b.like, turn)
        assert receive.statistics().route == {"cma": "split", "tcp": "write"}[path]
    fill(a.like, 9)
    send = a.isend()
    b.recv()
    send.wait()
    assert holds(b.like, 9)
    assert send.statistics().route == {"cma": "read", "tcp": "write"}[path]


def test_tensors_without_bytes_are_a_barrier(world: World, path: str) -> None:
    a, b = pair(world, lambda: torch.zeros(0, 3))
    work = a.isend()
    b.recv()
    work.wait()
    with pytest.raises(TransferTimeout):
        a.send(timeout=0.05)


def test_after_the_first_step_nothing_is_looked_up(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    calls = [count_calls(HashStore, STORE_CALLS, monkeypatch.setattr)]
    a, b = pair(world, lambda: [torch.zeros(HUGE), torch.zeros(100)])
    work = b.irecv()
    a.send()
    work.wait()
    assert sum(calls[0].values()) > 0, "nothing is counted"
    calls += [
        count_calls(adapter_of(end._communicator), ADAPTER_CALLS, monkeypatch.setattr)
        for end in (a, b)
    ]
    before = calls[0].copy()
    posts = count_calls(
        a._communicator.connection.adapter, ("prepare_indexed", "notify"), monkeypatch.setattr
    )
    for turn in range(1, 11):
        fill(a.like, turn)
        work = b.irecv()
        a.send()
        work.wait()
        assert holds(b.like, turn)
    fill(b.like, 77)
    work = b.isend()
    a.recv()
    work.wait()
    assert holds(a.like, 77)
    assert calls[0] == before
    assert calls[1:] == [Counter(), Counter()]
    assert posts["prepare_indexed"] >= 10
    assert posts["notify"] <= 2 * 11


def test_small_steps_take_one_frame_each_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair(world, lambda: torch.zeros(100))
    work = a.isend()
    b.recv()
    work.wait()
    sent = [
        count_calls(end._communicator.connection.adapter, ("notify",), monkeypatch.setattr)
        for end in (a, b)
    ]
    for _ in range(10):
        work = a.isend()
        assert b._communicator.connection.progress.wait_until(
            lambda: b._session._ready is not None and b._session._ready[0] == b._session._index,
            None,
        )
        b.recv()
        work.wait()
    assert [one["notify"] for one in sent] == [10, 10]


@pytest.mark.parametrize(
    ("ours", "theirs", "match"),
    [
        ({"w": torch.zeros(3)}, {"w": torch.zeros(4)}, r"\['w'\]: \[\d\] of torch.float32 here"),
        ([torch.zeros(3)], [torch.zeros(3).int()], r"\[0\]: .*torch.(int|float)32 there"),
        ([torch.zeros(3)], [torch.zeros(3), torch.zeros(3)], r"\[1\]: .*nothing"),
        (torch.zeros(3), {"x": torch.zeros(3)}, "the tensor: .*nothing|nothing.*"),
    ],
)
def test_a_mismatch_names_the_tensor_on_both_ends(
    world: World, ours: Any, theirs: Any, match: str
) -> None:
    a, b = world()
    sender, receiver = a.channel(1, like=ours), b.channel(0, like=theirs)
    for step in (sender.send, receiver.recv, sender.send):
        with pytest.raises(MismatchError, match=match):
            step()
    receiver.reconnect()
    sender.reconnect()
    with pytest.raises(MismatchError):
        sender.send()
    sender.close()
    receiver.close()
    assert both_released(a, b)


@pytest.mark.parametrize(
    ("like", "match"),
    [
        ([torch.zeros(3), "text"], r"like\[1\]: expected tensors, got str"),
        ([], "at least one tensor"),
        ({"a": {"b": torch.zeros(3).to_sparse()}}, r"like\['a'\]\['b'\]"),
        (torch.zeros(3, device="meta"), "like"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conj"),
    ],
)
def test_what_can_not_be_moved_is_refused_by_name(world: World, like: Any, match: str) -> None:
    a, _ = world()
    with pytest.raises((TypeError, ValueError), match=match):
        a.channel(1, like=like)


def test_wrong_arguments_are_refused(world: World) -> None:
    a, _ = world()
    like = torch.zeros(3)
    with pytest.raises(ValueError, match="another rank"):
        a.channel(0, like=like)
    with pytest.raises(ValueError, match="peer=2"):
        a.channel(2, like=like)
    with pytest.raises(ValueError, match="tag=-1"):
        a.channel(1, like=like, tag=-1)
    channel = a.channel(1, like=like)
    with pytest.raises(ValueError, match="open already"):
        a.channel(1, like=like)
    with pytest.raises(ValueError, match="timeout=-1"):
        channel.send(timeout=-1)


def test_an_end_that_can_not_be_written_to_sends_and_does_not_receive(world: World) -> None:
    a, b = world()
    shared = torch.ones(1)
    sender = a.channel(1, like=shared.expand(4))
    receiver = b.channel(0, like=torch.zeros(4))
    work = sender.isend()
    assert holds(receiver.recv(), 1)
    work.wait()
    with pytest.raises(ValueError, match="can't receive"):
        sender.recv()
    tied = torch.zeros(4)
    with pytest.raises(ValueError, match="share memory"):
        a.channel(1, like=[tied, tied], tag=1).recv()


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_both_ends_doing_the_same_is_an_error_on_both(world: World, verb: str, path: str) -> None:
    a, b = pair(world, lambda: torch.zeros(100))
    works = [getattr(end, f"i{verb}")() for end in (a, b)]
    for work in works:
        with pytest.raises(TransferError, match="both ends " + verb.replace("recv", "receive")):
            work.wait()
    assert all(work.wait_released(5) for work in works)
    reconnected(a, b)


def reconnected(a: Channel[Any], b: Channel[Any], value: float = 3.0) -> None:
    """Have both ends reconnect, and check that a step is right."""
    for end in (a, b):
        end.reconnect()
    fill(a.like, value)
    work = b.irecv()
    a.send()
    work.wait()
    assert holds(b.like, value)


def test_one_step_at_a_time(world: World) -> None:
    a, b = pair(world, lambda: torch.zeros(100))
    work = a.isend()
    with pytest.raises(TransferError, match="still under way"):
        a.isend()
    b.recv()
    work.wait()
    other = b.irecv()
    a.send()
    other.wait()


def test_a_step_that_times_out_ends_the_channel_on_both_ends(world: World, path: str) -> None:
    a, b = pair(world, lambda: torch.zeros(HUGE))
    with pytest.raises(TransferTimeout, match="before the other end did its part"):
        a.send(timeout=0.05)
    with pytest.raises(TransferTimeout):
        a.send()
    with pytest.raises(TransferTimeout, match="the other end's time was up"):
        b.recv()
    reconnected(a, b)


def test_memory_of_a_timed_out_step_is_owned_until_nothing_moves(
    world: World, fabric: LoopbackFabric, path: str
) -> None:
    a, b = pair(world, lambda: torch.zeros(HUGE))
    mover, waiter = (b, a) if path == "cma" else (a, b)
    fabric.delay(1, initiator=mover._communicator.connection.name)
    send = a.isend(timeout=0.2)
    receive = b.irecv(timeout=0.2)
    for work in (send, receive):
        with pytest.raises(TransferTimeout):
            work.wait()
    assert not send.wait_released(0.05) and not receive.wait_released(0.05)
    with pytest.raises(TransferTimeout, match="may still touch"):
        waiter.reconnect(timeout=0.05)
    fabric.delay(None, initiator=mover._communicator.connection.name)
    fabric.delay(1 << 30)
    assert send.wait_released(10) and receive.wait_released(10)
    reconnected(a, b)


def test_a_cancelled_step_is_told(world: World) -> None:
    a, b = pair(world, lambda: torch.zeros(HUGE))
    work = a.isend()
    work.cancel()
    with pytest.raises(TransferCancelled):
        work.wait()
    with pytest.raises(TransferCancelled, match="ended by the other end"):
        b.recv()
    reconnected(a, b)


@pytest.mark.parametrize("how", ["resize", "data", "shape"])
def test_a_tensor_that_moved_is_noticed_and_taken_up_by_reconnect(world: World, how: str) -> None:
    a, b = pair(world, lambda: [torch.zeros(8), torch.zeros(100)])
    work = b.irecv()
    a.send()
    work.wait()
    tensor = a.like[1]
    if how == "resize":
        tensor.resize_(100_000).resize_(100)
    elif how == "data":
        tensor.data = torch.zeros(100)
    else:
        tensor.resize_(50)
    with pytest.raises(ValueError, match=r"like\[1\]: it has been resized"):
        a.send()
    with pytest.raises(TransferError, match=r"like\[1\]"):
        b.recv()
    tensor.resize_(100)
    reconnected(a, b)


def test_a_closed_channel_says_so_on_both_ends(world: World) -> None:
    a, b = pair(world, lambda: torch.zeros(100))
    work = b.irecv()
    with a:
        a.send()
        work.wait()
    a.close()
    assert a.closed
    with pytest.raises(ClosedError):
        a.send()
    with pytest.raises(TransferCancelled, match="rank 0 closed it"):
        b.recv()
    b.close()
    assert both_released(a._communicator, b._communicator)
    again = a._communicator.channel(1, like=a.like), b._communicator.channel(0, like=b.like)
    work = again[1].irecv()
    again[0].send()
    work.wait()


def test_closing_ends_a_step_under_way(world: World) -> None:
    a, b = pair(world, lambda: torch.zeros(100))
    work = b.irecv()
    b.close()
    with pytest.raises(ClosedError):
        work.wait()
    with pytest.raises(TransferCancelled):
        a.send()
    assert both_released(a._communicator, b._communicator)


def test_a_dropped_channel_ends_after_its_step(world: World) -> None:
    a, b = pair(world, lambda: torch.zeros(100))
    communicators = a._communicator, b._communicator
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work = a.isend()
        del a
        gc.collect()
        assert holds(b.recv(), 0)
        work.wait()
        with pytest.raises(TransferCancelled, match="closed it"):
            b.recv()
        assert communicators[0].connection.progress.wait_until(
            lambda: any(one.category is ResourceWarning for one in caught), None
        )
    b.close()
    assert both_released(*communicators)


def test_a_peer_that_closes_its_communicator_is_lost(world: World, path: str) -> None:
    a, b = pair(world, lambda: torch.zeros(HUGE))
    work = b.irecv()
    a.send()
    work.wait()
    work = b.irecv()
    a._communicator.close()
    with pytest.raises(TransferError):
        work.wait(5)
    assert work.wait_released(5)
    with pytest.raises((PeerLostError, TransferCancelled)):
        b.recv()
    with pytest.raises(PeerLostError):
        b.reconnect()
    with pytest.raises(ClosedError):
        a.send()


def test_a_killed_peer_is_lost_and_another_one_takes_its_place(
    world: World, fabric: LoopbackFabric, path: str
) -> None:
    store = HashStore()
    first = [make(store, fabric, rank, f"one{rank}") for rank in range(2)]
    a = first[0].channel(1, like=torch.zeros(HUGE))
    b = first[1].channel(0, like=torch.zeros(HUGE))
    work = b.irecv()
    a.send()
    work.wait()
    fabric.kill("one1")
    for step in (a.send, a.recv):
        with pytest.raises(PeerLostError) as caught:
            step()
        assert caught.value.rank == 1
    second = [make(store, fabric, rank, f"two{rank}") for rank in range(2)]
    b = second[1].channel(0, like=torch.zeros(HUGE))
    if not a._session.released:
        # The fake's agents share a process, so nothing proves that the dead one is gone.
        a._session.on_left(PeerLostError("gone"))
    a.reconnect(second[0], timeout=10)
    fill(a.like, 5)
    work = b.irecv()
    a.send()
    work.wait()
    assert holds(b.like, 5)
    for one in (*first, *second):
        one.abort()
        one.connection.abort()


def make(store: Store, fabric: LoopbackFabric, rank: int, name: str) -> Communicator:
    return Communicator(store, rank, 2, timeout=20, connection=Connection(fabric.adapter(name)))


def test_failing_transfers_fail_on_both_ends(
    world: World, fabric: LoopbackFabric, path: str
) -> None:
    a, b = pair(world, lambda: torch.zeros(HUGE))
    mover = b if path == "cma" else a
    fabric.fail_next(adapter_of(mover._communicator), "post", MetadataError("scripted"))
    send, receive = a.isend(), b.irecv()
    for work in (send, receive):
        with pytest.raises((TransferError, MetadataError), match="scripted"):
            work.wait()
    assert send.wait_released(5) and receive.wait_released(5)
    reconnected(a, b)


def test_a_step_waits_for_the_other_end_to_make_its_channel(world: World) -> None:
    a, b = world()
    channel = a.channel(1, like=torch.full((5,), 4.0), tag=3)
    work = channel.isend()
    with pytest.raises(TransferTimeout, match="before the other end made this channel"):
        a.channel(1, like=torch.zeros(1), tag=4).send(timeout=0.05)
    assert holds(b.channel(0, like=torch.zeros(5), tag=3).recv(), 4)
    work.wait()


def test_channels_and_messages_of_three_ranks_do_not_mix(world: World, path: str) -> None:
    ranks = world(3)
    rings: dict[tuple[int, int], Channel[Any]] = {}
    for me, one in enumerate(ranks):
        for tag in range(2):
            for other in range(3):
                if other != me:
                    like = torch.zeros(HUGE if tag else 50)
                    rings[me, other * 2 + tag] = one.channel(other, like=like, tag=tag)
    errors: list[BaseException] = []

    def run(me: int) -> None:
        try:
            for turn in range(3):
                works = []
                for other in range(3):
                    for tag in range(2):
                        channel = rings.get((me, other * 2 + tag))
                        if channel is not None:
                            fill(channel.like, 100 * turn + 10 * me + other + tag)
                            sends = (me < other) is (turn % 2 == 0)
                            works.append(
                                (channel.isend() if sends else channel.irecv(), other, tag)
                            )
                ranks[me].isend(torch.tensor(turn), (me + 1) % 3)
                assert int(ranks[me].recv((me - 1) % 3)) == turn
                for work, other, tag in works:
                    work.wait()
                    channel = rings[me, other * 2 + tag]
                    sends = (me < other) is (turn % 2 == 0)
                    source, target = (me, other) if sends else (other, me)
                    assert holds(channel.like, 100 * turn + 10 * source + target + tag)
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors


def test_garbage_is_refused_and_harms_nothing(world: World) -> None:
    a, b = pair(world, lambda: torch.zeros(100))
    work = b.irecv()
    a.send()
    work.wait()
    exchange = a._communicator._exchange
    peer = exchange.peers[1]
    number = a._session.number
    head = protocol.CONTEXT.pack(exchange.context)
    before = b._communicator.connection.statistics().frames_refused
    bodies = [
        (terms.CHANNEL, head + b"garbage"),
        (terms.READY, terms.pack_ready(exchange.context, number, 99, terms.Role.SEND, 0)),
        (terms.MOVED, terms.pack_moved(exchange.context, number, 1)),
        (terms.MOVED, terms.pack_moved(exchange.context, number + 50, 1)),
        (terms.AGREE, terms.pack_agree(exchange.context, number, 12345, reads=True)),
        (terms.BREAK, head),
        (terms.BYTES, terms.pack_moved(exchange.context, number, 1) + b"too few"),
    ]
    for kind, body in bodies:
        exchange.send(peer, kind, body)
    statistics = b._communicator.connection.statistics
    assert b._communicator.connection.progress.wait_until(
        lambda: statistics().frames_refused == before + 5, None
    )
    fill(a.like, 6)
    work = b.irecv()
    a.send()
    work.wait()
    assert holds(b.like, 6)


def test_a_peer_can_not_make_channels_without_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_nixl.p2p import channels

    monkeypatch.setattr(channels, "MAX_PENDING", 3)
    a, b = world()
    made = [a.channel(1, like=torch.zeros(1), tag=tag) for tag in range(5)]
    statistics = b.connection.statistics
    assert b.connection.progress.wait_until(lambda: statistics().frames_refused == 2, None)
    assert len(b._exchange.channels._pending) == 3
    for channel in made:
        channel.close()
    assert b.connection.progress.wait_until(lambda: not b._exchange.channels._pending, None)


def test_a_tree_too_large_to_describe_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_nixl.p2p import agreement

    a, b = world()
    monkeypatch.setattr(agreement, "MAX_BODY", 300)
    with pytest.raises(ValueError, match="3 tensors take"):
        a.channel(1, like=[torch.ones(4), torch.ones(4), torch.ones(4)])
    monkeypatch.undo()
    sender = a.channel(1, like=[torch.ones(4), torch.ones(4), torch.ones(4)])
    work = sender.isend()
    assert holds(b.channel(0, like=[torch.zeros(4) for _ in range(3)]).recv(), 1)
    work.wait()


def test_what_the_other_end_made_and_closed_before_is_as_if_it_had_never_been(
    world: World,
) -> None:
    a, b = world()
    for turn in range(10):
        early = b.channel(0, like=torch.zeros(4))
        early.close()
        sender = a.channel(1, like=torch.full((4,), float(turn)))
        receiver = b.channel(0, like=torch.zeros(4))
        work = sender.isend()
        assert holds(receiver.recv(), turn)
        work.wait()
        receiver.close()
        sender.close()
    assert both_released(a, b)


def test_step_that_was_aborted_is_released_once_the_other_end_has_left(world: World) -> None:
    sender, receiver = pair(world, lambda: torch.ones(HUGE))
    a, b = sender._communicator, receiver._communicator
    with a.connection.progress._driving:  # What the receiver says is taken in after the abort.
        work = sender.isend()
        receiver.recv()
        a.abort()
        b.abort()
    assert work.wait_released(10)
