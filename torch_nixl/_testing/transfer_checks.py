"""Conformance: messages, transfers, and what ends them."""

from __future__ import annotations

import threading

import numpy as np

from torch_nixl._testing.harness import Harness
from torch_nixl._testing.sides import DEADLINE, DRAM, Side, never, pair, raises, spans, until
from torch_nixl.engine.adapter import Direction, Region
from torch_nixl.errors import ClosedError, MetadataError

READ, WRITE = Direction.READ, Direction.WRITE


def check_messages_arrive_whole_and_in_order(harness: Harness) -> None:
    a, b = pair(harness)
    sizes = [0, 1, 17, 9000, 70_000, 300_000] * 20
    sent = [
        number.to_bytes(4, "little") + b"\xff\x00" * (size // 2)
        for number, size in enumerate(sizes)
    ]
    sent.append(b"")
    for message in sent:
        a.adapter.notify("b", message)
    until(lambda: len(b.inbox) == len(sent), a, b)
    assert b.inbox == [("a", message) for message in sent]


def check_messages_wait_for_a_receiver_that_does_not_drain(harness: Harness) -> None:
    a, b = pair(harness)
    for number in range(3000):
        a.adapter.notify("b", b"%d" % number)
    until(lambda: len(b.inbox) == 3000, a, b)
    assert [message for _, message in b.inbox] == [b"%d" % number for number in range(3000)]


def check_first_message_needs_both_sides_progress(harness: Harness) -> None:
    a, b = Side(harness, "a"), Side(harness, "b")
    a.know(b)
    a.adapter.notify("b", b"first")
    never(lambda: b.inbox, b)
    until(lambda: b.inbox == [("a", b"first")], a, b)


def check_sender_is_named_and_reply_needs_its_metadata(harness: Harness) -> None:
    a, b = Side(harness, "a"), Side(harness, "b")
    a.know(b)
    a.adapter.notify("b", b"hi")
    until(lambda: b.inbox == [("a", b"hi")], a, b)
    raises(MetadataError, b.adapter.notify, "a", b"reply")
    b.know(a)
    b.adapter.notify("a", b"reply")
    until(lambda: a.inbox == [("b", b"reply")], a, b)


def check_agent_can_reach_itself(harness: Harness) -> None:
    a = Side(harness, "a")
    a.adapter.notify("a", b"me")
    until(lambda: a.inbox == [("a", b"me")], a)
    a.buffer[:8] = 8
    a.run(a.transfer(WRITE, a.span(0, 8), a.span(100, 8), "a"), a)
    assert a.buffer[100:109].tolist() == [8] * 8 + [0]


def check_notification_leaves_when_completion_is_observed(harness: Harness) -> None:
    a, b = pair(harness)
    # The message owes a flush, so that the transfer can't complete inside post.
    a.adapter.notify("b", b"first")
    transfer = a.transfer(WRITE, a.span(0, 64), b.span(0, 64), "b")
    assert not a.adapter.post(transfer, b"done")
    until(lambda: b.inbox == [("a", b"first")], b)
    never(lambda: len(b.inbox) > 1, b, a)
    a.finish(transfer, b)
    until(lambda: b.inbox[1:] == [("a", b"done")], a, b)


def check_bytes_are_there_when_the_notification_is(harness: Harness) -> None:
    a, b = pair(harness)
    for value in range(1, 50):
        a.buffer[:] = value
        transfer = a.transfer(WRITE, a.span(0, 200_000), b.span(0, 200_000), "b")
        a.run(transfer, b, notification=b"%d" % value)
        until(lambda: b.inbox, a, b)
        assert b.inbox.pop() == ("a", b"%d" % value)
        assert (b.buffer[:200_000] == value).all()
        a.adapter.release(transfer)


def check_transfer_can_be_posted_again(harness: Harness) -> None:
    a, b = pair(harness)
    transfer = a.transfer(WRITE, a.span(0, 64), b.span(0, 64), "b")
    for value in (1, 2, 3):
        a.buffer[:] = value
        a.run(transfer, b)
        assert (b.buffer[:64] == value).all()
        assert a.adapter.poll(transfer), "complete stays complete"
    a.run(transfer, b, notification=b"one")
    a.run(transfer, b, notification=b"two")
    until(lambda: b.inbox == [("a", b"one"), ("a", b"two")], a, b)
    raises(ValueError, a.adapter.post, transfer)
    a.adapter.release(transfer)


def check_misuse_of_a_transfer_is_an_error(harness: Harness) -> None:
    a, b = pair(harness)
    transfer = a.transfer(WRITE, a.span(0, 64), b.span(0, 64), "b")
    raises(AssertionError, a.adapter.poll, transfer)
    a.adapter.notify("b", b"owes a flush")
    assert not a.adapter.post(transfer)
    raises(AssertionError, a.adapter.post, transfer)
    a.finish(transfer, b)
    a.adapter.release(transfer)
    for call in (a.adapter.poll, a.adapter.post, a.adapter.release):
        raises(AssertionError, call, transfer)


def check_unequal_span_lists_are_refused(harness: Harness) -> None:
    a, b = pair(harness)
    one, two = a.span(0, 8), b.span(0, 8)
    raises(ValueError, a.transfer, WRITE, one, np.concatenate([two, two]), "b")
    raises(ValueError, a.transfer, WRITE, one, b.span(0, 9), "b")
    raises(ValueError, a.transfer, WRITE, spans(), spans(), "b")
    raises(ValueError, a.adapter.prepare_list, DRAM, spans(), None)


def check_indexed_transfer_moves_the_chosen_rows(harness: Harness) -> None:
    a, b = pair(harness)
    page = 4096
    mine = np.concatenate([a.span(row * page, page) for row in range(16)])
    theirs = np.concatenate([b.span(row * page, page) for row in range(16)])
    local, remote = (
        a.adapter.prepare_list(DRAM, mine, None),
        a.adapter.prepare_list(DRAM, theirs, "b"),
    )
    a.buffer[:] = np.arange(len(a.buffer)) // page % 256
    order = np.array([3, 4, 5, 0, 15], np.int32)
    target = np.array([0, 1, 2, 9, 8], np.int32)
    transfer = a.adapter.prepare_indexed(WRITE, local, order, remote, target)
    a.run(transfer, b, notification=b"pages")
    until(lambda: b.inbox == [("a", b"pages")], a, b)
    pages = b.buffer[: 16 * page].reshape(16, page)
    expected = dict(zip(target.tolist(), order.tolist(), strict=True))
    for row in range(16):
        assert (pages[row] == expected.get(row, 0)).all(), row
    a.adapter.release(transfer)
    a.adapter.release_list(local)
    a.adapter.release_list(remote)
    raises(AssertionError, a.adapter.prepare_indexed, WRITE, local, order, remote, target)
    raises(AssertionError, a.adapter.release_list, local)


def check_bad_indices_are_refused(harness: Harness) -> None:
    a, b = pair(harness)
    local = a.adapter.prepare_list(DRAM, np.concatenate([a.span(0, 8)] * 4), None)
    remote = a.adapter.prepare_list(DRAM, np.concatenate([b.span(0, 8)] * 4), "b")
    good = np.array([0, 1], np.int32)
    for bad in ([0, 4], [-1, 0], [0], [], [2**31 - 1, 0]):
        indices = np.array(bad, np.int32)
        raises(ValueError, a.adapter.prepare_indexed, WRITE, local, indices, remote, good)
        raises(ValueError, a.adapter.prepare_indexed, WRITE, local, good, remote, indices)
    wide = np.array([2**32, 1], np.int64)
    raises(ValueError, a.adapter.prepare_indexed, WRITE, local, wide, remote, good)
    raises(ValueError, a.adapter.prepare_indexed, WRITE, remote, good, local, good)


def check_removed_remote_makes_what_was_prepared_stale(harness: Harness) -> None:
    a, b = pair(harness)
    index = np.array([0], np.int32)
    transfer = a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b")
    local = a.adapter.prepare_list(DRAM, a.span(0, 8), None)
    remote = a.adapter.prepare_list(DRAM, b.span(0, 8), "b")
    a.adapter.remove_remote("b")
    a.adapter.remove_remote("b")
    raises(MetadataError, a.adapter.notify, "b", b"x")
    a.know(b)
    raises(MetadataError, a.adapter.post, transfer)
    raises(MetadataError, a.adapter.prepare_indexed, WRITE, local, index, remote, index)
    a.adapter.release(transfer)
    a.run(a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b"), b)


def check_release_under_way_cancels_nothing(harness: Harness) -> None:
    a, b = pair(harness)
    a.buffer[:] = 6
    a.adapter.notify("b", b"owes a flush")
    transfer = a.transfer(WRITE, a.span(0, 300_000), b.span(0, 300_000), "b")
    assert not a.adapter.post(transfer, b"never sent")
    a.adapter.release(transfer)
    until(lambda: (b.buffer[:300_000] == 6).all(), a, b)
    never(lambda: len(b.inbox) > 1, a, b)


def check_removing_a_remote_cancels_nothing(harness: Harness) -> None:
    a, b = pair(harness)
    a.buffer[:] = 6
    a.adapter.notify("b", b"owes a flush")
    transfer = a.transfer(WRITE, a.span(0, 300_000), b.span(0, 300_000), "b")
    assert not a.adapter.post(transfer, b"never sent")
    a.adapter.remove_remote("b")
    raises(MetadataError, a.adapter.poll, transfer)
    until(lambda: (b.buffer[:300_000] == 6).all(), a, b)
    raises(MetadataError, a.adapter.poll, transfer)
    never(lambda: len(b.inbox) > 1, a, b)
    a.adapter.release(transfer)


def check_closed_agent_refuses_every_call(harness: Harness) -> None:
    a, b = pair(harness)
    transfer = a.transfer(WRITE, a.span(0, 8), b.span(0, 8), "b")
    local = a.adapter.prepare_list(DRAM, a.span(0, 8), None)
    remote = a.adapter.prepare_list(DRAM, b.span(0, 8), "b")
    told = b.adapter.metadata([], connection=True)
    index = np.array([0], np.int32)
    a.adapter.close()
    a.adapter.close()
    raises(ClosedError, a.adapter.register, a.region)
    raises(ClosedError, a.adapter.deregister, a.registration)
    raises(ClosedError, lambda: a.adapter.metadata([], connection=True))
    raises(ClosedError, a.adapter.add_remote, told)
    raises(ClosedError, a.adapter.remove_remote, "b")
    raises(ClosedError, a.adapter.notify, "b", b"x")
    raises(ClosedError, a.adapter.drain)
    raises(ClosedError, a.transfer, WRITE, a.span(0, 8), b.span(0, 8), "b")
    raises(ClosedError, a.adapter.prepare_list, DRAM, a.span(0, 8), None)
    raises(ClosedError, a.adapter.prepare_indexed, WRITE, local, index, remote, index)
    raises(ClosedError, a.adapter.release_list, local)
    raises(ClosedError, a.adapter.post, transfer)
    raises(ClosedError, a.adapter.poll, transfer)
    raises(ClosedError, a.adapter.release, transfer)


def check_many_threads_share_an_agent(harness: Harness) -> None:
    a, b = pair(harness)
    rounds, workers = 100, 3
    failures: list[BaseException] = []
    spare = [harness.buffer(4096).ctypes.data for _ in range(workers)]
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            b.step()
            a.step()

    def work(number: int) -> None:
        try:
            offset = 1000 * number
            for _ in range(rounds):
                transfer = a.transfer(WRITE, a.span(offset, 1000), b.span(offset, 1000), "b")
                a.run(transfer)
                a.adapter.release(transfer)
                a.adapter.notify("b", b"%d" % number)
                a.adapter.deregister(a.adapter.register(Region(DRAM, spare[number], 4096, number)))
        except BaseException as exc:
            failures.append(exc)
            raise

    a.buffer[:] = 1
    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    server = threading.Thread(target=serve)
    for thread in (server, *threads):
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    stop.set()
    server.join(DEADLINE)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    until(lambda: len(b.inbox) == rounds * workers, a, b)
    assert b.buffer[: 1000 * workers].all()


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
