"""Kernels that compute a round's weights and apply its selection, against torch, over rounds of all kinds. See
tests/kernels/rounds.py."""

from __future__ import annotations

import pytest
import torch

from smc.algorithm.verification import match_samples
from smc.arrays import map_tensors
from smc.executor.ops import RoundOps
from smc.executor.select import SelectStage
from smc.executor.triton_ops import TritonOps
from smc.executor.verify import lay_out_blocks
from smc.round.tensors import ScoreInputs
from smc.types import OF_BOTH_MODELS, Decoding
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import Round, assert_equal

ALL = OF_BOTH_MODELS
ROUNDS = [
    *((ALL, lookahead) for lookahead in (True, False)),
    *(pytest.param(frozenset({kind}), kind % 2 == 0, marks=pytest.mark.slow) for kind in sorted(OF_BOTH_MODELS)),
]
"""(kinds, whether in look-ahead): all kinds in both forms, each kind alone in one form."""
CPU = torch.device("cpu")
SEEDS = range(6)


def name_of(value: frozenset[Decoding] | bool) -> str:
    if isinstance(value, bool):
        return "ahead" if value else "lockstep"
    return "+".join(kind.name.lower() for kind in sorted(value))


def inputs_of(
    seed: int, kinds: frozenset[Decoding], lookahead: bool, device: torch.device, **options: int
) -> ScoreInputs:
    made = Round(seed, kinds, lookahead, device, **options)
    logq_SQ, drafted = made.here(made.floats(made.slots + 1, made.most)), made.drafted()
    asked = lay_out_blocks(made.state, logq_SQ, made.plan, None if lookahead else drafted)
    return made.inputs(asked, drafted, match_samples)


def assert_same(seed: int, kinds: frozenset[Decoding], lookahead: bool, **options: int) -> None:
    inputs, there = (inputs_of(seed, kinds, lookahead, device, **options) for device in (CPU, DEVICE))
    wanted = RoundOps().score_rows(inputs)
    found = TritonOps().score_rows(there)
    for name in ("root_X", "alive_A", "own_size_G", "keys_G"):
        assert_equal(getattr(found, name), getattr(wanted, name), name)
    for name in ("mass_R", "there_R", "groups"):
        assert_equal(getattr(found.source, name), getattr(wanted.source, name), name)
    for name in ("token_RC", "share_RC"):
        assert_equal(getattr(found.source.candidates, name), getattr(wanted.source.candidates, name), name)
    used_G = inputs.plan.arrays.size_G > 0
    for name in ("target_nan_G", "draft_nan_G"):
        assert torch.equal(getattr(found, name).cpu()[used_G], getattr(wanted, name)[used_G]), name
    stage, plan = SelectStage(None, inputs.state, RoundOps(), lookahead=lookahead), inputs.plan
    own = stage._select_independent(plan, wanted) if Decoding.INDEPENDENT in kinds else None
    trees = stage._select_trees(plan, wanted, inputs.drafted.block) if kinds - {Decoding.INDEPENDENT} else None
    expected = RoundOps().apply_selection(inputs, wanted, own, trees)
    here = map_tensors(lambda tensor: tensor.to(DEVICE), (wanted, own, trees))
    assert_equal(TritonOps().apply_selection(there, *here), expected)


@pytest.mark.parametrize(("kinds", "lookahead"), ROUNDS, ids=name_of)
def test_weights_and_conclusions_are_the_torch_ones(kinds, lookahead):
    for seed in SEEDS:
        assert_same(seed, kinds, lookahead)


@pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "lockstep"])
def test_groups_of_the_largest_size(lookahead):
    for seed in range(2):
        assert_same(100 + seed, ALL, lookahead, largest=64)
