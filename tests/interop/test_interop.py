"""torch_nixl.connect and dynamo.nixl_connect exchange memory: both directions, READ and WRITE."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from types import ModuleType
from typing import Any

import pytest
import torch

from interop.client import Peer, PeerError
from interop.dynamo_peer import Buffer, digest, pattern

pytestmark = pytest.mark.timeout(120)

DEADLINE = 30.0
SEED = 23
SHAPES: dict[str, list[int]] = {
    "single": [70_001],
    "list_of_one": [4096],
    "list": [1, 4096, 300_000],
}
# What sends and what receives; bytes can't receive.
KIND_PAIRS = [
    ("torch", "torch"),
    ("numpy", "bytearray"),
    ("bytes", "pointer"),
    ("bytearray", "numpy"),
    ("pointer", "torch"),
]

shapes = pytest.mark.parametrize("shape", SHAPES)
kinds = pytest.mark.parametrize(("source_kind", "target_kind"), KIND_PAIRS)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario in an event loop of its own, with a deadline."""

    async def bounded() -> None:
        await asyncio.wait_for(scenario, DEADLINE)

    asyncio.run(bounded())


def expected(sizes: list[int], seed: int = SEED) -> list[str]:
    return [digest(pattern(seed + place, size)) for place, size in enumerate(sizes)]


def digests(buffers: list[Buffer]) -> list[str]:
    return [digest(buffer.view) for buffer in buffers]


def make(kind: str, sizes: list[int], seed: int | None = None) -> list[Buffer]:
    return [
        Buffer.make(kind, size, None if seed is None else seed + place)
        for place, size in enumerate(sizes)
    ]


def describe(connect: ModuleType, buffers: list[Buffer], shape: str) -> Any:
    """Return one Descriptor for the shape "single", else a list."""
    found = [connect.Descriptor(buffer.data) for buffer in buffers]
    return found[0] if shape == "single" else found


@shapes
@kinds
def test_we_read_what_dynamo_exposes(
    connect: ModuleType,
    connector: Any,
    dynamo: Peer,
    shape: str,
    source_kind: str,
    target_kind: str,
) -> None:
    sizes = SHAPES[shape]
    targets = make(target_kind, sizes)

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind=source_kind, sizes=sizes, seed=SEED))["names"]
        owner = await dynamo.ask("create_readable", buffers=names, as_list=shape != "single")
        metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
        with await connector.begin_read(metadata, describe(connect, targets, shape)) as reading:
            await reading.wait_for_completion()
            assert reading.status == connect.OperationStatus.COMPLETE
            assert [descriptor.size for descriptor in reading.results()] == sizes
        assert (await dynamo.ask("wait", op=owner["op"]))["status"] == "COMPLETE"
        await dynamo.ask("leave", op=owner["op"])

    run(scenario())
    assert digests(targets) == expected(sizes)


@shapes
@kinds
def test_we_write_to_what_dynamo_exposes(
    connect: ModuleType,
    connector: Any,
    dynamo: Peer,
    shape: str,
    source_kind: str,
    target_kind: str,
) -> None:
    sizes = SHAPES[shape]
    sources = make(source_kind, sizes, SEED)

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind=target_kind, sizes=sizes))["names"]
        owner = await dynamo.ask("create_writable", buffers=names, as_list=shape != "single")
        metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
        with await connector.begin_write(describe(connect, sources, shape), metadata) as writing:
            await writing.wait_for_completion()
            assert writing.status == connect.OperationStatus.COMPLETE
        assert (await dynamo.ask("wait", op=owner["op"]))["status"] == "COMPLETE"
        assert (await dynamo.ask("digest", buffers=names))["digests"] == expected(sizes)
        await dynamo.ask("leave", op=owner["op"])

    run(scenario())


@shapes
@kinds
def test_dynamo_reads_what_we_expose(
    connect: ModuleType,
    connector: Any,
    dynamo: Peer,
    shape: str,
    source_kind: str,
    target_kind: str,
) -> None:
    sizes = SHAPES[shape]
    sources = make(source_kind, sizes, SEED)

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind=target_kind, sizes=sizes))["names"]
        with await connector.create_readable(describe(connect, sources, shape)) as exposed:
            reader = await dynamo.ask(
                "begin_read",
                metadata=exposed.metadata().model_dump_json(),
                buffers=names,
                as_list=shape != "single",
            )
            assert (await dynamo.ask("wait", op=reader["op"]))["status"] == "COMPLETE"
            await exposed.wait_for_completion()
            assert exposed.status == connect.OperationStatus.COMPLETE
        assert (await dynamo.ask("results", op=reader["op"]))["sizes"] == sizes
        assert (await dynamo.ask("digest", buffers=names))["digests"] == expected(sizes)
        await dynamo.ask("leave", op=reader["op"])

    run(scenario())


