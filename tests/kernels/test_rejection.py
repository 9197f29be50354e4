"""Kernels of rejection sampling against torch, with extreme inputs: the chains' distributions, and the target's
verdict.

Local axes: P chains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from smc.distributions import Distributions, DistributionSpec
from smc.executor.chains import chain_groups
from smc.executor.ops import RoundOps
from smc.executor.triton_ops import TritonOps, TritonSampling
from smc.executor.verify import lay_out_blocks
from smc.kernels.sampling import write_distribution
from smc.types import Decoding
from tests.kernels.conftest import DEVICE
from tests.kernels.rounds import VOCAB, Round, assert_equal
from tests.pairwise import one_of

CPU = torch.device("cpu")
ON_GPU = pytest.mark.skipif(DEVICE.type == "cpu", reason="too slow in the interpreter")
VOCABS = [VOCAB, 77, 5000, pytest.param(128_256, marks=ON_GPU)]
"""The next to last is larger than one block of the kernel."""
KINDS = frozenset({Decoding.REJECTION})


def laws(rng: np.random.Generator, rows: tuple[int, ...], vocab: int) -> Tensor:
    """Log-distributions [rows, vocab]: wide ones, narrow ones, ones with tokens without mass, and ones with a single
    token. Most of the mass is on the first `VOCAB` tokens."""
    flat = int(np.prod(rows))
    logits_RV = rng.normal(size=(flat, vocab)) * rng.choice([0.1, 1.0, 30.0], (flat, 1))
    logits_RV[:, VOCAB:] -= 8.0
    logits_RV[rng.random((flat, vocab)) < rng.choice([0.0, 0.4], (flat, 1))] = -np.inf
    kept_R = rng.integers(0, VOCAB, flat)
    logits_RV[np.arange(flat), kept_R] = 0.0
    alone_R = rng.random(flat) < 0.2
    logits_RV[alone_R] = -np.inf
    logits_RV[alone_R, kept_R[alone_R]] = 0.0
    return torch.from_numpy(logits_RV).log_softmax(-1).float().view(*rows, vocab)


def said(
    ops: RoundOps, seed: int, vocab: int, lookahead: bool, device: torch.device, alike: bool
) -> tuple[Tensor, Tensor]:
    made = Round(seed, KINDS, lookahead, device)
    asked = lay_out_blocks(
        made.state, made.here(made.floats(made.slots + 1, made.most)), made.plan, None if lookahead else made.drafted()
    )
    rng, count = np.random.default_rng(seed), len(made.plan.arrays.chain_P)
    logp_PQV, logq_PKV = laws(rng, (count, made.q), vocab), laws(rng, (count, made.q - 1), vocab)
    if alike:
        logq_PKV = logp_PQV[:, :-1].clone()
    return ops.verify_chains(made.plan, asked, logp_PQV.to(device), logq_PKV.to(device), chain_groups(made.plan))


@pytest.mark.parametrize("lookahead", [True, False], ids=["ahead", "lockstep"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_verify_chains_equals_torch(vocab, lookahead):
    """Blocks of different lengths, dead chains, groups of one to six chains; distributions of draft and target that
    have nothing in common, or are equal."""
    seeds = range(4 if vocab < 100 else 3)
    spoken = kept = 0
    for seed in seeds:
        for alike in (False, True):
            wanted = said(RoundOps(), seed, vocab, lookahead, CPU, alike)
            found = said(TritonOps(), seed, vocab, lookahead, DEVICE, alike)
            assert_equal(found, wanted)
            spoken += int((wanted[0] >= 0).sum())
            kept += int((wanted[0][:, :-1] >= 0).sum())
    assert spoken > 20 and kept > 5


@pytest.mark.parametrize("columns", one_of(4100, 1))
def test_full_distributions_equal_torch(columns):
    """Temperatures from greedy to wide, every truncation, a row of NaN, and columns outside the vocabulary. The output
    is a strided tensor, and nothing between its rows is overwritten."""
    rng = np.random.default_rng(columns)
    rows = 16 if columns == 1 else 9
    logits_RV = torch.from_numpy(rng.normal(size=(rows, columns + 3)).astype(np.float32) * 4)
    logits_RV[5, 0] = torch.nan
    logits_RV[6, : columns // 2] = -torch.inf
    law = DistributionSpec.of(
        temperature_R=rng.choice([0.0, 0.5, 1.0, 2.0], rows),
        top_k_R=rng.choice([0, 1, 5], rows),
        top_p_R=rng.choice([1.0, 0.7], rows),
        min_p_R=rng.choice([0.0, 0.05], rows),
    ).canonical()
    wanted_RV = Distributions(law).target(logits_RV[:, :columns])
    here = law.to(DEVICE)
    room_RV = torch.full((rows, columns + 2), 7.0, device=DEVICE)
    TritonSampling(columns).write_distribution(logits_RV.to(DEVICE), here, room_RV[:, :columns])
    found_RV = room_RV[:, :columns].cpu()
    assert (room_RV[:, columns:] == 7).all()
    torch.testing.assert_close(found_RV, wanted_RV, atol=2e-6, rtol=1e-5, equal_nan=True)
    write_distribution(logits_RV.to(DEVICE), room_RV[:, :columns], torch.ones(rows, device=DEVICE))
    torch.testing.assert_close(
        room_RV[:, :columns].cpu(), logits_RV[:, :columns].log_softmax(-1), atol=2e-6, rtol=1e-5, equal_nan=True
    )
