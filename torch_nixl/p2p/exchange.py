"""One Communicator's traffic: whom it has met, and what the two halves of it share.

[Note: p2p locks]
`Exchange.lock` guards the matcher, credits and queues. All exchanges of a connection share one: to
send may find a peer lost, which all of them are told in the same thread. Frames whose order counts
are sent with it held: the library's messages are first in, first out, and so are those of one
source and tag. What takes longer (copies, registrations) happens without it. The connection's lock
may be taken inside of it, never the other way round; nobody polls while holding it.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from torch_nixl.errors import ClosedError, MetadataError, PeerLostError, PoisonedError
from torch_nixl.p2p import protocol
from torch_nixl.p2p.channels import Channels
from torch_nixl.p2p.inbox import Inbox
from torch_nixl.p2p.outbox import Outbox
from torch_nixl.p2p.peer import Peer
from torch_nixl.p2p.probing import Prober
from torch_nixl.p2p.receiving import ReceiveOperation
from torch_nixl.p2p.sending import SendOperation
from torch_nixl.p2p.step import StepOperation
from torch_nixl.p2p.values import CommunicatorStatistics

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote
    from torch_nixl.p2p.bootstrap import Address

Watched: TypeAlias = SendOperation | ReceiveOperation | StepOperation


log = logging.getLogger("torch_nixl.p2p")


class Exchange:
    """The traffic of one Communicator.

    Attributes:
        connection: The agent, which other Communicators may share.
        context: Tells its frames from those of others.
        rank: Ours.
        world_size: How many ranks there are.
        peers: Those met, by rank.
        by_remote: The same by agent.
        closed: Why nothing can be done any more; None while all is well.
        poisoned: Why no call is taken any more; None while all is well.
        finishers: What is let end before it is closed, each until a `time.monotonic()`.
        handlers: What is done with frames of each kind.
    """

    def __init__(
        self,
        connection: Connection,
        context: int,
        rank: int,
        world_size: int,
        lock: threading.RLock,
    ) -> None:
        self.connection = connection
        self.context = context
        self.rank = rank
        self.world_size = world_size
        self.lock = lock
        self.numbers = itertools.count(1)
        self.peers: dict[int, Peer] = {}
        self.by_remote: dict[Remote, Peer] = {}
        self._num_gone = 0
        self.closed: BaseException | None = None
        self.poisoned: PoisonedError | None = None
        self.finishers: list[Callable[[float], None]] = []
        self.outbox = Outbox(self)
        self.inbox = Inbox(self)
        self.prober = Prober(self)
        self.channels = Channels(self)
        self.handlers: dict[int, Callable[[Peer, bytes], None]] = {
            **self.outbox.handlers,
            **self.inbox.handlers,
            **self.channels.handlers,
            protocol.LEAVE: self.on_leave,
        }

    def renew_lock(self, lock: threading.RLock) -> None:
        """Use another lock: in a forked child, where nobody frees the old one."""
        self.lock = lock
        self.outbox.renew_lock(lock)
        self.inbox.renew_lock(lock)
        self.channels.renew_lock(lock)

    def contact(self, rank: int, address: Address) -> Peer:
        """Make contact with the agent of a rank, and meet it.

        Raises:
            MetadataError: The metadata is not acceptable, or another agent is that rank.
            PeerLostError: The agent can't be reached.
        """
        connection, blob = self.connection, address.metadata
        info = connection.adapter.inspect(blob)
        try:
            remote = connection.contact(info.agent, blob, identity=address.identity)
        except PeerLostError as error:
            raise PeerLostError(f"rank {rank}: {error}", remote=info.agent, rank=rank) from error
        return self.meet(rank, remote)

    def meet(self, rank: int, remote: Remote) -> Peer:
        """Find or make the peer of that rank, and introduce ourselves.

        Raises:
            MetadataError: Another agent is that rank.
        """
        with self.lock:
            peer = self.peers.get(rank)
            if peer is not None:
                if peer.remote is not remote and peer.remote.name != remote.name:
                    raise MetadataError(
                        f"{remote.name} says it is rank {rank}, which is {peer.remote.name}"
                    )
                return peer
            peer = Peer(self, rank, remote)
            self.peers[rank] = peer
            self.by_remote[remote] = peer
            self.connection.operations.add(peer.link)
            self.send(
                peer, protocol.INTRO, protocol.pack_intro(self.context, self.rank, self.world_size)
            )
            if self.inbox.matcher.num_any or self.prober.num_any:
                self.look_after(peer)
        if remote.lost_error is not None:
            self.lose(peer, remote.lost_error)
        self.connection.progress.kick()
        return peer

    def on_intro(self, remote: Remote, body: bytes) -> None:
        """A rank says who it is."""
        rank, world_size = protocol.parse_intro(body)
        if world_size != self.world_size or rank >= world_size or rank == self.rank:
            raise MetadataError(
                f"{remote.name} says it is rank {rank} of {world_size}; "
                f"this is rank {self.rank} of {self.world_size}"
            )
        self.meet(rank, remote)

    def send(self, peer: Peer, kind: int, body: bytes) -> None:
        """Send a frame; a lost peer is noted, not raised."""
        remote = peer.remote
        codec = self.connection.codec
        if codec.unnumbered:
            frame = codec.pack_raw(kind, body, to=remote.name)
            self.connection.contacts.send_raw(remote, frame)
        else:
            self.connection.contacts.send_body(remote, kind, body)

    def lose(self, peer: Peer, error: BaseException) -> None:
        """A peer's agent is gone. Its operations have been told, or are being told."""
        name, rank = peer.remote.name, peer.rank
        lost = PeerLostError(f"rank {rank} is lost: {error}", remote=name, rank=rank)
        self._part(peer, lost)
        self.channels.lose(peer, lost)

    def on_leave(self, peer: Peer, body: bytes) -> None:
        """A peer closed its Communicator, and touches no memory of ours any more."""
        name, rank = peer.remote.name, peer.rank
        error = PeerLostError(f"rank {rank} has closed ({name})", remote=name, rank=rank)
        self._part(peer, error)
        self.channels.leave(peer, error)
        with self.lock:
            sends = [
                one for one in (*self.outbox.sends.values(), *peer.unsent()) if one.peer is peer
            ]
            receives = [one for one in self.inbox.receiving if one.watched is peer]
        for send in sends:
            send.on_left(PeerLostError(f"{send}: rank {rank} has closed", remote=name))
        for receive in receives:
            if not receive.reading:
                receive.on_left(PeerLostError(f"{receive}: it has closed", remote=name))

    def _part(self, peer: Peer, error: BaseException) -> None:
        """Nothing can be exchanged with a peer any more."""
        with self.lock:
            if peer.error is not None:
                return
            peer.error = error
            self._num_gone += 1
            alone = self.is_alone()
            orphans = [one for source, _, one in self.inbox.matcher.receives() if source is None]
        peer.link.close()
        if alone:
            for receive in orphans:
                why = f"{receive}: no other rank is left; the last: {error}"
                receive.fail(PeerLostError(why, remote=peer.remote.name, rank=peer.rank))

    def is_alone(self) -> bool:
        """Whether all other ranks were met and are gone."""
        return 0 < self._num_gone == self.world_size - 1

    def watch(self, operation: Watched, peer: Peer) -> None:
        """Have a peer looked after until the operation is forgotten."""
        with self.lock:
            if operation.watched is None:
                operation.watched = peer
                peer.pending += 1
                self.look_after(peer)
        lost = peer.remote.lost_error
        if lost is not None:
            # Those that were told of the loss may not have included this one.
            error = PeerLostError(f"{operation}: {lost}", remote=peer.remote.name)
            self.connection.progress.call_later([lambda: operation.on_lost(error)])

    def unwatch(self, operation: Watched) -> None:
        peer = operation.watched
        if peer is not None:
            operation.watched = None
            peer.pending -= 1
            self.look_after(peer)

    def look_after(self, peer: Peer) -> None:
        """Have a peer pinged while something waits for it, or for any."""
        busy = self.connection.operations.busy
        waits = peer.pending or self.inbox.matcher.num_any or self.prober.num_any
        if peer.error is None and waits:
            busy[peer.link] = None
        else:
            busy.pop(peer.link, None)

    def why_closed(self) -> ClosedError | None:
        """Why nothing can be done any more; None while the agent and the Communicator live."""
        if self.closed is not None:
            return ClosedError(str(self.closed))
        if self.connection.closed:
            return ClosedError(f"the agent of this Communicator is gone: {self.connection!r}")
        return None

    def why_lost(self, source: int | None) -> PeerLostError | None:
        """Why nothing comes from a rank, or from any if it is None; None while something can."""
        if source is None and self.is_alone():
            source = next(iter(self.peers))
        peer = None if source is None else self.peers.get(source)
        return None if peer is None or peer.error is None else self._lost(peer)

    def why_none(self, source: int | None) -> BaseException | None:
        """Why no message can come any more; None while one can."""
        return self.why_closed() or self.why_lost(source)

    def check_open(self) -> None:
        """Refuse a call after the end, the Communicator's or its agent's.

        Raises:
            ClosedError: That is so.
        """
        closed = self.why_closed()
        if closed is not None:
            raise closed

    def check(self, peer: Peer) -> None:
        """Refuse to send where nothing can be sent any more.

        Raises:
            ClosedError: This side has ended.
            PeerLostError: The peer has, or the way to it is broken.
        """
        if self.closed is not None or self.connection.closed:
            self.check_open()
        if peer.error is not None:
            raise self._lost(peer)
        if peer.remote.broken is not None:
            raise self.broken(peer)

    def _lost(self, peer: Peer) -> PeerLostError:
        return PeerLostError(str(peer.error), remote=peer.remote.name, rank=peer.rank)

    def broken(self, peer: Peer) -> PeerLostError:
        """Why nothing more can be sent to a peer, which counts as lost in a moment."""
        why = f"rank {peer.rank} can't be sent to: {peer.remote.broken}"
        return PeerLostError(why, remote=peer.remote.name, rank=peer.rank)

    def poison(self, error: BaseException) -> None:
        """Take no more calls: a stream went on although what it waited for has failed."""
        if self.poisoned is None:
            log.error("a device's stream went on without its data: %s", error)
            self.poisoned = PoisonedError(
                f"an earlier operation failed while a device's stream waited for it, and what that "
                f"computes can't be trusted. Make a new Communicator. It was: {error}"
            )

    def check_poison(self) -> None:
        """Refuse a call after a stream has gone on without its data.

        Raises:
            PoisonedError: That is so.
        """
        if self.poisoned is not None:
            raise copy.copy(self.poisoned)

    def outstanding(self) -> list[Watched]:
        """What has not ended: sends first."""
        with self.lock:
            queued = [one for peer in self.peers.values() for one in peer.unsent()]
            return [
                *self.outbox.sends.values(),
                *queued,
                *self.channels.steps(),
                *self.inbox.receiving,
            ]

    def statistics(self) -> CommunicatorStatistics:
        """What was sent and received so far."""
        return CommunicatorStatistics(
            sent=self.outbox.num_sent,
            received=self.inbox.num_received,
            queued=self.outbox.num_queued,
            refused=self.outbox.num_refused,
            unexpected=self.inbox.matcher.num_messages,
            outstanding=len(self.outstanding()),
            peers=len(self.peers),
        )

    def has_ended(self) -> bool:
        """Whether nothing is outstanding but memory that a lost peer may still touch."""
        return all(one.quarantined for one in self.outstanding())

    def is_exposed(self) -> bool:
        """Whether peers may still touch memory of what was sent, or of channels."""
        return bool(self.outbox.sends or self.channels.sessions)

    def say_leave(self) -> None:
        """Tell the peers that this side ends and touches their memory no more, where that is so."""
        for peer in list(self.peers.values()):
            if peer.error is None and not self.moves_with(peer.remote.name):
                self.send(peer, protocol.LEAVE, protocol.CONTEXT.pack(self.context))
            peer.link.close()

    def moves_with(self, name: str) -> bool:
        """Whether a transfer that we started may still touch memory of that agent."""
        return any(
            one.moving and one.remote is not None and one.remote.name == name
            for one in self.outstanding()
        )
