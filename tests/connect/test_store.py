"""publish and fetch over every torch Store."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from connect.pairs import DEADLINE, Pair, pattern
from torch_nixl import connect
from torch_nixl.connect import store as store_module
from torch_nixl.errors import MetadataError, TransferError


@pytest.fixture(params=["tcp", "file", "hash", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    patience = datetime.timedelta(seconds=20)
    match request.param:
        case "tcp":
            yield TCPStore("127.0.0.1", 0, 1, True, timeout=patience)
        case "file":
            yield FileStore(str(tmp_path / "store"), 1)
        case "hash":
            yield HashStore()
        case _:
            yield PrefixStore("torch_nixl/7", HashStore())


def gone(store: Any, key: str) -> bool:
    deadline = time.monotonic() + DEADLINE
    while store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_metadata_goes_through_a_store_and_its_key_goes_with_the_operation(
    pair: Pair, store: Any
) -> None:
    content, target = pattern(1000), bytearray(1000)
    exposed = pair.readable(content)
    assert connect.publish(store, "weights/0", exposed) == exposed.metadata()
    told = connect.fetch(store, "weights/0", timeout=DEADLINE)
    pair.read(told, target).wait(DEADLINE)
    exposed.wait(DEADLINE)
    assert target == content.tobytes()
    assert gone(store, "weights/0")


def test_a_cancelled_or_dropped_operation_takes_its_key_along(pair: Pair, store: Any) -> None:
    exposed = pair.readable(bytearray(8))
    connect.publish(store, "cancelled", exposed)
    exposed.cancel()
    connect.publish(store, "dropped", pair.readable(bytearray(8)))
    assert gone(store, "cancelled")
    assert gone(store, "dropped")


def test_fetch_waits_for_whoever_publishes_later(pair: Pair, store: Any) -> None:
    found: list[connect.RdmaMetadata] = []
    asking = threading.Thread(
        target=lambda: found.append(connect.fetch(store, "later", timeout=DEADLINE))
    )
    asking.start()
    # With a TCPStore this would wait, too, if fetch waited inside the store.
    with pair.readable(bytearray(8)) as exposed:
        connect.publish(store, "later", exposed)
        asking.join(DEADLINE)
        assert found == [exposed.metadata()]


def test_fetch_gives_up(store: Any) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="nobody"):
        connect.fetch(store, "nobody", timeout=0.1)
    assert time.monotonic() - started < 5.0


def test_what_is_no_metadata_is_refused(store: Any) -> None:
    for text in ("{", "{}x", '{"operation_kind": 9}', "0"):
        store.set("garbage", text)
        with pytest.raises(MetadataError):
            connect.fetch(store, "garbage", timeout=1.0)


def test_a_key_that_was_published_anew_stays(pair: Pair, store: Any) -> None:
    first, second = pair.readable(bytearray(8)), pair.readable(bytearray(8))
    connect.publish(store, "shared", first)
    connect.publish(store, "shared", second)
    connect.publish(store, "other", first)
    first.cancel()
    assert gone(store, "other")  # removed after the first's other key
    assert connect.fetch(store, "shared", timeout=1.0) == second.metadata()
    second.cancel()
    assert gone(store, "shared")


def test_only_living_passive_operations_are_published(pair: Pair, store: Any) -> None:
    with pair.readable(bytearray(8)) as exposed:
        pass
    with pytest.raises(TransferError):
        connect.publish(store, "ended", exposed)
    with pytest.raises(TypeError):
        connect.publish(store, "ended", exposed.connection)  # type: ignore[arg-type]
    assert not store.check(["ended"])


def test_a_key_that_is_being_removed_is_published_after_its_removal(
    pair: Pair, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new value is not deleted in the old one's stead, whoever removes that."""
    store.set("key", store_module._REMOVED)  # as another process does before it deletes
    with pytest.raises(TimeoutError):
        connect.fetch(store, "key", timeout=0.05)
    with pair.readable(bytearray(8)) as exposed:
        publishing = threading.Thread(target=connect.publish, args=(store, "key", exposed))
        publishing.start()
        publishing.join(0.05)
        assert publishing.is_alive()
        store.delete_key("key")
        publishing.join(DEADLINE)
        assert connect.fetch(store, "key", timeout=DEADLINE) == exposed.metadata()
    assert gone(store, "key")


