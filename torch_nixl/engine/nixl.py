"""The `Adapter` over NIXL: the one file of this package that imports nixl.

It speaks to NIXL's bindings, not to its Python wrapper: the wrapper's agent has no lock by
default, which crashes with threads, and its progress thread spins on a whole core. Everything that
NIXL raises ends here: it becomes an error from `torch_nixl.errors`, with NIXL's as ``__cause__``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch_nixl.engine import nixl_support as support
from torch_nixl.engine.adapter import Capabilities, Direction, Indices, MemoryKind, Region, Spans
from torch_nixl.engine.blob import BlobInfo
from torch_nixl.engine.nixl_environment import (
    TUNED_ENVIRONMENT,
    tune_environment,
    tuned_environment,
)
from torch_nixl.engine.nixl_support import (
    IDLE,
    IN_CALL,
    RELEASED,
    Handle,
    Registration,
    SpanList,
    Transfer,
)
from torch_nixl.errors import (
    BackendError,
    ClosedError,
    MetadataError,
    RegistrationError,
    TransferError,
)

__all__ = ["TUNED_ENVIRONMENT", "NixlAdapter", "tuned_environment"]

log = logging.getLogger("torch_nixl.nixl")

# Arguments for "no messages yet" and "whichever backend": NIXL copies both.
_NOTHING: dict[str, list[bytes]] = {}
_ANY_BACKEND: list[int] = []


@functools.cache
def load() -> Any:
    """Import NIXL and return its bindings."""
    raise_exceptions = logging.raiseExceptions
    try:
        # `nixl` picks the wheel that fits this process's CUDA and only then has `_bindings`.
        importlib.import_module("nixl")
        return importlib.import_module("nixl._bindings")
    except ImportError as exc:
        raise BackendError(
            f"NIXL can't be imported ({exc}). Install it with `pip install nixl`; "
            "it exists for Linux on x86-64 and ARM64."
        ) from exc
    finally:
        # Importing nixl turns this off for the whole process. That isn't ours to let happen.
        logging.raiseExceptions = raise_exceptions


class NixlAdapter:
    """One NIXL agent. See `torch_nixl.engine.adapter.Adapter`, whose contract this fulfils.

    Args:
        name: The agent's name, unique among all agents that can reach each other.
        backends: NIXL plugins to set up, in order.
        backend_params: For each plugin, its parameters. NIXL ignores unknown ones silently.
        progress_thread: Longest sleep in seconds of NIXL's own progress thread, which events wake
            earlier. None leaves it off: progress is made by `drain` and `poll` only.

    Raises:
        BackendError: NIXL is missing, or could not set up the agent or a plugin.
        ValueError: The name is empty, no backend was named, or `progress_thread` isn't positive.
    """

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        backend_params: Mapping[str, Mapping[str, str]] | None = None,
        progress_thread: float | None = None,
    ) -> None:
        support.check_options(name, backends, progress_thread)
        self._nixl = nixl = load()
        self._errors = support.exception_types(nixl)
        tune_environment()
        self._name = name
        self._agent = support.AgentMethods()
        self._agent.bind(
            support.make_agent(nixl, name, backends, backend_params or {}, progress_thread)
        )
        ucx_only = set(backends) == {"UCX"}
        self._capabilities = Capabilities(
            free_device_ids=frozenset({MemoryKind.DRAM} if ucx_only else ()),
            backends=tuple(backends),
            version=importlib.metadata.version("nixl"),
        )
        self._segments, self._operations = support.segments(nixl), support.operations(nixl)
        self._region_list = functools.partial(support.region_list, nixl, self._segments)
        self._live: set[Handle] = set()
        self._closing = threading.Lock()

    def __repr__(self) -> str:
        state = f"{len(self._live)} handles" if not self._agent.closed else "closed"
        return f"<NixlAdapter {self._name!r} over {'+'.join(self._capabilities.backends)}, {state}>"

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def register(self, region: Region) -> Registration:
        try:
            self._agent.register_mem(self._region_list([region]), _ANY_BACKEND)
        except self._errors as exc:
            raise RegistrationError(
                f"NIXL refused to register {region.nbytes} bytes of {region.kind.value} memory at "
                f"{region.address:#x}, device {region.device_id} ({exc}); backends: "
                f"{', '.join(self._capabilities.backends)}"
            ) from exc
        return Registration(region)

    def deregister(self, registration: Any) -> None:
        assert registration.alive, "region deregistered twice"
        self._agent.deregister_mem(self._region_list([registration.region]), _ANY_BACKEND)
        registration.alive = False

    def metadata(self, registrations: Sequence[Any], *, connection: bool) -> bytes:
        """Return the blob from which a remote learns of these regions.

        NIXL's blobs hold one kind of memory each and can't be joined: ask once for each kind.

        Raises:
            ValueError: The regions are of several kinds, or there is nothing to tell.
        """
        regions = [registration.region for registration in registrations]
        if not regions and not connection:
            raise ValueError("metadata of no regions and no connection says nothing")
        if len({region.kind for region in regions}) > 1:
            raise ValueError("one blob can tell regions of one kind of memory only")
        assert all(registration.alive for registration in registrations), "region is deregistered"
        blob: bytes = self._agent.get_partial_md(
            self._region_list(regions), connection, _ANY_BACKEND
        )
        return blob

    def add_remote(self, metadata: bytes) -> str:
        """Learn of a remote agent, or of more regions of a known one, and return its name.

        An agent knows itself from the start; its own metadata is refused.

        Raises:
            MetadataError: The blob was refused, or tells regions of an agent that isn't known.
            PeerLostError: The agent can't be reached.
        """
        try:
            name: bytes = self._agent.load_remote_md(metadata)
            return name.decode()
        except UnicodeDecodeError as exc:
            self._agent.invalidate_remote_md(name)
            raise MetadataError("the metadata's agent has a name that isn't text") from exc
        except self._errors as exc:
            raise support.refused_metadata(self._nixl, exc, len(metadata)) from exc

    def inspect(self, metadata: bytes) -> BlobInfo:
        return support.inspect(metadata, self._capabilities.version)

    def remove_remote(self, remote: str) -> None:
        # Of an unknown remote NIXL returns NOT_FOUND without raising: there is nothing to do.
        self._agent.invalidate_remote_md(remote)

    def notify(self, remote: str, message: bytes) -> None:
        """Send a message. See `Adapter.notify`.

        Raises:
            PeerLostError: The connection is known to be broken.
            MetadataError: The remote isn't known.
        """
        try:
            self._agent.gen_notif(remote, message, _ANY_BACKEND)
        except self._errors as exc:
            raise support.translate(
                self._nixl, exc, remote, f"a message of {len(message)} bytes"
            ) from exc

    def drain(self) -> list[tuple[str, bytes]]:
        try:
            arrived = self._agent.get_notifs(_NOTHING, _ANY_BACKEND)
        except self._errors as exc:
            raise BackendError(f"NIXL can't receive messages ({exc})") from exc
        except UnicodeDecodeError:
            # The bindings give up on the whole batch, so what came with it is lost: an agent
            # whose name is not text gets no answer, and others have their deadlines.
            log.warning("dropped messages: one came from an agent whose name is not UTF-8")
            return []
        if not arrived:
            return []
        return [(sender, message) for sender, batch in arrived.items() for message in batch]

    def prepare(
        self,
        direction: Direction,
        local_kind: MemoryKind,
        local: Spans,
        remote_kind: MemoryKind,
        remote_spans: Spans,
        remote: str,
    ) -> Transfer:
        """Set up a transfer. See `Adapter.prepare`.

        Raises:
            MetadataError: A remote span lies in no region that the remote has told.
            RegistrationError: A local span lies in no registered region.
            PeerLostError: The connection is known to be broken.
            ValueError: There are no spans, or the lists differ in length or size.
        """
        remote_list = self._nixl.nixlXferDList(self._segments[remote_kind], remote_spans)
        try:
            value = self._agent.create_xfer(
                self._operations[direction],
                self._nixl.nixlXferDList(self._segments[local_kind], local),
                remote_list,
                remote,
                b"",
                _ANY_BACKEND,
            )
        except self._errors as exc:
            # NIXL doesn't say whose memory it didn't find.
            told = self._agent.check_remote_md(remote, remote_list).value == 0
            counts = len(local), len(remote_spans)
            raise support.refused_transfer(self._nixl, exc, remote, counts, told) from exc
        transfer = Transfer(value, remote)
        self._live.add(transfer)
        return transfer

    def prepare_list(self, kind: MemoryKind, spans: Spans, remote: str | None) -> SpanList:
        agent = self._nixl.NIXL_INIT_AGENT if remote is None else remote
        if len(spans) == 0:
            raise ValueError("a span list needs at least one span")
        try:
            value = self._agent.prep_dlist(
                agent, self._nixl.nixlXferDList(self._segments[kind], spans), _ANY_BACKEND
            )
        except self._errors as exc:
            what = f"a list of {len(spans)} spans"
            if remote is not None:
                raise support.translate(self._nixl, exc, remote, what) from exc
            raise RegistrationError(f"{what}: a span is in no registered region ({exc})") from exc
        spans_list = SpanList(value, len(spans), remote)
        self._live.add(spans_list)
        return spans_list

    def release_list(self, spans: Any) -> None:
        with spans.lock:
            if spans.state is not IDLE:
                raise self._misuse(spans)
            self._agent.release_dlist(spans.value)
            spans.state = RELEASED
        self._live.discard(spans)

    def prepare_indexed(
        self,
        direction: Direction,
        local: Any,
        local_indices: Indices,
        remote_spans: Any,
        remote_indices: Indices,
    ) -> Transfer:
        support.check_indexed(local, local_indices, remote_spans, remote_indices)
        # Always the local list's lock first: two threads can't each hold one and want the other.
        with local.lock, remote_spans.lock:
            for spans in (local, remote_spans):
                if spans.state is not IDLE:
                    raise self._misuse(spans)
            try:
                value = self._agent.make_xfer(
                    self._operations[direction],
                    local.value,
                    local_indices,
                    remote_spans.value,
                    remote_indices,
                    b"",
                    _ANY_BACKEND,
                    False,
                )
            except self._errors as exc:
                if isinstance(exc, self._nixl.nixlInvalidParamError):
                    raise ValueError("the indexed spans differ in size") from exc
                what = f"a {direction.value} of {len(local_indices)} indexed spans"
                raise support.translate(self._nixl, exc, remote_spans.remote, what) from exc
        transfer = Transfer(value, remote_spans.remote)
        self._live.add(transfer)
        return transfer

    def post(self, transfer: Any, notification: bytes = b"") -> bool:
        """Start a transfer. See `Adapter.post`.

        Raises:
            PeerLostError: The remote died, or one of the sides' memory can't be accessed.
            MetadataError: The remote was removed since `prepare`.
            TransferError: The backend failed.
            ValueError: The transfer was posted with a notification before and now without:
                NIXL would send the old one again.
        """
        if transfer.state is not IDLE:
            raise self._misuse(transfer)
        if notification:
            transfer.notified = True
        elif transfer.notified:
            raise ValueError("a transfer once posted with a notification needs one in each post")
        transfer.state = IN_CALL
        try:
            done: bool = self._agent.post_xfer(transfer.value, notification).value == 0
            return done
        except self._errors as exc:
            raise support.translate(self._nixl, exc, transfer.remote, "a transfer") from exc
        finally:
            transfer.state = IDLE

    def poll(self, transfer: Any) -> bool:
        """Make progress; return True once the transfer has completed. See `Adapter.poll`.

        Raises:
            PeerLostError: As for `post`.
            MetadataError: The remote was removed. The bytes keep moving all the same.
            TransferError: The backend failed.
        """
        if transfer.state is not IDLE:
            raise self._misuse(transfer)
        transfer.state = IN_CALL
        try:
            done: bool = self._agent.xfer_status(transfer.value).value == 0
            return done
        except self._errors as exc:
            raise support.translate(self._nixl, exc, transfer.remote, "a transfer") from exc
        finally:
            transfer.state = IDLE

    def release(self, transfer: Any) -> None:
        """Free a transfer. One that is under way is NOT aborted. See `Adapter.release`.

        Raises:
            TransferError: NIXL can't free it while it is under way. Try again later.
        """
        if transfer.state is not IDLE:
            raise self._misuse(transfer)
        transfer.state = IN_CALL
        try:
            self._agent.release_xfer(transfer.value)
        except self._errors as exc:
            raise TransferError(f"NIXL could not free a transfer ({exc})") from exc
        finally:
            transfer.state = IDLE
        transfer.state = RELEASED
        self._live.discard(transfer)

    def close(self) -> None:
        """Destroy the agent, which stops the transfers that it posted. Idempotent.

        A call under way in another thread ends as if nothing had happened, and the agent with it.
        """
        with self._closing:
            if self._agent.closed:
                return
            release_xfer, release_dlist = self._agent.release_xfer, self._agent.release_dlist
            # See [Note: handles and close] for the order.
            self._agent.unbind()
            live = list(self._live)
            self._live.clear()
            support.free_handles(live, release_xfer, release_dlist, self._errors)

    def disown(self) -> None:
        # The parent's agent runs on with the same sockets: its copy here must not be destroyed.
        keep_for_ever = ctypes.pythonapi.Py_IncRef
        keep_for_ever(ctypes.py_object(self._agent.bound()))
        keep_for_ever(ctypes.py_object(self))
        self._agent.unbind()

    def _misuse(self, handle: Handle) -> AssertionError | ClosedError:
        if self._agent.closed:
            return ClosedError(f"agent {self._name!r} is closed")
        return AssertionError(f"a {type(handle).__name__} was used while {handle.state}")
