"""Contacting a lost peer again that lives, and may still touch pages of ours."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from torch_nixl.errors import TorchNixlError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection
    from torch_nixl.engine.remotes import Remote

RECONTACT_SECONDS: Final = 1.0
"""Time from a loss to the first try; doubled after each, up to `MAX_RECONTACT_SECONDS`."""

MAX_RECONTACT_SECONDS: Final = 30.0


class Recontact:
    """When to try again. Neither side may send to the other any more: somebody has to begin."""

    __slots__ = ("_after", "_at")

    def __init__(self) -> None:
        self._after = RECONTACT_SECONDS
        self._at = 0.0

    def begin(self) -> None:
        """The peer was lost just now."""
        self._at = time.monotonic() + self._after

    def try_if_due(self, connection: Connection, remote: Remote) -> None:
        """Contact it again, if that is due. Runs in the driver."""
        now = time.monotonic()
        if now < self._at or connection.closing:
            return
        self._at = now + self._after
        self._after = min(2 * self._after, MAX_RECONTACT_SECONDS)
        with contextlib.suppress(TorchNixlError):  # It is tried again.
            connection.contact(remote.name, remote.connection_blob)
