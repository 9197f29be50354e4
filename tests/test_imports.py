"""Imports run one way: in the library by layers, in the service by a table. Modules at the top of a package count as
packages of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

# All tests of the code run in one process, which reads it once.
pytestmark = pytest.mark.xdist_group("code")
ROOT = Path(__file__).resolve().parents[1]
LIBRARY = [
    ("smc.arrays", "smc.once", "smc.philox", "smc.terminal", "smc.training", "smc.types"),
    ("smc.api",),
    ("smc.distributions",),
    ("smc.algorithm",),
    ("smc.model",),
    (
        "smc.memory",
        "smc.stops",
        "smc.bad_words",
        "smc.grammar",
        "smc.constraints",
        "smc.constraint_masks",
        "smc.mask_reader",
        "smc.potentials",
    ),
    ("smc.round",),
    ("smc.attention", "smc.kernels"),
    ("smc.executor",),
    ("smc.reference",),
    ("smc.scheduler",),
    ("smc.calibration",),
    ("smc.local_engine",),
    ("smc.demo",),
    ("smc.draft_step",),
    ("smc.probe", "smc.draft_dtype"),
    ("smc.loading",),
    ("smc.distill",),
]
"""Layers, lowest first. Packages of one layer may import each other."""
FORBIDDEN = {"ray", "grpc", "prometheus_client", "services", "loadtest", "benchmarks", "tests"}
"""Packages that the library must not import."""
HANDLER = {"gateway.request_handler", "gateway.calls"}
"""The only modules of the gateway that a front end may import. The gateway imports no front end."""
SERVICES = {
    "backend": set(),
    "pb": set(),
    "prompts": {"pb"},
    "metrics": {"metrics_page"},
    "metrics_page": set(),
    "security": set(),
    "connection_options": set(),
    "protobuf": {"pb", "backend"},
    "errors": {"backend", "protobuf"},
    "client": {"pb", "security", "protobuf"},
    "link": {"security"},
    "workers": {"link"},
    "coordinator": {"link", "backend"},
    "gateway": {"pb", "protobuf", "errors", "metrics", "prompts", "security", "backend"},
    "openai": {"backend", "errors", "prompts", "security", *HANDLER},
    "vllm": {"backend", "openai", "prompts", "protobuf", "security", *HANDLER},
    "launch": {"pb", "link", "workers", "coordinator", "gateway", "metrics", "openai", "protobuf", "vllm", "backend"},
    "batch": {"backend", "errors", "launch", "metrics", "openai", "security"},
    "cli": {"batch", "client", "connection_options", "gateway", "launch", "security"},
}
"""For each package of the service, the other packages it may import; a name with a dot is a single module."""
MEASURING = "services.cli.main"
"""The only module of the product that may import `benchmarks`, when a command that measures is called."""
LOADTEST = {
    *("services.client", "services.connection_options", "services.pb", "services.protobuf", "services.security"),
}
"""Modules that the load generator may import: it is a client."""
GENERATED = ROOT / "services" / "pb"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Modules that a file imports, at any nesting level."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from smc import demo` names a package, `from services.cli import options` a module.
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from named if any(is_module(name) for name in named) else [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def sources(root: str) -> list[Path]:
    return [path for path in sorted((ROOT / root).rglob("*.py")) if GENERATED not in path.parents]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def package(module: str) -> str:
    return ".".join(module.split(".")[:2])


def layer(name: str) -> int:
    return next(number for number, names in enumerate(LIBRARY) if name in names)


def test_the_library_s_packages_import_one_way():
    wrong = []
    for path in sources("smc"):
        own = package(name_of(path))
        if own == "smc.__init__":
            continue
        for module in imports(path):
            if module.startswith("smc") and layer(package(module)) > layer(own):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_library_knows_nothing_of_the_service():
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("smc")
        for module in imports(path)
        if module.split(".")[0] in FORBIDDEN
    ]
    assert not found, "\n".join(found)


def test_the_service_s_packages_import_what_the_table_says():
    wrong = []
    for path in sources("services"):
        own = package(name_of(path)).partition(".")[2]
        for module in imports(path):
            other = package(module).partition(".")[2]
            back = module.split(".")[0] in ("loadtest", "benchmarks", "tests") and name_of(path) != MEASURING
            known = SERVICES.get(own, set())
            is_known = other in known or module.removeprefix("services.") in known
            if back or (module.startswith("services.") and other != own and not is_known):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_what_measures_is_imported_by_its_commands_alone():
    """The import is inside a function, so that the product runs where `benchmarks` is not installed."""
    tree = ast.parse(ROOT.joinpath(*MEASURING.split(".")).with_suffix(".py").read_text())
    at_start = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not any(module and module.startswith("benchmarks") for module in at_start)
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("benchmarks")
        for module in imports(path)
        if module.split(".")[0] in ("loadtest", "tests")
    ]
    assert not found, "\n".join(found)


def test_the_load_generator_is_a_client():
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources("loadtest")
        for module in imports(path)
        if module.split(".")[0] in ("services", "benchmarks", "tests") and package(module) not in LOADTEST
    ]
    assert not found, "\n".join(found)


def test_no_two_modules_of_a_package_import_each_other():
    """There is no cycle of any length, within a package or across packages; CycleError names one."""
    modules = {name_of(path): path for root in ("smc", "services", "loadtest", "benchmarks") for path in sources(root)}
    TopologicalSorter(
        {name: {module for module in imports(path) if module in modules} for name, path in modules.items()}
    ).prepare()


def test_only_the_methods_file_of_the_scheduler_asks_which_method_a_request_has():
    for path in sorted((ROOT / "smc" / "scheduler").glob("*.py")):
        if path.name == "methods.py":
            continue
        named = [
            node.lineno
            for node in ast.walk(tree_of(path))
            if (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Method")
            or (
                isinstance(node, ast.Compare)
                and any(
                    isinstance(part, ast.Attribute) and part.attr == "method" for part in (node.left, *node.comparators)
                )
                and "params" in ast.unparse(node)
            )
        ]
        assert not named, f"{path}: asks for a method in lines {named}"


def test_no_class_name_is_defined_twice():
    """A class name has one meaning in the whole product."""
    defined: dict[str, Path] = {}
    for path in (path for root in ("smc", "services") for path in sources(root)):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                other = defined.setdefault(node.name, path)
                assert other == path, f"class {node.name}: in {other} and in {path}"
