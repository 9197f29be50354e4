"""Ranks that do not lead: they carry out what the leader passes on, and nobody reads their results."""

from __future__ import annotations

import pytest

from services.link.messages import REQUESTS, Stop, WorkRequest
from services.workers.rank import Rank, follow
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.calibration.warm_up import padding_plan
from smc.executor.forward import StaticForward
from smc.local_engine import ModelPair, local_engine
from smc.round.plan import Contexts
from smc.scheduler.methods import RULES
from smc.types import Decoding


@pytest.mark.parametrize("decoding", [Decoding.WALK, Decoding.DRAFT, Decoding.TARGET])
def test_a_rank_ends_where_its_own_pass_has_failed(decoding, monkeypatch):
    """Its rows are no longer those of the other ranks, so the answers would be wrong."""
    config = EngineConfig(form="lockstep", block=2, max_slots=8)
    engine = local_engine(ModelPair.load(demo.TARGET, demo.DRAFT), config)
    plan = padding_plan(frozenset({decoding}), RULES[decoding].shape(config), 1, config.max_slots, Contexts.SHORT)
    rounds = [REQUESTS.encode(WorkRequest(1, number, plan)) for number in range(3)]
    stop = REQUESTS.encode(WorkRequest(1, 3, Stop()))
    rank = Rank(engine.workers, engine.executor, 1, 1.0)
    follow(rank, iter([*rounds, stop]).__next__)

    def failed(self: StaticForward) -> None:
        raise RuntimeError("a pass has given up")

    monkeypatch.setattr(StaticForward, "check", failed)
    with pytest.raises(RuntimeError, match="a pass has given up"):
        follow(rank, iter([*rounds, stop]).__next__)
