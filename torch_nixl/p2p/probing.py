"""Looks at what waits to be received, without receiving it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from torch_nixl.errors import ClosedError, TransferTimeout
from torch_nixl.p2p.description import Bundle
from torch_nixl.p2p.values import Envelope

if TYPE_CHECKING:
    from torch_nixl.p2p.exchange import Exchange
    from torch_nixl.p2p.peer import Peer


class Prober:
    """One Communicator's probes.

    Attributes:
        num_any: Threads that wait for a message from any rank.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.num_any = 0

    def ask(self, source: int | None, tag: int) -> None:
        """Have the next message of a tag come even if its sender is out of credit."""
        with self._exchange.lock:
            self._exchange.inbox.asker.ask_probed(source, tag)

    def peek(self, source: int | None, tag: int) -> Envelope | None:
        """What the next receive would get, if it is here."""
        with self._exchange.lock:
            message = self._exchange.inbox.matcher.peek(source, tag)
        if message is None:
            return None
        what = message.description
        if isinstance(what, Bundle):
            shape, form = (what.nbytes,), what.form.name.lower()
            return Envelope(message.source, tag, shape, torch.uint8, what.nbytes, form)
        return Envelope(message.source, tag, what.shape, what.dtype, what.nbytes)

    def wait(self, source: int | None, tag: int, deadline: float | None) -> Envelope:
        """Wait until a message is here. See `Communicator.probe`."""
        exchange = self._exchange
        exchange.check_open()

        def ready() -> bool:
            # Each time: a receive that gave up may have withdrawn what was asked for.
            self.ask(source, tag)
            return self.peek(source, tag) is not None or exchange.why_none(source) is not None

        with self._looking_after(source):
            came = exchange.connection.progress.wait_until(ready, deadline)
        if not came:
            raise TransferTimeout(f"no message from rank {source}, tag {tag} came in time")
        envelope = self.peek(source, tag)
        if envelope is None:
            raise exchange.why_none(source) or ClosedError("the Communicator was closed")
        return envelope

    @contextlib.contextmanager
    def _looking_after(self, source: int | None) -> Iterator[None]:
        """Have a rank, or each if it is None, looked after: who probes is in no table."""
        peer = None if source is None else self._exchange.peers.get(source)
        self._count(source, peer, 1)
        try:
            yield
        finally:
            self._count(source, peer, -1)

    def _count(self, source: int | None, peer: Peer | None, by: int) -> None:
        exchange = self._exchange
        with exchange.lock:
            if peer is not None:
                peer.pending += by
                exchange.look_after(peer)
            elif source is None:
                self.num_any += by
                for one in exchange.peers.values():
                    exchange.look_after(one)
