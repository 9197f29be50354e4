"""Losses between the token distributions of a target and a draft, and their gradients, a few tokens at a time.

The gradient of every loss with respect to the draft's logits has a closed form. It is computed with the loss, and
multiplied into the hidden states at once, so that logits over the vocabulary exist for the tokens of one chunk only.

p is the target's distribution, q the draft's:

  total variation    1 - sum min(p, q)       probability that a coupled draw of the draft misses: for exact decoding
  chi-square         log sum p^2 / q         log(1 + chi-square), the variance of importance weights: for SMC
  KL                 sum p log(p / q)        gradients where both others have none: for the beginning

Axes: X tokens that are predicted, C tokens of a chunk, E hidden size of the draft, V vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from smc.model.decoder import Decoder

logger = logging.getLogger(__name__)

CHUNK_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 24}
"""Logits of one chunk, by device."""
MOST_CHUNK = 1 << 14
"""Tokens of one chunk: no more are computed at once, and on a GPU every chunk is padded to its full size."""
LOSSES = ("tv", "chi2", "kl")


@dataclass(frozen=True)
class LossMix:
    """Weights of the losses, which are added."""

    tv: float = 0.0
    chi2: float = 0.0
    kl: float = 0.0

    @property
    def has_chi2(self) -> bool:
        return self.chi2 != 0.0


KL_AT_END = 0.1
"""Share of KL that remains: the other losses hardly change tokens to which the draft gives no probability."""


def mix_at(loss: str, progress: float, kl_until: float) -> LossMix:
    """KL alone at first, then more and more of `loss`, up to the fraction `kl_until` of the run."""
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r}; allowed: {', '.join(LOSSES)}")
    if loss == "kl":
        return LossMix(kl=1.0)
    other = (1 - KL_AT_END) * (min(1.0, progress / kl_until) if kl_until else 1.0)
    return LossMix(kl=1 - other, tv=other) if loss == "tv" else LossMix(kl=1 - other, chi2=other)


def divergence(p_logits_CV: Tensor, q_logits_CV: Tensor, weights_3: Tensor, has_chi2: bool) -> tuple[Tensor, Tensor]:
    """Loss [C] and its gradient [C, V] with respect to the draft's logits; and in the loss's second row the overlap sum
    min(p, q): [2, C]. `weights`: of tv, chi2 and kl."""
    logp_CV = torch.log_softmax(p_logits_CV.float(), -1)
    logq_CV = torch.log_softmax(q_logits_CV.float(), -1)
    p_CV, q_CV = logp_CV.exp(), logq_CV.exp()
    tv, chi2, kl = weights_3.unbind()
    below_CV = q_CV < p_CV
    overlap_C = torch.minimum(p_CV, q_CV).sum(-1)
    below_C1 = torch.where(below_CV, q_CV, 0.0).sum(-1, keepdim=True)
    kl_C = torch.where(p_CV > 0, p_CV * (logp_CV - logq_CV), 0.0).sum(-1)
    loss_C = tv * (1 - overlap_C) + kl * kl_C
    gradient_CV = tv * q_CV * (below_C1 - below_CV.float()) + kl * (q_CV - p_CV)
    if has_chi2:
        ratio_CV = 2 * logp_CV - logq_CV
        log_sum_C1 = torch.logsumexp(ratio_CV, -1, keepdim=True)
        loss_C = loss_C + chi2 * log_sum_C1[:, 0]
        gradient_CV = gradient_CV + chi2 * (q_CV - (ratio_CV - log_sum_C1).exp())
    return torch.stack((loss_C, overlap_C)), gradient_CV


def _scaled_divergence(
    p_logits_CV: Tensor, q_logits_CV: Tensor, weights_3: Tensor, scale: Tensor, has_chi2: bool
) -> tuple[Tensor, Tensor]:
    """`divergence` with a scaled gradient in the type of the logits."""
    values_2C, gradient_CV = divergence(p_logits_CV, q_logits_CV, weights_3, has_chi2)
    return values_2C, (scale * gradient_CV).to(q_logits_CV.dtype)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_scaled_divergence, dynamic=False)


_eager_devices = {"cpu"}
"""Where the loss is computed operation by operation. On GPUs it is compiled, since it is bound by memory: one pass for
many."""


def _divergence_on(device: str, *arguments: Tensor | bool) -> tuple[Tensor, Tensor]:
    if device not in _eager_devices:
        try:
            return _compiled()(*arguments)
        except torch.OutOfMemoryError:
            raise
        except (ImportError, OSError, RuntimeError) as error:
            words = str(error).splitlines()[:1]
            logger.warning("the loss cannot be compiled and is computed operation by operation: %s", *words)
            _eager_devices.add(device)
    return _scaled_divergence(*arguments)  # type: ignore[arg-type]


def chunk_size(vocab: int, device: str) -> int:
    """Tokens of a chunk: a power of two."""
    return min(MOST_CHUNK, max(16, 1 << (CHUNK_LOGITS[device] // vocab).bit_length() - 1))


def raw_gradient(model: Decoder, logits_CV: Tensor, gradient_CV: Tensor) -> Tensor:
    """Gradient with respect to the products of the head, of which `Decoder.finish_logits` makes logits."""
    divisor, cap = model.config.logit_divisor, model.config.logit_cap
    if cap is not None:
        gradient_CV = gradient_CV * (1 - (logits_CV / cap).square())
    return gradient_CV if divisor == 1.0 else gradient_CV / divisor


@torch.no_grad()
def head_loss(
    target: Decoder, draft: Decoder, p_hidden_XE: Tensor, q_hidden_XE: Tensor, vocab: int, mix: LossMix, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over tokens of the loss and of the overlap, and the gradient [X, E] of `scale` times the loss with respect to
    the draft's hidden states. The gradient of the draft's head, if it is trained, is added to `grad`."""
    device = q_hidden_XE.device.type
    size = chunk_size(vocab, device)
    head = draft.lm_head
    weight_VE = head.weight[:vocab]
    weights_3 = torch.tensor([mix.tv, mix.chi2, mix.kl], device=q_hidden_XE.device)
    scale_1 = torch.tensor([scale], device=q_hidden_XE.device)
    sums_2 = torch.zeros(2, device=q_hidden_XE.device)
    gradient_XE = torch.zeros_like(q_hidden_XE)
    head_VE = torch.zeros(head.weight.shape, device=q_hidden_XE.device) if head.weight.requires_grad else None
    for begin in range(0, len(q_hidden_XE), size):
        p_hidden_CE, q_hidden_CE = p_hidden_XE[begin : begin + size], q_hidden_XE[begin : begin + size]
        count = len(q_hidden_CE)
        if device == "cuda" and count < size:  # a compiled function has one shape
            p_hidden_CE, q_hidden_CE = (
                torch.cat((hidden, hidden.new_zeros(size - count, hidden.shape[1])))
                for hidden in (p_hidden_CE, q_hidden_CE)
            )
        p_logits_CV = _finished(target, target.lm_head(p_hidden_CE))[:, :vocab]
        q_logits_CV = _finished(draft, head(q_hidden_CE))[:, :vocab]
        values_2C, gradient_CV = _divergence_on(device, p_logits_CV, q_logits_CV, weights_3, scale_1, mix.has_chi2)
        sums_2 += values_2C[:, :count].sum(1)
        gradient_CV = raw_gradient(draft, q_logits_CV, gradient_CV)[:count].to(q_hidden_XE.dtype)
        gradient_XE[begin : begin + size] = gradient_CV @ weight_VE
        if head_VE is not None:
            head_VE[:vocab] += gradient_CV.t() @ q_hidden_XE[begin : begin + size]
    if head_VE is not None:
        head_VE = head_VE.to(head.weight.dtype)
        head.weight.grad = head_VE if head.weight.grad is None else head.weight.grad + head_VE
    return sums_2[0], sums_2[1], gradient_XE


def _finished(model: Decoder, product_CV: Tensor) -> Tensor:
    return product_CV if model.plain_logits else model.finish_logits(product_CV.float())
