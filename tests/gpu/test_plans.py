"""Plans that a GPU copies late."""

from __future__ import annotations

from dataclasses import replace

import torch

from smc.api.engine_config import EngineConfig
from smc.calibration.warm_up import padding_plan
from smc.executor.round_executor import PlanBuffer
from smc.round.plan import IN_FLIGHT, Contexts
from smc.scheduler.methods import RULES
from smc.types import Decoding

LATE = 200_000_000
"""Clocks for which the stream is busy: about 0.1 s."""


def test_a_plan_is_not_overwritten_before_it_is_copied():
    config, device = EngineConfig(form="lockstep", block=2), torch.device("cuda", 0)
    walk = frozenset({Decoding.WALK})
    plan = padding_plan(walk, RULES[Decoding.WALK].shape(config), 4, config.max_slots, Contexts.SHORT)
    buffer, found = PlanBuffer(plan, device), []
    torch.cuda._sleep(LATE)
    for number in range(3 * IN_FLIGHT):
        arrays = plan.arrays._replace(slot_A=plan.arrays.slot_A * 0 + number)
        found.append(buffer.load(replace(plan, arrays=arrays)).arrays.slot_A.clone())
    assert [one.tolist() for one in found] == [[number] * 4 for number in range(3 * IN_FLIGHT)]
