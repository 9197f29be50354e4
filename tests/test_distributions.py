"""Distributions of target and proposal, against a slow float64 version of one row at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smc.distributions import Distributions, DistributionSpec, Processors, log_sum

# Logits are multiples of 1/8, so that float64 and float32 have the same ties.
logit = st.integers(-64, 64).map(lambda k: k / 8)
temperature = st.sampled_from([0.25, 0.5, 0.7, 1.0, 1.5, 4.0])
# A share too small for float32 becomes 0 there, which must not mean "no truncation".
share = st.floats(1 / 64, 1.0, width=32) | st.sampled_from([1e-50, 1e-44, 1e-30])
TOLERANCE = 2e-5
examples = settings(max_examples=10, deadline=None)


@dataclass(frozen=True)
class Spec:
    """Settings of one row; the defaults switch everything off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    alpha: float = 1.0


PROCESSORS = {
    "temperature": st.builds(Spec, temperature=temperature),
    "greedy": st.just(Spec(temperature=0.0)),
    "top-k": st.builds(Spec, top_k=st.integers(1, 12)),
    "top-p": st.builds(Spec, top_p=share),
    "min-p": st.builds(Spec, min_p=st.floats(0.0, 63 / 64, width=32)),
    "all": st.builds(
        Spec,
        temperature=st.just(0.0) | temperature,
        top_k=st.integers(0, 12),
        top_p=st.just(1.0) | share,
        min_p=st.just(0.0) | st.floats(0.0, 63 / 64, width=32),
    ),
}


def law_spec(*specs: Spec) -> DistributionSpec:
    return DistributionSpec.of(**{f"{name}_R": [getattr(s, name) for s in specs] for name in Spec.__dataclass_fields__})


def laws(*specs: Spec) -> Distributions:
    return Distributions(law_spec(*specs))


def softmax(logits: list[float], temperature: float) -> list[float]:
    if temperature == 0:
        best = max(range(len(logits)), key=lambda v: logits[v])
        return [float(v == best) for v in range(len(logits))]
    powers = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [power / sum(powers) for power in powers]


def truncate(law: list[float], spec: Spec) -> list[float]:
    """Top-k, then top-p of the rest, then min-p; ties go to the smaller index. Rejects examples close to the edge of a
    cut."""
    order = sorted(range(len(law)), key=lambda v: -law[v])
    kept = order[: spec.top_k] if spec.top_k else order
    if spec.top_p < 1:
        mass, before, inside = sum(law[v] for v in kept), 0.0, []
        for v in kept:
            assume(not before or abs(before / mass - spec.top_p) > 1e-5)
            if before / mass < spec.top_p:
                inside.append(v)
            before += law[v]
        kept = inside
    if spec.min_p > 0:
        for v in kept[1:]:
            assume(law[v] == law[order[0]] or abs(math.log(max(law[v], 1e-300) / law[order[0]] / spec.min_p)) > 1e-4)
        kept = [v for v in kept if law[v] >= spec.min_p * law[order[0]]]
    mass = sum(law[v] for v in kept)
    return [law[v] / mass if v in kept else 0.0 for v in range(len(law))]


def reference(logits: list[float], spec: Spec) -> torch.Tensor:
    return torch.tensor(truncate(softmax(logits, spec.temperature), spec), dtype=torch.float64).log()


def assert_same_law(actual_RV: torch.Tensor, expected_RV: torch.Tensor) -> None:
    """Equal support; log-probabilities equal up to float32 rounding."""
    assert torch.equal(actual_RV == -torch.inf, expected_RV == -torch.inf)
    torch.testing.assert_close(actual_RV.double(), expected_RV.double(), atol=TOLERANCE, rtol=TOLERANCE)


@st.composite
def batches(draw_from, spec: st.SearchStrategy[Spec] = PROCESSORS["all"]) -> tuple[list[list[float]], list[Spec]]:
    size = draw_from(st.integers(2, 12))
    # A masked token has logit -inf; the first token is never masked, so that every row has a distribution.
    row = st.lists(logit | st.just(-math.inf), min_size=size - 1, max_size=size - 1)
    rows = draw_from(st.lists(st.tuples(logit, row, spec), min_size=1, max_size=5))
    return [[first, *rest] for first, rest, _ in rows], [s for *_, s in rows]


