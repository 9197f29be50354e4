"""Imports run one way: a package imports only those listed before it. Modules of the library's root count as packages of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = [
    ("smc.arrays", "smc.limits", "smc.philox", "smc.statistics"),
    ("smc.laws",),
    ("smc.algorithm",),
    ("smc.models",),
    ("smc.kv", "smc.stops"),
    ("smc.attention", "smc.kernels"),
    ("smc.runtime",),
    ("smc.engine",),
    ("smc.demo",),
    ("smc.evaluation",),
]
"""Layers, lowest first; those of one layer may import each other."""
FORBIDDEN = {"ray", "grpc", "prometheus_client", "services", "loadtest", "tests"}
"""What the library must not know."""


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from smc import demo` names a package.
            yield from [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "smc" else [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def package(module: str) -> str:
    return ".".join(module.split(".")[:2])


def layer(name: str) -> int:
    return next(number for number, names in enumerate(LIBRARY) if name in names)


def test_the_library_s_packages_import_one_way():
    wrong = []
    for path in sorted((ROOT / "smc").rglob("*.py")):
        own = package(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if own == "smc.__init__":
            continue
        for module in imports(path):
            if module.startswith("smc") and layer(package(module)) > layer(own):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_library_knows_nothing_of_the_service():
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sorted((ROOT / "smc").rglob("*.py"))
        for module in imports(path)
        if module.split(".")[0] in FORBIDDEN
    ]
    assert not found, "\n".join(found)


def test_no_two_modules_of_a_package_import_each_other():
    """Circles, at any length, within a package."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted((ROOT / "smc").rglob("*.py"))}
    reached = {name: {module for module in imports(path) if module in modules} for name, path in modules.items()}
    for _ in modules:
        wider = {name: found | {far for near in found for far in reached[near]} for name, found in reached.items()}
        if wider == reached:
            break
        reached = wider
    assert not (circles := [name for name, found in reached.items() if name in found]), circles
