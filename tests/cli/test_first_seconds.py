"""What a command imports before it says what is wrong, or answers: that is what its first seconds are made of."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from services.cli.main import run
code = run(sys.argv[2:])
print(code, sys.argv[1] in sys.modules)
"""


def ran(module: str, *arguments: str) -> str:
    """The exit code, and whether the module was imported by then."""
    command = [sys.executable, "-c", SCRIPT, module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "hi", "-n", "0"),
        ("generate", "hi", "--target", "nowhere", "--draft", "nowhere"),
        ("generate", "hi", "--target", "nowhere"),
        ("generate", "hi", "--device", "tpu"),
        ("serve", "--target", "nowhere", "--draft", "nowhere"),
        ("serve", "--target-tp", "3"),
        ("serve", "--max-queue", "0"),
        ("batch", "nowhere.jsonl", "out.jsonl"),
        ("eval", "--only", "nothing"),
        ("client", "generate", "hi", "--timeout", "0"),
        ("generate", "--nonsense"),
    ],
)
def test_mistakes_are_found_without_torch(arguments):
    assert ran("torch", *arguments) == "2 False"


def test_a_pair_is_checked_without_torch(tmp_path):
    assert ran("torch", "check") == "0 False"
    assert ran("torch", "check", "--target", str(tmp_path), "--draft", str(tmp_path)) == "1 False"


def test_an_answer_needs_no_library_of_symbols():
    """torch imports it where parameters on `meta` are made to exist by its own function: as many seconds as its own."""
    assert ran("sympy", "generate", "hi", "--seed", "1", "--max-tokens", "4") == "0 False"
