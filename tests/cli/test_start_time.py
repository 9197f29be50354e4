"""The libraries that a command imports before it reports a mistake or answers: they determine its start time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from services.cli.main import run
module, *commands = json.load(sys.stdin)
found = [(run(command), module in sys.modules) for command in commands]
print("found", json.dumps(found))
"""
MISTAKES = [
    "generate hi -n 0",
    "generate hi --target nowhere --draft nowhere",
    "generate hi --target nowhere",
    "generate hi --device tpu",
    "serve --target nowhere --draft nowhere",
    "serve --target-tp 5",
    "serve --max-queue 0",
    "batch nowhere.jsonl out.jsonl",
    "eval --only nothing",
    "client generate hi --timeout 0",
    "generate --nonsense",
]


def ran(module: str, *commands: str) -> list[list]:
    """Run `commands` one after another in one process. Returns each one's exit code, and whether `module` was imported
    by then."""
    given = json.dumps([module, *map(str.split, commands)])
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=given, capture_output=True, text=True, timeout=200, check=True
    ).stdout
    return json.loads(said.splitlines()[-1].removeprefix("found "))


def test_mistakes_are_found_without_torch():
    assert dict(zip(MISTAKES, ran("torch", *MISTAKES), strict=True)) == {command: [2, False] for command in MISTAKES}


def test_a_pair_is_checked_without_torch(tmp_path):
    assert ran("torch", "check", f"check --target {tmp_path} --draft {tmp_path}") == [[0, False], [1, False]]


@pytest.mark.slow
def test_an_answer_needs_no_library_of_symbols():
    """torch imports sympy when its own function materialises parameters on `meta`; that takes as long as importing
    torch."""
    assert ran("sympy", "generate hi --seed 1 --max-tokens 4") == [[0, False]]
