"""What happens between loopback agents: contact, messages, bytes that move, and who stands still.

[Note: what the fake keeps of NIXL]
- Contact takes a round trip: the target must make progress, then the sender. What was sent before
  waits in the sender and dies with it. Afterwards a message lies with the target at once.
- A message owes a flush: transfers to that target complete only once it has made progress.
- Inline, bytes move inside post, without the target. In "tcp" mode they move step by step as
  either side makes progress, and stand still when the target makes none.
- Nothing stops a transfer but the end of its agent. Released, or with its remote removed, it goes
  on moving bytes; only its message is never sent.
- A lost target is noticed at the sender's next progress, not when something is sent.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from torch_nixl.engine.adapter import Direction, MemoryKind
from torch_nixl.engine.loopback_tables import RegionTable

TCP_STEP = 64 * 1024
"""Bytes of one transfer that move in "tcp" mode each time a side makes progress."""


class Contact(enum.Enum):
    """How far the first round trip between two agents has come."""

    NONE = enum.auto()
    ASKED = enum.auto()
    ANSWERED = enum.auto()
    OPEN = enum.auto()


@dataclass(eq=False, repr=False, slots=True)
class Agent:
    """One incarnation of a name."""

    name: str
    incarnation: int
    alive: bool = True
    stopped: bool = False
    key: int = 0
    regions: RegionTable = field(default_factory=RegionTable)
    links: dict[str, Link] = field(default_factory=dict)
    poisoned: set[str] = field(default_factory=set)
    inbox: list[tuple[str, bytes]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    failures: defaultdict[str, deque[Exception | None]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    @property
    def running(self) -> bool:
        return self.alive and not self.stopped


@dataclass(eq=False, repr=False, slots=True)
class Link:
    """What one agent knows of another, until it removes it."""

    source: Agent
    target: Agent
    told: RegionTable = field(default_factory=RegionTable)
    contact: Contact = Contact.NONE
    unsent: deque[bytes] = field(default_factory=deque)
    owes_flush: bool = False
    broken: bool = False
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are still to be moved."""

    kind: MemoryKind
    local: int
    device_id: int
    remote: int
    nbytes: int


@dataclass(eq=False, slots=True)
class Job:
    """A posted transfer. It outlives the handle that it was posted by."""

    link: Link
    direction: Direction
    pieces: deque[Piece]
    notification: bytes
    target_moved: bool = False
    released: bool = False


class World:
    """All agents of a fabric and what is under way between them. Callers hold `lock`."""

    def __init__(self, *, tcp: bool) -> None:
        self.lock = threading.RLock()
        self.tcp = tcp
        self.agents: list[Agent] = []
        self.cuts: set[frozenset[str]] = set()
        self.losses: Counter[tuple[str, str]] = Counter()
        self.steps: dict[str | None, int] = {}

    def living(self, name: str) -> Agent | None:
        return next((agent for agent in self.agents if agent.name == name and agent.alive), None)

    def end(self, agent: Agent) -> None:
        """End an agent, and with it all that only it held."""
        agent.alive = False
        agent.jobs.clear()
        agent.inbox.clear()
        for link in agent.links.values():
            link.unsent.clear()
        self.agents.remove(agent)

    def open(self, link: Link) -> bool:
        """Whether something can pass from the link's source to its target now."""
        return link.contact is Contact.OPEN and self._path(link)

    def send(self, link: Link, message: bytes) -> None:
        self._ask(link)
        link.unsent.append(message)
        self._flush(link)

    def start(self, job: Job) -> None:
        self._ask(job.link)
        job.link.source.jobs.append(job)
        if not self.tcp:
            self._move(job)

    def complete(self, job: Job) -> bool:
        return not job.pieces and not job.link.owes_flush

    def progress(self, agent: Agent) -> None:
        """Do what the library does while a process is inside it."""
        if not agent.running:
            return
        for other in list(self.agents):
            for link in other.links.values():
                if link.target is agent and self._path(link):
                    link.owes_flush = False
                    if link.contact is Contact.ASKED:
                        link.contact = Contact.ANSWERED
                    self._flush(link)
            for job in list(other.jobs):
                if job.link.target is agent:
                    # A removed remote's link is in no table: its jobs are all that know of it.
                    job.link.owes_flush = False
                    job.target_moved = True
                    if self.tcp:
                        self._move(job)
        for link in agent.links.values():
            if not link.target.alive:
                link.broken = True
                link.unsent.clear()
            elif link.contact is Contact.ANSWERED and self._path(link):
                link.contact = Contact.OPEN
            self._flush(link)
        for job in list(agent.jobs):
            if job.link.target.alive:
                self._move(job)
            elif job.released or job.link.removed:
                agent.jobs.remove(job)

    def _path(self, link: Link) -> bool:
        names = frozenset({link.source.name, link.target.name})
        standing = link.source.running and link.target.alive and not link.broken
        return standing and names not in self.cuts

    def _ask(self, link: Link) -> None:
        if link.contact is Contact.NONE:
            # An agent needs no contact with itself.
            link.contact = Contact.OPEN if link.source is link.target else Contact.ASKED

    def _flush(self, link: Link) -> None:
        pair = (link.source.name, link.target.name)
        while link.unsent and self.open(link):
            message = link.unsent.popleft()
            if self.losses[pair] > 0:
                self.losses[pair] -= 1
                continue
            link.target.inbox.append((link.source.name, message))
            link.owes_flush = link.source is not link.target

    def _move(self, job: Job) -> None:
        """Move one step of a transfer, if it can move now."""
        link = job.link
        if not self.open(link):
            return
        if self.tcp:
            if not link.target.running or not job.target_moved:
                return
            job.target_moved = False
        left = self.steps.get(link.source.name, self.steps.get(None, TCP_STEP if self.tcp else -1))
        while job.pieces and left != 0:
            piece = job.pieces.popleft()
            size = piece.nbytes if left < 0 else min(left, piece.nbytes)
            if job.direction is Direction.WRITE:
                ctypes.memmove(piece.remote, piece.local, size)
            else:
                ctypes.memmove(piece.local, piece.remote, size)
            if size < piece.nbytes:
                rest = Piece(
                    piece.kind,
                    piece.local + size,
                    piece.device_id,
                    piece.remote + size,
                    piece.nbytes - size,
                )
                job.pieces.appendleft(rest)
            left -= size if left > 0 else 0
        if not job.pieces and (job.released or link.removed):
            link.source.jobs.remove(job)
