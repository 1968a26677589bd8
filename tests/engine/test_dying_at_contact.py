"""A peer dies in the microseconds in which it is being connected to: its survivor goes on.

UCX aborts the process unless it connects without waiting (UCX_TCP_CONN_NB). Killing peers meets
that moment once in hundreds of times, so `dying_at_contact.c` stands for them: it is preloaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory

NUM_DYING = 3

SURVIVOR = """
import ctypes, json, sys, torch
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.offer import Offer
from torch_nixl.errors import PeerLostError

preloaded = ctypes.CDLL(None)

def read(text):
    parse = survivor.adapter.inspect
    offer = Offer.unpack(bytes.fromhex(text), key=None, parse_metadata=parse)
    target = torch.zeros(100)
    survivor.claim(offer, [tensor_memory(target)], timeout=10).wait()
    return bool(target.all())

*dying, living = json.load(sys.stdin)
with Connection.open("survivor") as survivor:
    for text in dying:
        preloaded.let_peers_die(1)
        try:
            read(text)
        except PeerLostError as error:
            assert preloaded.let_peers_die(0) >= 1
            print(error)
    assert read(living)
print("went on")
"""


@pytest.mark.parametrize("transports", ["", "tcp,self"], ids=["default", "tcp"])
def test_a_peer_that_dies_while_it_is_connected_to_is_lost_and_nothing_else(
    tmp_path: Path, transports: str
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, Debian's gcc")
    source, library = Path(__file__).with_name("dying_at_contact.c"), tmp_path / "dying.so"
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "UCX_TCP_CONN_NB"},
        **({"UCX_TLS": transports} if transports else {}),
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_LOG_LEVEL": "fatal",
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with contextlib.ExitStack() as stack:
        owners = [stack.enter_context(Connection.open("owner")) for _ in range(NUM_DYING + 1)]
        offers = [
            owner.expose(Direction.READ, [tensor_memory(torch.ones(100))]).offer()
            for owner in owners
        ]
        done = subprocess.run(
            [sys.executable, "-c", SURVIVOR],
            input=json.dumps([offer.pack(key=None).hex() for offer in offers]),
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    *losses, last = done.stdout.splitlines()
    assert last == "went on"
    assert len(losses) == NUM_DYING
    assert all("UCX_NET_DEVICES" in loss for loss in losses), "nothing ever came from them"
