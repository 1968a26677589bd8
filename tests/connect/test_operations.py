"""Operations: what each side learns, who owns the memory until when, and what waits do."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from connect.pairs import DEADLINE, Pair, over_json, pattern
from torch_nixl import connect
from torch_nixl.connect import OperationStatus
from torch_nixl.errors import (
    ClosedError,
    MetadataError,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

READ_AND_WRITE = pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])


def until(condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
    """Wait for what another thread does, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


@READ_AND_WRITE
def test_lists_of_all_shapes_arrive(pair: Pair, reads: bool) -> None:
    sources: list[Any] = [
        torch.arange(12.0).view(3, 4).t(),
        np.arange(20, dtype=np.int16)[::3],
        torch.empty(0),
        pattern(100_000),
        bytearray(b"short"),
    ]
    targets: list[Any] = [
        torch.zeros(24)[::2].view(4, 3),
        np.zeros(7, np.int16),
        bytearray(),
        torch.zeros(100_000, dtype=torch.uint8),
        np.zeros(10, np.uint8)[::2],
    ]
    exposed: Any
    if reads:
        exposed = pair.readable(sources)
        active = pair.read(exposed.metadata(), targets)
    else:
        exposed = pair.writable(targets)
        active = pair.write(sources, exposed.metadata())
    active.wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert torch.equal(targets[0], sources[0])
    assert np.array_equal(targets[1], sources[1])
    assert np.array_equal(targets[3].numpy(), sources[3])
    assert bytes(targets[4]) == b"short"
    assert [one.size for one in active._local] == [48, 14, 0, 100_000, 5]


