"""Kernels that keep inner nodes of a block and grow rows from them, against torch. See tests/kernels/rounds.py.

Local axes: P nodes from which rows may begin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smc.algorithm.expansion import CandidateTokens
from smc.executor.ops import RoundOps
from smc.executor.triton_ops import TritonOps
from smc.round.tensors import DraftStep, GrownRows, InnerNodes, RoundSelection
from smc.types import OF_BOTH_MODELS, Decoding
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import VOCAB, assert_equal
from tests.kernels.test_draft import CPU, DraftRound
from tests.kernels.test_slot_update import selection_of
from tests.pairwise import one_of

BEST = frozenset({Decoding.WALK})
WIDTH = VOCAB + 1
"""Candidates of a row: every token, and one for the rest."""


def grown_rows(made: DraftRound) -> GrownRows:
    """K random steps, or fewer: every step continues rows of the step before, and the tokens are those of the resulting
    paths."""
    rng, rows, kept = made.rng, made.places * made.f, []
    steps = made.k if rng.random() < 0.6 else int(rng.integers(1, made.k + 1))
    tokens_XK = np.zeros((rows, made.k), np.int64)
    for step in range(steps):
        parent_X = np.arange(rows)
        for size, first in zip(made.sizes, made.plan.arrays.first_G.tolist()):
            mine = slice(first * made.f, (first + size) * made.f)
            parent_X[mine] = np.sort(rng.integers(mine.start, mine.stop, mine.stop - mine.start))
        token_XC = np.stack([rng.permutation(WIDTH) for _ in range(rows)])
        candidate_X = rng.integers(0, 3, rows)
        tokens_XK = tokens_XK[parent_X]
        tokens_XK[:, step] = token_XC[parent_X, candidate_X]
        tree = made.tree()._replace(tokens_XK=made.here(tokens_XK), mass_X=made.here(rng.normal(size=rows)))
        shares_XC = made.here(made.floats(rows, WIDTH))
        candidates = CandidateTokens(made.here(token_XC), shares_XC, shares_XC)
        kept.append(DraftStep(tree, made.here(parent_X), candidates))
    # Some rows end at an earlier step; their tokens are those of the same paths.
    step_X = np.where(rng.random(rows) < 0.3, rng.integers(0, steps, rows), steps - 1)
    leaf_X = made.here(step_X * rows + np.arange(rows))
    tokens_XK = torch.cat([step.tree.tokens_XK for step in kept])[leaf_X]
    return GrownRows(tree._replace(tokens_XK=tokens_XK), tuple(kept), leaf_X)


def selection_for(made: DraftRound, grown: GrownRows) -> RoundSelection:
    """A selection in which the block of every row is accepted completely, unless the row ends."""
    selection = selection_of(made)
    whole_A = grown.leaf_X[selection.particles.row_A] // len(grown.leaf_X) + 1
    selection.taken_A.copy_(torch.where(selection.ended_A, torch.minimum(selection.taken_A, whole_A), whole_A))
    return selection


def nodes_of(made: DraftRound, ops: RoundOps) -> tuple[InnerNodes, RoundSelection]:
    nodes, grown = InnerNodes.allocate(made.slots, made.k, VOCAB, made.device), grown_rows(made)
    selection = selection_for(made, grown)
    # Of the blocks before.
    nodes.share_SKC.fill_(0.5)
    ops.store_inner_nodes(nodes, made.state, made.plan, grown, selection)
    return nodes, selection


@pytest.mark.parametrize("kinds", one_of(OF_BOTH_MODELS, BEST), ids=["all", "best"])
def test_nodes_are_the_torch_ones(kinds):
    seen = 0
    for seed in range(6):
        kept = []
        for device, ops in ((CPU, RoundOps()), (DEVICE, TritonOps())):
            made = DraftRound(seed, kinds, True, device, largest=64 if seed == 0 else 6)
            if made.k == 1:
                break
            nodes, _ = nodes_of(made, ops)
            begun = ops.begin_draft(made.state, made.plan, made.law, made.k, by_round=True).tree
            shares_AC = made.here(made.floats(made.places, WIDTH))
            token_AC = made.here(made.rng.integers(0, VOCAB, (made.places, WIDTH)))
            candidates, rows, bounds = ops.with_inner_nodes(
                nodes, made.plan, begun, CandidateTokens(token_AC, shares_AC, shares_AC)
            )
            has_mass_PC = candidates.share_RC > -torch.inf
            seen += int(has_mass_PC.sum())
            slots = made.plan.arrays.slot_A
            # Of a candidate without a share, and of a node without candidates, no other field is compared.
            is_there_P = has_mass_PC.any(-1) | (rows.cut_X == 0)
            # All padding writes to the dummy slot.
            is_there_P = is_there_P & (slots < made.slots).repeat_interleave(made.k)
            has_mass_PC = has_mass_PC & is_there_P[:, None]
            kept.append(
                (
                    candidates.share_RC.masked_fill(~has_mass_PC, -torch.inf),
                    candidates.logq_RC.masked_fill(~has_mass_PC, 0),
                    candidates.token_RC.masked_fill(~has_mass_PC, 0),
                    *(
                        values_P.masked_fill(~is_there_P, 0)
                        for values_P in (rows.root_X, rows.alive_X, rows.ended_X, rows.text_X, rows.mass_X, rows.cut_X)
                    ),
                    *(bound.long() for bound in bounds),
                    nodes.count_S[slots[slots < made.slots]],
                )
            )
        if len(kept) == 2:
            assert_equal(tuple(kept[1]), tuple(kept[0]))
    assert seen > 50


def outcomes_of(made: DraftRound) -> np.ndarray:
    """Random outcomes. Rows of one outcome are neighbours: at most as many as the group has batch indices, and one more
    for the group's first outcome."""
    outcome_X = np.arange(made.places * made.f)
    for size, first in zip(made.sizes, made.plan.arrays.first_G.tolist()):
        begin, end = first * made.f, (first + size) * made.f
        while begin < end:
            more = size + 1 if begin == first * made.f else int(made.rng.integers(1, size + 1))
            outcome_X[begin : min(begin + more, end)] = begin
            begin += more
    return outcome_X


