"""Asks senders that may be out of credit for what is waited for here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_nixl.errors import MetadataError
from torch_nixl.p2p import protocol
from torch_nixl.p2p.protocol import Unwanted

if TYPE_CHECKING:
    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.matching import Matcher
    from torch_nixl.p2p.message import Message
    from torch_nixl.p2p.peer import Peer
    from torch_nixl.p2p.receiving import ReceiveOperation


class Asker:
    """Opens and withdraws WANTs: see `wants.py`. Called with the exchange's lock held.

    Never more are open than receives wait, but for those that probes have opened and that are
    left for the next receive; and never more than `CREDIT_FRAMES` at one sender.
    """

    def __init__(self, exchange: Exchange, matcher: Matcher[ReceiveOperation, Message]) -> None:
        self._peers = exchange.peers
        self._context = exchange.context
        self._send = exchange.send
        self._matcher = matcher

    def ask(self, peer: Peer | None, source: int | None, tag: int) -> None:
        """Say that a receive waits, where the sender may be out of credit."""
        if peer is not None:
            if peer.debt.strained:
                self._want_enough(peer, tag)
        elif source is None:
            for one in self._peers.values():
                if one.debt.strained:
                    self._want_enough(one, tag)

    def ask_all(self, peer: Peer) -> None:
        """Say so for all that wait: from here on the sender may be out of credit."""
        for tag in self._matcher.waiting_tags(peer.rank):
            if not self._want_enough(peer, tag):
                return

    def ask_probed(self, source: int | None, tag: int) -> None:
        """Have the next message of a tag come, though no receive waits for it."""
        if self._matcher.peek(source, tag) is not None:
            return
        for peer in self._peers.values():
            if source in (None, peer.rank) and peer.debt.strained and not peer.wants.staying(tag):
                self._want(peer, tag)

    def unask(self, source: int | None, tag: int) -> None:
        """A receive waits no more, and no message has come for it."""
        peers = self._peers.values() if source is None else (self._peers.get(source),)
        for peer in peers:
            if peer is not None:
                self._withdraw_surplus(peer, tag)

    def has_come(self, peer: Peer, tag: int) -> bool:
        """Note a message without credit; return False if nobody has asked for it."""
        was_full = peer.wants.full
        found = peer.wants.end(tag)
        if found and was_full and peer.debt.strained:
            self.ask_all(peer)
        return found

    def on_unwant(self, peer: Peer, tag: int, state: Unwanted) -> None:
        """A sender answers that it has forgotten a WANT, or served it."""
        if not peer.wants.withdrawn(tag):
            raise MetadataError(f"rank {peer.rank} forgets a WANT that it was to keep")
        was_full = peer.wants.full
        if state is Unwanted.FORGOTTEN:
            peer.wants.end(tag)
        self._withdraw_surplus(peer, tag)
        if peer.debt.strained:
            self._want_enough(peer, tag)
            if was_full:
                self.ask_all(peer)

    def _want_enough(self, peer: Peer, tag: int) -> bool:
        """Open as many WANTs as receives wait; return False if that can't be now."""
        for _ in range(self._matcher.num_waiting(peer.rank, tag) - peer.wants.staying(tag)):
            if not self._want(peer, tag):
                return False
        return True

    def _want(self, peer: Peer, tag: int) -> bool:
        if peer.error is not None:
            return False
        if peer.wants.full:
            # What waits is asked for once one of those that nobody waits for has ended.
            for other in peer.wants.tags():
                self._withdraw_surplus(peer, other)
            return False
        peer.wants.add(tag)
        self._send(peer, protocol.WANT, protocol.pack_want(self._context, tag))
        return True

    def _withdraw_surplus(self, peer: Peer, tag: int) -> None:
        staying = peer.wants.staying(tag)
        if staying <= 0 or peer.error is not None:
            return
        for _ in range(staying - self._matcher.num_waiting(peer.rank, tag)):
            peer.wants.withdraw(tag)
            body = protocol.pack_unwant(self._context, tag, Unwanted.ASKED)
            self._send(peer, protocol.UNWANT, body)
