"""The doctor's worker process: `python -m torch_nixl.cli.doctor.worker FD`.

It imports NIXL, and lets forked children of its own try what could crash or hang. After each trial
it writes one line of JSON to FD, so that what was found is not lost if a later one ends it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path as FilePath

from torch_nixl.cli.doctor import ucxlog
from torch_nixl.cli.doctor.children import Json, run_together
from torch_nixl.cli.doctor.cma import try_cma
from torch_nixl.cli.doctor.messages import Message
from torch_nixl.cli.doctor.report import Backend, Path

CMA_TIMEOUT_S = 10.0
BACKEND_TIMEOUT_S = 20.0
PAIR_TIMEOUT_S = 45.0

_UCX = "UCX"
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_PAIR_ENVIRONMENT = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}


def main(descriptor: int) -> None:
    """Try everything and report on `descriptor`."""
    _report(descriptor, Message(cma=try_cma(CMA_TIMEOUT_S)))
    _try_nixl(descriptor)
    # Last: a device that is broken may take the process with it.
    streams = _describe_streams()
    if streams:
        _report(descriptor, Message(streams=streams))


def _describe_streams() -> tuple[str, ...]:
    # To import torch takes seconds, and where there is no device there is nothing to tell.
    if not any(FilePath(name).exists() for name in _DEVICE_FILES):
        return ()
    try:
        from torch_nixl.engine.device_streams import describe_devices
    except ImportError:
        return ()
    return describe_devices()


def _try_nixl(descriptor: int) -> None:
    # Imported only now: if NIXL is missing, or if its import crashes, the above is known already.
    from torch_nixl.cli.doctor.pair import try_pair
    from torch_nixl.engine import nixl
    from torch_nixl.errors import BackendError

    try:
        nixl.load()
    except BackendError as exc:
        _report(descriptor, Message(nixl_failure=str(exc)))
        return
    wheel, package = _find_wheel()
    _report(descriptor, Message(nixl_wheel=wheel))
    plugins = _find_plugins(package)
    ucx = _try_backend(_UCX, plugins.pop(_UCX, None))
    _report(descriptor, ucx)
    for name in sorted(plugins):
        _report(descriptor, _try_backend(name, plugins[name]))
    if ucx.backend is None or not ucx.backend.works:
        failure = "the UCX backend can't be used"
        _report(descriptor, Message(path=Path(works=False, failure=failure)))
        return
    path, log = try_pair(PAIR_TIMEOUT_S, _PAIR_ENVIRONMENT)
    _report(
        descriptor,
        Message(
            path=path,
            ucx_version=ucxlog.version(log),
            ucx_complaints=ucxlog.complaints(log, _tuned()),
        ),
    )


def _report(descriptor: int, message: Message) -> None:
    os.write(descriptor, message.model_dump_json(exclude_none=True).encode() + b"\n")


def _tuned() -> frozenset[str]:
    """Return the variables that torch_nixl itself sets, of which UCX may use none."""
    from torch_nixl.engine.nixl import tuned_environment

    return frozenset(name for name, _, source in tuned_environment() if source == "torch_nixl")


def _find_wheel() -> tuple[str, FilePath | None]:
    """Return the name of the wheel that was loaded, such as nixl-cu13, and its package's folder."""
    module = sys.modules.get("nixl._bindings")
    package = module.__name__.rpartition(".")[0] if module is not None else ""
    if module is None or not package or module.__file__ is None:
        return "nixl", None
    return package.replace("_", "-"), FilePath(module.__file__).parent


def _find_plugins(package: FilePath | None) -> dict[str, FilePath]:
    """Return NIXL's plugins by name: those in its wheel, and in NIXL_PLUGIN_DIR."""
    folders = []
    if package is not None:
        folders.append(package.parent / f".{package.name}.mesonpy.libs" / "plugins")
    if "NIXL_PLUGIN_DIR" in os.environ:
        folders.append(FilePath(os.environ["NIXL_PLUGIN_DIR"]))
    return {
        path.stem.removeprefix("libplugin_"): path
        for folder in folders
        for path in folder.glob("libplugin_*.so")
    }


def _try_backend(name: str, library: FilePath | None) -> Message:
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".ucx.log") as log:
        [outcome] = run_together([partial(_make_agent, name, library, log.name)], BACKEND_TIMEOUT_S)
        text = FilePath(log.name).read_text(errors="replace") + outcome.output
    works = outcome.value == ""
    detail = outcome.failure or str(outcome.value)
    if name == _UCX and not works:
        detail = "; ".join(ucxlog.complaints(text, _tuned())) or detail
    seconds = round(time.monotonic() - start, 3)
    backend = Backend(name=name, works=works, detail="" if works else detail, seconds=seconds)
    return Message(backend=backend, devices=ucxlog.devices(text) if name == _UCX else None)


def _make_agent(name: str, library: FilePath | None, log: str) -> Json:
    """Return why an agent with this backend can't be made; empty if it can."""
    from torch_nixl.engine.nixl import NixlAdapter
    from torch_nixl.errors import TorchNixlError

    if name == _UCX:
        # Only at this level UCX lists its devices.
        os.environ.update(UCX_LOG_LEVEL="debug", UCX_LOG_FILE=log)
    try:
        NixlAdapter(f"doctor-{os.getpid()}", backends=(name,)).close()
    except TorchNixlError as exc:
        return _missing_library(library) or str(exc)
    return ""


def _missing_library(library: FilePath | None) -> str | None:
    """Say which library is missing, if that is why a plugin can't be loaded."""
    if library is None:
        return None
    try:
        ctypes.CDLL(str(library))
    except OSError as exc:
        missing, _, rest = str(exc).partition(": cannot open shared object file")
        return f"it needs {missing}, which is not installed" if rest else str(exc)
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
