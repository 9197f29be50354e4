"""Losses and their gradients, against automatic differentiation of the plain formulas in float64."""

from __future__ import annotations

import pytest
import torch

from smc.distill import trainer
from smc.distill.trainer import LossMix, TrainingSettings, chunk_size, head_loss, mix_at
from tests.model.tiny import random_decoder, tiny_config

VOCAB = 290
"""Smaller than the number of rows of the embedding."""


def plain(p_logits: torch.Tensor, q_logits: torch.Tensor, mix: LossMix) -> torch.Tensor:
    """Return the sum over tokens of the mixed loss, by definition."""
    p, q = p_logits.double().softmax(-1), q_logits.double().softmax(-1)
    tv, chi2, kl = 1 - torch.minimum(p, q).sum(-1), (p * p / q).sum(-1).log(), (p * (p / q).log()).sum(-1)
    return (mix.tv * tv + mix.chi2 * chi2 + mix.kl * kl).sum()


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setitem(trainer.CHUNK_LOGITS, "cpu", 16 * VOCAB)


@pytest.mark.parametrize("mix", [LossMix(tv=1.0), LossMix(chi2=1.0), LossMix(kl=1.0), LossMix(0.5, 0.3, 0.2)], ids=str)
@pytest.mark.parametrize("family", ["llama", "granite", "gemma3_text"])
def test_gradients_are_those_of_the_plain_formula(small_chunks, mix, family):
    """Gradients of hidden states and of a trained head, over several chunks of which the last is shorter, also for
    models that divide or cap their logits."""
    target, draft = (random_decoder(tiny_config(family), seed=seed) for seed in (0, 1))
    draft.lm_head.weight.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    p_hidden, q_hidden = (3 * torch.randn(37, 32, generator=generator) for _ in range(2))
    loss, overlap, gradient = head_loss(target, draft, p_hidden, q_hidden, VOCAB, mix, 0.25)

    q_leaf = q_hidden.double().requires_grad_(True)
    head = draft.lm_head.weight.detach().double().requires_grad_(True)
    expected = plain(target.logits(p_hidden)[:, :VOCAB], draft.finish_logits(q_leaf @ head.t())[:, :VOCAB], mix)
    (0.25 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    p, q = target.logits(p_hidden)[:, :VOCAB].softmax(-1), draft.logits(q_hidden)[:, :VOCAB].softmax(-1)
    assert overlap.item() == pytest.approx(torch.minimum(p, q).sum().item(), rel=1e-5)
    for found, wanted in ((gradient, q_leaf.grad), (draft.lm_head.weight.grad, head.grad)):
        assert found is not None and wanted is not None
        assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max() + 1e-7


def test_certain_targets_have_finite_gradients():
    """Probabilities of either model may be zero in float32."""
    p_logits, q_logits = torch.zeros(2, 5), torch.zeros(2, 5)
    p_logits[0, 1], q_logits[1, 2] = 200.0, 200.0
    values, gradient = trainer.divergence(p_logits, q_logits, torch.ones(3), True)
    assert values.isfinite().all() and gradient.isfinite().all()
    assert gradient.sum(-1).abs().max() < 1e-4


def test_kl_weight_decays():
    assert mix_at("tv", 0.0, 0.3) == LossMix(kl=1.0)
    assert mix_at("tv", 0.3, 0.3) == mix_at("tv", 1.0, 0.3) == LossMix(tv=0.9, kl=pytest.approx(0.1))
    assert mix_at("chi2", 0.15, 0.3) == LossMix(chi2=pytest.approx(0.45), kl=pytest.approx(0.55))
    assert mix_at("kl", 1.0, 0.3) == LossMix(kl=1.0)
    with pytest.raises(ValueError, match="loss='mse'; allowed: tv, chi2, kl"):
        TrainingSettings(loss="mse")


def test_chunks_are_no_larger_than_what_runs_at_once():
    """On a GPU every chunk is padded to its full size, which for a small vocabulary would be half a million tokens."""
    assert chunk_size(1 << 17, "cuda") == 1 << 11 and chunk_size(1 << 17, "cpu") == 1 << 7
    assert chunk_size(512, "cuda") == chunk_size(512, "cpu") == 1 << 14