@pytest.mark.parametrize("kinds", one_of(BEST, OF_BOTH_MODELS), ids=["best", "all"])
def test_outcomes_are_limited_as_by_the_torch_form(kinds):
    left_out = 0
    for seed in range(8):
        kept, has_rest = [], seed % 2 == 0
        for device, ops in ((CPU, RoundOps()), (DEVICE, TritonOps())):
            made = DraftRound(seed, kinds, True, device, largest=64 if seed == 0 else 6)
            tree = made.tree()._replace(outcome_X=made.here(outcomes_of(made)))
            shares_XC = made.here(made.floats(len(tree.mass_X), WIDTH))
            if seed % 3 == 0:  # among equal masses the first stay
                shares_XC, tree = shares_XC.round(), tree._replace(mass_X=tree.mass_X.round())
            if seed % 3 == 1:
                shares_XC, tree = shares_XC.clamp(0, 0), tree._replace(mass_X=tree.mass_X.clamp(0, 0))
            candidates = CandidateTokens(shares_XC.long(), shares_XC, shares_XC)
            kept.append(ops.limit_outcomes(made.plan, tree, candidates, has_rest))
            left_out += int((kept[-1].share_RC != shares_XC).sum())
        assert_equal(kept[1], kept[0])
    assert left_out > 100


def test_an_outcome_gets_no_more_rows_than_the_group_may_have():
    """The candidates of largest mass stay, and rows that have ended count as well. The first candidate of a group's
    first row always stays."""
    seen = 0
    for seed in range(20):
        made = DraftRound(seed, frozenset({Decoding.WALK}), True, CPU)
        tree = made.tree()._replace(outcome_X=made.here(outcomes_of(made)))
        shares_XC = made.here(made.floats(len(tree.mass_X), WIDTH, nan=False))
        candidates = CandidateTokens(shares_XC.long(), shares_XC, shares_XC)
        left_XC = RoundOps().limit_outcomes(made.plan, tree, candidates, False).share_RC
        mass_XC = (tree.mass_X[:, None] + shares_XC).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        for size, first, most in zip(
            made.sizes, made.plan.arrays.first_G.tolist(), made.plan.arrays.next_count_G.tolist()
        ):
            rows = range(first * made.f, (first + size) * made.f)
            for outcome in {int(tree.outcome_X[x]) for x in rows}:
                of = [x for x in rows if tree.outcome_X[x] == outcome and tree.alive_X[x]]
                goes_on = [x for x in of if not tree.ended_X[x]]
                found = sorted(
                    float(mass_XC[x, c])
                    for x in goes_on
                    for c in range(WIDTH)
                    if left_XC[x, c] > -torch.inf and mass_XC[x, c] > -torch.inf and (x, c) != (rows.start, 0)
                )
                others = sorted(
                    float(mass_XC[x, c])
                    for x in goes_on
                    for c in range(WIDTH)
                    if mass_XC[x, c] > -torch.inf and (x, c) != (rows.start, 0)
                )
                room = max(0, most - (len(of) - len(goes_on)))
                assert len(found) in {min(room, len(others)), max(0, min(room - 1, len(others)))}
                assert found == others[len(others) - len(found) :]
                seen += len(others) > len(found)
    assert seen > 50


def test_no_outcome_is_that_of_a_row_and_none_is_there_twice():
    """No outcome equals the beginning of a row of the block, and all outcomes differ."""
    outcomes = 0
    for seed in range(40):
        made = DraftRound(seed, frozenset({Decoding.WALK}), True, CPU)
        if made.k == 1:
            continue
        nodes, grown = InnerNodes.allocate(made.slots, made.k, VOCAB, CPU), grown_rows(made)
        selection = selection_for(made, grown)
        RoundOps().store_inner_nodes(nodes, made.state, made.plan, grown, selection)
        tokens_AK, slot_A = grown.tree.tokens_XK[selection.particles.row_A], made.plan.arrays.slot_A
        for size, first in zip(made.sizes, made.plan.arrays.first_G.tolist()):
            alive = [a for a in range(first, first + size) if selection.particles.alive_A[a]]
            paths = {tuple(tokens_AK[a, : d + 1].tolist()) for a in alive for d in range(int(selection.taken_A[a]))}
            found = [
                (*tokens_AK[a, : d + 1].tolist(), int(nodes.token_SKC[slot_A[a], d, c]))
                for a in range(first, first + size)
                for d in range(made.k - 1)
                for c in (nodes.share_SKC[slot_A[a], d] > -torch.inf).nonzero()[:, 0].tolist()
            ]
            assert len(set(found)) == len(found) and not paths & set(found)
            # Every node of a row that continues has outcomes, because each row has as many candidates as there are
            # tokens.
            inner = {path[:-1] for path in found}
            assert inner <= paths
            outcomes += len(found)
    assert outcomes > 1000
