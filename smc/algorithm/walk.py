"""Exact decoding: how far blocks of a tree agree with the target's own draws (design section 7). Knows nothing about
models or requests.

Axes: A places of a packed batch, Q tokens of a block, G groups, H those that have places, N places of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smc.algorithm.expansion import grid


def walk(
    tokens_AQ: Tensor, count_A: Tensor, drawn_AQ: Tensor, alive_A: Tensor, groups: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The block of every place's group that agrees longest, the first of equals [A], and how many tokens of it do, the
    first included [A].

    `tokens_AQ`: blocks of `count` tokens, whose first is known to be right. `drawn_AQ`: what the target draws after
    each of them. `groups`: first and size [G]. A padding place stands for itself, with one token. Reads the host."""
    q = tokens_AQ.shape[1]
    exists_AQ = torch.arange(1, q, device=tokens_AQ.device) < count_A[:, None]
    agrees_AQ = (tokens_AQ[:, 1:] == drawn_AQ[:, :-1]) & exists_AQ
    right_A = torch.where(alive_A, 1 + agrees_AQ.long().cumprod(-1).sum(-1), 0)
    best_A = torch.arange(len(count_A), device=tokens_AQ.device)
    used_H = (groups[1] > 0).nonzero()[:, 0]
    if len(used_H):
        place_HN, exists_HN = grid(*(bound[used_H] for bound in groups))
        right_HN = torch.where(exists_HN, right_A[place_HN], -1)
        first_H1 = right_HN.argmax(-1, keepdim=True)
        best_A[place_HN[exists_HN]] = place_HN.gather(1, first_H1).expand_as(place_HN)[exists_HN]
    return best_A, right_A[best_A].clamp(min=1)
