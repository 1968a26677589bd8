from __future__ import annotations

import os
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_nixl.engine.adapter import MemoryKind
from torch_nixl.engine.blob import knows, parse
from torch_nixl.errors import MetadataError

SOAK = os.environ.get("TORCH_NIXL_SOAK") == "1"
FUZZ = settings(
    max_examples=100_000 if SOAK else 300, derandomize=not SOAK, deadline=None, database=None
)
pytestmark = pytest.mark.timeout(3600 if SOAK else 60)

# UCX addresses that NIXL 1.5.1 wrote in front of TCP, shared memory and CMA on one machine.
UCX_V1 = bytes.fromhex(
    "208043594cbedf7e980000637577cc2b320040975000000000004f03c0888fd747e12a05143a01060002c0000202"
    "cf1917b751389763344bd7e037370013230082ade7010e01028d2e1ae1141b5d97f9ffffefcf1917b75138539e3e"
    "4bd7e037370113230082cf1f02088d2e1ae1141b5d178d5377cc2b320000705077ccab33004f23c0881100010000"
    "00000003088d2e1ae1141b5d17a7d377cc2b320000705077ccab33004f23c088a2170080030000c004088d2e1ae1"
    "141b5d17478bbd37063600242e5077ccab330092210084a21700008780"
)
UCX_V2 = bytes.fromhex(
    "7102db72f39cb0032278000063754426000080001b0388adc475639f845a0401060002c0000202cf190c015a0080"
    "008b00829af1010e01028d2e1ae1141b5d97f9ffffefcf190c015a0180008b00828cc302088d2e1ae1141b5d178d"
    "5344e5430081009b0388190001000000000003088d2e1ae1141b5d17a7d344e5430081009b0388ac170080030000"
    "c004888d2e1ae1141b5d17478bfb5543000000990084ac170000"
)
UCX_DEBUG_NAME = b"\x30" + UCX_V1[1:9] + b"\x0avm:user:12" + UCX_V1[9:]
UCX_PID_NAMESPACE = bytes.fromhex(
    "20ccdd8578c2c3add50000637577cc2b320040975000000000004f03c08883207d1106ee1db801060002c0000202"
    "cf1917b751389763344bd7e037370013230082b517010e01028d2e1ae1141b5d97f9ffffefcf1917b75138539e3e"
    "4bd7e037370113230082a03102088d2e1ae1141b5d178d5377cc2b320000705077ccab33004f23c0882800010000"
    "00000003088d2e1ae1141b5d17a7d377cc2b320000705077ccab33004f23c08c02000080030000d0530100f00408"
    "8d2e1ae1141b5d17478bbd37063600242e5077ccab33009221008802000080530100f08780"
)
UCX_IPC_NAMESPACE = bytes.fromhex(
    "204651334d0b91c4080000637577cc2b320040975000000000004f03c0887c3cf26dac38eabf01060002c0000202"
    "cf1917b751389763344bd7e037370013230082d5a1010e01028d2e1ae1141b5d97f9ffffefcf1917b75138539e3e"
    "4bd7e037370113230082d951020c8d2e1ae1141b5d97510100f08d5377cc2b320000705077ccab33004f23c08803"
    "00000000000000030c8d2e1ae1141b5d97510100f0a7d377cc2b320000705077ccab33004f23c088391800800300"
    "00c0040c8d2e1ae1141b5d97510100f0478bbd37063600242e5077ccab330092210084391800008780"
)
HOST_KEY = bytes.fromhex("01000000000000000000ff")
TCP_KEY = bytes(9)
# Two domains with keys of 4 and 0 bytes, the system device and one distance.
LONG_KEY = struct.pack("<QB", 5, 1) + b"\x04rkey\x00" + b"\x02" + b"\x01\x50\x60"
Row = tuple[int, int, int, bytes]


