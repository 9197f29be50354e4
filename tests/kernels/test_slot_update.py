"""Kernels that update slots after the selection, against torch, over rounds of all kinds. See
tests/kernels/rounds.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smc.algorithm.selection import NextParticles
from smc.arrays import map_tensors
from smc.executor.ops import RoundOps
from smc.executor.triton_ops import TritonOps
from smc.round.tensors import NextSequences, RoundSelection, SlotState
from smc.types import OF_BOTH_MODELS
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import VOCAB, WIDTH, Round, assert_equal


def selection_of(made: Round) -> RoundSelection[torch.Tensor]:
    """A random selection: survivors keep their batch index, every other batch index continues one of them."""
    rng, a = made.rng, made.places
    ancestor_A = np.arange(a)
    for size, first in zip(made.sizes, made.plan.arrays.first_G.tolist()):
        survivors = np.sort(rng.permutation(size)[: rng.integers(1, size + 1)]) + first
        copies = np.setdiff1d(np.arange(first, first + size), survivors)
        ancestor_A[copies] = rng.choice(survivors, len(copies))
    alive_A = rng.random(a) < 0.8
    bonus_A = np.where(rng.random(a) < (0.4 if made.lookahead else 0.9), rng.integers(0, VOCAB, a), -1)
    row_A = ancestor_A * made.f + rng.integers(0, made.f, a)
    selection = RoundSelection(
        taken_A=rng.integers(0, made.k + 1, a),
        # All rows of a particle begin at the node at which the walk ended.
        cut_A=rng.integers(0, 3, a)[ancestor_A],
        bonus_A=bonus_A,
        ended_A=~alive_A | (rng.random(a) < 0.3),
        text_A=rng.integers(0, 4, a),
        particles=NextParticles(ancestor_A, row_A, alive_A, rng.normal(size=a)),
    )
    return RoundSelection.memory(a).allocate(made.device).write(map_tensors(made.here, selection)).fields


def contents(state: SlotState) -> tuple[torch.Tensor, ...]:
    """Return everything that is read later; of the dummy slot, pages, tokens and text are not."""
    whole = (
        state.end_S,
        state.pending_S,
        state.ended_S,
        state.alive_S,
        state.logw_S,
        state.base_S,
        state.limit_S,
        state.entry_S,
    )
    return *whole, state.table_SL[:-1], state.pending_SQ[:-1], state.text_S[:-1]


@pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "lockstep"])
def test_slots_follow_as_by_the_torch_one(lookahead):
    for seed in range(20):
        kept = []
        for device, ops in ((torch.device("cpu"), RoundOps()), (DEVICE, TritonOps())):
            made = Round(seed, OF_BOTH_MODELS, lookahead, device)
            state, plan, drafted, selection = made.state, made.plan, made.drafted(), selection_of(made)
            logq_SQ = made.here(made.floats(made.slots + 1, made.most))
            reach_A = state.held(plan.arrays.slot_A[selection.particles.ancestor_A]) + made.q
            next_ = ops.remap_target(state, logq_SQ, plan, drafted, selection, lookahead)
            ops.advance(state, plan.arrays.slot_A, selection, next_)
            # All particles share the prompt's pages; pages past the block's end are overwritten before they are read.
            column_L = torch.arange(WIDTH, device=device)
            is_read_AL = (column_L >= state.base_S[plan.arrays.slot_A][:, None]) & (column_L < reach_A[:, None])
            pages_AL = torch.where(is_read_AL, state.table_SL[plan.arrays.slot_A], 0)[plan.arrays.slot_A < made.slots]
            kept.append((next_, logq_SQ[:-1], pages_AL, *contents(state)[:-3], *contents(state)[-2:]))
        assert_equal(kept[1], kept[0])


def test_tokens_of_a_slice_are_kept():
    """`advance` accepts a slice of a wider tensor, as the draft passes it: it has one or two pending tokens."""
    for seed in range(4):
        kept = []
        for device, ops in ((torch.device("cpu"), RoundOps()), (DEVICE, TritonOps())):
            made = Round(seed, OF_BOTH_MODELS, False, device)
            made.drafted()
            selection, a = selection_of(made), made.places
            end_A, pending_A, text_A = (made.here(made.rng.integers(1, 30, a)) for _ in range(3))
            tokens_AQ = made.here(made.rng.integers(0, VOCAB, (a, 2)))[:, :1]
            next_ = NextSequences(end_A, tokens_AQ, pending_A, text_A)
            ops.advance(made.state, made.plan.arrays.slot_A, selection, next_)
            kept.append(contents(made.state))
        assert_equal(kept[1], kept[0])
