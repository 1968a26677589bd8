"""Conformance: peers that die, stand still and come back."""

from __future__ import annotations

import contextlib

from torch_nixl._testing.harness import Harness
from torch_nixl._testing.sides import PeerSide, Side, never, raises, side_and_peer, until
from torch_nixl.engine.adapter import Direction
from torch_nixl.errors import MetadataError, PeerLostError

READ, WRITE = Direction.READ, Direction.WRITE


def _wait_until_lost(side: Side, remote: str) -> PeerLostError:
    """Send until the loss shows; messages sent before are lost without an error."""
    lost: list[PeerLostError] = []

    def send() -> bool:
        try:
            side.adapter.notify(remote, b"are you there")
        except PeerLostError as exc:
            lost.append(exc)
        return bool(lost)

    until(send, side)
    return lost[0]


def check_bytes_and_messages_cross(harness: Harness) -> None:
    a, peer = side_and_peer(harness)
    a.buffer[:] = 7
    a.run(a.transfer(WRITE, a.span(0, 99), peer.span(1, 99), "peer"), peer, notification=b"sent")
    until(lambda: peer.inbox == [("a", b"sent")], a, peer)
    assert peer.peer.contents()[:101] == b"\0" + b"\7" * 99 + b"\0"


def check_killed_peer_is_lost_to_whoever_uses_it(harness: Harness) -> None:
    a, peer = side_and_peer(harness)
    other = Side(harness, "other")
    a.know(other)
    transfer = a.transfer(WRITE, a.span(0, 64), peer.span(0, 64), "peer")
    peer.peer.kill()
    assert _wait_until_lost(a, "peer").remote == "peer"
    raises(PeerLostError, a.adapter.post, transfer)
    raises(PeerLostError, a.adapter.poll, transfer)
    a.adapter.release(transfer)
    # Nobody else is: not the agent's other remotes.
    a.adapter.notify("other", b"still here")
    until(lambda: other.inbox == [("a", b"still here")], a, other)


def check_transfer_under_way_fails_when_its_peer_dies(harness: Harness) -> None:
    a, peer = side_and_peer(harness)
    a.adapter.notify("peer", b"owes a flush")
    transfer = a.transfer(WRITE, a.span(0, 64), peer.span(0, 64), "peer")
    assert not a.adapter.post(transfer)
    peer.peer.kill()

    def failed() -> bool:
        try:
            assert not a.adapter.poll(transfer)
        except PeerLostError as exc:
            return exc.remote == "peer"
        return False

    until(failed)
    a.adapter.release(transfer)


def check_peer_that_restarts_must_be_removed_first(harness: Harness) -> None:
    a, peer = side_and_peer(harness)
    peer.peer.kill()
    again = PeerSide(harness.peer("peer"))
    with contextlib.suppress(PeerLostError):  # The first use after its death tells, or a later one.
        a.adapter.notify("peer", b"for the dead")
    _wait_until_lost(a, "peer")
    raises(MetadataError, a.adapter.add_remote, again.peer.metadata())
    a.adapter.remove_remote("peer")
    assert a.adapter.add_remote(again.peer.metadata()) == "peer"
    a.adapter.notify("peer", b"for the living")
    until(lambda: again.inbox, a, again)
    assert again.inbox == [("a", b"for the living")]
    a.run(a.transfer(WRITE, a.span(0, 64), again.span(0, 64), "peer"), again)


def check_agent_that_is_gone_can_not_be_added(harness: Harness) -> None:
    a, peer = Side(harness, "a"), PeerSide(harness.peer("peer"))
    told = peer.peer.metadata()
    peer.peer.kill()
    raises(PeerLostError, a.adapter.add_remote, told)
    raises(MetadataError, a.adapter.notify, "peer", b"x")


def check_messages_before_contact_die_with_the_sender(harness: Harness) -> None:
    a, peer = Side(harness, "a"), PeerSide(harness.peer("peer"))
    peer.peer.add_remote(a.adapter.metadata([], connection=True))
    peer.peer.notify("a", b"last words")
    peer.peer.kill()
    never(lambda: a.inbox, a)


def check_messages_after_contact_outlive_the_sender(harness: Harness) -> None:
    a, peer = side_and_peer(harness)
    for number in range(10):
        peer.peer.notify("a", b"%d" % number)
    peer.peer.kill()
    until(lambda: len(a.inbox) == 10, a)
    assert a.inbox == [("peer", b"%d" % number) for number in range(10)]


def check_stopped_peer_keeps_transfers_under_way(harness: Harness) -> None:
    a, peer = side_and_peer(harness)
    a.adapter.notify("peer", b"owes a flush")
    peer.peer.stop()
    transfer = a.transfer(WRITE, a.span(0, 64), peer.span(0, 64), "peer")
    assert not a.adapter.post(transfer)
    never(lambda: a.adapter.poll(transfer), a)
    a.adapter.notify("peer", b"waits")
    peer.peer.resume()
    a.finish(transfer, peer)
    until(lambda: len(peer.inbox) == 2, a, peer)
    assert [message for _, message in peer.inbox] == [b"owes a flush", b"waits"]


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