@pytest.mark.parametrize("processor", PROCESSORS)
@examples
@given(data=st.data())
def test_target_equals_the_slow_version(processor, data):
    logits, specs = data.draw(batches(PROCESSORS[processor]))
    expected_RV = torch.stack([reference(row, spec) for row, spec in zip(logits, specs)])
    assert_same_law(laws(*specs).target(torch.tensor(logits)), expected_RV)


@examples
@given(batches(), st.sampled_from([0.0, 0.01, 0.3]))
def test_laws_sum_to_one(batch, share):
    logits, specs = batch
    for law_RV in (laws(*specs).target(torch.tensor(logits)), laws(*specs).proposal(torch.tensor(logits), share)):
        torch.testing.assert_close(law_RV.logsumexp(-1), torch.zeros(len(specs)), atol=TOLERANCE, rtol=0)


@examples
@given(batches())
def test_a_canonical_spec_gives_the_same_laws(batch):
    logits, specs = batch
    one, logits_RV = law_spec(*specs), torch.tensor(logits)
    wider = one.canonical()
    assert one.active | Processors.TEMPERATURE | Processors.GREEDY in wider.active
    for share in (0.0, 0.1):
        assert_same_law(Distributions(wider).proposal(logits_RV, share), Distributions(one).proposal(logits_RV, share))


@examples
@given(batches())
def test_rows_of_different_specs_in_one_batch_equal_the_same_rows_alone(batch):
    logits, specs = batch
    together, logits_RV = laws(*specs), torch.tensor(logits)
    for r, spec in enumerate(specs):
        alone, row_1V = laws(spec), logits_RV[r : r + 1]
        assert_same_law(together.target(logits_RV)[r], alone.target(row_1V)[0])
        assert_same_law(together.proposal(logits_RV, 0.1)[r], alone.proposal(row_1V, 0.1)[0])


@examples
@given(batches(), st.randoms())
def test_rows_taken_from_a_spec_follow_their_rows(batch, random):
    logits, specs = batch
    rows = random.choices(range(len(specs)), k=4)
    taken = Distributions(law_spec(*specs).take(np.array(rows)))
    assert_same_law(taken.target(torch.tensor(logits)[rows]), laws(*specs).target(torch.tensor(logits))[rows])


@examples
@given(st.lists(logit, min_size=2, max_size=12))
def test_greedy_puts_all_mass_on_the_first_largest_logit(logits):
    law_V = laws(Spec(temperature=0.0)).target(torch.tensor([logits]))[0]
    best = logits.index(max(logits))
    assert law_V[best] == 0
    assert (law_V == -torch.inf).sum() == len(logits) - 1
    greedy_proposal_V = laws(Spec(temperature=0.0, top_k=3)).proposal(torch.tensor([logits]), 0.2)[0]
    assert_same_law(greedy_proposal_V, law_V)


@examples
@given(batches(), st.sampled_from([0.01, 0.3, 0.99]))
def test_truncated_proposal_is_the_defensive_mixture(batch, share):
    logits, specs = batch
    assume(any(s.top_k or s.top_p < 1 or s.min_p for s in specs))
    full_RV = torch.tensor([softmax(row, s.temperature) for row, s in zip(logits, specs)], dtype=torch.float64)
    truncated_RV = torch.stack([reference(row, s).exp() for row, s in zip(logits, specs)])
    proposal_RV = laws(*specs).proposal(torch.tensor(logits), share)
    assert_same_law(proposal_RV, ((1 - share) * truncated_RV + share * full_RV).log())
    # With any truncation of the target, a tempered proposal covers it, and the ratio of the two is at most 1 / share.
    assert ((full_RV > 0) <= (proposal_RV > -torch.inf)).all()
    assert (full_RV.log() - proposal_RV)[full_RV > 0].max() <= -math.log(share) + TOLERANCE


