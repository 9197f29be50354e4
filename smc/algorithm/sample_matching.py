"""Sample matching for exact decoding: finds the drafted block that agrees longest with the target's own draws.

Knows nothing about models or requests.

Axes: A batch indices, Q tokens of a block, G groups, H non-empty groups, N batch indices of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smc.algorithm.expansion import grid


def match_samples(
    tokens_AQ: Tensor, count_A: Tensor, drawn_AQ: Tensor, alive_A: Tensor, groups: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """For every batch index, the block of its group with the longest match (the first among equals) [A], and the number
    of matching tokens, including the block's first [A].

    `tokens_AQ`: blocks of `count` tokens, of which the first is already accepted. `drawn_AQ`: the target's draw after
    each token. `groups`: first and size [G]. A padding index is its own best block, with one token. Synchronises with
    the host."""
    q = tokens_AQ.shape[1]
    exists_AQ = torch.arange(1, q, device=tokens_AQ.device) < count_A[:, None]
    agrees_AQ = (tokens_AQ[:, 1:] == drawn_AQ[:, :-1]) & exists_AQ
    matching_A = torch.where(alive_A, 1 + agrees_AQ.long().cumprod(-1).sum(-1), 0)
    best_A = torch.arange(len(count_A), device=tokens_AQ.device)
    used_H = (groups[1] > 0).nonzero()[:, 0]
    if len(used_H):
        index_HN, exists_HN = grid(*(bound[used_H] for bound in groups))
        matching_HN = torch.where(exists_HN, matching_A[index_HN], -1)
        first_H1 = matching_HN.argmax(-1, keepdim=True)
        best_A[index_HN[exists_HN]] = index_HN.gather(1, first_H1).expand_as(index_HN)[exists_HN]
    return best_A, matching_A[best_A].clamp(min=1)
