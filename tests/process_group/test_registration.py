"""`import torch_nixl` makes the backend known, whichever is imported first."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from torch_nixl.process_group import registration

ROOT = Path(__file__).parents[2]

_REGISTRY = "n = 'torch.distributed.distributed_c10d'"

_CHECK = """
import sys
assert dist.Backend("nixl") == "nixl"
assert "NIXL" in dist.Backend._plugins
assert dist.Backend.backend_capability["nixl"] == ["cpu", "cuda"]
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
assert not [one for one in sys.meta_path if "torch_nixl" in type(one).__module__]
assert not [one for one in sys.modules if one.startswith(("nixl", "torch_nixl.p2p"))]
import inspect
assert "class Backend" in inspect.getsource(dist.distributed_c10d)
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import torch_nixl, torch.distributed as dist",
        # To look for a module is not to import it.
        "import torch_nixl, importlib.util as i; i.find_spec(n); import torch.distributed as dist",
    ],
)
def test_backend_is_known_whichever_import_comes_first(imports: str) -> None:
    subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{_REGISTRY}\n{imports}\n{_CHECK}"],
        timeout=60,
        check=True,
    )


def test_to_register_again_changes_nothing() -> None:
    registration.register()
    before = dist.Backend._plugins["NIXL"]
    registration.register()
    assert dist.Backend._plugins["NIXL"] is before
    assert dist.Backend.backend_list.count("nixl") == 1


def test_entry_point_names_the_function_that_registers() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = re.escape('[project.entry-points."torch.distributed.backends"]')
    [(module, name)] = re.findall(rf'^{section}\nnixl = "(.*):(.*)"$', text, re.MULTILINE)
    assert getattr(importlib.import_module(module), name) is registration.register
