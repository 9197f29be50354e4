from __future__ import annotations

from dataclasses import dataclass

import pytest

from services.cli.main import run


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def smcserve(capsys, monkeypatch):
    """Run a command line in this process, on a terminal too wide to wrap a line."""
    monkeypatch.setenv("COLUMNS", "400")

    def call(*arguments: object) -> Ran:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return call
