"""Limits of the documentation: its size, its line lengths, its links, the files it names, and what it says of settings:
their names, defaults and allowed values."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from services.batch.config import BatchConfig
from services.gateway.config import GatewayConfig
from services.launch.config import WorkerGroupConfig
from services.openai.bodies import ChatBody, CompletionBody
from smc.api.engine_config import DISTRIBUTION_BYTES, GPU_PREFILL, MAX_QUEUE, EngineConfig
from smc.api.sampling_params import SETTINGS, SamplingParams
from smc.api.settings import OneOf, Setting, settings_of

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/ray/README.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

MAX_WORDS = 22_500
"""Words of all pages in docs/ together."""
MAX_README = 155
"""Maximum number of lines of README.md."""
MAX_COLUMNS = 120


def _without_code(text: str) -> str:
    """The text with blocks of code replaced by empty lines."""
    return re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _without_code(page.read_text()), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def _links(page: Path) -> Iterator[tuple[str, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield path, anchor


def _rows(page: str, *head: str) -> list[list[str]]:
    """The cells of all rows of a page's tables with these first columns."""
    text = (ROOT / "docs" / page).read_text()
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        if tuple(names[: len(head)]) == head:
            found += rows
    return found


def _words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _numbers(cell: str) -> list[float]:
    """The numbers in a cell, without words and links."""
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", cell)
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?", plain)]


OPTIONS: dict[str, tuple[Setting, Any]] = {
    name.replace("_", "-"): (known, default)
    for kind in (EngineConfig, WorkerGroupConfig, GatewayConfig, BatchConfig)
    for name, known in settings_of(kind).items()
    for default in [kind.__dataclass_fields__[name].default]
}
"""Options of the service, with their settings and defaults."""
COMPUTED = {
    "max-queue": [MAX_QUEUE],
    "max-chains": [DISTRIBUTION_BYTES / 2**30],
    "prefill-chunk": [EngineConfig().prefill_chunk, GPU_PREFILL["prefill_chunk"]],
    "prefill-share": [GPU_PREFILL["prefill_share"]],
    "smc-block": [EngineConfig().fixed_block],
    "branches": [EngineConfig().branches],
}
"""Numbers in the defaults of options that are computed, or that differ between devices."""
OPTION_ROWS = [
    (page, *row)
    for page, head in (("scheduling.md", "setting"), ("speculation.md", "setting of the service"))
    for row in _rows(page, head, "default")
]
FIELD_ROWS = [(name, row[1]) for row in _rows("openai.md", "field") for name in _words(row[0])]


def test_the_tables_of_settings_are_read():
    assert len(OPTION_ROWS) >= 15 and len(FIELD_ROWS) >= 50


@pytest.mark.parametrize(("page", "name", "default", "meaning"), OPTION_ROWS, ids=[row[1] for row in OPTION_ROWS])
def test_tables_of_options_say_what_the_settings_say(page, name, default, meaning):
    (shown,) = _words(name)
    known, value = OPTIONS[shown.removeprefix("--")]
    assert known.help and shown.startswith("--") == known.has_flag
    if isinstance(value, str):
        assert _words(default) == [value] and not _numbers(default)
    else:
        computed = COMPUTED.get(shown.removeprefix("--"), [])
        assert _numbers(default) == (computed or ([value] if value is not None else [])) and not _words(default)
    if isinstance(known.check, OneOf) and shown != "--default-method":  # whose values another page lists
        assert {*_words(default), *_words(meaning)} == set(known.check.names)


@pytest.mark.parametrize(("name", "meaning"), FIELD_ROWS, ids=[name for name, _ in FIELD_ROWS])
def test_tables_of_fields_say_what_the_settings_say(name, meaning):
    """Fields exist. Where the table names bounds, they are the largest and the smallest allowed value."""
    body = {**ChatBody.model_fields, **CompletionBody.model_fields}
    assert name in body or name in SETTINGS
    if name not in SETTINGS:
        return
    known = SETTINGS[name]
    assert known.check is not None or "default" not in meaning
    if isinstance(known.check, OneOf):
        assert set(_words(meaning)) & set(known.check.names) in (set(), set(known.check.names)), "some are missing"
    bounds = re.findall(r"(-?[\d.]+) (?:\([^)]*\) )?to (-?[\d.]+)\b", meaning)
    if isinstance(getattr(SamplingParams(), name), bool):
        bounds = []  # those of another type that a field has, too
    for low, high in bounds:
        assert known.check is not None
        beyond = 0.001 if "." in low else 1
        for bound, outside in ((float(low), float(low) - beyond), (float(high), float(high) + beyond)):
            assert _allows(known.check, name, bound) and not _allows(known.check, name, outside)
    said = re.findall(r"default:? (\d[\d.]*\d|\d)\b", meaning) + re.findall(r"`(\w+)` \(default\)", meaning)
    values = [getattr(SamplingParams(method=method), name) for method in ("exact", "smc")]
    assert all(one in [f"{value:g}" if isinstance(value, float) else str(value) for value in values] for one in said)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_defaults_that_sentences_name(page):
    """As in `--option` (8192) and `option` (default 60 s)."""
    for name, default in re.findall(r"`(?:--)?([a-z][a-z-]+)` \((?:default:? )?(\d[\d,.]*\d|\d)\b", page.read_text()):
        if name in OPTIONS and OPTIONS[name][1] is not None:
            assert float(default.replace(",", "")) == OPTIONS[name][1], name


