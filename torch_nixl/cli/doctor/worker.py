"""The doctor's worker process: `python -m torch_nixl.cli.doctor.worker FD PARENT`.

It imports NIXL, and lets forked children of its own try what could crash or hang. After each trial
it writes one line of JSON to FD, so that what was found is not lost if a later one ends it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path as FilePath

from torch_nixl.cli.doctor import ucxlog
from torch_nixl.cli.doctor.backends import UCX, find_plugins, find_wheel, try_backend, tuned
from torch_nixl.cli.doctor.children import Json, run_together
from torch_nixl.cli.doctor.cma import try_cma
from torch_nixl.cli.doctor.gpus import try_gpus, try_streams
from torch_nixl.cli.doctor.host import read_host
from torch_nixl.cli.doctor.messages import Message
from torch_nixl.cli.doctor.programs import die_with_parent
from torch_nixl.cli.doctor.report import Host, Path

HOST_TIMEOUT_S = 10.0
CMA_TIMEOUT_S = 10.0
GPU_TIMEOUT_S = 30.0
BACKEND_TIMEOUT_S = 20.0
PAIR_TIMEOUT_S = 45.0

_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def main(descriptor: int) -> None:
    """Try everything and report on `descriptor`."""
    host = _read_host()
    _report(descriptor, host)
    _report(descriptor, Message(cma=try_cma(CMA_TIMEOUT_S)))
    plugins, package = _try_nixl(descriptor)
    if _may_have_gpus(host.host):
        _report(descriptor, Message(gpus=try_gpus(GPU_TIMEOUT_S)))
        _report(descriptor, Message(streams=try_streams(GPU_TIMEOUT_S)))
    # Last: what matters is known by now, should they take all the time there is.
    for name in sorted(plugins):
        _report(descriptor, try_backend(name, plugins[name], package, BACKEND_TIMEOUT_S))


def _try_nixl(descriptor: int) -> tuple[dict[str, FilePath], FilePath | None]:
    """Try UCX; return NIXL's other plugins, by name, and the folder of its package."""
    # Imported only now: if NIXL is missing, or if its import crashes, the above is known already.
    from torch_nixl.engine import nixl
    from torch_nixl.errors import BackendError

    try:
        nixl.load()
    except BackendError as exc:
        _report(descriptor, Message(nixl_failure=str(exc)))
        return {}, None
    wheel, package = find_wheel()
    _report(descriptor, Message(nixl_wheel=wheel))
    plugins = find_plugins(package)
    ucx = try_backend(UCX, plugins.pop(UCX, None), package, BACKEND_TIMEOUT_S)
    _report(descriptor, ucx)
    if ucx.backend is not None and ucx.backend.works:
        _report(descriptor, _try_pair())
    else:
        failure = "the UCX backend can't be used"
        _report(descriptor, Message(path=Path(works=False, failure=failure)))
    return plugins, package


def _may_have_gpus(host: Host | None) -> bool:
    # Where there is no sign of one, to import torch would be seconds for nothing.
    signs = any(FilePath(name).exists() for name in _GPU_FILES)
    return signs or (host is not None and bool(host.gpus))


def _try_pair() -> Message:
    from torch_nixl.cli.doctor.pair import try_pair

    path, log = try_pair(PAIR_TIMEOUT_S)
    return Message(
        path=path,
        ucx_version=ucxlog.version(log),
        ucx_complaints=ucxlog.complaints(log, tuned()),
    )


def _read_host() -> Message:
    # A home on a file server that is gone, or a card's driver, can hang whoever reads.
    [outcome] = run_together([_host], HOST_TIMEOUT_S)
    if outcome.value is None:
        return Message(host_failure=outcome.failure)
    return Message(host=Host.model_validate(outcome.value))


def _host() -> Json:
    value: Json = read_host(FilePath("/")).model_dump(mode="json")
    return value


def _report(descriptor: int, message: Message) -> None:
    os.write(descriptor, message.model_dump_json(exclude_unset=True).encode() + b"\n")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    main(int(sys.argv[1]))
