"""Move PyTorch tensors between processes over NIXL.

Importing this package is cheap: no NIXL, no torch, no environment variable, no thread, no log line.
Names are loaded when they are first used. All that it does is to make the backend "nixl" known to
`torch.distributed`, as soon as that is imported.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if sys.version_info < (3, 10):  # noqa: UP036 - pip would have refused; a clone on the path it can't
    raise ImportError("torch_nixl needs Python 3.10 or newer; this is " + sys.version.split()[0])

from torch_nixl.process_group.registration import register_when_loaded

if TYPE_CHECKING:
    from torch_nixl import connect, metrics
    from torch_nixl.collectives.functions import (
        all_gather_tensor,
        all_reduce_tensor,
        all_to_all_tensor,
        barrier,
        broadcast_tensor,
        gather_tensor,
        reduce_scatter_tensor,
        reduce_tensor,
        scatter_tensor,
    )
    from torch_nixl.collectives.work import CollectiveWork
    from torch_nixl.errors import (
        BackendError,
        ClosedError,
        IncompatibleError,
        LeaseConsumed,
        LeaseError,
        LeaseExpired,
        LeaseOutOfRange,
        LeaseReused,
        LeaseUnknown,
        MetadataError,
        PeerLostError,
        PoisonedError,
        RegistrationError,
        TorchNixlError,
        TransferCancelled,
        TransferError,
        TransferTimeout,
    )
    from torch_nixl.kv.cache import CacheGroup, KVCache
    from torch_nixl.kv.client import KVCacheClient
    from torch_nixl.kv.server import KVCacheServer
    from torch_nixl.p2p.channel import Channel
    from torch_nixl.p2p.communicator import Communicator
    from torch_nixl.p2p.default import get_communicator, init, shutdown
    from torch_nixl.p2p.functions import (
        batch_isend_irecv,
        channel,
        irecv_object,
        irecv_tensor,
        irecv_tree,
        isend_object,
        isend_tensor,
        isend_tree,
        recv_object,
        recv_tensor,
        recv_tree,
        send_object,
        send_tensor,
        send_tree,
    )
    from torch_nixl.p2p.tensors import MismatchError
    from torch_nixl.p2p.work import TreeWork, Work
    from torch_nixl.tracing import merge_traces, trace

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CacheGroup",
    "Channel",
    "ClosedError",
    "CollectiveWork",
    "Communicator",
    "IncompatibleError",
    "KVCache",
    "KVCacheClient",
    "KVCacheServer",
    "LeaseConsumed",
    "LeaseError",
    "LeaseExpired",
    "LeaseOutOfRange",
    "LeaseReused",
    "LeaseUnknown",
    "MetadataError",
    "MismatchError",
    "PeerLostError",
    "PoisonedError",
    "RegistrationError",
    "TorchNixlError",
    "TransferCancelled",
    "TransferError",
    "TransferTimeout",
    "TreeWork",
    "Work",
    "__version__",
    "all_gather_tensor",
    "all_reduce_tensor",
    "all_to_all_tensor",
    "barrier",
    "batch_isend_irecv",
    "broadcast_tensor",
    "channel",
    "connect",
    "gather_tensor",
    "get_communicator",
    "init",
    "irecv_object",
    "irecv_tensor",
    "irecv_tree",
    "isend_object",
    "isend_tensor",
    "isend_tree",
    "merge_traces",
    "metrics",
    "recv_object",
    "recv_tensor",
    "recv_tree",
    "reduce_scatter_tensor",
    "reduce_tensor",
    "scatter_tensor",
    "send_object",
    "send_tensor",
    "send_tree",
    "shutdown",
    "trace",
]

# Where each public name lives. `TYPE_CHECKING` above says the same to type checkers.
_HOMES = {
    "BackendError": "torch_nixl.errors",
    "CacheGroup": "torch_nixl.kv.cache",
    "Channel": "torch_nixl.p2p.channel",
    "ClosedError": "torch_nixl.errors",
    "CollectiveWork": "torch_nixl.collectives.work",
    "Communicator": "torch_nixl.p2p.communicator",
    "IncompatibleError": "torch_nixl.errors",
    "KVCache": "torch_nixl.kv.cache",
    "KVCacheClient": "torch_nixl.kv.client",
    "KVCacheServer": "torch_nixl.kv.server",
    "LeaseConsumed": "torch_nixl.errors",
    "LeaseError": "torch_nixl.errors",
    "LeaseExpired": "torch_nixl.errors",
    "LeaseOutOfRange": "torch_nixl.errors",
    "LeaseReused": "torch_nixl.errors",
    "LeaseUnknown": "torch_nixl.errors",
    "MetadataError": "torch_nixl.errors",
    "MismatchError": "torch_nixl.p2p.tensors",
    "PeerLostError": "torch_nixl.errors",
    "PoisonedError": "torch_nixl.errors",
    "RegistrationError": "torch_nixl.errors",
    "TorchNixlError": "torch_nixl.errors",
    "TransferCancelled": "torch_nixl.errors",
    "TransferError": "torch_nixl.errors",
    "TransferTimeout": "torch_nixl.errors",
    "TreeWork": "torch_nixl.p2p.work",
    "Work": "torch_nixl.p2p.work",
    "all_gather_tensor": "torch_nixl.collectives.functions",
    "all_reduce_tensor": "torch_nixl.collectives.functions",
    "all_to_all_tensor": "torch_nixl.collectives.functions",
    "barrier": "torch_nixl.collectives.functions",
    "batch_isend_irecv": "torch_nixl.p2p.functions",
    "broadcast_tensor": "torch_nixl.collectives.functions",
    "channel": "torch_nixl.p2p.functions",
    "gather_tensor": "torch_nixl.collectives.functions",
    "get_communicator": "torch_nixl.p2p.default",
    "init": "torch_nixl.p2p.default",
    "irecv_object": "torch_nixl.p2p.functions",
    "irecv_tensor": "torch_nixl.p2p.functions",
    "irecv_tree": "torch_nixl.p2p.functions",
    "isend_object": "torch_nixl.p2p.functions",
    "isend_tensor": "torch_nixl.p2p.functions",
    "isend_tree": "torch_nixl.p2p.functions",
    "merge_traces": "torch_nixl.tracing",
    "recv_object": "torch_nixl.p2p.functions",
    "recv_tensor": "torch_nixl.p2p.functions",
    "recv_tree": "torch_nixl.p2p.functions",
    "reduce_scatter_tensor": "torch_nixl.collectives.functions",
    "reduce_tensor": "torch_nixl.collectives.functions",
    "scatter_tensor": "torch_nixl.collectives.functions",
    "send_object": "torch_nixl.p2p.functions",
    "send_tensor": "torch_nixl.p2p.functions",
    "send_tree": "torch_nixl.p2p.functions",
    "shutdown": "torch_nixl.p2p.default",
    "trace": "torch_nixl.tracing",
}

# Public modules, loaded the same way.
_MODULES = frozenset({"connect", "metrics"})


def __getattr__(name: str) -> object:
    """Load a public name, from the module that it lives in, on its first use."""
    if name in _MODULES:
        return _import(f"torch_nixl.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import(home), name)
    globals()[name] = value
    return value


def _import(module: str) -> ModuleType:
    """Import a module of this package; say what to install where a dependency is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "numpy", "pydantic"):
            raise
        raise ModuleNotFoundError(
            f"torch_nixl needs {missing}, which is not installed: pip install {missing}",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


register_when_loaded()
