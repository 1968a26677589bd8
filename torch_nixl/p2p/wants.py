"""Messages that a receiver has asked for beyond its sender's credit. Pure: no I/O.

    receiver                        sender
    WANT tag ───────────────────────▶  one message of that tag may come without credit
         ◀──── EAGER or OFFER, without credit
    or, when nothing waits for it any more:
    UNWANT tag, ASKED ──────────────▶  forgets one WANT of that tag, if it has one left
         ◀────────── UNWANT tag, FORGOTTEN or SERVED

So each WANT ends once, by a message or by FORGOTTEN, and both sides count the same. A message that
comes without credit while no WANT of its tag is open is one that nobody asked for.
"""

from __future__ import annotations

from torch_nixl.p2p.protocol import CREDIT_FRAMES


class Wants:
    """A receiver's WANTs at one sender, by tag. Not locked.

    Attributes:
        num_open: WANTs that have not ended: what the sender may have waiting here beyond credit.
    """

    __slots__ = ("_leaving", "_open", "num_open")

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._leaving: dict[int, int] = {}
        self.num_open = 0

    @property
    def full(self) -> bool:
        """Whether no more may be opened."""
        return self.num_open >= CREDIT_FRAMES

    def staying(self, tag: int) -> int:
        """How many are open and not being withdrawn."""
        return max(0, self._open.get(tag, 0) - self._leaving.get(tag, 0))

    def tags(self) -> list[int]:
        """Those of open ones."""
        return list(self._open)

    def add(self, tag: int) -> None:
        """One is opened."""
        self._open[tag] = self._open.get(tag, 0) + 1
        self.num_open += 1

    def end(self, tag: int) -> bool:
        """One has ended, by its message if not by FORGOTTEN; return False if none was open."""
        if not self._open.get(tag):
            return False
        _count_down(self._open, tag)
        self.num_open -= 1
        return True

    def withdraw(self, tag: int) -> None:
        """One is being withdrawn: it ends when the sender says so, or by its message."""
        self._leaving[tag] = self._leaving.get(tag, 0) + 1

    def withdrawn(self, tag: int) -> bool:
        """The sender has answered; return False if it was not asked."""
        if not self._leaving.get(tag):
            return False
        _count_down(self._leaving, tag)
        return True


def _count_down(counts: dict[int, int], tag: int) -> None:
    if counts[tag] == 1:
        del counts[tag]
    else:
        counts[tag] -= 1
