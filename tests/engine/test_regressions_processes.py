"""What a hostile review broke once, where it takes NIXL itself or two processes to see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from stopping import stop_process

from torch_nixl._testing.rank_worker import Rank
from torch_nixl.engine import lost, remotes
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.nixl import load
from torch_nixl.engine.offer import Offer
from torch_nixl.errors import PeerLostError
from torch_nixl.testing import RankPool

READ = Direction.READ
QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
TCP = {**QUIET, "UCX_TLS": "tcp,self"}


def pack(offer: Offer) -> str:
    return offer.pack(key=None).hex()


def unpack(text: str, connection: Connection) -> Offer:
    return Offer.unpack(bytes.fromhex(text), key=None, parse_metadata=connection.adapter.inspect)


def read(offer: Offer, reader: Connection) -> None:
    target = torch.zeros(100)
    reader.claim(offer, [tensor_memory(target)], timeout=8).wait()
    assert target.all()


def test_an_agent_whose_name_is_not_text_does_not_end_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bindings = load()
    config = bindings.nixlAgentConfig()
    config.syncMode = bindings.NIXL_THREAD_SYNC_RW
    evil = bindings.nixlAgent(b"\xff\xfe-evil", config)
    evil.createBackend("UCX", {})
    with Connection.open("victim", timeout=10) as victim, Connection.open("friend") as friend:
        exposed = victim.expose(READ, [tensor_memory(torch.ones(100))])
        evil.loadRemoteMD(victim.metadata()[0])
        evil.genNotif(victim.name, b"boo", [])
        deadline = time.monotonic() + 10
        while "not UTF-8" not in caplog.text and not victim.closed:
            assert time.monotonic() < deadline
            evil.getNotifs({}, [])
            time.sleep(0.001)
        assert not victim.closed
        read(exposed.offer(), friend)
        exposed.wait(5)


def gives_up_a_stopped_process_that_lives(rank: Rank) -> None:
    store = rank.store()
    before, lost.RECONTACT_SECONDS = lost.RECONTACT_SECONDS, 0.0
    source = torch.ones(100)
    try:
        if rank.rank == 0:
            with Connection.open("stopped", timeout=20) as stopped:
                first, second, third = (
                    stopped.expose(READ, [tensor_memory(source)]) for _ in range(3)
                )
                offers = [pack(one.offer()) for one in (first, second, third)]
                store.set("offers", json.dumps([os.getpid(), *offers]))
                offer = unpack(store.get("own").decode(), stopped)
                store.get("go on")
                read(offer, stopped)
                third.wait(10)
                store.set("over", "1")
            return
        with Connection.open("hasty", timeout=20, peer_timeout=0.5) as hasty:
            pid, *packed = json.loads(store.get("offers"))
            contact, unanswered, again = (unpack(text, hasty) for text in packed)
            read(contact, hasty)
            store.set("own", pack(hasty.expose(READ, [tensor_memory(source)]).offer()))
            stop_process(pid)
            try:
                active = hasty.claim(unanswered, [tensor_memory(torch.zeros(100))])
                with pytest.raises(PeerLostError, match="peer_timeout"):
                    active.wait()
                assert active.wait_released(5)
            finally:
                os.kill(pid, signal.SIGCONT)
            read(again, hasty)
            store.set("go on", "1")
            store.get("over")
    finally:
        lost.RECONTACT_SECONDS = before


@pytest.mark.parametrize("environment", [QUIET, TCP], ids=["cma", "tcp"])
def test_a_process_that_was_given_up_while_stopped_works_again(
    rank_pool: RankPool, environment: dict[str, str]
) -> None:
    rank_pool.run(gives_up_a_stopped_process_that_lives, world_size=2, timeout=30, env=environment)


def crowds_a_remote_from_many_threads(rank: Rank) -> None:
    store = rank.store()
    count, num_threads = 60, 6
    with Connection.open("w", timeout=20) as connection:
        if rank.rank == 0:
            sources = [torch.ones(100) for _ in range(count)]
            exposed = [connection.expose(READ, [tensor_memory(one)]) for one in sources]
            store.set("offers", json.dumps([pack(one.offer()) for one in exposed]))
            for one in exposed:
                one.wait(15)
            return
        before, remotes.MAX_KNOWN_REGIONS = remotes.MAX_KNOWN_REGIONS, 4
        failures: list[BaseException] = []

        def work(start: int) -> None:
            try:
                for offer in offers[start::num_threads]:
                    read(offer, connection)
            except BaseException as error:  # noqa: BLE001 - shown below
                failures.append(error)

        try:
            offers = [unpack(text, connection) for text in json.loads(store.get("offers"))]
            threads = [threading.Thread(target=work, args=(n,)) for n in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
        finally:
            remotes.MAX_KNOWN_REGIONS = before
        assert not failures
        assert connection.statistics().remotes_relearned > 1


@pytest.mark.parametrize("environment", [QUIET, TCP], ids=["cma", "tcp"])
def test_no_end_is_lost_when_a_crowded_remote_is_learned_anew(
    rank_pool: RankPool, environment: dict[str, str]
) -> None:
    rank_pool.run(crowds_a_remote_from_many_threads, world_size=2, timeout=30, env=environment)


FORKER = """
import os, sys, torch
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.errors import TorchNixlError

