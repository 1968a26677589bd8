"""A process ends in the middle of a transfer: neither end's stderr says anything of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

_BOTH = """
import sys, time
import torch
from torch_nixl import connect
from torch_nixl.engine import host, transfer
from torch_nixl.engine.nixl import NixlAdapter

# Many pieces, each of which takes a while: the transfer outlasts what exit allows for it.
host.EXIT_SECONDS = 1.0
transfer.LONG_PIECE_BYTES = transfer.PIECE_BYTES = 1 << 20
post = NixlAdapter.post
def post_slowly(self, *args):
    time.sleep(0.03)
    return post(self, *args)
NixlAdapter.post = post_slowly
memory = torch.zeros(256 << 20, dtype=torch.uint8)
connection = connect.Connector().connection()

def outlive(operation):
    try:
        operation.wait(20)
    except RuntimeError as error:
        print(type(error).__name__, flush=True)
"""
_OWNER = """
operation = connect.{role}(connection, connect.Descriptor(memory))
print(operation.metadata().model_dump_json(), flush=True)
while operation.status is not connect.OperationStatus.IN_PROGRESS:
    time.sleep(0.001)
"""
_ACTIVE = """
print("ready", flush=True)
told = connect.RdmaMetadata.model_validate_json(sys.stdin.readline())
{begin}
while operation._operation.moved_nbytes == 0:
    time.sleep(0.001)
"""
_ROLES = {"read": "ReadableOperation", "write": "WritableOperation"}
_BEGINS = {
    "read": "operation = connect.ReadOperation(connection, told, connect.Descriptor(memory))",
    "write": "operation = connect.WriteOperation(connection, connect.Descriptor(memory), told)",
}
_OUTLIVES = "outlive(operation)"
_RAISES = "raise ValueError('mine')"


def _start(program: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(path or "." for path in sys.path)
    plain = {name: value for name, value in os.environ.items() if name != "NIXL_LOG_LEVEL"}
    return subprocess.Popen(
        [sys.executable, "-c", _BOTH + program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**plain, "PYTHONPATH": paths},
    )


@pytest.mark.parametrize(
    ("who", "what", "end"),
    [
        ("active", "read", ""),
        ("active", "write", _RAISES),
        ("owner", "read", "sys.exit(0)"),
        ("owner", "write", _RAISES),
    ],
    ids=["reader ends", "writer raises", "owner exits", "written to, raises"],
)
def test_an_exit_in_the_middle_leaves_no_word_on_either_side(who: str, what: str, end: str) -> None:
    ends = {"active": _OUTLIVES, "owner": _OUTLIVES, who: end}
    owner = _start(_OWNER.format(role=_ROLES[what]) + ends["owner"])
    active = _start(_ACTIVE.format(begin=_BEGINS[what]) + ends["active"])
    try:
        assert active.stdout is not None and active.stdin is not None and owner.stdout is not None
        assert active.stdout.readline() == "ready\n"
        active.stdin.write(owner.stdout.readline())
        active.stdin.flush()
        said = {"owner": owner.communicate(timeout=60), "active": active.communicate(timeout=60)}
    finally:
        for process in (owner, active):
            process.kill()
            process.wait()
    survivor = "owner" if who == "active" else "active"
    told = "TransferCancelled" if who == "active" else "PeerLostError"
    assert said[survivor] == (f"{told}\n", "")
    out, err = said[who]
    assert out == ""
    if end == _RAISES:
        assert err.splitlines()[0].startswith("Traceback") and err.endswith("ValueError: mine\n")
        assert len(err.splitlines()) == 3
    else:
        assert err == ""
