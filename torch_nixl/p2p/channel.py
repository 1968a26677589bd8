"""Channels: the same tensors, moved between two ranks again and again."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

from torch_nixl.engine.operation import deadline_after
from torch_nixl.engine.starting import register_all, release_all
from torch_nixl.errors import TransferTimeout
from torch_nixl.p2p.buffers import buffers_of
from torch_nixl.p2p.session import Session
from torch_nixl.p2p.step import StepOperation
from torch_nixl.p2p.terms import Role
from torch_nixl.p2p.work import Work

if TYPE_CHECKING:
    from types import TracebackType

    from torch_nixl.p2p.communicator import Communicator

T = TypeVar("T")


class Channel(Generic[T]):
    """Moves a fixed tensor, or tree of tensors, between two ranks, step after step.

    Made by `Communicator.channel` on both ranks. Memory is registered, described and looked up
    once; a step then costs a few frames of under 100 bytes and the bytes themselves; up to 64 KiB
    in all, one frame with the bytes and a short one back.

    In each step one end sends and the other receives, whichever: a channel goes both ways, but only
    one step at a time. What moves is what the tensors hold: do not replace or resize them.

    *The sender's tensors* must not change from the call of `send` or `isend` until it has returned,
    or its Work has ended. *The receiver's* are being written to from `recv` or `irecv` until it has
    returned, or its Work has ended; then they are the program's until it receives again, however
    far ahead the sender is. To move one step while the program works on the last, use two channels
    with different tags, over two sets of tensors, in turn.

    Device tensors move in the order of streams: a step begins once what is queued on their current
    streams at the call has run, and the `wait` of its Work has the current streams wait. `send` and
    `recv` block the host, as does a step that follows one that a stream waits for. See `Work.wait`,
    also for what a failure then leaves behind.

    A step that fails, by its timeout or in any other way, ends the channel on both ranks: they no
    longer agree on what has arrived. All later steps raise the same error until both call
    `reconnect`.

    Attributes:
        like: The tensors.
        peer: The other rank.
        tag: Sets channels between two ranks apart.
    """

    def __init__(
        self, communicator: Communicator, peer: int, like: T, tag: int, timeout: float | None
    ) -> None:
        self.like = like
        self.peer = peer
        self.tag = tag
        self._session = _open(communicator, peer, like, tag, timeout)
        self._communicator = communicator
        self._closed = False
        self._watch()

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, *, timeout: float | None = None) -> None:
        """Send what the tensors hold; return once they may be changed again.

        Args:
            timeout: Seconds; `math.inf` for no limit; the Communicator's by default.

        Raises:
            ValueError: A tensor was resized, or its memory has moved: reconnect.
            PoisonedError: A step or message failed while a device's stream waited for it: make
                new Communicators, and reconnect by these.
            MismatchError: The two ends differ in structure, shapes or dtypes.
            TransferTimeout: The other end did not receive in time, or its time was up. Memory stays
                owned until nothing moves there any more; use `isend` to know when.
            PeerLostError: The other rank died or closed its Communicator.
            TransferCancelled: The other end closed the channel.
            TransferError: It failed; or both ends send; or the last step is still under way.
            ClosedError: This channel or its Communicator is closed.
        """
        self._post(Role.SEND, timeout, waiting=True).run()

    def isend(self, *, timeout: float | None = None) -> Work:
        """Begin to send. See `send`; errors of the transfer come with the Work."""
        return self._enlisted(self._post(Role.SEND, timeout, waiting=False))

    def recv(self, *, timeout: float | None = None) -> T:
        """Receive into the tensors, and return them. See `send` for arguments and errors.

        After an error they hold undefined bytes, on devices NaN.
        """
        self._post(Role.RECEIVE, timeout, waiting=True).run()
        return self.like

    def irecv(self, *, timeout: float | None = None) -> Work:
        """Begin to receive. See `send`; errors of the transfer come with the Work."""
        return self._enlisted(self._post(Role.RECEIVE, timeout, waiting=False))

    def _post(self, role: Role, timeout: float | None, *, waiting: bool) -> StepOperation:
        default = self._communicator.timeout
        deadline = deadline_after(default if timeout is None else timeout)
        return self._session.post(role, deadline, waiting=waiting)

    def _enlisted(self, step: StepOperation) -> Work:
        self._session.enlist(step)
        return Work(self._session.exchange, step)

    def reconnect(
        self, communicator: Communicator | None = None, *, timeout: float | None = None
    ) -> None:
        """Begin anew over the same tensors, wherever they lie by now, from step 0.

        Both ends do so, after a step has failed. Like making a channel it does not wait for the
        other end; the next step does.

        Args:
            communicator: Use this one from now on. Needed once the other rank has died or closed
                its Communicator: both ranks make new ones, and find each other by these.
            timeout: Seconds for what is left of the failed step to end, and for the other rank to
                have made its Communicator; the Communicator's by default.

        Raises:
            TransferTimeout: The other end may still touch the memory, or made no Communicator.
            PeerLostError: The other rank is lost to this Communicator.
            ClosedError: The Communicator is closed.
            TypeError, ValueError: As `Communicator.channel`.
        """
        old = self._session
        old.cancel()
        chosen = communicator or self._communicator
        deadline = deadline_after(chosen.timeout if timeout is None else timeout)
        if not old.released and not old.connection.progress.wait_until(
            lambda: old.released, deadline
        ):
            raise TransferTimeout(f"{old}: rank {self.peer} may still touch its memory")
        self._session = _open(chosen, self.peer, self.like, self.tag, timeout)
        # Python holds what a finalizer is given: the old session, and its connection.
        self._finalizer.detach()
        self._communicator = chosen
        self._closed = False
        self._watch()

    def close(self) -> None:
        """End it on both ends: a step under way fails. Idempotent.

        The tensors may still be touched by the other end if such a step was under way.
        """
        self._closed = True
        self._session.cancel()

    def _watch(self) -> None:
        """Have the session end when this is dropped."""
        self._finalizer = weakref.finalize(self, _drop, self._session)
        self._finalizer.atexit = False

    def __enter__(self) -> Channel[T]:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        broken = self._session.broken
        state = "closed" if self._closed else "open" if broken is None else f"broken: {broken}"
        return f"<Channel with rank {self.peer}, tag {self.tag}, {self._session.nbytes} B, {state}>"


def _open(
    communicator: Communicator, peer: int, like: object, tag: int, timeout: float | None
) -> Session:
    exchange, other = communicator.contact_for_channel(peer, tag, timeout)
    buffers = buffers_of(like)
    connection = exchange.connection
    held = register_all(connection, [one.memory for one in buffers if one.memory.nbytes])
    try:
        session = Session(exchange, other, tag, buffers, held)
        exchange.channels.open(session)
    except BaseException:
        release_all(connection, held)
        raise
    return session


def _drop(session: Session) -> None:
    """End a channel that was dropped. Runs in a finalizer, so it only has that done later."""
    if session.broken is None:
        session.connection.progress.call_from_finalizer(lambda: _abandon(session))


def _abandon(session: Session) -> None:
    if session.broken is None:
        session.abandon()
        warnings.warn(f"{session} was dropped without close()", ResourceWarning, stacklevel=1)
