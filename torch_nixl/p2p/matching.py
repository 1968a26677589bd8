"""Which receive gets which message. Pure: no I/O, no threads, no knowledge of what either is.

The rules, MPI's:

- A message goes to the receive that was posted first among those that it fits: same tag, and same
  source or any source.
- A receive gets the message that arrived first among those that fit it.
- So messages of one source and tag are received in the order they arrived, and no receive is
  overtaken by a later one that fits the same message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

R = TypeVar("R")
M = TypeVar("M")

_ANY = -1


class Matcher(Generic[R, M]):
    """Receives that wait for messages, and messages that wait for receives. Not locked.

    Sources are ranks, 0 and up; None, in a receive, stands for any.
    """

    __slots__ = ("_messages", "_number", "_receives", "num_any", "num_messages")

    def __init__(self) -> None:
        # Empty queues are removed: programs may use a new tag for each message.
        self._receives: dict[tuple[int, int], deque[tuple[int, R]]] = {}
        self._messages: dict[int, dict[int, deque[tuple[int, M]]]] = {}
        self._number = 0
        self.num_any = 0
        self.num_messages = 0

    def post(self, receive: R, source: int | None, tag: int) -> None:
        """Have a receive wait. Only if `take` found no message for it."""
        if source is None:
            source = _ANY
            self.num_any += 1
        self._number += 1
        queue = self._receives.get((source, tag))
        if queue is None:
            queue = self._receives[source, tag] = deque()
        queue.append((self._number, receive))

    def match(self, source: int, tag: int) -> R | None:
        """Return the receive that a message which has just arrived goes to, and forget it."""
        receives = self._receives
        if not receives:
            return None
        key = (source, tag)
        queue = receives.get(key)
        if self.num_any:
            any_queue = receives.get((_ANY, tag))
            if any_queue is not None and (queue is None or any_queue[0][0] < queue[0][0]):
                key, queue = (_ANY, tag), any_queue
                self.num_any -= 1
        if queue is None:
            return None
        # Without a call after it: a signal handler can't raise before the caller has it.
        receive = queue[0][1]
        del queue[0]
        if not queue:
            del receives[key]
        return receive

    def cancel(self, receive: R, source: int | None, tag: int) -> bool:
        """Forget a receive; return False if it doesn't wait any more."""
        key = (_ANY if source is None else source, tag)
        queue = self._receives.get(key)
        for index, (_, waiting) in enumerate(queue or ()):
            if waiting is receive:
                assert queue is not None
                del queue[index]
                if not queue:
                    del self._receives[key]
                self.num_any -= source is None
                return True
        return False

    def store(self, message: M, source: int, tag: int) -> None:
        """Have a message wait. Only if `match` found no receive for it."""
        self._number += 1
        self.num_messages += 1
        by_source = self._messages.setdefault(tag, {})
        by_source.setdefault(source, deque()).append((self._number, message))

    def take(self, source: int | None, tag: int) -> M | None:
        """Return the message that a receive which is just made gets, and forget it."""
        found = self._find(source, tag)
        if found is None:
            return None
        source, by_source = found
        message = by_source[source][0][1]
        self._drop(tag, source, 0)
        return message

    def peek(self, source: int | None, tag: int) -> M | None:
        """Return the message that `take` would, and keep it."""
        found = self._find(source, tag)
        return None if found is None else found[1][found[0]][0][1]

    def remove(self, message: M, source: int, tag: int) -> bool:
        """Forget a message; return False if it doesn't wait any more."""
        queue = self._messages.get(tag, {}).get(source)
        for index, (_, waiting) in enumerate(queue or ()):
            if waiting is message:
                self._drop(tag, source, index)
                return True
        return False

    def forget_messages(self) -> None:
        """Forget all waiting messages."""
        self._messages.clear()
        self.num_messages = 0

    def receives(self, source: int | None = None) -> Iterator[tuple[int | None, int, R]]:
        """All waiting receives that fit messages of `source`, with their source and tag.

        Args:
            source: A rank, or None for the receives of every source.
        """
        for (wanted, tag), queue in list(self._receives.items()):
            if source is None or wanted in (source, _ANY):
                for _, receive in list(queue):
                    yield (None if wanted == _ANY else wanted), tag, receive

    def num_waiting(self, source: int, tag: int) -> int:
        """How many waiting receives fit messages of a source and tag."""
        found = (self._receives.get((source, tag)), self._receives.get((_ANY, tag)))
        return sum(len(queue) for queue in found if queue is not None)

    def waiting_tags(self, source: int) -> list[int]:
        """The tags of waiting receives that fit messages of a source, each once."""
        return list({tag: None for wanted, tag in self._receives if wanted in (source, _ANY)})

    def messages(self) -> Iterator[M]:
        """All waiting messages."""
        for by_source in list(self._messages.values()):
            for queue in list(by_source.values()):
                for _, message in list(queue):
                    yield message

    def tags(self) -> list[tuple[int, int]]:
        """Tag and source of all waiting messages, each once."""
        found = list(self._messages.items())
        return [(tag, source) for tag, by_source in found for source in list(by_source)]

    def _find(
        self, source: int | None, tag: int
    ) -> tuple[int, dict[int, deque[tuple[int, M]]]] | None:
        by_source = self._messages.get(tag)
        if by_source is None:
            return None
        if source is None:
            return min(by_source, key=lambda rank: by_source[rank][0][0]), by_source
        return (source, by_source) if source in by_source else None

    def _drop(self, tag: int, source: int, index: int) -> None:
        # As in `match`, no call.
        by_source = self._messages[tag]
        queue = by_source[source]
        del queue[index]
        self.num_messages -= 1
        if not queue:
            del by_source[source]
            if not by_source:
                del self._messages[tag]
