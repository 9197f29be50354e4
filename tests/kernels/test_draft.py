"""Kernels that run at the draft before and after its passes, against torch. See tests/kernels/rounds.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from smc.distributions import NEUTRAL, DistributionSpec, Processors
from smc.executor.ops import RoundOps
from smc.executor.triton_ops import TritonOps
from smc.round.tensors import DraftInputs, TokenTree
from smc.types import OF_BOTH_MODELS, Decoding
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import NO_MASS, VOCAB, WIDTH, Round, assert_equal
from tests.kernels.test_slot_update import selection_of

CPU = torch.device("cpu")
SEEDS = range(2)
KINDS = [frozenset({kind}) for kind in sorted(OF_BOTH_MODELS)] + [OF_BOTH_MODELS]
in_both = pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "lockstep"])


class DraftRound(Round):
    """A round as the draft sees it: slots have one or two pending tokens, and pages are assigned to these and to the
    rows."""

    def __init__(
        self, seed: int, kinds: frozenset[Decoding], lookahead: bool, device: torch.device, **options: int
    ) -> None:
        super().__init__(seed, kinds, lookahead, device, **options)
        rng, n, pending = self.rng, self.slots + 1, 1 if lookahead else 2
        pending_S, held_S = rng.integers(1, pending + 1, n), rng.integers(1, 20, n)
        pending_S[-1], held_S[-1] = 1, 0
        self.state = self.state._replace(
            pending_SQ=self.here(rng.integers(0, VOCAB, (n, pending))),
            pending_S=self.here(pending_S),
            end_S=self.here(held_S + pending_S),
            base_S=self.here(np.minimum(rng.integers(0, 4, n), held_S)),
        )
        pages = (
            rng.integers(1, 999, shape).astype(np.int32)
            for shape in ((self.places, pending), (self.places * self.f, self.k - 1))
        )
        begin_AQ, branch_XB = map(self.here, pages)
        # All else that is drawn does not depend on the number of fields.
        of_law = np.random.default_rng(seed)
        law = {
            name: of_law.integers(0, 9, self.places) if none_R.dtype == np.int64 else of_law.random(self.places)
            for name, none_R in NEUTRAL.items()
        }
        active = Processors.TEMPERATURE | Processors.TOP_K
        self.law = DistributionSpec.of(**law).to(self.device)._replace(active=active)
        arrays = self.plan.arrays._replace(begin_pages_AQ=begin_AQ, branch_pages_XB=branch_XB)
        self.plan = replace(self.plan, arrays=arrays, draft_distribution=self.law).sized()

    def tree(self) -> TokenTree:
        """A random tree: rows of K tokens."""
        rng, drafted, rows = self.rng, self.drafted(), self.places * self.f
        mass_X = rng.normal(size=rows) * 5
        mass_X[rng.random(rows) < self.dead] = NO_MASS
        mass_X[rng.random(rows) < self.nan] = np.nan
        longs = {name: self.here(rng.integers(0, 9, rows)) for name in ("before_X", "text_X", "last_X", "next_X")}
        return TokenTree(
            root_X=drafted.root_X.long(),
            tokens_XK=drafted.tokens_XK.long().contiguous(),
            logq_XK=drafted.logq_XK.contiguous(),
            tail_XB=self.here(rng.integers(1, 999, (rows, self.k - 1)).astype(np.int32)),
            count_X=drafted.count_X.long(),
            alive_X=self.here(rng.random(rows) < 0.8),
            ended_X=drafted.ended_X,
            cut_X=drafted.cut_X.long(),
            outcome_X=self.here(np.arange(rows)),
            mass_X=self.here(mass_X),
            **longs,
        )


def begun(made: DraftRound, ops: RoundOps, by_round: bool) -> tuple:
    """Run `begin_draft` and return everything that is read later; the table of the dummy slot is not."""
    of: DraftInputs = ops.begin_draft(made.state, made.plan, made.law, made.k, by_round)
    rows = of.rows
    assert rows.tables.tail_RB is None and rows.tables.tail_R is None and rows.contexts is made.plan.kind.contexts
    run = (rows.tables.slot_R, *rows.spans, *rows.groups, rows.queries)
    return of.tokens_AQ, run, of.last_A, of.tree, of.first, of.later, made.state.table_SL[:-1]


@in_both
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "+".join(kind.name.lower() for kind in sorted(kinds)))
def test_draft_begin_and_messages_equal_torch(kinds, lookahead):
    for seed in SEEDS:
        kept = []
        for device, ops in ((CPU, RoundOps()), (DEVICE, TritonOps())):
            made = DraftRound(seed, kinds, lookahead, device, largest=64 if seed == 0 else 6)
            first = begun(made, ops, by_round=seed % 3 > 0)
            kept.append((first, ops.pack_rows(made.state, made.plan, made.tree())))
        assert_equal(kept[1], kept[0])


@in_both
def test_particles_go_on_as_by_the_torch_one(lookahead):
    for seed in range(4):
        kept = []
        for device, ops in ((CPU, RoundOps()), (DEVICE, TritonOps())):
            made = DraftRound(seed, OF_BOTH_MODELS, lookahead, device, largest=64 if seed == 0 else 6)
            plan, state, tree, selection = made.plan, made.state, made.tree(), selection_of(made)
            reach_A = state.end_S[plan.arrays.slot_A[selection.particles.ancestor_A]] - selection.cut_A + made.k - 1
            next_ = ops.remap_draft(state, plan, tree, selection, max(1, made.k - seed % 2))
            # All particles share the prompt's pages; pages past the row's end are overwritten before they are read.
            column_L = torch.arange(WIDTH, device=device)
            is_read_AL = (column_L >= state.base_S[plan.arrays.slot_A][:, None]) & (column_L < reach_A[:, None])
            pages_AL = torch.where(is_read_AL, state.table_SL[plan.arrays.slot_A], 0)
            kept.append((next_, pages_AL[plan.arrays.slot_A < made.slots]))
        assert_equal(kept[1], kept[0])
