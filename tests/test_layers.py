"""The import graph of torch_nixl follows the layers of its design.

Read from the source with `ast`, so that imports inside functions and under ``TYPE_CHECKING`` count
too, and so that nothing has to be installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_nixl

ROOT = Path(torch_nixl.__file__).parent

# Lowest first. A module imports only from layers above its own in this table, and from modules of
# its own layer. A name stands for the module, or for the package and all in it; the longest that
# fits counts. Names of modules that do not exist yet are allowed: the table is the plan.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("torch_nixl.errors",),
    (
        "torch_nixl.engine.adapter",
        "torch_nixl.engine.arrays",
        "torch_nixl.engine.blob",
        "torch_nixl.engine.envelope",
        "torch_nixl.engine.extents",
        "torch_nixl.engine.frames",
        "torch_nixl.engine.memory",
        "torch_nixl.engine.spans",
        "torch_nixl.engine.ucx",
        "torch_nixl.engine.wire",
    ),
    (
        "torch_nixl.engine.loopback",
        "torch_nixl.engine.loopback_adapter",
        "torch_nixl.engine.loopback_tables",
        "torch_nixl.engine.loopback_world",
        "torch_nixl.engine.nixl",
        "torch_nixl.engine.nixl_environment",
        "torch_nixl.engine.nixl_support",
    ),
    ("torch_nixl.engine",),
    ("torch_nixl.connect",),
    ("torch_nixl.p2p",),
    ("torch_nixl.collectives",),
    ("torch_nixl.kv",),
    ("torch_nixl.state",),
    ("torch_nixl.process_group",),
    ("torch_nixl.metrics", "torch_nixl.tracing"),
    ("torch_nixl.integrations",),
    ("torch_nixl.bench",),
    ("torch_nixl.cli",),
    ("torch_nixl.testing", "torch_nixl._testing"),
)

# The package itself only re-exports; any module may read its `__version__`.
FACADE = "torch_nixl"

# Modules that must not drag in more than they need, with what they may import from outside.
PURE = {
    "torch_nixl.collectives.choice": frozenset[str](),
    "torch_nixl.collectives.protocol": frozenset[str](),
    "torch_nixl.errors": frozenset[str](),
    "torch_nixl.engine.adapter": frozenset({"numpy"}),
    "torch_nixl.engine.arrays": frozenset({"numpy", "torch"}),
    "torch_nixl.engine.blob": frozenset({"numpy"}),
    "torch_nixl.engine.cuda_driver": frozenset({"cuda"}),
    "torch_nixl.engine.deferred": frozenset[str](),
    "torch_nixl.engine.envelope": frozenset[str](),
    "torch_nixl.engine.extents": frozenset[str](),
    "torch_nixl.engine.frames": frozenset[str](),
    "torch_nixl.engine.shared": frozenset[str](),
    "torch_nixl.engine.spans": frozenset({"numpy"}),
    "torch_nixl.engine.ucx": frozenset({"numpy"}),
    "torch_nixl.engine.wire": frozenset[str](),
    "torch_nixl.engine.memory": frozenset({"numpy", "torch"}),
    "torch_nixl.kv.callbacks": frozenset[str](),
    "torch_nixl.kv.compatibility": frozenset[str](),
    "torch_nixl.kv.frames": frozenset({"numpy"}),
    "torch_nixl.kv.layout": frozenset({"numpy", "torch"}),
    "torch_nixl.kv.leases": frozenset({"numpy"}),
    "torch_nixl.kv.overlap": frozenset({"numpy"}),
    "torch_nixl.kv.plan": frozenset({"numpy"}),
    "torch_nixl.kv.pools": frozenset({"numpy"}),
    "torch_nixl.kv.protocol": frozenset[str](),
    "torch_nixl.kv.ticket": frozenset({"pydantic"}),
    "torch_nixl.p2p.description": frozenset({"torch"}),
    "torch_nixl.p2p.fitting": frozenset({"torch"}),
    "torch_nixl.p2p.manifest": frozenset({"torch"}),
    "torch_nixl.p2p.matching": frozenset[str](),
    "torch_nixl.p2p.nodes": frozenset({"torch"}),
    "torch_nixl.p2p.place": frozenset({"numpy"}),
    "torch_nixl.p2p.protocol": frozenset[str](),
    "torch_nixl.p2p.terms": frozenset[str](),
}

NIXL_PACKAGES = {"nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm", "nixl_meta_utils"}


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(tree: ast.AST, known: frozenset[str]) -> Iterator[str]:
    """Yield every module that a source imports; of `from a import b`, `a.b` if that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in {"importlib.import_module", "import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def _layer(module: str) -> int | None:
    best = None
    for index, names in enumerate(LAYERS):
        for name in names:
            fits = module == name or module.startswith(name + ".")
            if fits and (best is None or len(name) > len(best[1])):
                best = (index, name)
    return best[0] if best else None


def _violations(module: str, source: str, known: frozenset[str]) -> list[str]:
    """Return one sentence for each import of `module` that breaks a rule."""
    own = _layer(module)
    wrong = []
    for target in _imports(ast.parse(source), known):
        top = target.partition(".")[0]
        if top in NIXL_PACKAGES and module != "torch_nixl.engine.nixl":
            wrong.append(f"{module} imports {target}: only torch_nixl.engine.nixl may")
        if top != "torch_nixl" or target == FACADE or module == FACADE:
            continue
        layer = _layer(target)
        if own is None or layer is None:
            wrong.append(f"{module} or {target} has no layer: add it to the table in this test")
        elif layer > own:
            wrong.append(f"{module} imports {target}, which lies in a later layer")
    return wrong


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_imports_only_from_its_own_and_earlier_layers(module: str) -> None:
    assert _violations(module, MODULES[module].read_text(), frozenset(MODULES)) == []


@pytest.mark.parametrize("module", sorted(PURE.keys() & MODULES.keys()))
def test_pure_module_imports_nothing_else_from_outside(module: str) -> None:
    import sys

    tree = ast.parse(MODULES[module].read_text())
    outside = {name.partition(".")[0] for name in _imports(tree, frozenset(MODULES))}
    assert outside - sys.stdlib_module_names - {"torch_nixl"} <= PURE[module]


def test_package_modules_beyond_the_facade_all_have_a_layer() -> None:
    assert [name for name in MODULES if name != FACADE and _layer(name) is None] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("torch_nixl.engine.wire", "from torch_nixl.engine import connection"),
        ("torch_nixl.errors", "import torch_nixl.engine.wire"),
        ("torch_nixl.engine.connection", "def f():\n    from torch_nixl.connect import Connector"),
        ("torch_nixl.connect.connector", "import nixl"),
        ("torch_nixl.engine.loopback", "import importlib\nimportlib.import_module('nixl')"),
        ("torch_nixl.engine.wire", "from torch_nixl.elsewhere import x"),
    ],
)
def test_forbidden_import_is_found(module: str, source: str) -> None:
    known = frozenset({"torch_nixl.engine.connection"})
    assert len(_violations(module, source, known)) == 1


def test_allowed_imports_are_not_reported() -> None:
    source = "from torch_nixl import __version__\nfrom torch_nixl.errors import ClosedError\n"
    assert _violations("torch_nixl.engine.connection", source, frozenset()) == []
