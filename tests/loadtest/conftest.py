from __future__ import annotations

import pytest

from loadtest.cli import run
from tests.conftest import Ran
from tests.gateway.conftest import certificates, pair

__all__ = ["certificates", "pair"]


@pytest.fixture
def loadtest(capsys, monkeypatch):
    """Run a command line in this process, on a terminal too wide to wrap a line."""
    monkeypatch.setenv("COLUMNS", "400")

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return call
