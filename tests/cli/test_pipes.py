"""What the commands print where there is no terminal: tables in full width, and signs of progress."""

from __future__ import annotations

import ast
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [
    *(sys.executable, "-c"),
    "import services.cli.demo; services.cli.demo.MAX_ANSWER = 16; from services.cli.main import main; main()",
]
"""`smcserve`, with short answers of the demo."""
WIDE = "; ".join(
    (
        "from rich.table import Table",
        "from smc.terminal import err, out",
        "table = Table(*(f'column{i:02}' for i in range(60)))",
        "table.add_row(*(f'{i}.{i:05}' for i in range(60)))",
        "out.print(table)",
        "err.print(table)",
    )
)
"""Prints a table of 60 columns on both outputs."""


def piped(*command: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run a command with pipes as its output and no input, as a script or a log has them."""
    plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "TERM", "FORCE_COLOR")}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=plain | {"TERM": "xterm"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.parametrize("environment", [{}, {"COLUMNS": "80"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_table_has_its_full_width_in_a_pipe(environment):
    ran = piped(sys.executable, "-c", WIDE, **environment)
    for text in (ran.stdout, ran.stderr):
        assert "…" not in text and all(f"{i}.{i:05}" in text for i in range(60))


def test_a_table_fits_into_a_terminal():
    """A pseudo-terminal of unknown size counts as 80 columns."""
    parent, child = pty.openpty()
    with os.fdopen(parent, "rb") as read:
        subprocess.run([sys.executable, "-c", WIDE], stdin=child, stdout=child, stderr=child, check=True)
        os.close(child)
        shown = bytearray()
        try:
            while block := read.read1(1 << 16):
                shown += block
        except OSError:  # how Linux reports the end of a terminal
            pass
    lines = shown.decode().splitlines()
    assert lines and max(map(len, lines)) <= 200


def test_every_command_prints_through_the_same_two_consoles():
    """No other module makes a console, whose tables would be cut in a pipe, nor a rule, which would be as wide."""
    made = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.func.id}"
        for folder in ("smc", "services", "benchmarks", "loadtest")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != ROOT / "smc/terminal.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Console", "Rule")
    ]
    assert not made, "use smc.terminal: out, err, Heading"


@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["bench", "--concurrency", "1", "--rounds", "1"],
        pytest.param(["demo", "--problems", "1"], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_no_figure_is_replaced_by_dots(words, tmp_path):
    """The demo's answers are short: its tables have the same columns."""
    short = "import services.cli.demo as demo; demo.MAX_ANSWER = 8; from services.cli.main import main; main()"
    command = [sys.executable, "-c", short] if words[0] == "demo" else COMMAND
    ran = piped(*command, *words, XDG_CACHE_HOME=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "…" not in ran.stdout and ran.stdout.strip()
    assert max(map(len, ran.stdout.splitlines())) < 1000, "no line is filled up"


def test_progress_is_said_in_a_pipe():
    """A line at most every `PROGRESS_SECONDS`, with what is done, and the likely time left if it is known."""
    script = "; ".join(
        (
            "import smc.terminal as t",
            "t.PROGRESS_SECONDS = 0.0",
            "p = t.progress_bar().__enter__()",
            "task = p.add_task('rounds', total=4)",
            "p.advance(task)",
            "t.PROGRESS_SECONDS = 1000.0",
            "p.advance(task)",
            "t.PROGRESS_SECONDS = 0.0",
            "p.update(task, description='more', completed=3)",
            "p.__exit__(None, None, None)",
        )
    )
    ran = piped(sys.executable, "-c", script)
    # The time left is known from the second line on, if time has passed.
    (first, second), said = ran.stderr.splitlines(), re.compile(r"(.*?)(, about \d+ s left)?")
    assert first == "rounds: 25%, 0 s" and said.fullmatch(second)[1] == "more: 75%, 0 s" and ran.stdout == ""
