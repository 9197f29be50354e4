"""One step of training: the target's distributions are computed beside the draft's, and nothing of them is kept.

Knows nothing about where conversations come from, or when training ends.

Axes: N conversations of a batch, B rows of a part of it, S token positions, X tokens that are predicted, E hidden size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from smc.distill.losses import LOSSES, head_loss, mix_at
from smc.distill.ranks import Ranks
from smc.model.decoder import Decoder, RopeTable
from smc.model.dense import hidden_states
from smc.training import LearningRate, Optimizer

ALIGNMENT = 64
"""Widths of rows are multiples of this."""
PART_TOKENS = {"cuda": 1 << 14, "cpu": 1 << 12}
"""Tokens that run at the same time, padding included, by device."""


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters. Raises ValueError naming the field."""

    loss: str = "tv"
    """What the draft is for: one of `losses.LOSSES`."""
    kl_until: float = 0.3
    """Fraction of the run over which KL gives way to the loss."""
    batch: int = 64
    """Conversations of a step, over all processes."""
    peak_rate: float = 1e-3
    warmup: int = 30
    """Steps of linear learning-rate warm-up."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of all gradients together."""

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r}; allowed: {', '.join(LOSSES)}")
        for name in ("batch", "warmup", "peak_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: above 0")
        if not 0 <= self.kl_until <= 1:
            raise ValueError(f"kl_until={self.kl_until}; allowed: 0 to 1")


@dataclass(frozen=True)
class StepResult:
    """Sums over the answer tokens of this process's share of a batch, on its device."""

    loss: Tensor
    overlap: Tensor
    tokens: int
    """Answer tokens of all processes."""


class Trainer:
    """Trains a draft on conversations of its target."""

    def __init__(
        self, target: Decoder, draft: Decoder, vocab: int, width: int, settings: TrainingSettings, ranks: Ranks
    ) -> None:
        """`width`: tokens of the longest conversation."""
        self._target, self._draft, self._vocab, self._settings, self._ranks = target, draft, vocab, settings, ranks
        self._device = target.embed.weight.device
        width = -(-width // ALIGNMENT) * ALIGNMENT
        self._p_rope, self._q_rope = (RopeTable(model.config, width, self._device).table for model in (target, draft))
        self.optimizer = Optimizer(
            draft.parameters(),
            LearningRate(settings.peak_rate, settings.warmup),
            settings.weight_decay,
            settings.clip,
        )

    def step(self, rows_N: np.ndarray, step: int, progress: float) -> StepResult:
        """Learn from this process's share of a batch; `progress`: the completed fraction of the run."""
        result = self.gradients(rows_N, progress)
        self.optimizer.step(step, progress)
        return result

    def gradients(self, rows_N: np.ndarray, progress: float) -> StepResult:
        """Compute the gradients of the mean loss over the answer tokens of all processes."""
        self.optimizer.clear()
        mix = mix_at(self._settings.loss, progress, self._settings.kl_until)
        (tokens,) = self._ranks.sum([_predicted(rows_N).sum()])
        loss, overlap = torch.zeros(2, device=self._device).unbind()
        for tokens_BS, index_X in parts_of(rows_N, self._device):
            with torch.no_grad():
                p_hidden_XE = hidden_states(self._target, self._p_rope, tokens_BS).flatten(0, 1)[index_X]
            q_hidden_XE = hidden_states(self._draft, self._q_rope, tokens_BS).flatten(0, 1)[index_X]
            part_loss, part_overlap, gradient_XE = head_loss(
                self._target,
                self._draft,
                p_hidden_XE,
                q_hidden_XE.detach(),
                self._vocab,
                mix,
                1 / max(1.0, tokens),
            )
            q_hidden_XE.backward(gradient_XE)
            loss, overlap = loss + part_loss, overlap + part_overlap
        self._ranks.sum_gradients(self.optimizer.gradients)
        return StepResult(loss, overlap, int(tokens))


def parts_of(rows_N: np.ndarray, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids [B, S] of conversations of similar length, and the index [X] into all of them of the tokens before those
    that are predicted."""
    most = PART_TOKENS[device.type]
    rows_N = rows_N[np.argsort(-rows_N["length"], kind="stable")]
    begin = 0
    while begin < len(rows_N):
        width = -(-int(rows_N["length"][begin]) // ALIGNMENT) * ALIGNMENT
        part_B = rows_N[begin : begin + max(1, most // width)]
        begin += len(part_B)
        tokens_BS = np.zeros((len(part_B), width), np.int64)
        size = min(width, part_B["tokens"].shape[1])
        tokens_BS[:, :size] = part_B["tokens"][:, :size]
        before_BS = np.zeros((len(part_B), width), bool)
        before_BS[:, : size - 1] = part_B["is_answer"][:, 1:size]
        index_X = np.flatnonzero(before_BS)
        yield torch.from_numpy(tokens_BS).to(device), torch.from_numpy(index_X).to(device)


def _predicted(rows_N: np.ndarray) -> np.ndarray:
    return rows_N["is_answer"][:, 1:]
