"""Shared by tests that run kernels in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smc.attention.fixed_order import FixedTiling
from smc.attention.kernels import Tuning

PIECES = 8


@pytest.fixture
def few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut prefixes into so many pieces a key/value head at most. A launch has a program for each piece that there may
    be, enough for all multiprocessors: of these small passes almost all have nothing to do, and the interpreter runs
    one after another."""
    for of in (FixedTiling, Tuning):
        choose = of.choose
        monkeypatch.setattr(
            of, "choose", staticmethod(lambda *given, choose=choose: replace(choose(*given), pieces=PIECES))
        )
