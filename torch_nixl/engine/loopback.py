"""A fake of NIXL in this process: real bytes, NIXL's manners, and faults on request.

`LoopbackFabric` is the network, `LoopbackAdapter` one agent on it. The adapter behaves like
`nixl.NixlAdapter`, also where that is unpleasant: see [Note: what the fake keeps of NIXL] in
`loopback_world.py` and [Note: look-up] in `loopback_tables.py`. It differs where NIXL would crash
or corrupt memory: misuse is an AssertionError here.

It moves bytes between addresses of this process, whatever kind of memory they are said to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Literal, TypeAlias

from torch_nixl.engine.adapter import Capabilities, MemoryKind
from torch_nixl.engine.loopback_adapter import Call, LoopbackAdapter
from torch_nixl.engine.loopback_world import Agent, World

__all__ = ["Call", "LoopbackAdapter", "LoopbackFabric", "Mode"]

Mode: TypeAlias = Literal["inline", "tcp"]


class LoopbackFabric:
    """A network of loopback agents, and the script of what goes wrong on it.

    Args:
        mode: ``"inline"``: bytes move inside `post`, as between processes of one host.
            ``"tcp"``: they move in steps, and only while the target makes progress.
        free_device_ids: Kinds of memory whose device id the adapters say is free to choose.
    """

    def __init__(
        self,
        *,
        mode: Mode = "inline",
        free_device_ids: Collection[MemoryKind] = (MemoryKind.DRAM,),
    ) -> None:
        if mode not in ("inline", "tcp"):
            raise ValueError(f"mode must be 'inline' or 'tcp', got {mode!r}")
        self._world = World(tcp=mode == "tcp")
        self._incarnations = itertools.count(1)
        self._capabilities = Capabilities(
            free_device_ids=frozenset(free_device_ids),
            backends=("LOOPBACK",),
            version="1",
        )

    def adapter(self, name: str) -> LoopbackAdapter:
        """Make an agent. After its end, by `kill` or `close`, its name can be used again."""
        if not name:
            raise ValueError("an agent needs a name")
        with self._world.lock:
            if self._world.living(name) is not None:
                raise ValueError(f"an agent named {name!r} is alive")
            agent = Agent(name, next(self._incarnations))
            self._world.agents.append(agent)
        return LoopbackAdapter(self._world, agent, self._capabilities)

    def kill(self, name: str) -> None:
        """End an agent as ``kill -9`` ends a process. Its adapter does nothing from here on."""
        with self._world.lock:
            self._world.end(self._agent(name))

    def stop(self, name: str) -> None:
        """Let an agent stand still, as SIGSTOP does: nothing that it calls has any effect yet."""
        with self._world.lock:
            self._agent(name).stopped = True

    def resume(self, name: str) -> None:
        """Undo `stop`."""
        with self._world.lock:
            self._agent(name).stopped = False

    def cut(self, a: str, b: str) -> None:
        """Let nothing pass between two agents, without an error to either."""
        with self._world.lock:
            self._world.cuts.add(frozenset({a, b}))

    def heal(self, a: str, b: str) -> None:
        """Undo `cut`. What waited passes at the sender's next progress."""
        with self._world.lock:
            self._world.cuts.discard(frozenset({a, b}))

    def lose_notifications(self, a: str, b: str, count: int) -> None:
        """Lose the next `count` messages from `a` to `b`, those of transfers included."""
        with self._world.lock:
            self._world.losses[a, b] = count

    def delay(self, nbytes: int | None, *, initiator: str | None = None) -> None:
        """Slow transfers down.

        Args:
            nbytes: Bytes of each transfer that move at a step of progress; None for the default.
            initiator: Only transfers that this agent posts, and before any general delay.
        """
        if nbytes is not None and nbytes <= 0:
            raise ValueError(f"a step must move at least a byte, got {nbytes}")
        with self._world.lock:
            if nbytes is None:
                self._world.steps.pop(initiator, None)
            else:
                self._world.steps[initiator] = nbytes

    def fail_next(
        self, adapter: LoopbackAdapter, what: Call, error: Exception | None = None
    ) -> None:
        """Let the adapter's next call of `what` raise.

        Args:
            adapter: The adapter whose call fails.
            what: The call.
            error: What it raises; by default what NIXL's refusal of that call becomes. A lost
                peer breaks the connection until the remote is removed and added again.
        """
        with self._world.lock:
            adapter.agent.failures[what].append(error)

    def change_keys(self, name: str) -> None:
        """Give what the agent registers from here on another key, as RDMA does.

        A remote that knows such a region by its old key refuses the agent's name for ever.
        """
        with self._world.lock:
            self._agent(name).key += 1

    def _agent(self, name: str) -> Agent:
        agent = self._world.living(name)
        if agent is None:
            raise ValueError(f"no agent named {name!r} is alive")
        return agent
