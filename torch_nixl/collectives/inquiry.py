"""What a collective waits for before it ends though a rank has called something else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from torch_nixl.engine.operation import Operation
from torch_nixl.p2p.tensors import MismatchError

if TYPE_CHECKING:
    from torch_nixl.engine.connection import Connection

INQUIRY_SECONDS: Final = 2.0
"""How long a rank that has called something else is given to say what."""


class Inquiry(Operation):
    """A rank was asked what it has called. It answers by failing the group, naming both calls.

    If it doesn't, this fails, which ends the collective nevertheless. It never ends well.

    Attributes:
        source: The rank.
    """

    __slots__ = ("_text", "source")

    def __init__(self, connection: Connection, source: int, text: str, deadline: float) -> None:
        super().__init__(connection, "inquiry", (), deadline)
        self.source = source
        self._text = text

    def attend(self) -> bool:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.expire()
        return self._done

    def expire(self) -> None:
        self.fail(MismatchError(self._text))

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        self._finish(error)
        self._release()

    def cancel(self) -> None:
        self.expire()

    def on_lost(self, error: BaseException) -> None:
        """It has no remote: the rank that leaves takes the answer with it."""

    def _count_end(self, error: BaseException | None) -> None:
        """It is a part of its collective."""
