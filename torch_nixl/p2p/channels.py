"""All channels of one Communicator, and the way from a frame to the one it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch_nixl.errors import MetadataError
from torch_nixl.p2p import terms
from torch_nixl.p2p.agreement import Agreement
from torch_nixl.p2p.session import Session
from torch_nixl.p2p.step import StepOperation
from torch_nixl.p2p.terms import Terms

if TYPE_CHECKING:
    import threading

    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.peer import Peer

MAX_PENDING: Final = 256
"""Channels that one peer may have made before this rank does."""


class Channels:
    """The sessions of an exchange.

    Attributes:
        sessions: Those whose memory the other end may touch, or that can make steps.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._lock = exchange.lock
        self._live: dict[tuple[int, int], Session] = {}
        self._by_theirs: dict[tuple[int, int], Session] = {}
        self._pending: dict[tuple[int, int], tuple[Terms, list[bytes]]] = {}
        self.sessions: dict[Agreement, None] = {}
        self.handlers = {
            terms.CHANNEL: self.on_channel,
            terms.AGREE: self.on_agree,
            terms.READY: self.on_ready,
            terms.MOVED: self.on_moved,
            terms.BREAK: self.on_break,
            terms.BYTES: self.on_bytes,
        }

    def renew_lock(self, lock: threading.RLock) -> None:
        """See `Exchange.renew_lock`."""
        self._lock = lock

    def open(self, session: Session) -> None:
        """Begin a session.

        Raises:
            ValueError: There is another one with that peer and tag, or too much to describe.
            ClosedError, PeerLostError: Communicator or peer have gone.
        """
        key = (session.peer.rank, session.tag)
        with self._lock:
            self._exchange.check(session.peer)
            if key in self._live:
                raise ValueError(f"tag={session.tag}: {session} is open already")
            try:
                body = session.pack()
                session.connection.operations.add(session)
                self._live[key] = session
                self.sessions[session] = None
                self._exchange.send(session.peer, terms.CHANNEL, body)
            except BaseException:
                session.peer.forget_told()
                raise
            pending = self._pending.pop(key, None)
            if pending is not None:
                self._marry(session, pending[0])
        if pending is not None:
            session.match(*pending)
        lost = session.peer.remote.lost_error
        if lost is not None:
            session.on_lost(lost)

    def _marry(self, session: Session, theirs: Terms) -> None:
        session.theirs = theirs
        self._by_theirs[session.peer.rank, theirs.number] = session

    def retire(self, session: Agreement) -> None:
        """A session makes no more steps: another one may take its place."""
        key = (session.peer.rank, session.tag)
        if self._live.get(key) is session:
            del self._live[key]

    def forget(self, session: Agreement) -> None:
        """A session is over on both ends."""
        self.sessions.pop(session, None)
        if session.theirs is not None:
            self._by_theirs.pop((session.peer.rank, session.theirs.number), None)

    def steps(self) -> list[StepOperation]:
        """The steps that are under way."""
        return [one.step for one in self.sessions if one.step is not None]

    def leave(self, peer: Peer, error: BaseException) -> None:
        """A peer closed its Communicator."""
        for session in self._of(peer):
            session.on_left(error)

    def lose(self, peer: Peer, error: BaseException) -> None:
        """A peer's agent is gone."""
        for session in self._of(peer):
            session.on_lost(error)

    def _of(self, peer: Peer) -> list[Agreement]:
        with self._lock:
            for key in [key for key in self._pending if key[0] == peer.rank]:
                del self._pending[key]
            return [one for one in self.sessions if one.peer is peer]

    def close(self) -> None:
        """End all of them."""
        for session in list(self.sessions):
            session.cancel()

    # What comes. Runs in the driver.

    def on_channel(self, peer: Peer, body: bytes) -> None:
        """A peer has made a channel."""
        theirs = terms.parse_channel(body)
        # Remembered at once: later frames may name these regions without their metadata.
        regions = [
            b"" if leaf.place is None else peer.regions(self._exchange, leaf.place)[0][0]
            for leaf in theirs.leaves
        ]
        key = (peer.rank, theirs.tag)
        with self._lock:
            session = self._live.get(key)
            if session is None or session.theirs is not None:
                waiting = sum(rank == peer.rank for rank, _ in self._pending)
                if waiting >= MAX_PENDING and key not in self._pending:
                    raise MetadataError(f"rank {peer.rank} has made {waiting} channels too many")
                self._pending[key] = theirs, regions
                return
            self._marry(session, theirs)
        session.match(theirs, regions)

    def on_agree(self, peer: Peer, body: bytes) -> None:
        """A peer is prepared."""
        number, answered, reads = terms.parse_agree(body)
        session = self._by_theirs.get((peer.rank, number))
        if session is not None and session.number == answered:
            session.on_agree(reads)

    def on_ready(self, peer: Peer, body: bytes) -> None:
        """A peer has begun a step."""
        number, step, role, flags = terms.parse_ready(body)
        session = self._by_theirs.get((peer.rank, number))
        if session is not None:
            session.on_ready(step, role, flags)

    def on_moved(self, peer: Peer, body: bytes) -> None:
        """A peer has moved its part of a step."""
        number, step = terms.parse_moved(body)
        session = self._by_theirs.get((peer.rank, number))
        if session is not None:
            session.on_moved(step)

    def on_bytes(self, peer: Peer, body: bytes) -> None:
        """A peer has begun a step, and all that it sends is here."""
        number, step = terms.parse_bytes(body)
        session = self._by_theirs.get((peer.rank, number))
        if session is not None:
            session.on_bytes(step, body)

    def on_break(self, peer: Peer, body: bytes) -> None:
        """A peer has ended a channel."""
        number, answered, outcome, text = terms.parse_break(body)
        with self._lock:
            session = self._by_theirs.get((peer.rank, number))
            if session is not None and session.number != answered and session.broken is None:
                # It was made for another one, before this one.
                del self._by_theirs[peer.rank, number]
                session.part()
                return
        if session is not None:
            session.on_break(outcome, text)
            return
        with self._lock:
            for key, (theirs, _) in list(self._pending.items()):
                if key[0] == peer.rank and theirs.number == number:
                    del self._pending[key]
