"""Coupled drafting: the probabilities that a token wins the target's draw, and the exponent fitted to those draws."""

from __future__ import annotations

import math

import pytest
import torch

from smc.algorithm.coupling import MOST_EXPONENT, SLACK, DrawObservation, ExponentFit, coupled_logp, score_of_exponent

VOCAB = 50


def gumbel(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return -torch.empty(shape).exponential_(generator=generator).log()


def test_with_the_target_s_distribution_the_most_probable_token_is_the_target_s_draw():
    generator = torch.Generator().manual_seed(0)
    logp_RV = torch.log_softmax(3 * torch.randn(200, VOCAB, generator=generator), -1)
    noise_RV = gumbel(generator, 200, VOCAB)
    coupled_RV = coupled_logp(logp_RV, torch.ones(200), noise_RV)
    torch.testing.assert_close(coupled_RV.exp().sum(-1), torch.ones(200))
    assert torch.equal(coupled_RV.argmax(-1), (logp_RV + noise_RV).argmax(-1))


def test_rows_that_are_not_coupled_stay_as_they_are_and_impossible_tokens_impossible():
    logq_RV = torch.log(torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]))
    found_RV = coupled_logp(logq_RV, torch.tensor([0.0, 2.0]), torch.zeros(2, 3))
    assert torch.equal(found_RV[0], logq_RV[0])
    torch.testing.assert_close(found_RV[1].exp(), torch.tensor([0.1, 0.9, 0.0]))


def test_the_score_is_the_derivative():
    generator = torch.Generator().manual_seed(1)
    logq_RV = torch.log_softmax(2 * torch.randn(20, VOCAB, generator=generator, dtype=torch.float64), -1)
    noise_RV, token_R = gumbel(generator, 20, VOCAB).double(), torch.randint(VOCAB, (20,), generator=generator)
    exponent_R = torch.linspace(0.5, 4, 20, dtype=torch.float64, requires_grad=True)
    win_RV = torch.softmax(exponent_R[:, None] * logq_RV + noise_RV, -1)
    torch.log(win_RV.gather(1, token_R[:, None]) + SLACK).sum().backward()
    is_drawn_RV = torch.nn.functional.one_hot(token_R, VOCAB).bool()
    score_R, information_R = score_of_exponent(logq_RV, exponent_R.detach(), noise_RV, is_drawn_RV)
    torch.testing.assert_close(score_R, exponent_R.grad)
    assert (information_R >= 0).all()


@pytest.mark.parametrize(("power", "exponent"), [(1.0, 1.0), (2.5, 2.5)])
def test_the_exponent_that_made_the_draws_is_found(power, exponent):
    """The target is close to q^power: the fitted exponent approaches `power`, starting at 1."""
    generator, fit = torch.Generator().manual_seed(2), ExponentFit(memory=0.999)
    for _ in range(1400):
        logq_1V = torch.log_softmax(2 * torch.randn(1, VOCAB, generator=generator), -1)
        # The target differs from q^power a little, so that noise and q do not decide its draws exactly.
        logp_1V = power * logq_1V + 0.5 * torch.randn(1, VOCAB, generator=generator)
        noise_1V = gumbel(generator, 1, VOCAB)
        is_drawn_1V = torch.zeros(1, VOCAB, dtype=torch.bool)
        is_drawn_1V[0, (logp_1V + noise_1V).argmax()] = True
        values = score_of_exponent(logq_1V, torch.tensor([fit.exponent]), noise_1V, is_drawn_1V)
        fit.observe(DrawObservation(values[0].item(), values[1].item(), fit.exponent))
    assert math.isclose(fit.exponent, exponent, rel_tol=0.3)


def test_at_temperature_zero_a_draft_that_is_always_right_is_trusted():
    """The exponent becomes large, so that more rows do not push the draft's most probable tokens out of the tree."""
    generator, fit = torch.Generator().manual_seed(3), ExponentFit(memory=0.99)
    for _ in range(300):
        logq_1V = torch.log_softmax(torch.randn(1, VOCAB, generator=generator), -1)
        is_drawn_1V = torch.nn.functional.one_hot(logq_1V.argmax(-1), VOCAB).bool()
        values = score_of_exponent(logq_1V, torch.tensor([fit.exponent]), torch.zeros(1, VOCAB), is_drawn_1V)
        fit.observe(DrawObservation(values[0].item(), values[1].item(), fit.exponent))
    assert fit.exponent > MOST_EXPONENT / 2


def test_draws_that_were_not_seen_change_nothing_and_one_draw_changes_little():
    fit = ExponentFit(memory=0.99)
    fit.observe(DrawObservation(math.nan, math.nan, 1.0))
    assert fit == ExponentFit(memory=0.99)
    fit.observe(DrawObservation(-1e6, 1e-3, 1.0))
    assert fit.exponent > 0.75
