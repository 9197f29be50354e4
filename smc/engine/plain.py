"""Plain decoding by one model: the baseline of every table, through the same slots, rows and workers as SMC.

Axes: A slots (one per group).
"""

from __future__ import annotations

import numpy as np

from smc.engine.group import Group, Population
from smc.engine.kvrows import KVRows
from smc.engine.messages import SampleBatch
from smc.engine.rows import answer_rows, fail_groups, grow, keys
from smc.engine.slots import Slots
from smc.philox import Purpose


def plain_round(groups: list[Group], slots: Slots, rows: KVRows, side: str, steps: int) -> None:
    """`steps` tokens for every group by the model of one side. No weights: a row is its own answer."""
    population = Population(groups)
    for group in groups:
        group.rounds += 1
        group.tally.rounds += 1
        group.tally.count_tokens(side, steps)
    all_A = np.ones(len(groups), dtype=bool)
    slots_A, kv_S = population.slots_A, rows.kv_S(side)
    first_A = kv_S[slots_A] - population.prompt_A
    count_A = slots.length_S[slots_A] - first_A
    rows_A = rows.of(side, slots_A)[:, 0]
    batch = SampleBatch(
        input=answer_rows(population, all_A, slots, side, rows_A, first_A, count_A),
        branch_rows_RF=rows_A[:, None],
        steps=steps,
        law=population.draft_law if side == "draft" else population.target_law,
        mixture=0.0,
        keys=keys(population, all_A, 1, Purpose.TARGET),
    )
    drawn = rows.workers[side].sample(batch).result()
    kv_S[slots_A] += count_A + steps - 1
    before_A = slots.length_S[slots_A].copy()
    if population.wants_logp:
        slots.logp_SL[slots_A[:, None], before_A[:, None] + np.arange(steps)] = drawn.logq_RFK[:, 0]
    grow(slots, population, all_A, drawn.tokens_RFK[:, 0])
    exists_AK = np.arange(steps) < (slots.length_S[slots_A] - before_A)[:, None]
    fail_groups(population, (np.isnan(drawn.logq_RFK[:, 0]) & exists_AK).any(1), side)
    slots.block_S[slots_A] = slots.length_S[slots_A] - 1
    for group in groups:
        group.committed = int(slots.length_S[group.slots[0]])
