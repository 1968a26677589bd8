"""Makes "nixl" known to `torch.distributed`, without importing it.

`import torch_nixl` is to cost nothing, so it registers at once only where `torch.distributed` is
loaded already; otherwise a finder in `sys.meta_path` waits for the module with the registry, and
leaves when it comes.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "nixl"

DEVICES = ("cpu", "cuda")
"""Kinds of devices that the group serves where none is named."""

_REGISTRY = "torch.distributed.distributed_c10d"


def register() -> None:
    """Tell `torch.distributed` of the backend. Idempotent.

    The entry point in the group ``torch.distributed.backends`` names this function: torch 2.14 and
    newer call it when the name is first used.
    """
    from torch.distributed.distributed_c10d import Backend

    if NAME.upper() not in Backend._plugins:
        Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def register_when_loaded() -> None:
    """Register now if `torch.distributed` is loaded, or as soon as it is."""
    module = sys.modules.get(_REGISTRY)
    if module is None:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    elif hasattr(module, "Backend"):
        # A build of torch without distributed has the module, but no registry in it.
        register()


def _create(options: Any, backend_options: object) -> dist.ProcessGroup:
    from torch_nixl.process_group.create import create

    return create(options)


class _Finder(MetaPathFinder):
    """Finds one module where it would have been found without it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    """Loads the module as its own loader does, then registers."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Tools that ask a module for its source ask its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if hasattr(module, "Backend"):
            register()
