"""A round's weights and its conclusion as kernels, against the torch ones, over rounds of all kinds. See
tests/kernels/rounds.py."""

from __future__ import annotations

import pytest
import torch

from smc.algorithm.expansion import Kind, expand, keep_roots
from smc.algorithm.selection import select
from smc.algorithm.walk import walk
from smc.executor import kernel_choice
from smc.executor import select as candidates
from smc.executor import select as choice
from smc.executor.select import ScoreInputs, SelectOps, Selector
from smc.executor.verify import lay_out
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import Round, assert_equal

ALL = frozenset(Kind)
KINDS = [pytest.param(frozenset({kind}), marks=pytest.mark.slow) for kind in Kind] + [ALL]
CPU = torch.device("cpu")
SEEDS = range(8)


def evidence_of(
    seed: int, kinds: frozenset[Kind], lookahead: bool, device: torch.device, **options: int
) -> ScoreInputs:
    made = Round(seed, kinds, lookahead, device, **options)
    logq_SQ, drafted = made.here(made.floats(made.slots + 1, made.q)), made.drafted()
    asked = lay_out(made.state, logq_SQ, made.plan, None if lookahead else drafted)
    return made.evidence(asked, drafted, walk)


def assert_same(seed: int, kinds: frozenset[Kind], lookahead: bool, **options: int) -> None:
    evidence, there = (evidence_of(seed, kinds, lookahead, device, **options) for device in (CPU, DEVICE))
    wanted = candidates.weigh(evidence)
    found = kernel_choice.weigh(there)
    assert_equal(found.numbers, wanted.numbers)
    for name in ("root_X", "weight_X", "there_X", "alive_A"):
        assert_equal(getattr(found, name), getattr(wanted, name), name)
    assert_equal((found.offers.token_RC, found.offers.share_RC), (wanted.offers.token_RC, wanted.offers.share_RC))
    used_G = evidence.plan.size_G > 0
    for name in ("target_nan_G", "draft_nan_G"):
        assert torch.equal(getattr(found, name).cpu()[used_G], getattr(wanted, name)[used_G]), name
    decide = SelectOps(candidates.weigh, select, expand, keep_roots, walk, choice.conclude)
    chooser, plan = Selector(None, evidence.state, decide, lookahead=lookahead), evidence.plan
    own = chooser._selected(plan, wanted) if Kind.INDEPENDENT in kinds else None
    trees = chooser._regrown(plan, wanted, evidence.drafted.block) if kinds - {Kind.INDEPENDENT} else None
    expected = choice.conclude(evidence, wanted, own, trees)
    here = [moved(value) for value in (wanted, own, trees)]
    assert_equal(kernel_choice.conclude(there, *here), expected)


def moved(value: object) -> object:
    """On the device."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    return type(value)(**{name: moved(one) for name, one in vars(value).items()}) if value is not None else None


@pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "lockstep"])
@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "+".join(kind.name.lower() for kind in sorted(kinds)))
def test_weights_and_conclusions_are_the_torch_ones(kinds, lookahead):
    for seed in SEEDS:
        assert_same(seed, kinds, lookahead)


@pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "lockstep"])
def test_groups_of_the_largest_size(lookahead):
    for seed in range(2):
        assert_same(100 + seed, ALL, lookahead, largest=64)
