"""Group J: what hosts and containers forbid. See README.md in this folder."""

from __future__ import annotations

import ctypes
import logging
import logging.handlers
import os

import pytest
import torch
import torch.distributed as dist

from torch_nixl._testing.rank_worker import Rank
from torch_nixl.engine.adapter import Direction
from torch_nixl.engine.connection import Connection
from torch_nixl.engine.memory import tensor_memory
from torch_nixl.engine.nixl import load
from torch_nixl.engine.offer import Offer
from torch_nixl.errors import BackendError
from torch_nixl.testing import RankPool, run_ranks

NOBODY = 65534
PR_SET_DUMPABLE = 4
QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its rights away")


def _exchange(rank: Rank, store: dist.Store, path: str) -> None:
    """Rank 1 reads 8 B to 64 MiB from rank 0, and says by which path."""
    with Connection.open(f"rank{rank.rank}", timeout=30) as connection:
        for nbytes in (8, 4096, 1 << 20, 64 << 20):
            source = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
            if rank.rank == 0:
                exposed = connection.expose(Direction.READ, [tensor_memory(source)])
                store.set(str(nbytes), exposed.offer().pack(key=None).hex())
                exposed.wait()
                continue
            packed = bytes.fromhex(store.get(str(nbytes)).decode())
            offer = Offer.unpack(packed, key=None, parse_metadata=connection.adapter.inspect)
            target = torch.zeros(nbytes, dtype=torch.uint8)
            active = connection.claim(offer, [tensor_memory(target)])
            active.wait()
            assert torch.equal(source, target)
            assert active.remote is not None
            assert connection.path(active.remote) == path


def _exchange_without_ptrace(rank: Rank) -> None:
    load()  # while its files can be read
    files = rank.store()
    port = 0 if rank.rank == 0 else int(files.get("port"))
    store = dist.TCPStore("127.0.0.1", port, 2, rank.rank == 0, wait_for_workers=False)
    files.set("port", str(store.port))
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.environ["HOME"] = "/tmp"
    # What a container without CAP_SYS_PTRACE or with a seccomp filter does: the kernel refuses
    # process_vm_readv and process_vm_writev on this process.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    told = logging.handlers.BufferingHandler(100)
    logging.getLogger("torch_nixl.performance").addHandler(told)
    _exchange(rank, store, "tcp")
    # Rank 1 was asked for the path, and that after each size.
    warnings = [record.getMessage() for record in told.buffer]
    assert ["CMA: EPERM" in text for text in warnings] == [True] * rank.rank, warnings
    # Rank 0 holds the store.
    if rank.rank == 0:
        store.get("done")
    else:
        store.set("done", "")


@needs_root
def test_j1_no_ptrace_falls_back_to_tcp_with_right_data() -> None:
    run_ranks(_exchange_without_ptrace, 2, timeout=60, env=QUIET)


def _exchange_over_cma(rank: Rank) -> None:
    _exchange(rank, rank.store(), "cma")


def test_j1_with_ptrace_the_same_goes_over_cma(rank_pool: RankPool) -> None:
    rank_pool.run(_exchange_over_cma, world_size=2, env=QUIET)


def _open_on_no_such_device(rank: Rank) -> None:
    with pytest.raises(BackendError, match="docker7"):
        Connection.open("w")


def test_j3_an_interface_that_is_not_there_is_named(rank_pool: RankPool) -> None:
    rank_pool.run(
        _open_on_no_such_device, world_size=1, env={**QUIET, "UCX_NET_DEVICES": "docker7"}
    )


def _exchange_over_tcp(rank: Rank) -> None:
    _exchange(rank, rank.store(), "tcp")


@pytest.mark.parametrize("devices", [{}, {"UCX_NET_DEVICES": "lo"}])
def test_j3_tcp_works_with_and_without_a_chosen_interface(
    rank_pool: RankPool, devices: dict[str, str]
) -> None:
    rank_pool.run(_exchange_over_tcp, world_size=2, env={**QUIET, "UCX_TLS": "tcp,self", **devices})


def _open_without_a_home(rank: Rank) -> None:
    load()
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.environ["HOME"] = str(rank.directory)
    with pytest.raises(BackendError, match=r"HOME=.*must be readable"):
        Connection.open("w")


@needs_root
def test_an_unreadable_home_is_named() -> None:
    """NIXL looks for $HOME/.nixl.cfg and fails where it can't."""
    run_ranks(_open_without_a_home, 1, timeout=60, env=QUIET)
