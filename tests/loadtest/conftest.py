from __future__ import annotations

from collections.abc import Callable

import pytest

from loadtest.cli import run
from tests.conftest import Ran, in_this_process
from tests.gateway.conftest import certificates, pair

__all__ = ["certificates", "pair"]


@pytest.fixture
def loadtest(capsys, monkeypatch) -> Callable[..., Ran]:
    return in_this_process(run, capsys, monkeypatch)
