"""Draws and log-probabilities of a row are those of the row alone, bit for bit, whatever other rows use and whichever
type their logits make those of the round."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from smc.distributions import DistributionSpec
from smc.executor.masks import allowed_tokens, apply_mask, given_constraint
from smc.executor.sampling import Sampling
from smc.executor.triton_sampling import PromptSampling, TritonSampling
from smc.executor.worker import first_tokens
from smc.philox import DrawKeys, Purpose
from tests.test_distributions import Spec, law_spec

ROWS = [
    Spec(),
    Spec(0.7),
    Spec(0.0),
    Spec(0.7, top_p=0.8),
    Spec(1.3, top_k=40),
    Spec(0.8, min_p=0.02),
    Spec(0.9, 300, 0.9, 0.001),
    Spec(1.0, alpha=2.0),
    Spec(0.7, top_p=0.95, alpha=0.5),
]
KINDS = [(Sampling, 40_000), (TritonSampling, 9000)]
"""Forms of sampling, with vocabularies: torch divides a sum of so many numbers among its threads; the kernels divide
these into several blocks for a draw, and for a score."""


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def keys(index: list[int], device: torch.device, draws: int = 1) -> DrawKeys:
    row_R = torch.tensor(index, device=device)
    stream_RF = torch.arange(draws, device=device).expand(len(index), draws)
    return DrawKeys(row_R * 7 + 1, torch.zeros_like(row_R), stream_RF, row_R + 40, Purpose.TARGET)


def form(kind: type[Sampling], vocab: int, device: torch.device) -> Sampling:
    if kind is Sampling and device.type == "cuda":
        pytest.skip("on a GPU, torch divides the sums of a row by the number of rows")
    return kind(vocab)


def outputs(sampling: Sampling, logits_RV: Tensor, index: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield everything that is read from the rows with this index: its name, and values for each of them."""
    device = logits_RV.device
    spec: DistributionSpec = law_spec(*(ROWS[row] for row in index)).to(device)
    token_R = (torch.tensor(index, device=device) * 31).int()
    given, one = (logits_RV[index], spec), keys(index, device)
    for name, values in {
        "own draws": sampling.own_draws(*given, keys(index, device, 2)),
        "propose": sampling.propose(*given, 0.0, one),
        "propose, mixture": sampling.propose(*given, 0.1, one),
        "score": (sampling.score(*given, token_R),),
        "raw score": (sampling.raw_score(given[0], token_R),),
        "written": (written(sampling, *given),),
    }.items():
        for part, value in enumerate(values):
            yield f"{name} {part}", value
    candidates, logp_RC, log_z_R = sampling.propose_bonus(*given, one)
    for name, value in zip((*candidates._fields, "log p", "log Z"), (*candidates, logp_RC, log_z_R)):
        yield f"propose_bonus {name}", value


def written(sampling: Sampling, logits_RV: Tensor, spec: DistributionSpec) -> Tensor:
    dist_RV = torch.empty(len(logits_RV), sampling.vocab, device=logits_RV.device)
    sampling.write_distribution(logits_RV, spec, dist_RV)
    return dist_RV


@pytest.mark.parametrize(("kind", "vocab"), KINDS)
def test_a_row_s_draws_do_not_depend_on_the_others(device, kind, vocab):
    sampling = form(kind, vocab, device)
    logits_RV = (torch.randn(len(ROWS), vocab, generator=torch.Generator().manual_seed(3)) * 3).bfloat16().to(device)
    everyone = list(range(len(ROWS)))
    together, widened = (dict(outputs(sampling, x, everyone)) for x in (logits_RV, logits_RV.float()))
    differ = [
        (name, ROWS[row])
        for row in everyone
        for name, value in outputs(sampling, logits_RV, [row])
        if not (same(value[0], together[name][row]) and same(value[0], widened[name][row]))
    ]
    assert not differ


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=7e30), other.nan_to_num(nan=7e30))


def test_first_tokens_are_those_of_a_round(device):
    """Draws after prompts have the bits of draws in rounds. Their keys come from the host, any number for each row."""
    vocab, everyone = 9000, list(range(len(ROWS)))
    logits_RV = (torch.randn(len(ROWS), vocab, generator=torch.Generator().manual_seed(3)) * 3).bfloat16().to(device)
    spec, of_host = law_spec(*ROWS), keys(everyone, torch.device("cpu"), 3)
    made = PromptSampling(vocab).own_draws(logits_RV.float(), spec, of_host)
    for draw, stream_R1 in enumerate(of_host.stream_RF.split(1, 1)):
        here = keys(everyone, device)._replace(stream_RF=stream_R1.to(device))
        token_R1, logp_R1, log_z_R = TritonSampling(vocab).own_draws(logits_RV, spec.to(device), here)
        assert torch.equal(made[0][:, draw], token_R1[:, 0]) and torch.equal(made[1][:, draw], logp_R1[:, 0])
        assert draw or torch.equal(made[2], log_z_R)


def test_equally_likely_tokens_are_listed_in_their_order(device):
    logp_TV = -torch.randint(0, 30, (3, 5000), generator=torch.Generator().manual_seed(5)).float().to(device) / 8
    logp_TV[1, ::2], logp_TV[2, 17] = -torch.inf, 0.5
    expected_TV = logp_TV.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(first_tokens(logp_TV, 20), expected_TV[:, :20])


@pytest.mark.parametrize(("kind", "vocab"), KINDS)
def test_masses_given_a_constraint_do_not_depend_on_the_others(device, kind, vocab):
    """Rows whose weights have the mass that their constraint allows, beside each other and rows without."""
    sampling, generator = form(kind, vocab, device), torch.Generator().manual_seed(4)
    logits_RV = (torch.randn(len(ROWS), vocab, generator=generator) * 3).to(device)
    mask_RW = torch.randint(-(1 << 31), 1 << 31, (len(ROWS), -(-vocab // 32)), generator=generator).int().to(device)
    by_answer_R = (torch.arange(len(ROWS)) % 3 > 0).to(device)

    def given(rows: Tensor) -> tuple[Tensor, Tensor]:
        masked_RV = apply_mask(logits_RV[rows], mask_RW[rows], vocab)
        law = law_spec(*(ROWS[row] for row in rows.tolist())).to(device)
        made_RV, _, mass_R = given_constraint(
            sampling, logits_RV[rows], masked_RV, mask_RW[rows], law, by_answer_R[rows]
        )
        assert mass_R is not None
        return made_RV, mass_R

    everyone = torch.arange(len(ROWS))
    together = given(everyone)
    for row in everyone.tolist():
        for made, all_made in zip(given(everyone[row : row + 1]), together):
            assert same(made[0], all_made[row]), ROWS[row]
    mass_R = together[1]
    logp_RV = torch.empty(len(ROWS), vocab, device=device)
    sampling.write_distribution(logits_RV, law_spec(*ROWS).to(device), logp_RV)
    allowed_RV = allowed_tokens(mask_RW, vocab)
    expected_R = torch.where(allowed_RV, logp_RV.double(), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(mass_R.double(), torch.where(by_answer_R, expected_R, 0.0), atol=1e-5, rtol=1e-5)