def test_5000_neighbouring_descriptors_move_as_one_span(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = pair.other.connection().engine.adapter
    counts: list[int] = []
    prepare = adapter.prepare

    def noted(direction: Any, kind: Any, local: Any, *rest: Any) -> Any:
        counts.append(len(local))
        return prepare(direction, kind, local, *rest)

    monkeypatch.setattr(adapter, "prepare", noted)
    source = torch.from_numpy(pattern(5000 * 256)).clone().view(5000, 256)
    target = torch.zeros_like(source)
    pair.move(list(source), list(target))
    assert counts == [1]
    assert torch.equal(source, target)
    # Where one side's do not follow each other, they are moved one by one.
    target.zero_()
    pair.move(list(source[:100]), [target[row] for row in reversed(range(100))])
    assert counts[1:] == [100]
    assert torch.equal(target[:100], source[:100].flip(0))


def test_nothing_but_empty_memory_completes(pair: Pair) -> None:
    exposed = pair.readable([torch.empty(0), b""])
    reading = pair.read(exposed.metadata(), [bytearray(), torch.empty(0, 3)])
    reading.wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert [one.size for one in reading.results()] == [0, 0]


def test_one_process_reads_what_it_exposes_itself(pair: Pair) -> None:
    content, target = pattern(1000), bytearray(1000)
    exposed = pair.readable(content)
    connection = pair.owner.connection()
    connect.ReadOperation(connection, exposed.metadata(), connect.Descriptor(target)).wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert target == content.tobytes()


def test_status_only_reads_and_the_driver_moves(pair: Pair) -> None:
    content, target = pattern(5000), bytearray(5000)
    exposed = pair.readable(content)
    assert exposed.status is OperationStatus.INITIALIZED
    reading = pair.read(exposed.metadata(), target)
    assert reading.status in (OperationStatus.IN_PROGRESS, OperationStatus.COMPLETE)
    until(lambda: reading.status is exposed.status is OperationStatus.COMPLETE)
    assert target == content.tobytes()
    assert reading.operation_kind is exposed.operation_kind is connect.OperationKind.READ
    assert reading.remote.name == exposed.connection.name
    assert "status='DONE'" in repr(reading) and "status='DONE'" in repr(exposed)


def test_begun_and_dropped_it_still_arrives(pair: Pair) -> None:
    target = torch.zeros(4 << 20, dtype=torch.uint8)
    exposed = pair.readable(torch.full_like(target, 7))
    pair.read(exposed.metadata(), target)
    gc.collect()
    exposed.wait(DEADLINE)
    assert bool((target == 7).all())


def test_a_context_left_early_lets_the_transfer_go_on(pair: Pair) -> None:
    content, target = pattern(5000), bytearray(5000)
    with pair.readable(content) as exposed:
        with pair.read(exposed.metadata(), target):
            pass
        exposed.wait(DEADLINE)
    assert target == content.tobytes()


def test_leaving_one_operation_leaves_others_on_the_same_memory(pair: Pair) -> None:
    tensor, target = torch.arange(1000.0), torch.zeros(1000)
    with pair.readable(tensor) as outer:
        with pair.readable(tensor[10:20]):
            pass
        pair.read(outer.metadata(), target).wait(DEADLINE)
    assert torch.equal(tensor, target)


@READ_AND_WRITE
def test_who_comes_late_is_told_that_it_was_withdrawn(pair: Pair, reads: bool) -> None:
    memory = bytearray(64)
    exposed: Any = pair.readable(memory) if reads else pair.writable(memory)
    told = exposed.metadata()
    exposed.cancel()
    exposed.cancel()
    assert exposed.status is OperationStatus.CANCELLED
    late = pair.read(told, bytearray(64)) if reads else pair.write(bytes(range(64)), told)
    with pytest.raises(TransferCancelled):
        late.wait(DEADLINE)
    assert late.status is OperationStatus.CANCELLED
    assert memory == bytes(64)
    with pytest.raises(TransferCancelled):
        exposed.wait(1)


def test_a_dropped_operation_is_withdrawn(pair: Pair) -> None:
    told = pair.readable(bytearray(64)).metadata()
    gc.collect()
    late = pair.read(told, bytearray(64))
    with pytest.raises(TransferCancelled):
        late.wait(DEADLINE)


def test_metadata_is_good_for_one_operation(pair: Pair) -> None:
    exposed = pair.readable(pattern(64))
    told = exposed.metadata()
    pair.read(told, bytearray(64)).wait(DEADLINE)
    exposed.wait(DEADLINE)
    with pytest.raises(TransferError, match="already taken"):
        pair.read(told, bytearray(64)).wait(DEADLINE)


def test_metadata_has_an_end(pair: Pair) -> None:
    exposed = pair.readable(bytearray(64), timeout=0.05)
    told = exposed.metadata()
    with pytest.raises(TransferTimeout):
        exposed.wait(DEADLINE)
    assert exposed.status is OperationStatus.ERRORED
    with pytest.raises(RuntimeError, match="lapsed"):
        pair.read(told, bytearray(64)).wait(DEADLINE)
    with pair.readable(bytearray(64)) as never_told:
        pass
    with pytest.raises(TransferError, match="has ended"):
        never_told.metadata()


def test_wait_ends_the_operation_at_its_timeout(pair: Pair) -> None:
    exposed = pair.readable(bytearray(64))
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        exposed.wait(0.1)
    assert 0.1 <= time.monotonic() - started < 2.0
    assert exposed.status is OperationStatus.ERRORED


def test_wrong_pairings_are_refused_and_the_connector_works_on(pair: Pair) -> None:
    with pair.readable(bytearray(64)) as readable, pair.writable(bytearray(64)) as writable:
        with pytest.raises(ValueError, match="kind"):
            pair.write(bytearray(64), readable.metadata())
        with pytest.raises(ValueError, match="kind"):
            pair.read(writable.metadata(), bytearray(64))
        for targets in (bytearray(65), [bytearray(32), bytearray(32)], bytearray()):
            with pytest.raises(ValueError, match="match"):
                pair.read(readable.metadata(), targets)
        relabelled = readable.metadata().model_copy(update={"operation_kind": 2})
        with pytest.raises(MetadataError):
            pair.write(bytearray(64), relabelled)
    pair.move(pattern(10), bytearray(10))


def test_cancel_ends_both_sides_and_the_memory_is_free_then(pair: Pair) -> None:
    """With 1 GiB to move the cancel comes in the middle; if it did not, that is fine, too."""
    source = torch.zeros(1 << 28, dtype=torch.uint8)
    target = torch.ones(1 << 28, dtype=torch.uint8)
    exposed = pair.readable(source)
    reading = pair.read(exposed.metadata(), target)
    until(lambda: reading._operation.moved_nbytes > 0)
    reading.cancel()
    assert reading.wait_released(0)
    before = int(target.count_nonzero())
    if reading.status is OperationStatus.CANCELLED:
        with pytest.raises(TransferCancelled):
            reading.wait()
        with pytest.raises(TransferCancelled):
            exposed.wait(DEADLINE)
        with pytest.raises(RuntimeError, match="no results"):
            reading.results()
    assert int(target.count_nonzero()) == before, "bytes landed after cancel() had returned"


def test_cancel_of_a_completed_operation_has_no_effect(pair: Pair) -> None:
    exposed = pair.readable(pattern(64))
    reading = pair.read(exposed.metadata(), bytearray(64))
    reading.wait(DEADLINE)
    exposed.wait(DEADLINE)
    reading.cancel()
    exposed.cancel()
    assert reading.status is exposed.status is OperationStatus.COMPLETE
    assert len(reading.results()) == 1


def test_the_owner_cancels_while_a_peer_reads(pair: Pair) -> None:
    source = torch.zeros(1 << 28, dtype=torch.uint8)
    exposed = pair.readable(source)
    reading = pair.read(exposed.metadata(), torch.ones_like(source))
    until(lambda: exposed.status is not OperationStatus.INITIALIZED)
    exposed.cancel(timeout=DEADLINE)
    assert exposed.wait_released(0)
    until(lambda: reading.status not in (OperationStatus.IN_PROGRESS,))
    # Both say the same: complete, or cancelled.
    assert reading.status is exposed.status


def test_an_exception_in_its_context_cancels_an_active_operation(pair: Pair) -> None:
    source = torch.zeros(1 << 28, dtype=torch.uint8)
    exposed = pair.readable(source)
    reading = pair.read(exposed.metadata(), torch.ones_like(source))
    with pytest.raises(KeyError), reading:
        raise KeyError
    assert reading.status in (OperationStatus.CANCELLED, OperationStatus.COMPLETE)
    assert reading.wait_released(DEADLINE)


def test_operations_of_many_threads_share_one_connection(pair: Pair) -> None:
    def work(seed: int) -> None:
        try:
            for round_number in range(20):
                content = pattern(10_000, seed * 100 + round_number)
                target = bytearray(10_000)
                exposed = pair.readable(content)
                pair.read(exposed.metadata(), target).wait(DEADLINE)
                exposed.wait(DEADLINE)
                assert target == content.tobytes()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            failures.append(error)

    failures: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert pair.owner.connection() is pair.owner.connection()


def test_many_threads_open_one_connection() -> None:
    with connect.Connector() as connector:
        barrier = threading.Barrier(8)
        found: list[connect.Connection] = []

        def open_it() -> None:
            barrier.wait(10)
            found.append(connector.connection())

        threads = [threading.Thread(target=open_it) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert len(found) == 8
        assert len(set(map(id, found))) == 1


def test_a_thousand_operations_in_flight(pair: Pair) -> None:
    count = 1000
    source = torch.arange(count * 16, dtype=torch.int32).view(count, 16)
    target = torch.zeros_like(source)
    exposed = [pair.readable(row) for row in source]
    reading = [pair.read(one.metadata(), row) for one, row in zip(exposed, target, strict=True)]
    for operation in (*reading, *exposed):
        operation.wait(DEADLINE)
    assert torch.equal(source, target)
    assert pair.owner.statistics().live_registrations < 100


def test_a_closed_connector_fails_what_it_had_and_takes_no_more() -> None:
    connector = connect.Connector()
    exposed = connect.ReadableOperation(connector.connection(), connect.Descriptor(bytearray(8)))
    connector.close()
    connector.close()
    with pytest.raises((TransferError, ClosedError)):
        exposed.wait(1)
    with pytest.raises(ClosedError):
        connector.connection()
    with pytest.raises(ClosedError):
        connect.ReadableOperation(exposed.connection, connect.Descriptor(bytearray(8)))
    never_used = connect.Connector()
    never_used.close()
    assert never_used.statistics().operations == 0


def test_closing_withdraws_at_once_what_a_stranger_may_have_been_told_of() -> None:
    connector = connect.Connector()
    exposed = connect.ReadableOperation(connector.connection(), connect.Descriptor(bytearray(8)))
    exposed.metadata()
    started = time.monotonic()
    connector.close()
    assert time.monotonic() - started < 2.0


def test_a_forgotten_connector_ends_by_itself(pair: Pair) -> None:
    connector = connect.Connector()
    engine = connector.connection().engine
    exposed = connect.ReadableOperation(connector.connection(), connect.Descriptor(bytearray(8)))
    told = exposed.metadata()
    pair.read(told, bytearray(8)).wait(DEADLINE)
    del connector, exposed
    gc.collect()
    until(lambda: engine.closed)


def test_a_forgotten_connector_that_was_never_used_ends_by_itself() -> None:
    engine = connect.Connector().connection().engine
    gc.collect()
    until(lambda: engine.closed)


def test_remotes_are_counted_for_code_that_asks(pair: Pair) -> None:
    connector = connect.Connector()
    connection = connector.connection()
    assert connection.release_remote_ref("nobody") is False
    connection.acquire_remote_ref("somebody")
    connection.acquire_remote_ref("somebody")
    assert connection.release_remote_ref("somebody") is False
    assert connection.release_remote_ref("somebody") is True
    told = pair.owner.connection().metadata
    with connect.Remote(connection, told) as remote:
        assert str(remote) == remote.name == pair.owner.connection().name
        assert remote.connection is connection
        assert connection.release_remote_ref(remote.name) is True
    connector.close()


def test_no_growth_over_many_operations(pair: Pair) -> None:
    source, target = torch.zeros(64), torch.zeros(64)

    def figures() -> list[Any]:
        import os

        gc.collect()
        found = [len(os.listdir("/proc/self/fd")), threading.active_count()]
        for connector in (pair.owner, pair.other):
            figures = connector.statistics()
            found += [figures.live_registrations, figures.outstanding, figures.remotes]
        return found

    pair.move(source, target)
    before = figures()
    objects = len(gc.get_objects())
    for _ in range(4000):
        pair.move(source, target)
    until(lambda: figures() == before)
    # What ended lately is remembered within bounds; what leaks, does so each time.
    assert len(gc.get_objects()) < objects + 8000


def test_json_round_trip_is_what_travels(pair: Pair) -> None:
    with pair.readable(bytearray(8)) as exposed:
        told = exposed.metadata()
        assert over_json(told) == told
