"""Parts that all trainings of models share: the learning rate over time, AdamW on float32 weights, and clipping.

Knows nothing about data, losses or files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class LearningRate:
    """A linear warm-up, then a cosine to zero at the end of the run."""

    peak: float
    warmup: int
    """Number of steps of the warm-up."""

    def at(self, step: int, progress: float) -> float:
        """Return the learning rate of a step; `progress`: the completed fraction of the run."""
        return self.peak * min(1, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Optimizer:
    """AdamW of a model's trainable weights, with weight decay on matrices.

    Weights in bfloat16 have float32 masters: the optimiser changes these, and the model holds them rounded."""

    def __init__(self, weights: Iterable[nn.Parameter], rate: LearningRate, weight_decay: float, clip: float) -> None:
        """`clip`: maximum norm of all gradients together. Raises ValueError if no weight is trainable."""
        self.weights = [weight for weight in weights if weight.requires_grad]
        if not self.weights:
            raise ValueError("the model has no trainable weights")
        self._rate, self._clip = rate, clip
        self.masters = [
            weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
            for weight in self.weights
        ]
        matrices, vectors = (
            [master for master in self.masters if (master.dim() == 2) == is_matrix] for is_matrix in (True, False)
        )
        self._rounded = [pair for pair in zip(self.weights, self.masters) if pair[0] is not pair[1]]
        """Weights that are rounded copies of their masters."""
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=rate.peak,
            betas=BETAS,
            fused=self.weights[0].is_cuda,
        )

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of all weights, in order; zeros for weights that nothing depends on."""
        for weight in self.weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return [weight.grad for weight in self.weights if weight.grad is not None]

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite."""
        return bool(torch.stack([master.detach().isfinite().all() for master in self.masters]).all())

    def clear(self) -> None:
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self, step: int, progress: float) -> None:
        """Update the weights by their gradients; `progress`: the completed fraction of the run."""
        for group in self._adam.param_groups:
            group["lr"] = self._rate.at(step, progress)
        for weight, master in self._rounded:
            master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, self._clip)
        self._adam.step()
        self._round()

    def state(self) -> dict:
        """Return everything that a run must restore to continue with identical bits."""
        return {"masters": [master.detach() for master in self.masters], "adam": self._adam.state_dict()}

    @torch.no_grad()
    def restore(self, state: dict) -> None:
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.copy_(saved)
        self._adam.load_state_dict(state["adam"])
        self._round()

    def _round(self) -> None:
        if self._rounded:
            weights, masters = zip(*self._rounded)
            torch._foreach_copy_(weights, masters)
