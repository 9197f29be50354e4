"""Limits of the documentation: its size, its line lengths, its links, and the files it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

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
