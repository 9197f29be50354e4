"""Tensors of a round that several kernels read, packed as arguments of kernels. Field names are those of the objects in
`smc.executor` that hold the tensors; this module knows nothing else about these. See `smc.executor` for axes."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Packed = TypeVar("Packed", bound=NamedTuple)


class PlanTensors(NamedTuple):
    """Of `smc.executor.plan.RoundPlan`."""

    slot_A: Tensor
    group_A: Tensor
    particle_A: Tensor
    seed_A: Tensor
    round_A: Tensor
    alpha_A: Tensor
    first_G: Tensor
    size_G: Tensor
    draws_G: Tensor
    kind_G: Tensor
    target_pages_AQ: Tensor
    begin_pages_AP: Tensor
    branch_pages_XB: Tensor


def row_tokens(rows_WX: Tensor) -> int:
    """K: tokens of drafted rows, `smc.executor.messages.DraftedRows.all_WX`."""
    return (len(rows_WX) - 5) // 2


class DistributionTensors(NamedTuple):
    """Parameters of the token distribution of each batch index, of `smc.distributions.DistributionSpec`."""

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    alpha_R: Tensor


class SlotTensors(NamedTuple):
    """Of `smc.executor.state.SlotState`."""

    table_SL: Tensor
    base_S: Tensor
    end_S: Tensor
    limit_S: Tensor
    least_S: Tensor
    pending_SQ: Tensor
    pending_S: Tensor
    ended_S: Tensor
    alive_S: Tensor
    text_S: Tensor
    logw_S: Tensor
    entry_S: Tensor


class BlockTensors(NamedTuple):
    """Of `smc.executor.verify.Blocks`."""

    origin_A: Tensor
    tokens_AQ: Tensor
    logq_AQ: Tensor
    count_A: Tensor
    ended_A: Tensor
    alive_A: Tensor
    logw_A: Tensor
    open_A: Tensor
    run_A: Tensor


class MatchTensors(NamedTuple):
    """What `smc.algorithm.sample_matching.match_samples` returns."""

    best_A: Tensor
    right_A: Tensor


class Sizes(NamedTuple):
    """Of a batch."""

    batch_size: int
    groups: int
    rows: int


def fields_of(kind: type[Packed], source: object) -> Packed:
    """The attributes of `source` that `kind` names."""
    return kind._make(getattr(source, name) for name in kind._fields)


def contiguous(tensors: Packed) -> Packed:
    """With every tensor contiguous; None and numbers stay."""
    return tensors._make(each.contiguous() if isinstance(each, Tensor) else each for each in tensors)


class Room:
    """Makes the tensors that a launch writes, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def longs(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self._device)

    def ints(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._device)

    def floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def doubles(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=self._device)

    def bools(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bool, device=self._device)
