"""Every kernel that normalises a distribution against torch and against the slow reference: logits far from 0, all
tokens but one forbidden, equal logits, vocabularies of one entry, of one block, and of one entry more.

Local axes: Y more tokens of a row that are scored."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smc import distributions
from smc.arrays import to_device
from smc.kernels import sampling
from smc.kernels.truncation import Cut, truncate
from smc.philox import DrawKeys, Purpose, exponentials, words
from tests.kernels.conftest import DEVICE
from tests.test_distributions import TOLERANCE, Spec, assert_same_law, law_spec, reference, share, softmax

BLOCK, DRAWS = 16, 3
DTYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
examples = settings(max_examples=300 if DEVICE.type == "cuda" else 4, deadline=None)
# With powers of two, logit / temperature is as exact as the logit, however far it is from 0.
temperature = st.sampled_from([0.0, 0.25, 1.0, 4.0])
specs = st.builds(Spec, temperature=temperature)
truncating = st.builds(
    Spec,
    temperature=temperature,
    top_k=st.sampled_from([0, 0, 1, 5, 16, 40]),
    top_p=st.just(1.0) | share,
    min_p=st.just(0.0) | st.floats(0.0, 63 / 64, width=32),
)


@st.composite
def logit_rows(draw, dtype: torch.dtype, vocab: int) -> list[float]:
    """Random logits in multiples of 1/8, which `dtype` rounds where they are far from 0: ties are exact."""
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    row = random.normal(size=vocab) * draw(st.sampled_from([0.1, 3.0, 20.0]))
    kind = draw(st.sampled_from(["any", "any", "one", "few", "equal"]))
    if kind == "equal":
        row[:] = 1.5
    row = (row * 8).round() / 8 + draw(st.sampled_from([0.0, 0.0, -110.0, 1e5, -1e5]))
    forbidden = {"one": np.ones(vocab, dtype=bool), "few": random.random(vocab) < 0.8}.get(
        kind, np.zeros(vocab, dtype=bool)
    )
    forbidden[draw(st.integers(0, vocab - 1))] = False
    return torch.tensor(np.where(forbidden, -math.inf, row)).to(dtype).tolist()


@st.composite
def batches(draw, dtype: torch.dtype, spec: st.SearchStrategy[Spec]) -> tuple[torch.Tensor, list[Spec]]:
    """Logits [R, V] on the device, and the settings of every row."""
    vocab = draw(st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1]))
    rows = draw(st.lists(st.tuples(logit_rows(dtype, vocab), spec), min_size=1, max_size=4))
    return torch.tensor([row for row, _ in rows], dtype=dtype, device=DEVICE), [spec for _, spec in rows]


def assert_draws_are_of(
    log_law_RV: torch.Tensor,
    logits_RV: torch.Tensor,
    spec: distributions.DistributionSpec,
    cut: Cut | None,
    slack: float,
) -> None:
    """Draw tokens, and check them and their log-probabilities. If the race keys of two tokens are equal up to rounding,
    either may win."""
    rows, vocab = logits_RV.shape
    rng = np.random.default_rng(rows)
    keys = (
        rng.integers(-(2**63), 2**63, rows),
        np.full(rows, 3),
        rng.integers(0, 2**32, (rows, DRAWS)),
        np.full(rows, 9),
    )
    temperature_R, *on_device = (to_device(array, DEVICE) for array in (spec.temperature_R, *keys))
    token_RF, logq_RF, _ = sampling.draw(
        logits_RV, vocab, temperature_R, DrawKeys(*on_device, Purpose.PROPOSAL), cut, block=BLOCK
    )
    token_RF = token_RF.cpu().long()
    word0_RF, word1_RF, _, _ = words(*(array.reshape(rows, -1) for array in keys), Purpose.PROPOSAL)
    race_RFV = (
        exponentials(torch.from_numpy(word0_RF), torch.from_numpy(word1_RF), vocab) / log_law_RV.float().exp()[:, None]
    )
    won_RF = race_RFV.gather(2, token_RF[..., None])[..., 0]
    assert (won_RF <= race_RFV.amin(-1) * (1 + 1e-5 + 2 * slack)).all()
    torch.testing.assert_close(
        logq_RF.cpu().double(), log_law_RV.gather(1, token_RF), atol=TOLERANCE + slack, rtol=TOLERANCE
    )


def scored(logits_RV: torch.Tensor, spec: distributions.DistributionSpec, cut: Cut | None) -> torch.Tensor:
    """Score every entry and return log-probabilities [R, V]: the last entry is scored as the label, the others as extra
    tokens."""
    rows, vocab = logits_RV.shape
    last_R = torch.full((rows,), vocab - 1, dtype=torch.int32, device=DEVICE)
    other_RY = torch.arange(vocab - 1, dtype=torch.int32, device=DEVICE).expand(rows, -1) if vocab > 1 else None
    temperature_R = to_device(spec.temperature_R, DEVICE)
    logp_R, logp_RY = sampling.score(logits_RV, vocab, temperature_R, last_R, other_RY, cut, block=BLOCK)
    return torch.cat(([] if logp_RY is None else [logp_RY]) + [logp_R[:, None]], dim=1).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(data=st.data())
def test_draws_and_scores(dtype, data):
    logits_RV, rows = data.draw(batches(dtype, specs))
    spec = law_spec(*rows)
    expected_RV = torch.stack([reference(row, of) for row, of in zip(logits_RV.tolist(), rows)])
    assert_same_law(distributions.Distributions(spec).target(logits_RV.cpu().float()), expected_RV)
    assert_same_law(scored(logits_RV, spec, None), expected_RV)
    assert_draws_are_of(expected_RV, logits_RV, spec, None, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(data=st.data(), mixed=st.sampled_from([0.0, 0.1]))
def test_draws_and_scores_after_a_cut(dtype, data, mixed):
    logits_RV, rows = data.draw(batches(dtype, truncating))
    spec = law_spec(*rows)
    truncated_RV = torch.stack([reference(row, of) for row, of in zip(logits_RV.tolist(), rows)]).exp()
    whole_RV = torch.tensor(
        [softmax(row, of.temperature) for row, of in zip(logits_RV.tolist(), rows)], dtype=torch.float64
    )
    expected_RV = ((1 - mixed) * truncated_RV + mixed * whole_RV).log()
    cut = truncate(logits_RV, logits_RV.shape[1], spec.to(DEVICE), mixed, block=BLOCK)
    assert_same_law(distributions.Distributions(spec).proposal(logits_RV.cpu().float(), mixed), expected_RV)
    # In a mixed distribution a token that is truncated, but not forbidden, has its logit lowered in float32; its
    # probability is that of the lowered logit.
    slack = largest(logits_RV, spec) * 2**-23 if mixed else 0.0
    found_RV = scored(logits_RV, spec, cut)
    assert torch.equal(found_RV == -torch.inf, expected_RV == -torch.inf)
    torch.testing.assert_close(found_RV.double(), expected_RV, atol=TOLERANCE + slack, rtol=TOLERANCE)
    assert_draws_are_of(expected_RV, logits_RV, spec, cut, slack)


def largest(logits_RV: torch.Tensor, spec: distributions.DistributionSpec) -> float:
    """Return the largest absolute value of a finite logit, divided by its temperature."""
    temperature_R = np.where(spec.temperature_R == 0, 1, spec.temperature_R)
    tempered_RV = logits_RV.cpu().double() / torch.from_numpy(temperature_R)[:, None]
    return tempered_RV[tempered_RV.isfinite()].abs().max().item()
