"""The profile of a round: which engine and which request it is of."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton")
from benchmarks import engine
from smc.api.engine_config import EngineConfig
from smc.api.request import Request


class Submitted(Exception):
    """The request that would be profiled."""


class Submits:
    """Takes the place of an engine on GPUs."""

    def submit(self, request: Request) -> None:
        raise Submitted(request)


@pytest.mark.parametrize("form", ["lockstep", "lookahead"])
@pytest.mark.parametrize("method", ["exact", "smc", "target"])
def test_every_form_and_method_can_be_profiled(form, method, monkeypatch):
    made: list[EngineConfig] = []
    monkeypatch.setattr(engine, "make_engine", lambda args, config, **_: made.append(config) or Submits())
    monkeypatch.setattr(sys, "argv", ["engine", "profile", "--form", form, "--method", method])
    with pytest.raises(Submitted) as submitted:
        engine.main()
    (request,) = submitted.value.args
    assert (made[0].form, made[0].branches) == (form, 4 if form == "lookahead" else 1)
    assert (request.params.method, request.params.rows) == (method, 1 if method == "target" else 8)
