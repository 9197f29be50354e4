"""Short runs for `smc.evaluation.advise`: what a draft step and a target pass cost on a machine, and how often drafts
are accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method, SamplingParams
from smc.calibration.costs import Effort, room_for, time_costs
from smc.evaluation.advise import Acceptance
from smc.evaluation.batch import run_in_flight
from smc.evaluation.load import fitted, problem_load
from smc.evaluation.machine import Mode
from smc.evaluation.ttft import PromptMachine
from smc.memory.kv_cache import pool_for
from smc.scheduler.latency_model import LatencyModel
from smc.scheduler.stats import EngineStats
from smc.types import ModelRole

BLOCK = 5
WIDE = 8
"""Rows of the second run: with those of the first, one each, it says what width is worth."""
PROBLEMS = 16
BESIDE = 4
"""Of these, in flight."""
MOST_GAIN = 2.0


def measure_costs(machine: PromptMachine, degrees: tuple[int, int], effort: Effort, rows: int) -> LatencyModel:
    """With so many GPUs for draft and target (0: the target's own), of draft steps of up to so many rows. One model
    works at a time, so that they are not in each other's way where they share a GPU."""
    mode = _mode(EngineConfig(form="lockstep", block=BLOCK), degrees, WIDE)
    longest = min(machine.shape(mode, role).max_context for role in ModelRole)
    context = min(room_for(effort.context, BLOCK), longest)
    # Everybody who is timed reads pages of its own; the request of which all of a round is timed needs some, too.
    pages = pool_for(max(4, min(rows, effort.crowd)) * context)
    config = replace(mode.config, max_slots=rows, max_context=context, pages=pages)
    with machine.engine(mode, config) as engine:
        costs = time_costs(engine, effort)
    assert costs is not None, "the context has room for a prompt"
    return costs


def measure_acceptance(
    machine: PromptMachine, degrees: tuple[int, int], law: Mapping[str, Any], problems: int = PROBLEMS
) -> Acceptance:
    """From exact answers to problems, with one row and with `WIDE`. `law`: settings of `SamplingParams`, by name."""
    missed = {}
    for rows in (1, WIDE):
        load = problem_load(machine.tokenizer, problems)
        assert load.answer is not None
        asked = load.asked(SamplingParams(method=Method.EXACT, particles=rows, **law), load.answer)[:problems]
        config = fitted(EngineConfig(form="lockstep", block=BLOCK), asked, BESIDE)
        with machine.engine(_mode(config, degrees, rows), config) as engine:
            for _ in run_in_flight(engine, asked, BESIDE):
                pass
            missed[rows] = missed_share(engine.take_stats(), problems)
    gain = math.log(missed[1] / missed[WIDE]) / math.log(WIDE)
    return Acceptance(1 - missed[1], min(max(gain, 0.0), MOST_GAIN))


def missed_share(stats: EngineStats, answers: int) -> float:
    """Of the tokens that rounds in lockstep compared, those that the target drew otherwise. Never 0 or 1, however few
    there were.

    A round compares tokens up to the first that is wrong; the last round of an answer, up to its end.
    """
    accepted = stats.spec["walk"].accepted_by_position
    found, unfinished = sum(accepted), stats.spec["walk"].rounds - accepted[-1]
    missed = max(0, unfinished - answers)
    return (missed + 0.5) / (found + missed + 1)


def _mode(config: EngineConfig, degrees: tuple[int, int], particles: int) -> Mode:
    return Mode("lockstep" if degrees == (0, 1) else "lockstep-apart", Method.EXACT, config, particles, degrees)