@shapes
@kinds
def test_dynamo_writes_to_what_we_expose(
    connect: ModuleType,
    connector: Any,
    dynamo: Peer,
    shape: str,
    source_kind: str,
    target_kind: str,
) -> None:
    sizes = SHAPES[shape]
    targets = make(target_kind, sizes)

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind=source_kind, sizes=sizes, seed=SEED))["names"]
        with await connector.create_writable(describe(connect, targets, shape)) as exposed:
            writer = await dynamo.ask(
                "begin_write",
                metadata=exposed.metadata().model_dump_json(),
                buffers=names,
                as_list=shape != "single",
            )
            assert (await dynamo.ask("wait", op=writer["op"]))["status"] == "COMPLETE"
            await exposed.wait_for_completion()
            assert exposed.status == connect.OperationStatus.COMPLETE
        await dynamo.ask("leave", op=writer["op"])

    run(scenario())
    assert digests(targets) == expected(sizes)


@pytest.mark.parametrize("hex_encode", [False, True])
def test_both_encodings_are_read_by_both(
    connect: ModuleType, connector: Any, dynamo: Peer, hex_encode: bool
) -> None:
    target = Buffer.make("torch", 5000)
    source = Buffer.make("torch", 5000, SEED)

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind="torch", sizes=[5000], seed=SEED))["names"]
        owner = await dynamo.ask("create_readable", buffers=names, hex_encode=hex_encode)
        metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
        with await connector.begin_read(metadata, connect.Descriptor(target.data)) as reading:
            await reading.wait_for_completion()
        with await connector.create_readable(connect.Descriptor(source.data)) as exposed:
            ours = exposed.metadata(hex_encode=hex_encode)
            assert ours.nixl_metadata.startswith("b64:") is not hex_encode
            reader = await dynamo.ask("begin_read", metadata=ours.model_dump_json(), buffers=names)
            await dynamo.ask("wait", op=reader["op"])
            await exposed.wait_for_completion()
        await dynamo.ask("leave", op=reader["op"])
        await dynamo.ask("leave", op=owner["op"])

    run(scenario())
    assert digests([target]) == expected([5000])


def test_empty_entries_beside_others(connect: ModuleType, connector: Any, dynamo: Peer) -> None:
    sizes = [0, 5000, 0]
    sources, targets = make("bytearray", sizes, SEED), make("bytearray", sizes)

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind="bytearray", sizes=sizes))["names"]
        with await connector.create_readable(describe(connect, sources, "list")) as exposed:
            told = exposed.metadata().model_dump_json()
            reader = await dynamo.ask("begin_read", metadata=told, buffers=names, as_list=True)
            await dynamo.ask("wait", op=reader["op"])
            await exposed.wait_for_completion()
        assert (await dynamo.ask("digest", buffers=names))["digests"] == digests(sources)
        await dynamo.ask("leave", op=reader["op"])
        owner = await dynamo.ask("create_readable", buffers=names, as_list=True)
        metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
        with await connector.begin_read(metadata, describe(connect, targets, "list")) as reading:
            await reading.wait_for_completion()
        await dynamo.ask("leave", op=owner["op"])

    run(scenario())
    assert digests(targets) == digests(sources)


def test_strided_memory_is_refused_rather_than_other_bytes(
    connect: ModuleType, connector: Any, dynamo: Peer
) -> None:
    matrix = torch.arange(64, dtype=torch.uint8).view(8, 8)

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind="torch", sizes=[8]))["names"]
        empty = (await dynamo.ask("digest", buffers=names))["digests"]
        # The whole matrix is known to dynamo, so that a wrong address would find something.
        with (
            await connector.create_readable(connect.Descriptor(matrix[0])) as row,
            await connector.create_readable(connect.Descriptor(matrix[:, 1])) as column,
        ):
            told = row.metadata().model_dump_json()
            reader = await dynamo.ask("begin_read", metadata=told, buffers=names)
            told = column.metadata().model_dump_json()
            with pytest.raises(PeerError) as refused:
                await dynamo.ask("begin_read", metadata=told, buffers=names)
            assert refused.value.type == "nixlNotFoundError"
            assert (await dynamo.ask("digest", buffers=names))["digests"] == empty
            assert (await dynamo.ask("wait", op=reader["op"]))["status"] == "COMPLETE"
            await row.wait_for_completion()
        await dynamo.ask("leave", op=reader["op"])

    run(scenario())


def test_our_json_has_dynamos_fields_and_no_others(connect: ModuleType, connector: Any) -> None:
    buffers = make("bytearray", [64, 32])

    async def scenario() -> None:
        with await connector.create_writable(describe(connect, buffers, "list")) as exposed:
            told = json.loads(exposed.metadata().model_dump_json())
        assert list(told) == [
            "descriptors",
            "nixl_metadata",
            "notification_key",
            "operation_kind",
        ]
        assert [list(row) for row in told["descriptors"]] == [["device", "ptr", "size"]] * 2
        assert [row["device"] for row in told["descriptors"]] == ["cpu", "cpu"]
        assert told["operation_kind"] == 2
        assert told["notification_key"].isprintable()

    run(scenario())


