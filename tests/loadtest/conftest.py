from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from loadtest.cli import run
from smc.demo.problems import generate
from tests.conftest import Ran, in_this_process
from tests.gateway.conftest import certificates, pair

__all__ = ["certificates", "pair"]


_generate = cache(generate)


@pytest.fixture(autouse=True)
def problems(monkeypatch) -> None:
    """Generate the thousands of problems that every workload needs only once."""
    monkeypatch.setattr("loadtest.workload.problems.generate", _generate)


@pytest.fixture
def loadtest(capsys, monkeypatch) -> Callable[..., Ran]:
    return in_this_process(run, capsys, monkeypatch)