def test_tables_of_values_name_those_of_the_chart():
    schema = json.loads((ROOT / "deploy/helm/smcserve/values.schema.json").read_text())

    def has(part: dict[str, Any], name: str) -> bool:
        while "$ref" in part:
            part = reduce(dict.__getitem__, part["$ref"].removeprefix("#/").split("/"), schema)
        first, _, rest = name.partition(".")
        inner = part.get("properties", {}).get(first)
        within = (one for key in ("oneOf", "anyOf", "allOf") for one in part.get(key, ()))
        return not name or (inner is not None and has(inner, rest)) or any(has(one, name) for one in within)

    cells = re.findall(r"^\| ([^|]*)\|", (ROOT / "docs/kubernetes.md").read_text(), re.MULTILINE)
    named = [name for cell in cells for name in _words(cell) if re.fullmatch(r"[a-z]\w*(\.\w+)+", name)]
    assert len(named) >= 15
    assert [name for name in named if not has(schema, name)] == []


def _allows(check: Callable[[str, Any], Any], name: str, value: float) -> bool:
    with suppress(ValueError):
        check(name, int(value) if value.is_integer() else value)
        return True
    return False


def test_size():
    assert sum(len(page.read_text().split()) for page in DOCS) <= MAX_WORDS
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README


def test_the_glossary_is_sorted():
    terms = re.findall(r"^\| ([a-z][^|]*?) \|", (ROOT / "docs/glossary.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(terms) >= 10 and terms == sorted(terms)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_lines(page):
    """Lines of tables, code and lines with links may be longer."""
    lines = enumerate(_without_code(page.read_text()).splitlines(), 1)
    long = [
        number for number, line in lines if len(line) > MAX_COLUMNS and not line.startswith("|") and "](" not in line
    ]
    assert not long, f"lines {long} have more than {MAX_COLUMNS} columns"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_resolve(page):
    """Links lead to pages and headings that exist. All pages but two have links."""
    links = list(_links(page))
    assert links or page.name in ("glossary.md", "particles.md")
    for path, anchor in links:
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), path
        assert not anchor or anchor in _anchors(there), f"{path}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_files_that_it_names_exist(page):
    named = re.findall(r"`((?:smc|services|benchmarks|loadtest|tests|proto|deploy)/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_worked_example_is_what_the_reference_computes(capsys):
    """The code of the page prints what the page says, and the picture shows the same words, draws and pages."""
    code, printed = re.findall(
        r"^```(?:python)?\n(.*?)^```$",
        (ROOT / "docs/speculation.md").read_text().partition("### A worked example")[2],
        flags=re.MULTILINE | re.DOTALL,
    )[:2]
    exec(code, {})
    assert capsys.readouterr().out == printed
    lines = {line.split()[0]: re.findall(r"\[(.*?)\]", line) for line in printed.splitlines()}
    texts = {
        group.get("id"): [text.text for text in group]
        for group in ElementTree.parse(ROOT / "docs/example.svg").iter("{http://www.w3.org/2000/svg}g")
    }
    assert sorted(texts["draws"]) == sorted(f"draws {draw.split()[-1]}" for draw in lines["draws"])
    for table in ("before", "after"):
        assert texts[table] == [page for row in lines[table] for page in row.split(", ")]
    paths = [*lines["block"], *(row.replace(" +", "") for row in lines["ahead"])]
    nodes = {tuple(path.split()[:n]) for path in paths for n in range(1, len(path.split()) + 1)}
    assert sorted(texts["words"]) == sorted(node[-1] for node in nodes)


def test_the_path_of_a_request_is_short_and_leads_through_what_there_is():
    """Each file is named once and holds the functions that the table names."""
    rows = re.findall(
        r"^\| \d+ \| `([^`]+\.py)` \| (.+?) \|", (ROOT / "docs" / "overview.md").read_text(), re.MULTILINE
    )
    assert 8 <= len(rows) <= 12 and len({path for path, _ in rows}) == len(rows)
    for path, functions in rows:
        text = (ROOT / path).read_text()
        for owner, _, method in (name.partition(".") for name in re.findall(r"`([^`]+)`", functions)):
            body = re.search(rf"^class {owner}\b.*?(?=^class |\Z)", text, re.MULTILINE | re.DOTALL)
            assert body, f"{path} has no class {owner}"
            assert not method or f"def {method}(" in body[0], f"{path}: {owner} has no {method}"


def test_the_walk_of_a_round_is_short_and_leads_through_what_there_is():
    """The guide of `smc.executor` leads through few files, and what it names for each step is defined there."""
    guide = ast.get_docstring(ast.parse((ROOT / "smc/executor/__init__.py").read_text()))
    assert guide
    steps = guide.partition("\n  plan ")[2].partition("What else")[0]
    named = re.findall(r"`([^`]+)`", guide.partition("What else")[0])
    places = [ROOT / "smc" / package for package in ("executor", "round", "scheduler")]
    found = [[ROOT / f"{name.replace('.', '/')}.py", *(place / f"{name}.py" for place in places)] for name in named]
    files = {path for paths in found for path in paths if path.is_file()}
    assert len(files) == 10, sorted(files)
    elsewhere = ("algorithm/expansion", "algorithm/verification", "scheduler/engine", "scheduler/results")
    beside = [ROOT / f"smc/{name}.py" for name in (*elsewhere, "executor/redraft")]
    nodes = [node for path in (*files, *beside) for node in ast.walk(ast.parse(path.read_text()))]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {
        node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    names = set(re.findall(r"`([^`]+)`", steps)) - {path.stem for path in files}
    parts = {part for name in names if not name.startswith(("smc.", "services.")) for part in name.split(".")}
    assert len(parts) > 30 and parts - defined - {"redraft"} == set()
