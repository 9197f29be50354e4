"""Bounds of the groups in a packed batch. Knows nothing about weights or requests.

Axes: A batch indices, G groups, H non-empty groups, N batch indices of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.weights import valid


@dataclass(frozen=True)
class Bounds:
    """The groups of a packed batch, one after another: int32 tensors [G] on the batch's device. Batch indices outside
    all groups are padding."""

    first_G: Tensor
    """First batch index of the group."""
    size_G: Tensor
    """Number of batch indices of the group; 0 for a padding group."""
    count_G: Tensor
    """Number of particles before selection, over which the mean weight is taken. At most the size."""
    draws_G: Tensor
    """Number of particles after selection. At most the size."""

    def used(self) -> tuple[Tensor, Bounds]:
        """Indices of the non-empty groups [H], and their bounds. Synchronises with the host."""
        index_H = (self.size_G > 0).nonzero()[:, 0]
        return index_H, Bounds(
            self.first_G[index_H], self.size_G[index_H], self.count_G[index_H], self.draws_G[index_H]
        )

    def grid(self) -> tuple[Tensor, Tensor]:
        """Batch indices of every group [G, N], 0 in padding, and whether each entry exists [G, N]. N is the largest
        size, at least 1. Synchronises with the host."""
        n = max(1, int(self.size_G.max())) if len(self.size_G) else 1
        exists_GN = valid(self.size_G, n)
        index_GN = self.first_G.long()[:, None] + torch.arange(n, device=exists_GN.device)
        return torch.where(exists_GN, index_GN, 0), exists_GN