def test_many_operations_in_flight_with_one_dynamo_process(
    connect: ModuleType, connector: Any, dynamo: Peer
) -> None:
    count, size = 24, 40_000
    targets = [Buffer.make("torch", size) for _ in range(count)]
    sources = [Buffer.make("numpy", size, place) for place in range(count)]

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind="torch", sizes=[size] * count, seed=SEED))[
            "names"
        ]
        copies = (await dynamo.ask("buffers", kind="torch", sizes=[size] * count))["names"]

        async def read(place: int) -> None:
            owner = await dynamo.ask("create_readable", buffers=[names[place]])
            metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
            target = connect.Descriptor(targets[place].data)
            with await connector.begin_read(metadata, target) as reading:
                await reading.wait_for_completion()
            assert (await dynamo.ask("wait", op=owner["op"]))["status"] == "COMPLETE"
            await dynamo.ask("leave", op=owner["op"])

        async def expose(place: int) -> None:
            source = connect.Descriptor(sources[place].data)
            with await connector.create_readable(source) as exposed:
                reader = await dynamo.ask(
                    "begin_read",
                    metadata=exposed.metadata().model_dump_json(),
                    buffers=[copies[place]],
                )
                await dynamo.ask("wait", op=reader["op"])
                await exposed.wait_for_completion()
            await dynamo.ask("leave", op=reader["op"])

        await asyncio.gather(*map(read, range(count)), *map(expose, range(count)))
        assert (await dynamo.ask("digest", buffers=copies))["digests"] == digests(sources)

    run(scenario())
    assert digests(targets) == expected([size] * count)


def test_dynamo_forgets_us_and_meets_us_again(
    connect: ModuleType, connector: Any, dynamo: Peer
) -> None:
    """dynamo removes the remote with its last operation and adds it again with the next."""
    buffer = Buffer.make("torch", 4096, SEED)

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind="torch", sizes=[4096]))["names"]
        for seed in range(5):
            buffer.view[:] = pattern(seed, 4096)
            with await connector.create_readable(connect.Descriptor(buffer.data)) as exposed:
                reader = await dynamo.ask(
                    "begin_read", metadata=exposed.metadata().model_dump_json(), buffers=names
                )
                await dynamo.ask("wait", op=reader["op"])
                await exposed.wait_for_completion()
            await dynamo.ask("leave", op=reader["op"])
            assert (await dynamo.ask("remotes"))["remotes"] == {}
            assert (await dynamo.ask("digest", buffers=names))["digests"] == digests([buffer])

    run(scenario())


def test_mistakes_are_refused_and_both_sides_go_on(
    connect: ModuleType, connector: Any, dynamo: Peer
) -> None:
    small, right = Buffer.make("torch", 32), Buffer.make("torch", 64)

    async def scenario() -> None:
        names = (await dynamo.ask("buffers", kind="torch", sizes=[64], seed=SEED))["names"]
        owner = await dynamo.ask("create_readable", buffers=names)
        metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
        with pytest.raises(ValueError, match="size"):
            await connector.begin_read(metadata, connect.Descriptor(small.data))
        with pytest.raises(RuntimeError):
            await connector.begin_write(connect.Descriptor(right.data), metadata)
        assert not small.view.any()

        with await connector.create_writable(connect.Descriptor(small.data)) as exposed:
            told = exposed.metadata().model_dump_json()
            with pytest.raises(PeerError) as size_differs:
                await dynamo.ask("begin_write", metadata=told, buffers=names)
            assert size_differs.value.type == "ValueError"
            with pytest.raises(PeerError) as wrong_kind:
                await dynamo.ask("begin_read", metadata=told, buffers=names)
            assert wrong_kind.value.type == "RuntimeError"
        assert not small.view.any()

        with await connector.begin_read(metadata, connect.Descriptor(right.data)) as reading:
            await reading.wait_for_completion()
        assert (await dynamo.ask("wait", op=owner["op"]))["status"] == "COMPLETE"
        await dynamo.ask("leave", op=owner["op"])

    run(scenario())
    assert digests([right]) == expected([64])


def test_dynamo_received_nothing_but_its_own_keys(
    connect: ModuleType, connector: Any, dynamo: Peer
) -> None:
    """One message that isn't UTF-8 would break every passive operation of a dynamo process."""
    target = Buffer.make("torch", 64)

    async def scenario() -> None:
        before = (await dynamo.ask("inbox"))["inbox"]
        names = (await dynamo.ask("buffers", kind="torch", sizes=[64], seed=SEED))["names"]
        owner = await dynamo.ask("create_readable", buffers=names)
        metadata = connect.RdmaMetadata.model_validate_json(owner["metadata"])
        with await connector.begin_read(metadata, connect.Descriptor(target.data)) as reading:
            await reading.wait_for_completion()
        await dynamo.ask("wait", op=owner["op"])
        await dynamo.ask("leave", op=owner["op"])
        after = (await dynamo.ask("inbox"))["inbox"]
        messages = [bytes.fromhex(text) for _, text in after]
        assert len(after) - len(before) == 1
        assert messages.count(metadata.notification_key.encode()) == 1
        for message in messages:
            assert len(message.decode("utf-8")) == 36  # dynamo's keys are UUIDs

    run(scenario())
