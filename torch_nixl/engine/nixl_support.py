"""What `nixl.NixlAdapter` stands on: an agent that can be let go, guarded handles, NIXL's errors.

[Note: handles and close]
NIXL's bindings hand out transfers and span lists as integers. Two things follow. A handle that was
released, or whose agent is gone, crashes the process when it is used, so each is wrapped in an
object that knows its state. And a handle does not keep the agent alive: dropping the bound methods
destroys it. `NixlAdapter.close` may race with calls in other threads. It first replaces every bound
method with one that raises, then frees the handles that no thread is inside a call with; a thread
marks its handle before it loads the method, so one of the two always sees the other. The agent
dies with the last call that is still under way.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from torch_nixl.engine.adapter import Direction, Indices, MemoryKind, Region
from torch_nixl.engine.blob import KNOWN_VERSIONS, BlobInfo, knows, parse
from torch_nixl.engine.nixl_environment import UCX_ADVICE, ucx_settings
from torch_nixl.errors import (
    BackendError,
    ClosedError,
    MetadataError,
    PeerLostError,
    RegistrationError,
    TorchNixlError,
    TransferError,
)

MAX_REMEMBERED = 4096
"""Most bytes of a blob whose check is remembered: the same few regions come again and again."""

# A handle's states. See [Note: handles and close].
IDLE, IN_CALL, RELEASED = "idle", "in a call", "released"


class Registration:
    """A registered region."""

    __slots__ = ("alive", "region")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.alive = True


class Handle:
    """An integer of NIXL's that crashes the process when it is used after its release."""

    __slots__ = ("state", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.state = IDLE


class Transfer(Handle):
    """A transfer. Belongs to one thread at a time."""

    __slots__ = ("notified", "remote")

    def __init__(self, value: int, remote: str) -> None:
        super().__init__(value)
        self.remote = remote
        self.notified = False


class SpanList(Handle):
    """A span list. Several threads may use it, so it has a lock where a transfer has a mark."""

    __slots__ = ("lock", "num_spans", "remote")

    def __init__(self, value: int, num_spans: int, remote: str | None) -> None:
        super().__init__(value)
        self.lock = threading.Lock()
        self.num_spans = num_spans
        self.remote = remote


def _raise_closed(*args: Any) -> NoReturn:
    raise ClosedError("this agent is closed")


class AgentMethods:
    """NIXL's agent as bound methods, which are all that keeps it alive."""

    def bind(self, agent: Any) -> None:
        """Look each method up once: a call then costs no more than NIXL's own."""
        self.register_mem: Any = agent.registerMem
        self.deregister_mem: Any = agent.deregisterMem
        self.get_partial_md: Any = agent.getLocalPartialMD
        self.load_remote_md: Any = agent.loadRemoteMD
        self.check_remote_md: Any = agent.checkRemoteMD
        self.invalidate_remote_md: Any = agent.invalidateRemoteMD
        self.gen_notif: Any = agent.genNotif
        self.get_notifs: Any = agent.getNotifs
        self.create_xfer: Any = agent.createXferReq
        self.prep_dlist: Any = agent.prepXferDlist
        self.make_xfer: Any = agent.makeXferReq
        self.post_xfer: Any = agent.postXferReq
        self.xfer_status: Any = agent.getXferStatus
        self.release_xfer: Any = agent.releaseXferReq
        self.release_dlist: Any = agent.releasedDlistH
        self.closed = False

    def bound(self) -> list[Any]:
        """The methods, which keep the agent alive."""
        return list(vars(self).values())

    def unbind(self) -> None:
        """Let the agent go; every method raises ClosedError from here on."""
        self.closed = True
        for attribute in list(vars(self)):
            if attribute != "closed":
                setattr(self, attribute, _raise_closed)


def free_handles(
    handles: Iterable[Handle],
    release_xfer: Callable[[int], object],
    release_dlist: Callable[[int], object],
    errors: tuple[type[Exception], ...],
) -> None:
    """Free what no thread is inside a call with; the agent is let go already."""
    # Transfers before the lists that they were made from.
    for handle in sorted(handles, key=lambda handle: isinstance(handle, SpanList)):
        # Whatever NIXL says now, the agent goes, and its transfers with it.
        with contextlib.suppress(*errors):
            if isinstance(handle, SpanList):
                with handle.lock:
                    handle.state = RELEASED
                    release_dlist(handle.value)
            elif handle.state is IDLE:
                handle.state = RELEASED
                release_xfer(handle.value)


def check_options(name: str, backends: Sequence[str], progress_thread: float | None) -> None:
    """Raise ValueError unless an agent can be made with these."""
    if not name:
        raise ValueError("an agent needs a name")
    if not backends:
        raise ValueError("an agent needs at least one backend")
    if progress_thread is not None and not progress_thread > 0:
        raise ValueError(f"progress_thread must be positive seconds, got {progress_thread}")


@functools.lru_cache(maxsize=256)
def _parse_small(blob: bytes) -> BlobInfo:
    return parse(blob)


def inspect(metadata: bytes, version: str) -> BlobInfo:
    """Check a blob's form, and return what it says.

    Args:
        metadata: The blob.
        version: That of the NIXL that is to take it in.

    Raises:
        MetadataError: It isn't of the form that this version writes, or that form isn't known.
    """
    if not knows(version):
        raise MetadataError(
            f"metadata of NIXL {version} can't be checked: torch_nixl does not know its form, only "
            f"that of NIXL {', '.join(sorted(KNOWN_VERSIONS))}"
        )
    return _parse_small(metadata) if len(metadata) <= MAX_REMEMBERED else parse(metadata)


def exception_types(nixl: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that NIXL's bindings raise. They have no base of their own."""
    return tuple(
        value
        for name, value in vars(nixl).items()
        if name.startswith("nixl") and name.endswith("Error")
    )


def segments(nixl: Any) -> dict[MemoryKind, Any]:
    """Return NIXL's word for each kind of memory."""
    return {
        MemoryKind.DRAM: nixl.DRAM_SEG,
        MemoryKind.VRAM: nixl.VRAM_SEG,
        MemoryKind.FILE: nixl.FILE_SEG,
        MemoryKind.BLOCK: nixl.BLK_SEG,
        MemoryKind.OBJECT: nixl.OBJ_SEG,
    }


def region_list(nixl: Any, kinds: Mapping[MemoryKind, Any], regions: Sequence[Region]) -> Any:
    """Return regions of one kind in NIXL's form. An empty list is of host memory."""
    if not regions:
        return nixl.nixlRegDList(nixl.DRAM_SEG)
    rows = [(region.address, region.nbytes, region.device_id, "") for region in regions]
    return nixl.nixlRegDList(kinds[regions[0].kind], rows)


def operations(nixl: Any) -> dict[Direction, Any]:
    """Return NIXL's word for each direction."""
    return {Direction.READ: nixl.NIXL_READ, Direction.WRITE: nixl.NIXL_WRITE}


def make_agent(
    nixl: Any,
    name: str,
    backends: Sequence[str],
    backend_params: Mapping[str, Mapping[str, str]],
    progress_thread: float | None,
) -> Any:
    """Make an agent with a lock and with the backends, or raise BackendError saying what to do."""
    config = nixl.nixlAgentConfig()
    config.useProgThread = progress_thread is not None
    if progress_thread is not None:
        config.pthrDelay = max(1, round(progress_thread * 1e6))
    config.useListenThread = False
    # Without a lock NIXL crashes as soon as two threads use it, and the lock costs nothing.
    config.syncMode = nixl.NIXL_THREAD_SYNC_RW
    refusals: tuple[type[Exception], ...] = (RuntimeError, *exception_types(nixl))
    try:
        agent = nixl.nixlAgent(name, config)
    except refusals as exc:
        raise BackendError(
            f"NIXL could not make an agent: {exc}. It looks for $HOME/.nixl.cfg "
            f"(HOME={os.environ.get('HOME')!r}), so that directory must be readable"
        ) from exc
    for backend in backends:
        params = dict(backend_params.get(backend, {}))
        try:
            agent.createBackend(backend, params)
        except refusals as exc:
            if isinstance(exc, nixl.nixlNotFoundError):
                hint = (
                    "there is no such plugin, or a library that it needs is missing. "
                    f"Plugins of this NIXL: {', '.join(agent.getAvailPlugins())}"
                )
            elif backend == "UCX":
                hint = f"UCX sees {ucx_settings()}; {UCX_ADVICE}"
            else:
                hint = f"its parameters are {params}"
            raise BackendError(
                f"NIXL could not set up its {backend} plugin ({exc}): {hint}"
            ) from exc
    return agent


def refused_metadata(nixl: Any, exc: Exception, nbytes: int) -> MetadataError | PeerLostError:
    """Return the error for what loadRemoteMD raised."""
    blob = f"{nbytes} bytes of metadata"
    if isinstance(exc, (nixl.nixlBackendError, nixl.nixlRemoteDisconnectError)):
        return PeerLostError(
            f"whoever {blob} are from can't be reached ({exc}): its process has ended, or no "
            f"network device leads from this side ({ucx_settings()}) to it and back"
        )
    if isinstance(exc, nixl.nixlNotFoundError):
        why = "they tell regions of an agent that isn't known; its connection is needed first"
    elif isinstance(exc, nixl.nixlNotAllowedError):
        why = "they contradict what is known of their agent; if it restarted, remove it first"
    elif isinstance(exc, nixl.nixlInvalidParamError):
        why = "they are this agent's own, or their agent's name became unusable in this process"
    else:
        why = "they aren't NIXL metadata, or of another version"
    return MetadataError(f"NIXL refused {blob} ({exc}): {why}")


def translate(nixl: Any, exc: Exception, remote: str, what: str) -> TorchNixlError | AssertionError:
    """Return the error for what NIXL raised about something that concerns a remote."""
    if isinstance(exc, nixl.nixlRemoteDisconnectError):
        return PeerLostError(
            f"{what} for agent {remote!r} met a broken connection ({exc}): its process has "
            "probably ended, and its own output says why",
            remote=remote,
        )
    if isinstance(exc, nixl.nixlNotFoundError):
        return MetadataError(
            f"{what} for agent {remote!r}: that agent isn't known, was removed, or has not told "
            f"of this memory ({exc})"
        )
    out_of_turn = (nixl.nixlRepostActiveError, nixl.nixlNotPostedError, nixl.nixlInvalidParamError)
    if isinstance(exc, out_of_turn):
        return AssertionError(f"{what} for agent {remote!r} came out of turn ({exc})")
    return TransferError(f"{what} for agent {remote!r} failed ({exc})")


def refused_transfer(
    nixl: Any, exc: Exception, remote: str, counts: tuple[int, int], told: bool
) -> Exception:
    """Return the error for what createXferReq raised.

    Args:
        nixl: NIXL's bindings.
        exc: What it raised.
        remote: The remote's name.
        counts: How many local and remote spans there were.
        told: Whether all of the remote's spans lie in regions that it has told.
    """
    what = f"a transfer between {counts[0]} local and {counts[1]} remote spans"
    if counts[0] == 0 or isinstance(exc, nixl.nixlInvalidParamError):
        return ValueError(
            f"{what}: they must be equally many, at least one, and pairwise equally large"
        )
    if told and isinstance(exc, nixl.nixlNotFoundError):
        return RegistrationError(f"{what}: a local span lies in no registered region ({exc})")
    return translate(nixl, exc, remote, what)


def check_indexed(
    local: SpanList, local_indices: Indices, remote: SpanList, remote_indices: Indices
) -> None:
    """Raise ValueError unless spans of two lists can be paired by these indices."""
    if local.remote is not None or remote.remote is None:
        raise ValueError("the first list must be of local spans, the second of a remote's")
    _check_indices(local_indices, local.num_spans)
    _check_indices(remote_indices, remote.num_spans)
    if len(local_indices) != len(remote_indices):
        raise ValueError(f"{len(local_indices)} local, {len(remote_indices)} remote indices")


def _check_indices(indices: Indices, num_spans: int) -> None:
    """Raise ValueError unless all are in range, and in the form that NIXL reads unconverted."""
    if indices.dtype != np.int32 or not indices.flags.c_contiguous:
        raise ValueError(f"indices must be contiguous int32, got {indices.dtype}")
    if len(indices) == 0:
        raise ValueError("a transfer needs at least one index")
    # Seen as unsigned, negative ones are large: one comparison finds both.
    if np.maximum.reduce(indices.view(np.uint32)) >= num_spans:
        raise ValueError(f"an index is out of range for a list of {num_spans} spans")