def field(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<Q", len(value)) + value + b"|"


def number(tag: bytes, value: int) -> bytes:
    return field(tag, struct.pack("<Q", value))


def section(rows: list[Row], kind: int = 0, backend: bytes = b"UCX") -> bytes:
    head = field(b"bknd", backend) + field(b"nixlDList", b"nixlSDList")
    head += field(b"t", struct.pack("<i", kind)) + number(b"n", len(rows))
    return head + b"".join(field(b"", struct.pack("<QQQ", *row[:3]) + row[3]) for row in rows)


def blob(
    *sections: bytes, agent: bytes = b"agent-1", connections: tuple[bytes, ...] = (UCX_V1,)
) -> bytes:
    return (
        b"nixlSerDes|"
        + field(b"Agent", agent)
        + number(b"Conns", len(connections))
        + b"".join(field(b"t", b"UCX") + field(b"c", value) for value in connections)
        + field(b"", b"MemSection")
        + number(b"nixlSecElms", len(sections))
        + b"".join(sections)
    )


ROWS: list[Row] = [
    (0x7F0000001000, 4096, 0, HOST_KEY),
    (0x7F0000003000, 4096, 0, HOST_KEY),
    (0x7F0000001000, 1 << 40, 9, HOST_KEY),
]
REAL = blob(section(ROWS))
PARTIAL = blob(section(ROWS), connections=())


def refused(data: bytes, match: str | None = None) -> None:
    with pytest.raises(MetadataError, match=match):
        parse(data)


def test_reads_what_a_blob_says() -> None:
    info = parse(blob(section(ROWS), section([(4096, 64, 1, LONG_KEY)], kind=1)))
    assert info.agent == "agent-1"
    assert info.connections == (("UCX", len(UCX_V1)),)
    assert info.backends == {"UCX"}
    assert info.kinds == {MemoryKind.DRAM, MemoryKind.VRAM}
    assert info.regions(MemoryKind.DRAM).tolist() == [list(row[:3]) for row in ROWS]
    assert info.regions(MemoryKind.VRAM).tolist() == [[4096, 64, 1]]
    assert info.regions(MemoryKind.FILE).shape == (0, 3)
    assert info.regions(MemoryKind.DRAM).dtype == np.uint64


def test_metadata_without_connection_or_without_regions_is_read() -> None:
    assert parse(PARTIAL).connections == ()
    assert parse(PARTIAL).backends == {"UCX"}
    empty = parse(blob())
    assert (empty.sections, empty.kinds) == ((), frozenset())


@pytest.mark.parametrize(
    "address", [UCX_V1, UCX_V2, UCX_DEBUG_NAME, UCX_PID_NAMESPACE, UCX_IPC_NAMESPACE]
)
def test_ucx_addresses_that_were_seen_are_accepted_and_their_cuts_refused(address: bytes) -> None:
    parse(blob(connections=(address,)))
    for end in range(len(address)):
        refused(blob(connections=(address[:end],)))
    refused(blob(connections=(address + b"\0",)))


@pytest.mark.parametrize("keys", [[HOST_KEY], [TCP_KEY], [LONG_KEY], [HOST_KEY, TCP_KEY, LONG_KEY]])
def test_remote_keys_of_several_shapes_are_read(keys: list[bytes]) -> None:
    rows = [(4096 * i, 4096, 0, keys[i % len(keys)]) for i in range(9)]
    info = parse(blob(section(rows)))
    assert info.regions(MemoryKind.DRAM).tolist() == [list(row[:3]) for row in rows]


def test_equally_long_remote_keys_of_different_shapes_are_each_checked() -> None:
    other = struct.pack("<QB", 2, 0) + b"\x00\xff"
    parse(blob(section([(0, 8, 0, HOST_KEY), (8, 8, 0, other)])))
    bad = struct.pack("<QB", 3, 0) + b"\x00\xff"
    refused(blob(section([(0, 8, 0, HOST_KEY), (8, 8, 0, bad)])), "remote key")


@pytest.mark.parametrize("data", [REAL, PARTIAL, blob()])
def test_a_blob_cut_at_any_length_is_refused(data: bytes) -> None:
    for end in range(len(data)):
        refused(data[:end])
    refused(data + b"\0", "after its end")


def test_a_flipped_bit_is_refused_or_changes_only_what_has_no_structure() -> None:
    start = REAL.index(UCX_V1)
    data = bytearray(REAL)
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            try:
                info = parse(bytes(data))
            except MetadataError:
                pass
            else:
                told = [info.agent, info.regions(MemoryKind.DRAM).tolist()]
                true = ["agent-1", [list(row[:3]) for row in ROWS]]
                in_key = any(
                    i <= at < i + len(HOST_KEY)
                    for i in range(len(data))
                    if REAL[i:].startswith(HOST_KEY)
                )
                assert told != true or start <= at < start + len(UCX_V1) or in_key
            data[at] ^= 1 << bit


@FUZZ
@given(st.binary(max_size=400), st.sampled_from([b"", b"nixlSerDes|", REAL[:40], REAL[:-30]]))
def test_random_bytes_are_refused(tail: bytes, start: bytes) -> None:
    refused(start + tail) if start + tail != REAL else parse(REAL)


@FUZZ
@given(st.integers(0, len(REAL) - 1), st.integers(0, 12), st.binary(max_size=12))
def test_a_spliced_blob_is_read_or_refused(at: int, cut: int, piece: bytes) -> None:
    try:
        parse(REAL[:at] + piece + REAL[at + cut :])
    except MetadataError:
        pass


@FUZZ
@given(st.binary(max_size=300), st.integers(0, len(UCX_V1)), st.sampled_from([UCX_V1, UCX_V2]))
def test_any_ucx_address_is_read_or_refused(tail: bytes, keep: int, address: bytes) -> None:
    try:
        parse(blob(connections=(address[:keep] + tail,)))
    except MetadataError:
        pass


@FUZZ
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**64 - 1),
            st.integers(0, 2**64 - 1),
            st.one_of(st.sampled_from([HOST_KEY, TCP_KEY, LONG_KEY]), st.binary(max_size=20)),
        ),
        max_size=6,
    ),
    st.integers(-(2**31), 2**31 - 1) | st.integers(0, 4),
)
def test_any_regions_are_read_as_written_or_refused(rows: list[Row], kind: int) -> None:
    rows.sort(key=lambda row: (row[2], row[0], row[1]))
    try:
        info = parse(blob(section(rows, kind)))
    except MetadataError:
        return
    assert kind in (0, 1)
    assert info.sections[0].regions.tolist() == [list(row[:3]) for row in rows]
    assert all(row[0] + row[1] <= 2**64 for row in rows)


