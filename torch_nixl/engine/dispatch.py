"""Takes in what arrives and hands it to whom it concerns."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch_nixl.engine import assisting, wire
from torch_nixl.engine.remotes import Remote
from torch_nixl.errors import ClosedError, MetadataError, PeerLostError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection

log = logging.getLogger("torch_nixl.dispatch")

FrameHandler = Callable[[Remote, bytes], None]

MAX_WARNED = 1024
"""Senders of garbage that are remembered, so that each is warned of once."""


class Dispatcher:
    """The receiving end of one connection. Called by the driver, one thread at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._contacts = connection.contacts
        self._lost = connection.lost
        self._operations = connection.operations
        self._handlers: dict[int, FrameHandler] = {}
        self._warned: set[str] = set()
        self._arrived: deque[tuple[str, bytes]] = deque()

    def route(self, kind: int, handler: FrameHandler) -> None:
        """Have frames of a protocol above handled."""
        assert kind not in self._handlers, f"frame kind {kind} has a handler"
        self._handlers[kind] = handler

    def poll(self) -> bool:
        """Take in what has arrived; return whether any of it was news.

        Whether a peer is still there is none: who waits for it would poll hotly after each answer.
        """
        arrived = self._connection.adapter.drain()
        if arrived:
            self._arrived.extend(arrived)
            if len(self._arrived) > 1:
                self._look_for_farewells(arrived)
        elif not self._arrived:
            return False
        now = time.monotonic()
        news = False
        # What is left when a handler is interrupted is handled by the next poll.
        while self._arrived:
            news |= self._take_in(*self._arrived.popleft(), now)
        self._contacts.leaving.clear()
        return news

    def _look_for_farewells(self, arrived: Iterable[tuple[str, bytes]]) -> None:
        """Note whose BYE has come with other words: those are taken in, and not answered."""
        is_bye = self._connection.codec.is_bye
        self._contacts.leaving.update(sender for sender, data in arrived if is_bye(sender, data))

    def _take_in(self, sender: str, data: bytes, now: float) -> bool:
        """Take in a message; return whether it was news."""
        counters = self._connection.counters
        counters.frames_received += 1
        try:
            return self._dispatch(sender, data, now)
        except MetadataError as error:
            counters.frames_refused += 1
            # Who sends garbage may send much of it.
            known = sender in self._warned or len(self._warned) >= MAX_WARNED
            self._warned.add(sender)
            level = logging.DEBUG if known else logging.WARNING
            log.log(level, "refused %d bytes from %s: %s", len(data), sender, error)
        except ClosedError:
            raise
        except Exception:
            # One frame that a handler chokes on must not cost those behind it.
            counters.frames_refused += 1
            log.exception("a frame of %d bytes from %s could not be handled", len(data), sender)
        return True

    def _dispatch(self, sender: str, data: bytes, now: float) -> bool:
        if not data.startswith(wire.MAGIC):
            keyed = self._operations.by_message(data)
            if keyed is not None:
                keyed.on_key(sender)
                return True
        codec = self._connection.codec
        kind, body = codec.open(sender, data)
        if kind >= wire.FIRST_RAW_KIND:
            remote = self._contacts.get(sender) or self._lost.hear_again(sender, now)
            if remote is None:
                raise MetadataError(f"frame of kind {kind} from an agent that has not said HELLO")
            remote.hear(now)
            handler = self._handlers.get(kind)
            if handler is None:
                raise MetadataError(f"frames of kind {kind} are not spoken here")
            handler(remote, body)
            return True
        frame = codec.read(kind, body)
        self._take_in_own(sender, frame, now)
        return not isinstance(frame, wire.Ping | wire.Pong)

    def _take_in_own(self, sender: str, frame: wire.Frame, now: float) -> None:
        """Take in a frame of this layer."""
        if isinstance(frame, wire.Hello):
            self._contacts.on_hello(sender, frame, now)
            return
        remote = self._contacts.get(sender)
        if remote is None and isinstance(frame, wire.Bye):
            self._lost.on_late_bye(sender)
            return
        remote = remote or self._lost.hear_again(sender, now)
        if remote is None:
            raise MetadataError(f"{type(frame).__name__} from an agent that has not said HELLO")
        remote.hear(now)
        match frame:
            case wire.Claim():
                self._on_claim(remote, frame)
            case wire.Assist():
                assisting.on_assist(self._connection, remote, frame)
            case wire.Done():
                passive = self._operations.offer(frame.key)
                if passive is not None:
                    passive.on_done(remote, frame)
            case wire.Granted() | wire.Refuse() | wire.Revoke():
                self._on_answer(remote, frame)
            case wire.Ping():
                self._contacts.send(remote, wire.Pong(frame.token))
            case wire.Pong():
                pass  # That it was heard is all that counts.
            case wire.HelloAck():
                self._contacts.on_hello_ack(remote, frame)
            case wire.Bye():
                # It says so only when its own operations have ended.
                remote.closed = True
                self._contacts.leaving.discard(sender)
                error = PeerLostError(f"{sender} closed its connection", remote=sender)
                self._contacts.lose(remote, error)

    def _on_claim(self, remote: Remote, frame: wire.Claim) -> None:
        operation = self._operations.offer(frame.key)
        if operation is not None:
            operation.on_claim(remote, frame)
        else:
            reason = self._operations.why_ended(frame.key)
            self._contacts.send(remote, wire.Refuse(frame.key, frame.claim, reason, ""))

    def _on_answer(self, remote: Remote, frame: wire.Granted | wire.Refuse | wire.Revoke) -> None:
        operation = self._operations.claim(frame.key, frame.claim, remote)
        match frame:
            case wire.Granted() | wire.Revoke() if operation is None:
                # Abandoned before it was granted, or our word of its end was lost: give it back.
                outcome = wire.Outcome.CANCELLED
                done = wire.Done(frame.key, frame.claim, outcome, "abandoned")
                self._contacts.send(remote, done)
            case wire.Granted() if operation is not None:
                operation.on_granted()
            case wire.Refuse() if operation is not None:
                operation.on_refused(frame)
            case wire.Revoke() if operation is not None:
                operation.on_revoked(frame)
            case _:
                pass  # It has ended here, and the remote has been told or is about to be.
