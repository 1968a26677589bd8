"""A barrier that names the ranks which did not come."""

from __future__ import annotations

import time

import torch

from torch_nixl.errors import TransferError, TransferTimeout
from torch_nixl.p2p.communicator import Communicator
from torch_nixl.p2p.protocol import MAX_TAG

_TAG = MAX_TAG - (1 << 33)
"""From here on tags are the barrier's: c10d's own are 32 bits wide."""

_ANSWER_SECONDS = 5.0
"""How much longer than its own time a rank waits to be told who is missing."""


def monitored_barrier(
    communicator: Communicator, number: int, timeout: float | None, *, wait_all_ranks: bool
) -> None:
    """Wait until all ranks have called it, or tell which have not.

    Rank 0 counts those who come and tells them the outcome.

    Args:
        communicator: The group's.
        number: How many such barriers the group has had: the same on all ranks.
        timeout: Seconds that rank 0 waits; None for ever.
        wait_all_ranks: Name all who are missing, not the first alone.

    Raises:
        TransferTimeout: Not all came in time. On rank 0, and on all that did come.
        PeerLostError: Rank 0 died or left; on rank 0: all others did.
    """
    arrive, answer = _TAG + 2 * number, _TAG + 2 * number + 1
    if communicator.rank:
        communicator.send(torch.tensor(communicator.rank), 0, tag=arrive, timeout=timeout)
        patience = None if timeout is None else timeout + _ANSWER_SECONDS
        try:
            verdict = communicator.recv(0, tag=answer, timeout=patience)
        except TransferTimeout as error:
            raise TransferTimeout(
                f"monitored_barrier #{number}: rank 0 has not come within {patience} s"
            ) from error
        told = bytes(verdict.tolist()).decode()
        if told:
            raise TransferTimeout(told)
        return
    text = _count(communicator, number, arrive, answer, timeout, wait_all_ranks)
    if text:
        raise TransferTimeout(text)


def _count(
    communicator: Communicator,
    number: int,
    arrive: int,
    answer: int,
    timeout: float | None,
    wait_all_ranks: bool,
) -> str:
    """Rank 0's part; return what went wrong."""
    deadline = None if timeout is None else time.monotonic() + timeout
    missing = set(range(1, communicator.world_size))
    text = ""
    while missing and not text:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            missing.discard(int(communicator.recv(tag=arrive, timeout=left)))
        except TransferError as error:
            # Any source: without contact, so one that never made its group costs no more.
            named = sorted(missing) if wait_all_ranks else sorted(missing)[:1]
            ranks = ", ".join(map(str, named))
            more = len(missing) - len(named)
            text = (
                f"monitored_barrier #{number}: {'ranks' if len(named) > 1 else 'rank'} {ranks}"
                f"{f' and {more} more' if more else ''} did not come within {timeout} s"
                f"{'' if isinstance(error, TransferTimeout) else f': {error}'}"
            )
    verdict = torch.tensor(list(text.encode()), dtype=torch.uint8)
    arrived = set(range(1, communicator.world_size)) - missing
    works = [communicator.isend(verdict, rank, tag=answer) for rank in sorted(arrived)]
    for work in works:
        work.wait()
    return text
