"""Runs prompts through the models, a chunk at a time, and starts answers.

A prompt is run once per model, in the row of its group's first slot. When its last chunk has run, the target draws the
first token of every particle, independently, from its own law (design section 2).
"""

from __future__ import annotations

import numpy as np

from smc.engine.group import Group, Population
from smc.engine.matcher import DONE, START
from smc.engine.messages import Draws, PromptBatch, Worker
from smc.engine.request import Method
from smc.engine.rounds import commit_tokens
from smc.engine.slots import Slots
from smc.philox import STREAMS_PER_PARTICLE, Purpose

Part = tuple[Group, int]
"""A group, and how many of its prompt's tokens are to be run."""


def prefill_step(groups: list[Group], slots: Slots, workers: dict[str, Worker], side: str, chunk: int) -> None:
    """Up to `chunk` prompt tokens of one side, oldest request first."""
    plain, drawing = [], []
    for group in groups:
        left = group.prompt_size - group.prefilled.get(side, group.prompt_size)
        count = min(left, chunk)
        if count:
            last = count == left and side == _drawing_side(group)
            (drawing if last else plain).append((group, count))
            chunk -= count
    if plain:
        workers[side].run_prompts(_batch(plain, side)).result()
    if drawing:
        _draw_first(drawing, slots, workers[side], side)
    for group, count in plain + drawing:
        group.prefilled[side] += count


def start_answer(group: Group, slots: Slots) -> None:
    """Every particle gets its first token."""
    tokens_N, rules = group.first_tokens, group.rules
    ended_N = np.isin(tokens_N, rules.stop_ids) | (group.params.max_tokens == 1)
    if rules.matcher is not None:
        ended_N |= rules.matcher.after(np.full(len(tokens_N), START), tokens_N) == DONE
    slots.begin(group.slots, tokens_N, group.first_logp, ended_N)
    commit_tokens(slots, Population([group]))


def _drawing_side(group: Group) -> str:
    return "draft" if group.params.method is Method.DRAFT else "target"


def _batch(parts: list[Part], side: str, draws: Draws | None = None) -> PromptBatch:
    """One row for each prompt."""
    done = [group.prefilled[side] for group, _ in parts]
    tokens = [t for (group, count), start in zip(parts, done) for t in group.request.prompt[start : start + count]]
    return PromptBatch(
        rows_R=np.array([group.slots[0] for group, _ in parts], dtype=np.int32),
        starts_R=np.array(done, dtype=np.int32),
        counts_R=np.array([count for _, count in parts], dtype=np.int32),
        tokens_T=np.array(tokens, dtype=np.int64),
        draws=draws,
    )


def _draw_first(parts: list[Part], slots: Slots, worker: Worker, side: str) -> None:
    groups = [group for group, _ in parts]
    population = Population(groups)
    law = population.draft_law if side == "draft" else population.target_law
    draws = Draws(
        law=law.take(population.particle_A == 0),
        seed_R=population.seed_G,
        round_R=np.zeros(len(groups), dtype=np.int64),
        stream_RD=np.tile(np.arange(population.sizes_G.max()) * STREAMS_PER_PARTICLE, (len(groups), 1)),
        purpose=Purpose.TARGET,
    )
    result = worker.run_prompts(_batch(parts, side, draws)).result()
    for group, tokens_D, logp_D, log_z in zip(groups, result.drawn_RD, result.drawn_logp_RD, result.log_z_R.tolist()):
        group.first_tokens, group.first_logp = tokens_D[: len(group.slots)], logp_D[: len(group.slots)]
        slots.logw_S[group.slots] = log_z
        if np.isnan(log_z):
            group.fail(side)
