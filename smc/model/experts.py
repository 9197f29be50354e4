"""Mixture of experts: each token runs through the few experts that its router chooses, and their outputs are weighed.

Two forms of the product: expert by expert, which is the reference, and one grouped product of tokens sorted by expert,
for prompts on a GPU. Few rows on a GPU have kernels of their own (`smc.kernels.experts`). Weights in FP8 and int4 are
widened, and activations stay as they are, so that all forms compute the same.

Axes: T tokens, E hidden size, X experts, C chosen experts of a token, I inner features of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smc.model.config import ModelConfig
from smc.model.linear import Linear


class Choice(NamedTuple):
    """The experts of every token."""

    expert_TC: Tensor
    """Their numbers, the likeliest first."""
    weight_TC: Tensor
    """Their weights, float32."""


Widen = Callable[[Linear, torch.dtype], Tensor]


def _values(matrix: Linear, dtype: torch.dtype) -> Tensor:
    return matrix.values(slice(0, matrix.out_features), dtype)


class Experts(nn.Module):
    """Router and experts of one layer. The experts' matrices stand below each other, gate before up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.count, self.chosen = config.num_experts, config.experts_per_token
        self.inner, self.normalised = config.intermediate_size, config.normalised_experts
        self.router = nn.Linear(config.hidden_size, self.count, bias=False)
        self.gate_up = Linear(config.hidden_size, self.count * 2 * self.inner)
        self.down = Linear(self.inner, self.count * config.hidden_size)

    def choose(self, x_TE: Tensor) -> Choice:
        """The likeliest experts of each token."""
        share_TX = torch.softmax(self.router(x_TE), dim=-1, dtype=torch.float32)
        weight_TC, expert_TC = share_TX.topk(self.chosen, dim=-1)
        if self.normalised:
            weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
        return Choice(expert_TC, weight_TC)

    def has_grouped_product(self, x_TE: Tensor) -> bool:
        """Whether the library has `grouped` for these activations."""
        return x_TE.is_cuda and x_TE.dtype == torch.bfloat16 and self.inner % 8 == 0

    def forward(self, x_TE: Tensor) -> Tensor:
        """This rank's share of the weighted sum [T, E]."""
        choice = self.choose(x_TE)
        return (self.grouped if self.has_grouped_product(x_TE) else self.expert_by_expert)(x_TE, choice)

    def expert_by_expert(self, x_TE: Tensor, choice: Choice) -> Tensor:
        """The reference."""
        expert_TC, weight_TC = choice
        parts_TCE = x_TE.new_zeros(*expert_TC.shape, x_TE.shape[1])
        for expert in expert_TC.unique().tolist():
            token_Y, column_Y = (expert_TC == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x_TE[token_Y], self._matrix(self.gate_up, expert, x_TE.dtype)).chunk(2, dim=-1)
            parts_TCE[token_Y, column_Y] = F.linear(F.silu(gate) * up, self._matrix(self.down, expert, x_TE.dtype))
        return (parts_TCE.float() * weight_TC[..., None]).sum(1).to(x_TE.dtype)

    def grouped(self, x_TE: Tensor, choice: Choice, widen: Widen = _values) -> Tensor:
        """Every expert takes its tokens in one product with the others'. Nothing reads the host. `widen` returns a
        matrix as numbers of a type."""
        expert_TC, weight_TC = choice
        order_Y = expert_TC.flatten().argsort(stable=True)
        ends_X = (expert_TC.flatten()[:, None] == torch.arange(self.count, device=x_TE.device)).sum(0).cumsum(0).int()
        gate, up = F.grouped_mm(
            x_TE[order_Y // self.chosen], self._all(self.gate_up, x_TE.dtype, widen).transpose(1, 2), offs=ends_X
        ).chunk(2, dim=-1)
        out_YE = F.grouped_mm(F.silu(gate) * up, self._all(self.down, x_TE.dtype, widen).transpose(1, 2), offs=ends_X)
        parts_YE = torch.empty_like(out_YE)
        parts_YE[order_Y] = out_YE
        return (parts_YE.view(*expert_TC.shape, -1).float() * weight_TC[..., None]).sum(1).to(x_TE.dtype)

    def _matrix(self, matrix: Linear, expert: int, dtype: torch.dtype) -> Tensor:
        """Of one expert [outputs, inputs]."""
        rows = matrix.out_features // self.count
        return matrix.values(slice(expert * rows, (expert + 1) * rows), dtype)

    def _all(self, matrix: Linear, dtype: torch.dtype, widen: Widen) -> Tensor:
        """Of all experts [X, outputs, inputs]."""
        return widen(matrix, dtype).unflatten(0, (self.count, -1))
