"""Which places of a packed batch belong to which group. Knows nothing about weights, requests or how places are filled.

Axes: A places of a batch, G groups, H those that have places, N places of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.weights import valid


@dataclass(frozen=True)
class Bounds:
    """The groups of a packed batch, one after another: int32 tensors [G] on the batch's device. Places of no group are
    padding."""

    first_G: Tensor
    """Index of the group's first place."""
    size_G: Tensor
    """Places of the group; 0 for a padding group."""
    count_G: Tensor
    """Particles that the mean weight is over: N before a choice. At most the size."""
    draws_G: Tensor
    """Particles wanted after it. At most the size."""

    def used(self) -> tuple[Tensor, Bounds]:
        """Index of the groups that have places [H], and their bounds. Reads the host."""
        index_H = (self.size_G > 0).nonzero()[:, 0]
        return index_H, Bounds(
            self.first_G[index_H], self.size_G[index_H], self.count_G[index_H], self.draws_G[index_H]
        )

    def grid(self) -> tuple[Tensor, Tensor]:
        """Index of every group's places and whether they exist (the others have index 0), [G, N]. N is the largest
        size, at least 1.

        Reads the host.
        """
        n = max(1, int(self.size_G.max())) if len(self.size_G) else 1
        exists_GN = valid(self.size_G, n)
        index_GN = self.first_G.long()[:, None] + torch.arange(n, device=exists_GN.device)
        return torch.where(exists_GN, index_GN, 0), exists_GN