# What crashed or hung NIXL 1.5.1 when it was loaded, its neighbours, and what NIXL never writes.
WRAPPING = (
    b"nixlSerDes|" + field(b"Agent", b"B0") + number(b"Conns", 2**62) + field(b"t", b"ZZ") + b"c"
)
CRASHERS = {
    "endless loop": WRAPPING + struct.pack("<Q", 2**64 - 30) + b"A" * 16 + b"|" + b"x" * 50,
    "2^62 connections": REAL.replace(number(b"Conns", 1), number(b"Conns", 2**62)),
    "no room for the connections": REAL.replace(number(b"Conns", 1), number(b"Conns", 2)),
    "name of 2^64-1 bytes": b"nixlSerDes|Agent" + struct.pack("<Q", 2**64 - 1) + b"B0|",
    "name of 2^63 bytes": b"nixlSerDes|Agent" + struct.pack("<Q", 2**63) + b"B0|",
    "2^40 regions": REAL.replace(number(b"n", 3), number(b"n", 2**40)),
    "2^61 regions": REAL.replace(number(b"n", 3), number(b"n", 2**61)),
    "fewer regions than claimed": REAL.replace(number(b"n", 3), number(b"n", 4)),
    "more regions than claimed": REAL.replace(number(b"n", 3), number(b"n", 2)),
    "2^62 sections": REAL.replace(number(b"nixlSecElms", 1), number(b"nixlSecElms", 2**62)),
    "memory type 5": blob(section(ROWS, kind=5)),
    "memory type 77": blob(section(ROWS, kind=77)),
    "memory type -1": blob(section(ROWS, kind=-1)),
    "memory type 10^8": blob(section(ROWS, kind=10**8)),
    "remote key of no bytes": blob(section([(4096, 64, 0, b"")])),
    "remote key of 8 bytes": blob(section([(4096, 64, 0, HOST_KEY[:8])])),
    "remote key of ff": blob(section([(4096, 64, 0, b"\xff" * 11)])),
    "remote key of an unknown memory type": blob(section([(4096, 64, 0, bytes(8) + b"\x09")])),
    "remote key that is cut": blob(section([(4096, 64, 0, b"\x01" + bytes(8) + b"\x05ab")])),
    "connection of one byte": blob(connections=(b"\xff",)),
    "connection of 00": blob(connections=(bytes(200),)),
    "connection of ff": blob(connections=(b"\xff" * 200,)),
    "connection of no bytes": blob(connections=(b"",)),
    "connection cut in half": blob(connections=(UCX_V1[: len(UCX_V1) // 2],)),
    "address version 2": blob(connections=(b"\x22" + UCX_V1[1:],)),
    "address version 15": blob(connections=(b"\x2f" + UCX_V1[1:],)),
    "bandwidth that is no number": blob(
        connections=(UCX_V1.replace(b"\x00\x40\x97\x50", b"\x00\x00\xc0\x7f"),)
    ),
    "tcp address of no family": blob(
        connections=(UCX_V1.replace(b"\x06\x00\x02", b"\x06\x00\x63"),)
    ),
    "two connections of one backend": blob(connections=(UCX_V1, UCX_V1)),
    "two sections of one kind": blob(section(ROWS), section(ROWS)),
    "an empty section": blob(section([])),
    "regions out of order": blob(section(ROWS[::-1])),
    "a region beyond 2^64": blob(section([(2**64 - 8, 9, 0, HOST_KEY)])),
    "file regions": blob(section(ROWS, kind=4)),
    "another backend's regions": blob(section(ROWS, backend=b"POSIX")),
    "no agent name": blob(agent=b""),
    "agent name not in UTF-8": blob(agent=b"\xff\xfe"),
    "agent name with a line feed": blob(agent=b"a\nb"),
    "agent name of 1025 bytes": blob(agent=b"a" * 1025),
    "compressed": b"x\x9c" + REAL,
}


@pytest.mark.parametrize("case", CRASHERS)
def test_what_crashes_nixl_or_is_not_its_own_is_refused(case: str) -> None:
    tracemalloc.start()
    try:
        refused(CRASHERS[case])
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_blob_over_the_limit_is_refused() -> None:
    refused(REAL + bytes(5 << 20), "limit")


def test_ten_thousand_regions_allocate_in_proportion() -> None:
    data = blob(section([(4096 * i, 4096, 0, HOST_KEY) for i in range(10_000)]))
    tracemalloc.start()
    try:
        info = parse(data)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(data)
    finally:
        tracemalloc.stop()
    assert len(info.regions(MemoryKind.DRAM)) == 10_000


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("1.5.1", True),
        ("1.5", True),
        ("1.50.1", False),
        ("1.6.0", False),
        ("2", False),
        ("", False),
    ],
)
def test_knows_the_releases_whose_grammar_was_checked(version: str, known: bool) -> None:
    assert knows(version) is known


# With NIXL itself, in child processes: it must not be loaded, let alone crash, in this one.
AGENT = """
import os, pickle, sys
import numpy as np
import nixl._bindings as nixl
def agent(name):
    made = nixl.nixlAgent(name, nixl.nixlAgentConfig())
    return made, made.createBackend("UCX", {})
def rows(items):
    return nixl.nixlRegDList(nixl.DRAM_SEG, [(*item, b"") for item in items])
"""
WRITE = """
made, ucx = agent("writer")
memory = np.zeros(1 << 20, np.uint8)
at = memory.ctypes.data
items = [(at + 65536, 4096, 8), (at, 65536, 7), (at, 1 << 20, 2), (at, 0, 3)]
made.registerMem(rows(items), [ucx])
blobs = [made.getLocalMD(), made.getLocalPartialMD(rows(items[:1]), False, []),
    made.getLocalPartialMD(rows(items), True, []),
    made.getLocalPartialMD(nixl.nixlRegDList(nixl.DRAM_SEG), True, [])]
sys.stdout.buffer.write(pickle.dumps((items, blobs)))
"""
LOAD = """
items, at = pickle.load(sys.stdin.buffer)
made, ucx = agent("reader")
memory = np.zeros(4096, np.uint8)
made.registerMem(rows([(memory.ctypes.data, 4096, 0)]), [ucx])
try:
    name = made.loadRemoteMD(items).decode()
    made.genNotif(name, b"hello", [ucx])
    made.getNotifs({}, [])
except Exception:
    pass  # NIXL may refuse it in any way but a crash.
sys.stdout.flush()
os._exit(0)
"""


def child(script: str, given: object = None) -> subprocess.CompletedProcess[bytes]:
    environment = dict(os.environ, NIXL_LOG_LEVEL="FATAL", UCX_LOG_LEVEL="FATAL")
    return subprocess.run(
        [sys.executable, "-c", AGENT + script],
        input=pickle.dumps(given),
        env=environment,
        capture_output=True,
        timeout=50,
        check=False,
    )


def test_what_nixl_writes_is_accepted_and_read_right() -> None:
    done = child(WRITE)
    assert done.returncode == 0, done.stderr
    items, blobs = pickle.loads(done.stdout)  # noqa: S301 - from our own child
    infos = [parse(item) for item in blobs]
    assert {info.agent for info in infos} == {"writer"}
    assert [len(info.connections) for info in infos] == [1, 0, 1, 1]
    everything = sorted(([a, n, d] for a, n, d in items), key=lambda row: (row[2], row[0]))
    expected = [everything, [list(items[0])], everything]
    assert [info.regions(MemoryKind.DRAM).tolist() for info in infos[:3]] == expected


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_accepted_mutants_do_not_crash_nixl() -> None:
    done = child(WRITE)
    assert done.returncode == 0, done.stderr
    data = pickle.loads(done.stdout)[1][0]  # noqa: S301 - from our own child
    dice = random.Random(1)
    accepted: list[bytes] = []
    while len(accepted) < 50:
        mutant = bytearray(data)
        for _ in range(dice.choice([1, 1, 2, 4])):
            mutant[dice.randrange(len(mutant))] = dice.randrange(256)
        try:
            parse(bytes(mutant))
        except MetadataError:
            continue
        accepted.append(bytes(mutant))
    for mutant_bytes in accepted:
        assert child(LOAD, (mutant_bytes, 0)).returncode == 0, mutant_bytes.hex()
