"""Kernels that lay out the target's blocks and verify them, against torch, over rounds of all kinds. See
tests/kernels/rounds.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from smc.executor.ops import RoundOps
from smc.executor.triton_ops import TritonOps
from smc.round.tensors import TargetDraws, VerifyInputs
from smc.types import Decoding
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import NO_MASS, VOCAB, Round, assert_equal
from tests.kernels.test_apply_selection import ROUNDS, name_of

CPU = torch.device("cpu")


def of(asked: VerifyInputs) -> tuple:
    """Return all fields of `asked`. The kernels' integer types may differ where this does not matter."""
    rows, keys = asked.rows, asked.keys
    laid = (*rows.tables[1:], *rows.spans, rows.groups.group_R, rows.queries)
    return asked.blocks, *laid, asked.distribution_T, asked.label_T.long(), keys, asked.last_A


@pytest.mark.parametrize(("kinds", "lookahead"), ROUNDS, ids=name_of)
def test_block_layout_and_verification_equal_torch(kinds, lookahead):
    for seed in range(12):
        laid, verified = [], []
        for device, ops in ((CPU, RoundOps()), (DEVICE, TritonOps())):
            made = Round(seed, kinds, lookahead, device, largest=64 if seed == 0 else 6)
            logq_SQ, drafted = made.here(made.floats(made.slots + 1, made.most)), made.drafted()
            if seed % 3 == 0:
                # The draft proposes nothing to its first group.
                drafted.share_X[: made.sizes[0] * made.f] = NO_MASS
            asked = ops.lay_out_blocks(made.state, logq_SQ, made.plan, None if lookahead else drafted)
            laid.append(of(asked))
            shape = (made.places * made.q,)
            labelled_T, logp_T, log_z_T = (made.here(made.floats(*shape)) for _ in range(3))
            drawn = TargetDraws(made.here(made.rng.integers(0, VOCAB, (*shape, 1))), logp_T[:, None], log_z_T)
            given = (
                labelled_T if kinds - {Decoding.WALK} else None,
                drawn if Decoding.WALK in kinds else None,
            )
            verified.append(ops.collect_outputs(asked, made.plan, *given, None))
        assert_equal(laid[1], laid[0])
        assert_equal(verified[1], verified[0])


@pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "lockstep"])
def test_nodes_of_blocks_and_their_outputs_equal_torch(lookahead):
    shared = cut = 0
    for seed in range(16):
        laid, verified = [], []
        for device, ops in ((CPU, RoundOps()), (DEVICE, TritonOps())):
            made = Round(seed, frozenset({Decoding.WALK}), lookahead, device, largest=64 if seed == 0 else 8)
            # Few tokens, so that blocks begin alike.
            logq_SQ, drafted = made.here(made.floats(made.slots + 1, made.most)), made.drafted()
            drafted.tokens_XK.remainder_(2)
            made.state.pending_SQ.remainder_(2)
            if seed % 4:
                # As in an engine, where blocks of a group begin at the same position.
                made.state.end_S.copy_(made.state.pending_S + 9)
            arrays = made.plan.arrays
            size_G = arrays.size_G.cpu().numpy()
            nodes_G = np.where(size_G, made.rng.integers(1, np.maximum(size_G * made.q, 1) + 1), 0)
            most = int(nodes_G.sum()) + int(made.rng.integers(0, 70))
            plan = replace(
                made.plan,
                kind=replace(made.plan.kind, nodes=most),
                arrays=arrays._replace(nodes_G=made.here(nodes_G, torch.int32)),
            )
            blocks = ops.lay_out_blocks(made.state, logq_SQ, plan, None if lookahead else drafted)
            found = ops.lay_out_nodes(plan, blocks)
            assert found.nodes is not None
            of_groups = (found.rows.groups.first_G, found.rows.groups.size_G)
            laid.append((*of(found), found.rows.path_RB, *of_groups, *found.nodes))
            logp_T, log_z_T = (made.here(made.floats(most)) for _ in range(2))
            drawn = TargetDraws(made.here(made.rng.integers(0, VOCAB, (most, 1))), logp_T[:, None], log_z_T)
            verified.append(ops.collect_outputs(found, plan, None, drawn, None))
        assert_equal(laid[1], laid[0])
        assert_equal(verified[1], verified[0])
        shared += int((found.blocks.run_A.sum() - found.rows.spans.count_R.sum()).item())
        cut += int((found.blocks.run_A < blocks.blocks.run_A).sum())
    assert shared > 50 and cut > 20, (shared, cut)
