"""Tries NIXL's plugins, each in a child, and looks at what UCX has loaded."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from torch_nixl.cli.doctor import ucxlog
from torch_nixl.cli.doctor.children import Json, run_together
from torch_nixl.cli.doctor.messages import Message
from torch_nixl.cli.doctor.report import Backend, UcxModule

UCX = "UCX"
_DEVICE_MODULES = ("uct_cuda", "uct_ib")
_MODULES = TypeAdapter(tuple[UcxModule, ...])


def find_wheel() -> tuple[str, Path | None]:
    """Return the name of the wheel that was loaded, such as nixl-cu13, and its package's folder."""
    module = sys.modules.get("nixl._bindings")
    package = module.__name__.rpartition(".")[0] if module is not None else ""
    if module is None or not package or module.__file__ is None:
        return "nixl", None
    return package.replace("_", "-"), Path(module.__file__).parent


def find_plugins(package: Path | None) -> dict[str, Path]:
    """Return NIXL's plugins by name: those in its wheel, and in NIXL_PLUGIN_DIR."""
    folders = []
    if package is not None:
        folders.append(package.parent / f".{package.name}.mesonpy.libs" / "plugins")
    if "NIXL_PLUGIN_DIR" in os.environ:
        folders.append(Path(os.environ["NIXL_PLUGIN_DIR"]))
    return {
        path.stem.removeprefix("libplugin_"): path
        for folder in folders
        for path in folder.glob("libplugin_*.so")
    }


def try_backend(name: str, library: Path | None, package: Path | None, timeout: float) -> Message:
    """Make an agent with one plugin, in a child.

    Args:
        name: The plugin's name.
        library: Its file, if known.
        package: Folder of NIXL's package, if known.
        timeout: Seconds.
    """
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".ucx.log") as log:
        task = partial(_make_agent, name, library, package, log.name)
        [outcome] = run_together([task], timeout)
        text = Path(log.name).read_text(errors="replace") + outcome.output
    value = outcome.value if isinstance(outcome.value, dict) else {}
    detail = outcome.failure or str(value.get("problem", ""))
    works = not detail
    if name == UCX and not works:
        detail = "; ".join(ucxlog.complaints(text, tuned())) or detail
    seconds = round(time.monotonic() - start, 3)
    backend = Backend(name=name, works=works, detail=detail, seconds=seconds)
    if name != UCX:
        return Message(backend=backend)
    modules = _MODULES.validate_python(value.get("modules", []))
    return Message(backend=backend, devices=ucxlog.devices(text), modules=modules)


def tuned() -> frozenset[str]:
    """Return the variables that torch_nixl itself sets, of which UCX may use none."""
    from torch_nixl.engine.nixl import tuned_environment

    return frozenset(name for name, _, source in tuned_environment() if source == "torch_nixl")


def _make_agent(name: str, library: Path | None, package: Path | None, log: str) -> Json:
    """Return why an agent with this backend can't be made, empty if it can; and UCX's modules."""
    from torch_nixl.engine.nixl import NixlAdapter
    from torch_nixl.errors import TorchNixlError

    if name == UCX:
        # Only at this level UCX lists its devices.
        os.environ.update(UCX_LOG_LEVEL="debug", UCX_LOG_FILE=log)
    try:
        adapter = NixlAdapter(f"doctor-{os.getpid()}", backends=(name,))
        maps = Path("/proc/self/maps").read_text(errors="replace")
        adapter.close()
    except TorchNixlError as exc:
        return {"problem": missing_library(library) or str(exc)}
    if name != UCX:
        return {"problem": ""}
    modules = look_at_modules(package, re.findall(r"\S*/libuct_\S+", maps))
    return {"problem": "", "modules": [module.model_dump(mode="json") for module in modules]}


def look_at_modules(package: Path | None, mapped: Sequence[str]) -> tuple[UcxModule, ...]:
    """Say of UCX's modules for CUDA and RDMA whether they are there and loaded, and why not.

    Args:
        package: Folder of NIXL's package, if known. Its libraries lie beside it.
        mapped: Libraries of UCX that a process with an agent has loaded.
    """
    folders = [package.parent / f"{package.name}.libs" / "ucx"] if package is not None else []
    if "UCX_MODULE_DIR" in os.environ:
        folders.append(Path(os.environ["UCX_MODULE_DIR"]))
    found = []
    for name in _DEVICE_MODULES:
        files = [path for folder in folders for path in sorted(folder.glob(f"lib{name}.so*"))]
        loaded = any(re.match(rf"lib{name}\b", os.path.basename(path)) for path in mapped)
        if loaded:
            why = ""
        elif not files:
            why = "it is not installed"
        else:
            unwanted = "UCX did not want it: no device for it, or UCX_TLS leaves it out"
            why = missing_library(files[0]) or unwanted
        present = bool(files) or loaded
        found.append(UcxModule(name=name, present=present, loaded=loaded, detail=why))
    return tuple(found)


def missing_library(library: Path | None) -> str | None:
    """Say which library is missing, if that is why another can't be loaded."""
    if library is None:
        return None
    try:
        ctypes.CDLL(str(library))
    except OSError as exc:
        missing, _, rest = str(exc).partition(": cannot open shared object file")
        return f"it needs {missing}, which is not installed" if rest else str(exc)
    return None
