"""Names of arrays follow one legend of axes: the docstring of `smc`."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from string import ascii_uppercase

import pytest

ROOT = Path(__file__).resolve().parents[1]
AXES = re.compile(r"\b_*[a-z]\w*_([A-Z0-9]*[A-Z][A-Z0-9]*)\b")
NO_AXES = {"do_GET", "do_HEAD"}
"""Names that the standard library gives to methods."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def legend(tree: ast.Module) -> list[str]:
    """Letters that the legend explains, one in a line."""
    return re.findall(r"^([A-Z])  \S", ast.get_docstring(tree) or "", re.MULTILINE)


def local_letters(tree: ast.Module) -> list[str]:
    """Letters that the paragraph "Local axes" of a docstring explains."""
    found = re.search(r"^Local axes: (.*?)(?:\.\s|\.?\Z)", ast.get_docstring(tree) or "", re.MULTILINE | re.DOTALL)
    return re.findall(r"(?:^|, | and )([A-Z])(?=\s)", re.sub(r"\s+", " ", found[1])) if found else []


@cache
def globally() -> Counter[str]:
    return Counter(legend(parsed(ROOT / "smc/__init__.py")))


def fields_of(tree: ast.Module) -> set[str]:
    """Names of the fields of a module's classes."""
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    lines = [line for body in bodies for line in body if isinstance(line, ast.AnnAssign)]
    return {line.target.id for line in lines if isinstance(line.target, ast.Name)}


@cache
def fields() -> frozenset[str]:
    """Names of all fields of `smc`: their axes are explained where the class stands."""
    paths = (path for path in (ROOT / "smc").rglob("*.py") if needs_local_letters(path.read_text()))
    return frozenset().union(*(fields_of(parsed(path)) for path in paths))


@cache
def local_name() -> re.Pattern[str]:
    others = "".join(set(ascii_uppercase) - set(globally()))
    return re.compile(rf"[a-z0-9]_[A-Z0-9]*[{others}][A-Z0-9]*\b")


def needs_local_letters(text: str) -> bool:
    """Whether a module explains local letters, or has names with letters that the legend does not explain."""
    return "Local axes" in text or local_name().search(text) is not None


def first_lines(tree: ast.Module) -> dict[str, int]:
    """Every name that a module gives or reads, with the first line that has it."""
    found: dict[str, int] = {}
    for node in ast.walk(tree):
        for attribute in ("id", "arg", "attr", "name"):
            if isinstance(name := getattr(node, attribute, None), str):
                line = getattr(node, "lineno", 0)
                found[name] = min(line, found.get(name, line))
    return found


def faults(path: Path, text: str) -> list[str]:
    """What a module's names and its paragraph "Local axes" have wrong."""
    if not needs_local_letters(text):
        return []
    tree, is_package = ast.parse(text), path.name == "__init__.py"
    around = [] if is_package else [folder / "__init__.py" for folder in path.parents if folder.is_relative_to(ROOT)]
    own = local_letters(tree)
    local = Counter(own) + Counter(letter for each in around if each.exists() for letter in local_letters(parsed(each)))
    found = [f"{letter} is explained {count} times" for letter, count in (globally() + local).items() if count > 1]
    theirs, used = fields() - fields_of(tree), set()
    for name, line in first_lines(tree).items():
        match = AXES.fullmatch(name)
        if match is None or name in NO_AXES:
            continue
        letters = set(match[1]) - set("0123456789")
        used |= letters
        if name not in theirs and (unknown := sorted(letters - set(globally()) - set(local))):
            found.append(f"line {line}: {name}: nothing explains {', '.join(unknown)}")
    if not is_package:
        found += [f"{letter} is explained, and no name has it" for letter in own if letter not in used]
    return [f"{path.relative_to(ROOT)}: {fault}" for fault in found]


def test_every_axis_is_explained() -> None:
    paths = [path for place in ("smc", "benchmarks", "tests") for path in sorted((ROOT / place).rglob("*.py"))]
    found = [fault for path in paths for fault in faults(path, path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("logits_RV = 1", []),
        ("def f(split_PR): ...", ["line 1: split_PR: nothing explains P"]),
        ("f(x_ZR=1)", ["line 1: x_ZR: nothing explains Z"]),
        ('"""A module.\n\nLocal axes: P splits, Y = P * R parts."""\nsplit_PR = part_Y', []),
        ('"""A module.\n\nLocal axes: P splits. Y = P * R."""\nx_P = 1\ny_Y = 2', ["line 5: y_Y: nothing explains Y"]),
        ('"""A module.\n\nLocal axes: R splits."""\nx_R = 1', ["R is explained 2 times"]),
        ('"""A module.\n\nLocal axes: P splits."""', ["P is explained, and no name has it"]),
        ("rows.row_Y", []),
    ],
)
def test_faults_are_found(text: str, said: list[str]) -> None:
    assert faults(ROOT / "smc/example.py", text) == [f"smc/example.py: {fault}" for fault in said]