@pytest.mark.parametrize("top_p", [1e-50, 1e-44, 1e-30, 1e-6])
@pytest.mark.parametrize("spec", [Spec(), Spec(0.7, top_k=3), Spec(0.0), Spec(min_p=0.1)])
def test_tiny_top_p_keeps_argmax(spec, top_p):
    """The first of several equally probable tokens."""
    found_RV = laws(*[replace(spec, top_p=top_p)] * 2).target(
        torch.tensor([[1.0, 3.0, -2.0, 3.0], [0.0, -math.inf, -math.inf, -math.inf]])
    )
    assert found_RV.exp().tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@examples
@given(batches())
def test_share_zero_gives_the_truncated_law_itself(batch):
    logits, specs = batch
    assert torch.equal(laws(*specs).proposal(torch.tensor(logits), 0.0), laws(*specs).target(torch.tensor(logits)))


@examples
@given(st.lists(logit, min_size=2, max_size=12), st.sampled_from([0.01, 0.5]))
def test_without_truncation_the_proposal_is_the_softmax_exactly(logits, share):
    logits_RV = torch.tensor([logits])
    assert torch.equal(laws(Spec()).proposal(logits_RV, share), logits_RV.log_softmax(-1))
    assert torch.equal(laws(Spec(temperature=0.5)).proposal(logits_RV, share), (logits_RV * 2).log_softmax(-1))
    odd = laws(Spec(temperature=0.7))
    assert torch.equal(odd.proposal(logits_RV, share), odd.target(logits_RV))


@examples
@given(batches(), st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=5, max_size=5))
def test_powered_is_the_normalised_power_and_its_log_normaliser(batch, alphas):
    logits, specs = batch
    specs = [Spec(s.temperature, s.top_k, s.top_p, s.min_p, alpha) for s, alpha in zip(specs, alphas)]
    alpha_R1 = torch.tensor([[s.alpha] for s in specs], dtype=torch.float64)
    logp_RV = laws(*specs).target(torch.tensor(logits))
    powered_RV, log_z_R = laws(*specs).powered(logp_RV)
    if all(s.alpha == 1 for s in specs):
        assert log_z_R is None
        assert powered_RV is logp_RV
        return
    power_RV = logp_RV.double().exp() ** alpha_R1
    torch.testing.assert_close(log_z_R.double(), power_RV.sum(-1).log(), atol=TOLERANCE, rtol=TOLERANCE)
    assert_same_law(powered_RV, (power_RV / power_RV.sum(-1, keepdim=True)).log())
    for r, spec in enumerate(specs):
        if spec.alpha == 1:
            assert torch.equal(powered_RV[r], logp_RV[r])
            assert log_z_R[r] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "spec",
    [
        Spec(),
        Spec(temperature=0.5),
        Spec(temperature=0.0),
        Spec(top_k=1),
        Spec(top_k=3),
        Spec(top_p=0.5),
        Spec(min_p=0.3),
        Spec(temperature=0.0, top_k=2, top_p=0.5, min_p=0.3),
        Spec(alpha=0.5),
        Spec(temperature=0.0, alpha=2.0),
        Spec(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, alpha=2.0),
    ],
)
def test_logits_that_give_no_law_stay_nan_in_every_path(spec, bad):
    healthy = [0.5, -1.0, 2.0, 0.0, 1.0]
    for position in range(5):
        sick = [*healthy[:position], bad, *healthy[position + 1 :]]
        both = laws(spec, spec)
        logits_RV = torch.tensor([sick, healthy])
        target_RV, proposal_RV = both.target(logits_RV), both.proposal(logits_RV, 0.1)
        powered_RV, log_z_R = both.powered(target_RV)
        for law_RV in (target_RV, proposal_RV, powered_RV):
            assert law_RV[0].isnan().all()
            assert not law_RV[1].isnan().any()
        if log_z_R is not None and spec.alpha != 1:
            assert log_z_R.isnan().tolist() == [True, False]
        assert_same_law(target_RV[1:], laws(spec).target(logits_RV[1:]))


def test_the_sum_of_a_row_has_the_same_bits_alone_and_of_no_rows_there_are_none():
    logits_RV = torch.randn(3, 151_936, generator=torch.Generator().manual_seed(0))
    sum_R1 = log_sum(logits_RV)
    assert all(torch.equal(log_sum(logits_RV[r : r + 1]), sum_R1[r : r + 1]) for r in range(3))
    assert log_sum(logits_RV[:0]).shape == (0, 1)
