"""What is kept of inner nodes, and the rows that begin there, against the torch form. See tests/kernels/rounds.py."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from smc.algorithm.expansion import CandidateTokens, Expansion, PopulationKind
from smc.executor.draft import DraftStep
from smc.executor.inner_nodes import InnerNodes
from smc.executor.messages import RoundChoice
from smc.executor.ops import RoundOps, TorchOps
from smc.executor.triton_ops import TritonOps
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import VOCAB, assert_equal
from tests.kernels.test_draft import CPU, DraftRound
from tests.kernels.test_follow import choice_of

WIDTH = VOCAB + 1
"""Candidates of a row: every token, and one for the rest."""


def drafted_steps(made: DraftRound) -> tuple[DraftStep, ...]:
    """K steps of which each continues rows of the one before, as their tokens say."""
    rng, rows, kept = made.rng, made.places * made.f, []
    tokens_XK = np.zeros((rows, made.k), np.int64)
    for step in range(made.k):
        parent_X = np.arange(rows)
        for size, first in zip(made.sizes, made.plan.first_G.tolist()):
            mine = slice(first * made.f, (first + size) * made.f)
            parent_X[mine] = np.sort(rng.integers(mine.start, mine.stop, mine.stop - mine.start))
        token_XC = np.stack([rng.permutation(WIDTH) for _ in range(rows)])
        candidate_X = rng.integers(0, 3, rows)
        tokens_XK = tokens_XK[parent_X]
        tokens_XK[:, step] = token_XC[parent_X, candidate_X]
        tree, mass_X = made.tree(), made.here(rng.normal(size=rows))
        tree = type(tree)(
            **{f.name: getattr(tree, f.name) for f in fields(tree)}
            | {"tokens_XK": made.here(tokens_XK), "mass_X": mass_X}
        )
        shares_XC = made.here(made.floats(rows, WIDTH))
        none_G = made.here(np.zeros(len(made.plan.first_G)))
        expansion = Expansion(
            made.here(parent_X), made.here(candidate_X), mass_X, mass_X > -9, none_G, none_G > 0, none_G > 0
        )
        kept.append(DraftStep(tree, (expansion, CandidateTokens(made.here(token_XC), shares_XC, shares_XC))))
    return tuple(kept)


def choice_for(made: DraftRound) -> RoundChoice:
    """As of a group that goes on: all of its rows take equally many tokens, but for those that end."""
    choice = choice_of(made)
    choice.all_9A[2] = torch.where(choice.ended_A, choice.count_A, made.k)
    return choice


def nodes_of(made: DraftRound, ops: RoundOps) -> tuple[InnerNodes, RoundChoice]:
    nodes, steps, choice = InnerNodes(made.slots, made.k, VOCAB, made.device), drafted_steps(made), choice_for(made)
    ops.keep_nodes(nodes, made.state, made.plan, steps, choice)
    return nodes, choice


@pytest.mark.parametrize("kinds", [frozenset({PopulationKind.BEST}), frozenset(PopulationKind)], ids=["best", "all"])
def test_nodes_are_the_torch_ones(kinds):
    seen = 0
    for seed in range(12):
        kept = []
        for device, ops in ((CPU, TorchOps()), (DEVICE, TritonOps())):
            made = DraftRound(seed, kinds, True, device, largest=64 if seed == 0 else 6)
            if made.k == 1:
                break
            nodes, _ = nodes_of(made, ops)
            begun = ops.begin_draft(made.state, made.plan, made.law, made.shape(by_round=True)).tree
            shares_AC = made.here(made.floats(made.places, WIDTH))
            token_AC = made.here(made.rng.integers(0, VOCAB, (made.places, WIDTH)))
            candidates, rows, bounds = ops.with_inner_nodes(
                nodes, made.plan, begun, CandidateTokens(token_AC, shares_AC, shares_AC)
            )
            has_mass_HC = candidates.share_RC > -torch.inf
            seen += int(has_mass_HC.sum())
            slots = made.plan.slot_A
            # Of a candidate without a share nothing else counts, nor of a node without candidates.
            is_there_H = has_mass_HC.any(-1) | (rows.cut_X == 0)
            kept.append(
                (
                    candidates.share_RC,
                    candidates.logq_RC.masked_fill(~has_mass_HC, 0),
                    candidates.token_RC.masked_fill(~has_mass_HC, 0),
                    *(
                        values_H.masked_fill(~is_there_H, 0)
                        for values_H in (rows.root_X, rows.alive_X, rows.ended_X, rows.text_X, rows.mass_X, rows.cut_X)
                    ),
                    *(bound.long() for bound in bounds),
                    nodes.count_S[slots[slots < made.slots]],
                )
            )
        if len(kept) == 2:
            assert_equal(tuple(kept[1]), tuple(kept[0]))
    assert seen > 100


def test_no_outcome_is_that_of_a_row_and_none_is_there_twice():
    """Every outcome is a path of tokens that no row of the block begins with, and no two are the same."""
    outcomes = 0
    for seed in range(40):
        made = DraftRound(seed, frozenset({PopulationKind.BEST}), True, CPU)
        if made.k == 1:
            continue
        nodes, steps, choice = InnerNodes(made.slots, made.k, VOCAB, CPU), drafted_steps(made), choice_for(made)
        TorchOps().keep_nodes(nodes, made.state, made.plan, steps, choice)
        tokens_AK, slot_A = steps[-1].tree.tokens_XK[choice.row_A], made.plan.slot_A
        for size, first in zip(made.sizes, made.plan.first_G.tolist()):
            alive = [a for a in range(first, first + size) if choice.alive_A[a]]
            paths = {tuple(tokens_AK[a, : d + 1].tolist()) for a in alive for d in range(int(choice.count_A[a]))}
            found = [
                (*tokens_AK[a, : d + 1].tolist(), int(nodes.token_SDC[slot_A[a], d, c]))
                for a in range(first, first + size)
                for d in range(made.k - 1)
                for c in (nodes.share_SDC[slot_A[a], d] > -torch.inf).nonzero()[:, 0].tolist()
            ]
            assert len(set(found)) == len(found) and not paths & set(found)
            # Every node of a row that goes on has outcomes: each row has as many candidates as there are tokens.
            inner = {path[:-1] for path in found}
            assert inner <= paths
            outcomes += len(found)
    assert outcomes > 1000
