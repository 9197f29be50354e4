"""`make test` repeats the failed tests, and only those."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
ONCE_MORE = ["-n", "0", "--last-failed", "--last-failed-no-failures", "none"]


def test_a_test_of_a_group_that_has_failed_is_run_alone(tmp_path):
    assert " ".join(ONCE_MORE) in MAKEFILE
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.ungrouped"]\n')
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n"
        "@pytest.fixture\ndef broken():\n    raise OSError\n\n"
        "@pytest.mark.xdist_group('ray')\ndef test_error(broken): pass\n\n"
        "@pytest.mark.xdist_group('ray')\n@pytest.mark.parametrize('name', ['a@ray', 'b'])\ndef test_failure(name): "
        "assert name == 'b'\n\n@pytest.mark.parametrize('i', range(5))\ndef test_good(i): pass\n"
    )
    assert pytest_says(tmp_path, "-n", "2", "--dist", "loadgroup") == "1 failed, 6 passed, 1 error"
    assert pytest_says(tmp_path, *ONCE_MORE) == "1 failed, 1 error"


def pytest_says(directory: Path, *arguments: str) -> str:
    """Last line of pytest's output, without the time."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", *arguments]
    own = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | own
    ran = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    return ran.stdout.strip().splitlines()[-1].partition(" in ")[0]