def test_a_removal_that_nobody_ends_is_waited_for_but_a_while(
    pair: Pair, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "REMOVAL_SECONDS", 0.05)
    store.set("key", store_module._REMOVED)
    with pair.readable(bytearray(8)) as exposed:
        connect.publish(store, "key", exposed)
        assert connect.fetch(store, "key", timeout=DEADLINE) == exposed.metadata()


def test_clients_that_publish_and_remove_under_one_key_lose_no_value(pair: Pair) -> None:
    """Two clients of one TCPStore share nothing in this process but the server."""
    patience = datetime.timedelta(seconds=20)
    server = TCPStore("127.0.0.1", 0, None, True, timeout=patience, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False, timeout=patience)
    for number in range(100):
        ours, theirs = (server, client) if number % 2 else (client, server)
        old, new = pair.readable(bytearray(8)), pair.readable(bytearray(8))
        connect.publish(ours, "key", old)
        old.cancel()  # its key is removed in another thread from here on
        connect.publish(theirs, "key", new)
        assert connect.fetch(ours, "key", timeout=DEADLINE) == new.metadata()
        new.cancel()
        assert gone(ours, "key")


class HangingStore(Store):
    """A store whose server has stopped answering."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.answers = threading.Event()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.asked.set()
        assert self.answers.wait(DEADLINE)
        return desired.encode()

    def delete_key(self, key: str) -> bool:
        return True


def test_a_store_that_hangs_keeps_nobody_from_publishing_in_another(pair: Pair) -> None:
    hanging, working = HangingStore(), HashStore()
    stuck, exposed = pair.readable(bytearray(8)), pair.readable(bytearray(8))
    publishing = threading.Thread(target=connect.publish, args=(hanging, "key", stuck))
    publishing.start()
    assert hanging.asked.wait(DEADLINE)
    connect.publish(working, "key", exposed)
    assert connect.fetch(working, "key", timeout=1.0) == exposed.metadata()
    assert publishing.is_alive()
    hanging.answers.set()
    publishing.join(DEADLINE)
    stuck.cancel()
    exposed.cancel()


def in_a_fork(program: Callable[[], bool]) -> bool:
    """What a forked child says; False if it does not come to that."""
    child = os.fork()
    if child == 0:
        said = False
        signal.alarm(60)
        try:
            said = program()
        finally:
            os._exit(0 if said else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_child_removes_its_own_keys_and_none_of_its_parents(pair: Pair) -> None:
    patience = datetime.timedelta(seconds=20)
    shared, remover = TCPStore("127.0.0.1", 0, 1, True, timeout=patience), store_module._remover
    exposed, before = pair.readable(bytearray(8)), pair.readable(bytearray(8))
    connect.publish(shared, "parent's", exposed)
    connect.publish(shared, "before", before)
    before.cancel()
    assert gone(shared, "before")  # The parent's thread runs.

    def program() -> bool:
        exposed.connection.engine.progress.stop()  # Calls back those of what ended by the fork.
        own = HashStore()
        own.set("child's", "text")
        remover.remove(own, "child's", "text")
        removed = gone(own, "child's")
        remover.stop()
        return removed

    assert in_a_fork(program)
    assert shared.check(["parent's"])
    exposed.cancel()
    assert gone(shared, "parent's")


def test_where_no_thread_can_be_started_any_more_keys_are_removed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    store, remover = HashStore(), store_module._Remover()
    for key in ("one", "two"):
        store.set(key, "text")
        remover.remove(store, key, "text")
        assert not store.check([key])
    remover.exit()
