"""Every exception that torch_nixl raises on purpose, in one tree.

Wrong arguments are ``TypeError`` or ``ValueError``, raised before anything moves. What is listed
here is what can go wrong after the arguments were accepted. The words follow one rule: *closed*
means that this process ended it, *lost* that the other side or the network did.
"""

from __future__ import annotations


class TorchNixlError(RuntimeError):
    """Base of all errors below. Catch it to catch whatever a transfer can end with.

    A RuntimeError, since that is what code written for dynamo's nixl_connect or for c10d catches.
    """


class ClosedError(TorchNixlError):
    """The Connection, operation or group was closed in this process and can't be used again."""


class BackendError(TorchNixlError):
    """NIXL is missing, or it could not set up what was asked (a plugin, a transport, an agent)."""


class RegistrationError(TorchNixlError):
    """NIXL refused to register memory. Nothing was registered and nothing has moved."""


class MetadataError(TorchNixlError, ValueError):
    """Bytes that a peer sent, or that were handed over on its behalf, are not acceptable.

    Truncated, altered, unauthenticated, of an unknown version, or naming memory that was never
    offered. NIXL has seen none of them, and nothing has moved.
    """


class TransferError(TorchNixlError):
    """An operation ended without moving what it was to move. Targets hold undefined bytes."""


class TransferTimeout(TransferError, TimeoutError):
    """An operation's deadline passed.

    NIXL can't abort a transfer, so bytes may still land: the memory stays owned until
    ``wait_released()`` of that operation returns.
    """


class TransferCancelled(TransferError):
    """An operation was cancelled by this side or by the other."""


class PoisonedError(TransferError):
    """An earlier operation failed while a device's stream waited for it.

    The stream went on, with NaN (or bytes of 0xFF) where data should be, so nothing that the
    program computes on it can be trusted: this Communicator takes no more calls.
    """


class LeaseError(TransferError):
    """What was asked for is not, or no longer, on offer. Nothing has moved."""


class LeaseExpired(LeaseError):
    """What was offered is no longer offered: its lease lapsed before anyone took it up."""


class LeaseConsumed(LeaseError):
    """What was offered has been taken up already: each offer is good for one taker."""


class LeaseUnknown(LeaseError):
    """There was never such an offer: the ticket is of another server, or of an earlier one."""


class LeaseReused(LeaseError):
    """The offer ended, and its place was given to another since: the ticket is an old one."""


class LeaseOutOfRange(LeaseError):
    """More was asked for than is offered: positions or pages beyond its end."""


class IncompatibleError(TransferError):
    """Two caches can't be converted into each other; the message names the first difference."""


class PeerLostError(TransferError, ConnectionError):
    """The peer died, or the path to it broke.

    Attributes:
        remote: Name of the agent that was lost.
        rank: Its rank in the Communicator that the operation belongs to; None where there are no
            ranks, as in `torch_nixl.connect`.
    """

    def __init__(self, message: str, *, remote: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.remote = remote
        self.rank = rank
