"""Transfers that fail, stand still or end too late, on the loopback adapter."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest
import torch

from p2p.conftest import World
from torch_nixl.engine.loopback import LoopbackAdapter
from torch_nixl.errors import PeerLostError, TransferError, TransferTimeout
from torch_nixl.p2p import protocol
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.testing import LoopbackFabric

LARGE = 4 * protocol.EAGER_NBYTES
"""Elements of float32 in a message that is offered."""


def adapter_of(communicator: Communicator) -> LoopbackAdapter:
    adapter = communicator.connection.adapter
    assert isinstance(adapter, LoopbackAdapter)
    return adapter


def mover(path: str, sender: Communicator, receiver: Communicator) -> Communicator:
    """Who posts the transfers."""
    return receiver if path == "cma" else sender


def settled(*communicators: Communicator) -> bool:
    """Whether nothing is left in any table, waiting for it a while."""
    return all(
        one.connection.progress.wait_until(lambda: one.statistics().outstanding == 0, None)  # noqa: B023 - called in this turn
        for one in communicators
    )


@pytest.mark.parametrize("call", ["prepare", "register"])
def test_transfer_that_can_not_start_fails_on_both_sides_and_costs_one_message(
    world: World, fabric: LoopbackFabric, path: str, call: str
) -> None:
    a, b = world()
    send = a.isend(torch.ones(LARGE), 1)
    b.probe(0)
    faulty = mover(path, a, b) if call == "prepare" else b
    fabric.fail_next(adapter_of(faulty), call)  # type: ignore[arg-type]
    receive = b.irecv(0)
    for work in (receive, send):
        with pytest.raises((TransferError, RuntimeError)):
            work.wait(10)
    assert send.wait_released(10)
    assert receive.wait_released(10)
    again = a.isend(torch.full((LARGE,), 2.0), 1)
    assert float(b.recv(0)[-1]) == 2.0
    again.wait()
    assert settled(a, b)


def test_post_that_breaks_the_connection_is_a_lost_peer(
    world: World, fabric: LoopbackFabric, path: str
) -> None:
    a, b = world()
    send = a.isend(torch.ones(LARGE), 1, timeout=2)
    b.probe(0)
    faulty = mover(path, a, b)
    fabric.fail_next(adapter_of(faulty), "post")
    receive = b.irecv(0, timeout=2)
    with pytest.raises(PeerLostError):
        (receive if faulty is b else send).wait(10)
    # The other side's connection may be whole: it hears of it at its next word, or times out.
    with pytest.raises(TransferError):
        (send if faulty is b else receive).wait(10)
    if faulty is b:
        assert send.wait_released(10)


def test_receiver_that_gives_up_owns_its_memory_until_nothing_moves(
    world: World, fabric: LoopbackFabric, path: str
) -> None:
    a, b = world()
    fabric.delay(1, initiator=mover(path, a, b).connection.name)
    out = torch.zeros(LARGE)
    sent = torch.ones(LARGE)
    send = a.isend(sent, 1)
    receive = b.irecv(0, out=out, timeout=0.1)
    with pytest.raises(TransferTimeout):
        receive.wait()
    assert not receive.wait_released(0.05), "bytes may still land"
    fabric.delay(None, initiator=mover(path, a, b).connection.name)
    fabric.delay(1 << 30)
    assert receive.wait_released(10)
    assert send.wait_released(10)
    out.zero_()
    a.isend(torch.full((LARGE,), 3.0), 1)
    assert float(b.recv(0)[-1]) == 3.0
    assert not out.any(), "bytes landed after the memory was released"
    assert settled(a, b)


def test_sender_that_gives_up_owns_its_memory_until_nothing_moves(
    world: World, fabric: LoopbackFabric, path: str
) -> None:
    a, b = world()
    fabric.delay(1, initiator=mover(path, a, b).connection.name)
    receive = b.irecv(0)
    send = a.isend(torch.ones(LARGE), 1, timeout=0.1)
    with pytest.raises(TransferTimeout):
        send.wait()
    assert not send.wait_released(0.05), "it may still be read"
    fabric.delay(None, initiator=mover(path, a, b).connection.name)
    fabric.delay(1 << 30)
    assert send.wait_released(10)
    if path == "cma":
        assert bool((receive.result() == 1.0).all())  # type: ignore[union-attr]
    else:
        with pytest.raises(TransferTimeout, match="other side"):
            receive.wait(10)
    assert settled(a, b)


def test_receive_that_finds_no_memory_tells_the_sender(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    a, b = world()

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    for count in (10, LARGE):
        send = a.isend(torch.ones(count), 1)
        b.probe(0)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                b.recv(0)
            assert a.connection.progress.wait_until(lambda: send.exception() is not None, None)  # noqa: B023 - called in this turn
            with pytest.raises(TransferError, match="out of memory"):
                send.wait()
    a.isend(torch.tensor(4), 1)
    assert int(b.recv(0)) == 4


def test_garbage_in_frames_is_refused_and_hurts_nobody(world: World) -> None:
    a, b = world()
    a.send(torch.tensor(1), 1)
    b.recv(0)
    peer = a._exchange.peers[1]
    context = protocol.CONTEXT.pack(a._exchange.context)
    refused = b.connection.statistics().frames_refused
    for kind in protocol.KINDS:
        for tail in (b"", b"\xff" * 3, b"\xff" * 70):
            if (kind, tail) != (protocol.LEAVE, b""):
                a._exchange.send(peer, kind, context + tail if kind != protocol.LEAVE else tail)
    a.send(torch.tensor(2), 1)
    assert int(b.recv(0)) == 2
    assert b.connection.statistics().frames_refused > refused


def test_frames_of_a_closed_communicator_are_answered(world: World) -> None:
    a, b = world()
    a.send(torch.tensor(1), 1)
    b.recv(0)
    b._hub.remove(b._exchange)
    with pytest.raises(PeerLostError, match="rank 1 has closed"):
        a.isend(torch.ones(LARGE), 1).wait(10)


def test_what_a_rank_sent_before_it_closed_is_received(world: World) -> None:
    a, b = world()
    receive = b.irecv(0)  # b greets a, and is not answered while it takes nothing in
    closing = threading.Thread(target=close_all, args=(a,))
    with b.connection.progress._driving:
        a.send(torch.arange(4.0), 1)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive(), "it left before its message could arrive"
    received = receive.result()
    assert received is not None
    assert torch.equal(received, torch.arange(4.0))
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(PeerLostError):
        b.recv(0, timeout=20)


def close_all(communicator: Communicator) -> None:
    communicator.close()
    communicator.connection.close()


def test_a_rank_that_is_alone_under_torchrun_times_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    program = (
        "import torch, torch_nixl\n"
        "try: torch_nixl.send_tensor(torch.zeros(1), 1, timeout=1)\n"
        "except torch_nixl.TransferTimeout as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment, "MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "not all ranks came to the store" in done.stdout


def test_small_message_that_can_not_leave_is_not_reported_as_sent(
    world: World, fabric: LoopbackFabric
) -> None:
    a, b = world()
    a.send(torch.ones(1), 1)
    b.recv(0)
    a.connection.progress.stop()  # Nobody but the caller looks at what it sends.
    fabric.fail_next(adapter_of(a), "notify")
    for number in range(2):
        with pytest.raises(PeerLostError, match="rank 1") as caught:
            a.send(torch.full((1,), float(number)), 1)
        assert caught.value.rank == 1


def test_region_that_an_interrupted_frame_was_to_tell_of_is_told_again(
    world: World, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = world(timeout=5.0)
    a.send(torch.ones(1), 1)
    b.recv(0)
    tensor, out = torch.arange(float(LARGE)), torch.empty(LARGE)
    teller, kind = (a, protocol.OFFER) if path == "cma" else (b, protocol.PUSH)
    notify = teller.connection.adapter.notify

    def interrupted(remote: str, message: bytes) -> None:
        if message[3] == kind:
            raise KeyboardInterrupt
        notify(remote, message)

    def message() -> None:
        work = a.isend(tensor, 1)
        b.probe(0)  # So that this thread is the one that takes it on.
        b.recv(0, out=out)
        work.wait()

    with monkeypatch.context() as patch:
        patch.setattr(teller.connection.adapter, "notify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            message()
    message()
    assert torch.equal(out, tensor)
