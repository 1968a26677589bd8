"""A dynamo process dies, stops or stays away: our side ends in bounded time and goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any

import pytest

from interop.client import Peer, PeerError
from interop.dynamo_peer import Buffer, digest, pattern

pytestmark = pytest.mark.timeout(120)

SEED = 5
LARGE = 64 << 20


def run(scenario: Coroutine[Any, Any, None], seconds: float = 60.0) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, seconds)

    asyncio.run(bounded())


async def read_within(connector: Any, metadata: Any, target: Any, seconds: float) -> None:
    with await connector.begin_read(metadata, target) as reading:
        await reading.wait_for_completion(timeout=seconds)


async def read_from(connect: ModuleType, connector: Any, peer: Peer) -> None:
    """Prove that the connector still works, by reading from a living peer."""
    target = Buffer.make("torch", 4096)
    names = (await peer.ask("buffers", kind="torch", sizes=[4096], seed=SEED))["names"]
    owner = await peer.ask("create_readable", buffers=names)
    metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
    await read_within(connector, metadata, connect.Descriptor(target.data), 20.0)
    assert (await peer.ask("wait", op=owner["op"]))["status"] == "COMPLETE"
    await peer.ask("leave", op=owner["op"])
    assert digest(target.view) == digest(pattern(SEED, 4096))


def test_nobody_comes_and_the_passive_wait_ends_by_its_timeout(
    connect: ModuleType, connector: Any, start_dynamo: Callable[[], Peer]
) -> None:
    source = Buffer.make("torch", 4096, SEED)

    async def scenario(peer: Peer) -> None:
        with await connector.create_readable(connect.Descriptor(source.data)) as exposed:
            before = time.monotonic()
            with pytest.raises(TimeoutError):
                await exposed.wait_for_completion(timeout=0.3)
            assert 0.2 < time.monotonic() - before < 3.0
        await read_from(connect, connector, peer)

    run(scenario(start_dynamo()))


def test_owner_killed_before_we_read(
    connect: ModuleType, connector: Any, start_dynamo: Callable[[], Peer]
) -> None:
    target = Buffer.make("torch", 4096)

    async def scenario(victim: Peer) -> None:
        names = (await victim.ask("buffers", kind="torch", sizes=[4096], seed=SEED))["names"]
        owner = await victim.ask("create_readable", buffers=names)
        metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
        victim.kill()
        before = time.monotonic()
        with pytest.raises((ConnectionError, TimeoutError)):
            await read_within(connector, metadata, connect.Descriptor(target.data), 10.0)
        assert time.monotonic() - before < 20.0
        assert not target.view.any()
        await read_from(connect, connector, start_dynamo())

    run(scenario(start_dynamo()), 100.0)


def test_owner_killed_after_contact(
    connect: ModuleType, connector: Any, start_dynamo: Callable[[], Peer]
) -> None:
    target = Buffer.make("torch", LARGE)

    async def scenario(victim: Peer) -> None:
        await read_from(connect, connector, victim)
        names = (await victim.ask("buffers", kind="torch", sizes=[LARGE], seed=SEED))["names"]
        owner = await victim.ask("create_readable", buffers=names)
        metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
        victim.kill()
        with pytest.raises((ConnectionError, TimeoutError)):
            await read_within(connector, metadata, connect.Descriptor(target.data), 10.0)
        await read_from(connect, connector, start_dynamo())

    run(scenario(start_dynamo()), 100.0)


def test_reader_killed_before_it_read_and_we_time_out(
    connect: ModuleType, connector: Any, start_dynamo: Callable[[], Peer]
) -> None:
    source = Buffer.make("torch", 4096, SEED)

    async def scenario(victim: Peer) -> None:
        names = (await victim.ask("buffers", kind="torch", sizes=[4096]))["names"]
        with await connector.create_readable(connect.Descriptor(source.data)) as exposed:
            await victim.ask(
                "begin_read", metadata=exposed.metadata().model_dump_json(), buffers=names
            )
            victim.kill()
            with pytest.raises((ConnectionError, TimeoutError)):
                await exposed.wait_for_completion(timeout=2.0)
        await read_from(connect, connector, start_dynamo())

    run(scenario(start_dynamo()), 100.0)


def test_stopped_owner_meets_the_deadline_and_works_again_when_resumed(
    connect: ModuleType, connector: Any, start_dynamo: Callable[[], Peer]
) -> None:
    target = Buffer.make("torch", 4096)

    async def scenario(peer: Peer) -> None:
        names = (await peer.ask("buffers", kind="torch", sizes=[4096], seed=SEED))["names"]
        owner = await peer.ask("create_readable", buffers=names)
        metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
        peer.stop()
        try:
            before = time.monotonic()
            # First contact: nothing can complete while the owner makes no progress.
            with pytest.raises(TimeoutError):
                await read_within(connector, metadata, connect.Descriptor(target.data), 1.0)
            assert time.monotonic() - before < 10.0
        finally:
            peer.resume()
        await read_from(connect, connector, peer)

    run(scenario(start_dynamo()))


def test_dynamo_restarted_under_the_same_worker_id(
    connect: ModuleType, connector: Any, start_dynamo: Callable[..., Peer]
) -> None:
    """Its agent has the same name as the dead one, and all that we know of that is wrong."""

    async def scenario() -> None:
        for _ in range(3):
            peer = start_dynamo("decode-0")
            await read_from(connect, connector, peer)
            await read_from(connect, connector, peer)
            peer.kill()

    run(scenario(), 100.0)


def test_a_set_secret_refuses_dynamo(
    start_own_process: Callable[[dict[str, str]], Peer], start_dynamo: Callable[[], Peer]
) -> None:
    """dynamo can't authenticate its metadata, so NIXL must not see it where a secret is set."""
    peer = start_dynamo()
    guarded = start_own_process({"TORCH_NIXL_SECRET": "correct horse battery staple"})
    theirs = peer.call("buffers", kind="torch", sizes=[64], seed=SEED)["names"]
    ours = guarded.call("buffers", kind="torch", sizes=[64])["names"]
    empty = guarded.call("digest", buffers=ours)["digests"]
    owner = peer.call("create_readable", buffers=theirs)

    with pytest.raises(PeerError) as refused:
        guarded.call("begin_read", metadata=owner["metadata"], buffers=ours)

    assert refused.value.type == "MetadataError"
    assert guarded.call("digest", buffers=ours)["digests"] == empty