owner, reader = Connection.open("owner"), Connection.open("reader")
entered = []

class Watched:
    def __init__(self, agent):
        self.agent = agent
    def __getattr__(self, name):
        method = getattr(self.agent, name)
        def call(*args):
            entered.append(name)
            return method(*args)
        return call

for connection in (owner, reader):
    agent = connection.adapter._agent
    for name, method in list(vars(agent).items()):
        if callable(method):
            setattr(agent, name, getattr(Watched(method.__self__), method.__name__))

def memory(fill):
    return tensor_memory(torch.full((100,), fill))

met = owner.expose(Direction.READ, [memory(1.0)])
reader.claim(met.offer(), [memory(0.0)]).wait(10)
met.wait(10)
exposed = owner.expose(Direction.READ, [memory(1.0)])
offer = exposed.offer()
other = reader.expose(Direction.READ, [memory(1.0)])
assert entered
# No thread may hold a lock at the fork: that is not what is tested here.
owner.progress.stop(), reader.progress.stop()
pid = os.fork()
if pid == 0:
    entered.clear()
    held = exposed.memories[0]
    for use in (
        lambda: exposed.wait(0.2),
        lambda: exposed.wait_released(0.2),
        lambda: other.cancel(),
        lambda: exposed.cancel(),
        lambda: owner.progress.step(),
        lambda: owner.expose(Direction.READ, [memory(1.0)]),
        lambda: reader.claim(offer, [memory(0.0)]),
        lambda: owner.metadata([held]),
        lambda: reader.close(),
        lambda: owner.abort(),
        lambda: owner.registry.collect(),
    ):
        try:
            use()
        except TorchNixlError:
            pass
    sys.stdout.write(" ".join(sorted(set(entered))))
    sys.stdout.flush()
    os._exit(7)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
target = torch.zeros(100)
active = reader.claim(offer, [tensor_memory(target)])
while not (active.released and exposed.released):
    active.attend(), owner.progress.step(), reader.progress.step()
assert target.all() and active.error is None and exposed.error is None
"""


def test_a_forked_child_never_enters_nixl_through_what_it_inherited() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKER],
        capture_output=True,
        timeout=40,
        env={**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def _first_contacts_with_the_idle(rank: Rank) -> list[float]:
    """How long it takes newcomers to read from rank 0, which nobody has spoken to for a while."""
    store = rank.store()
    if rank.rank == 0:
        with Connection.open("idle", timeout=10) as owner:
            source = torch.ones(100)
            exposed = [owner.expose(READ, [tensor_memory(source)]) for _ in range(9)]
            store.set("offers", "\n".join(pack(one.offer()) for one in exposed))
            store.wait(["done"], timedelta(seconds=30))
        return []
    took = []
    for number, text in enumerate(store.get("offers").decode().split("\n")):
        with Connection.open(f"newcomer-{number}", timeout=10) as newcomer:
            offer = unpack(text, newcomer)
            # No two at the same moment of the owner's sleeps.
            time.sleep(0.15 + 0.0017 * number)
            started = time.monotonic()
            read(offer, newcomer)
            took.append(time.monotonic() - started)
    store.set("done", "")
    return took


def test_a_newcomer_is_not_kept_waiting_by_the_sleeps_of_who_is_idle(rank_pool: RankPool) -> None:
    """Four polls of the idle one would be 40 ms, and what else contact takes here 12."""
    for _ in range(3):  # A busy machine adds its own.
        took = sorted(rank_pool.run(_first_contacts_with_the_idle, world_size=2, timeout=60)[1])
        if took[2] < 0.035:
            return
    pytest.fail(f"seconds, the last time: {took}")
