"""Parts that all trainings of models share: the learning rate over time, AdamW on float32 weights, and clipping.

Knows nothing about data, losses or files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.98)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Hyperparameters of an optimiser. The learning rate rises linearly in a warm-up, then follows a cosine to zero at
    the end of the run. Raises ValueError naming the field."""

    peak_rate: float = 1e-3
    warmup: int
    """Number of steps of the warm-up."""
    weight_decay: float
    clip: float = 1.0
    """Maximum norm of all gradients together."""

    def __post_init__(self) -> None:
        for name in ("warmup", "peak_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: above 0")

    def rate(self, step: int, progress: float) -> float:
        """Return the learning rate of a step; `progress`: the completed fraction of the run."""
        return self.peak_rate * min(1, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Optimizer:
    """AdamW of a model's trainable weights, with weight decay on matrices.

    Weights in bfloat16 have float32 masters: the optimiser changes these, and the model holds them rounded."""

    def __init__(self, weights: Iterable[nn.Parameter], settings: OptimizerSettings) -> None:
        """Raises ValueError if no weight is trainable."""
        self.weights = [weight for weight in weights if weight.requires_grad]
        if not self.weights:
            raise ValueError("the model has no trainable weights")
        self._settings = settings
        self.masters = [
            weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
            for weight in self.weights
        ]
        matrices, vectors = (
            [master for master in self.masters if (master.dim() == 2) == is_matrix] for is_matrix in (True, False)
        )
        self._rounded = [pair for pair in zip(self.weights, self.masters) if pair[0] is not pair[1]]
        """Weights that are rounded copies of their masters."""
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.peak_rate,
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
            group["lr"] = self._settings.rate(step, progress)
        for weight, master in self._rounded:
            master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, self._settings.clip)
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
