"""Replaced words of our own do not return: in names, comments, docstrings and other texts of the code, and in
protocols, charts and other files of deploy/, and in comments of the tests. `tests.test_docs` checks the pages."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import words

pytestmark = pytest.mark.xdist_group("code")

ROOT = Path(__file__).parents[1]
FOLDERS = ("smc", "services", "benchmarks", "loadtest", "deploy")
OTHER_FILES = ("proto", "deploy")
TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
"""From Python 3.12 on the text of an f-string is a token of its own."""
OF_USERS = {"cohorts", "gangs"}
"""Names that users write in a configuration: they stay."""
STANDARD = re.compile(r"component: gang|\"gang\"|\bcohorts\b|\^gangs\$|Little's law")
"""Exceptions in files other than Python: a label by which users select pods, keys of the configuration, a name from
the literature."""


@cache
def _replaced(text: str, is_name: bool) -> dict[str, str]:
    """A name is in many places."""
    gone = words.ANYWHERE | words.IN_CODE
    return words.replaced(words.parts(text), gone | words.IN_NAMES if is_name else gone)


def _tokens(file: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether the token is a name) of each name, comment and string."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string, True
        elif token.type in TEXTS:
            yield token.start[0], token.string, False


@pytest.mark.parametrize("folder", FOLDERS)
def test_replaced_words_do_not_come_back(folder):
    found = [
        f"{file.relative_to(ROOT)}:{line}: {word} (write: {standard})"
        for file in sorted((ROOT / folder).rglob("*.py"))
        if ROOT / "services/pb" not in file.parents
        for line, text, is_name in _tokens(file)
        if text.strip("\"'") not in OF_USERS
        for word, standard in _replaced(text, is_name).items()
    ]
    assert not found, "\n".join(found)


def test_replaced_words_do_not_come_back_to_comments_of_tests():
    """Only comments and docstrings are checked. Names of tests may contain such words."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {word} (write: {standard})"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        if file.name != "words.py"
        for line, text, is_name in _tokens(file)
        if not is_name and text.startswith(("#", '"""'))
        for word, standard in words.replaced(words.parts(STANDARD.sub("", text)), words.ANYWHERE).items()
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", OTHER_FILES)
def test_replaced_words_do_not_come_back_to_other_files(folder):
    files = [
        file for file in sorted((ROOT / folder).rglob("*")) if file.is_file() and file.suffix not in (".py", ".pyc")
    ]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {word} (write: {standard})"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for word, standard in words.replaced(STANDARD.sub("", line), words.ANYWHERE | words.IN_CODE).items()
    ]
    assert files and not found, "\n".join(found)


def test_parts_of_names_count():
    assert set(words.replaced(words.parts("_place_N, isPlace, OFFERED_AC"), words.IN_NAMES)) == {"place", "offered"}
    assert words.replaced("replaced, placement, masked", words.IN_NAMES) == {}
