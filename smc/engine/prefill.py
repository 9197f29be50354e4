"""Runs prompts through the models, a chunk at a time, and starts answers.

A prompt is run once per model, in the first row of its group's first slot. When its last chunk has run, the target draws the
first token of every particle, independently, from its own law (design section 2).
"""

from __future__ import annotations

import numpy as np

from smc.engine.group import Group, Population
from smc.engine.kvrows import KVRows
from smc.engine.messages import ExtendBatch, Keys, Rows
from smc.engine.request import Method
from smc.engine.rows import fail_groups, grow
from smc.engine.slots import Slots
from smc.philox import STREAMS_PER_PARTICLE, Purpose


def prefill_step(groups: list[Group], slots: Slots, rows: KVRows, side: str, chunk: int) -> None:
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
        rows.workers[side].extend(ExtendBatch(_rows(plain, rows, side))).result()
    if drawing:
        _draw_first(drawing, slots, rows, side)
    for group, count in plain + drawing:
        group.prefilled[side] += count


def start_answer(group: Group, slots: Slots, rows: KVRows, *, fan_out: bool) -> None:
    """Every particle appends its first token and, unless that ended it, with `fan_out` gets rows that share the prompt."""
    population = Population([group])
    slots.logp_SL[group.slots, 0] = group.first_logp
    grow(slots, population, np.ones(len(group.slots), dtype=bool), group.first_tokens[:, None])
    if not fan_out:
        rows.commit_tokens(population)
        return
    for side in group.prefilled:
        rows.fan_out(group, side)
    rows.commit(population)


def _drawing_side(group: Group) -> str:
    return "draft" if group.params.method is Method.DRAFT else "target"


def _rows(parts: list[tuple[Group, int]], rows: KVRows, side: str) -> Rows:
    """One row and one segment for each prompt."""
    done = [group.prefilled[side] for group, _ in parts]
    tokens = [t for (group, count), start in zip(parts, done) for t in group.request.prompt[start : start + count]]
    return Rows(
        rows_R=np.array([rows.of(side, group.slots[:1])[0, 0] for group, _ in parts], dtype=np.int32),
        starts_R=np.array(done, dtype=np.int32),
        counts_R=np.array([count for _, count in parts], dtype=np.int32),
        tokens_T=np.array(tokens, dtype=np.int64),
        bounds_S=np.arange(len(parts) + 1),
        shared_S=np.zeros(len(parts), dtype=np.int64),
    )


def _draw_first(parts: list[tuple[Group, int]], slots: Slots, rows: KVRows, side: str) -> None:
    groups = [group for group, _ in parts]
    population = Population(groups)
    most = int(population.sizes_G.max())
    batch = ExtendBatch(
        _rows(parts, rows, side),
        draws=Keys(
            seed_R=np.array([g.seed for g in groups], dtype=np.int64),
            round_R=np.zeros(len(groups), dtype=np.int64),
            stream_RD=np.tile(np.arange(most, dtype=np.int64) * STREAMS_PER_PARTICLE, (len(groups), 1)),
            purpose=Purpose.TARGET,
        ),
        law=(population.draft_law if side == "draft" else population.target_law).take(population.particle_A == 0),
    )
    result = rows.workers[side].extend(batch).result()
    fail_groups(population, np.isnan(result.log_z_R)[population.group_A], side)
    for group, tokens_D, logp_D, log_z in zip(groups, result.drawn_RD, result.drawn_logp_RD, result.log_z_R.tolist()):
        group.first_tokens, group.first_logp = tokens_D[: len(group.slots)], logp_D[: len(group.slots)]
        slots.logw_S[group.slots] = log_z
