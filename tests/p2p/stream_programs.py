"""What ranks run over NIXL with fake devices: the host's memory, used by slow streams."""

from __future__ import annotations

import os
import signal

import torch

import torch_nixl
from p2p.programs import HUGE, LARGE, make
from torch_nixl.testing import FakeDevice, Rank

SIZES = (10, LARGE, HUGE)


def pipeline(rank: Rank) -> int:
    """Round trips through kernels of both ranks, with no host wait but the last."""
    device = FakeDevice()
    other = 1 - rank.rank
    with make(rank) as comm:
        for count in SIZES:
            for strided in (False, True):
                if strided and count == HUGE:
                    continue
                made = device.zeros(count, 2) if strided else device.zeros(count)
                tensor = made[:, 0] if strided else made
                stream = device.new_stream()
                with device.stream(stream):
                    for turn in range(4):
                        if turn % 2 == rank.rank:
                            stream.launch(lambda tensor=tensor: tensor.add_(1), seconds=0.003)  # type: ignore[misc]
                            comm.isend(tensor, other, tag=count).wait()
                        else:
                            comm.irecv(other, out=tensor, tag=count).wait()
                    stream.synchronize()
                assert bool((tensor == 4).all()), (count, strided, tensor)
                # Both have had the last one before a shape of the same tag follows.
                comm.send(torch.ones(1), other, tag=0)
                comm.recv(other, tag=0)
        return comm.statistics().outstanding


def channel(rank: Rank) -> list[int]:
    """Steps of channels between kernels of both ranks, with no host wait but the channels' own."""
    device = FakeDevice()
    with make(rank) as comm:
        for number, count in enumerate(SIZES):
            tensors = [device.zeros(count), device.zeros(count, 2)[:, 0] if count < HUGE else None]
            like = [one for one in tensors if one is not None]
            stream = device.new_stream()
            with comm.channel(1 - rank.rank, like=like, tag=number) as steps, device.stream(stream):
                for turn in range(6):
                    if turn % 2 == rank.rank:
                        for tensor in like:
                            stream.launch(lambda tensor=tensor: tensor.add_(1), seconds=0.002)  # type: ignore[misc]
                        work = steps.isend()
                    else:
                        work = steps.irecv()
                    work.wait()
                work.synchronize()
                stream.synchronize()
                assert all(bool((tensor == 6).all()) for tensor in like), (count, like)
                # Neither closes before the other has ended its last step.
                comm.send(torch.ones(1), 1 - rank.rank)
                comm.recv(1 - rank.rank)
        return [comm.statistics().outstanding]


def killed_sender(rank: Rank) -> bool:
    """Rank 1 is killed while a stream of rank 0 waits for it."""
    device = FakeDevice()
    comm = make(rank)
    if rank.rank == 1:
        comm.send(torch.ones(1), 0)
        comm.recv(0)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(1)
    out = device.zeros(LARGE)
    work = comm.irecv(1, out=out)
    work.wait()
    seen: list[bool] = []
    device.default_stream.launch(lambda: seen.append(bool(out.isnan().all())))
    comm.send(torch.ones(1), 1)
    device.default_stream.synchronize()
    assert seen == [True]
    try:
        work.wait()
    except torch_nixl.PeerLostError:
        pass
    else:
        raise AssertionError("the loss does not show")
    try:
        comm.irecv(1)
    except torch_nixl.PoisonedError:
        comm.close()
        return True
    raise AssertionError("a poisoned Communicator took a call")


def exit_while_a_stream_waits(rank: Rank) -> bool:
    """The program ends, and nobody waits for anything."""
    device = FakeDevice()
    comm = make(rank)
    comm.isend(torch.ones(1), 1 - rank.rank)
    comm.recv(1 - rank.rank)
    comm.irecv(1 - rank.rank, out=device.zeros(LARGE)).wait()
    device.default_stream.launch(lambda: None)
    return True
