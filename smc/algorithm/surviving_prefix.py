"""A population in which no particle has weight goes on from where one still had: the longest prefix of every block that
the target may have written is weighed, and one of these is drawn. The target's own next token follows it.

The estimate of Z is 0 from there on, which keeps its expectation. What is drawn has probability under the target, token
by token. Knows nothing about models or requests.

Axes: A batch indices, Q tokens of a block, G groups, H non-empty groups, N batch indices of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from smc.algorithm.expansion import grid

PREFIX_POSITION = 3 << 20
"""Position of the uniform by which a prefix is drawn."""


def surviving_prefix(
    step_AQ: Tensor, count_A: Tensor, logw_A: Tensor, groups: tuple[Tensor, Tensor], uniform_G: Tensor
) -> tuple[Tensor, Tensor]:
    """For every batch index, the block of its group that was drawn [A] and how many of its tokens are kept, including
    the block's first [A].

    `step_AQ`: log-weight that the token after each brings, -inf where the target cannot write it; the tokens of a block
    are `count`. `logw_A`: log-weight of the block's first token, -inf where there is no block. `groups`: first and size
    [G]. If no block of a group has weight, the first is taken. Synchronises with the host."""
    exists_AQ = torch.arange(step_AQ.shape[1], device=step_AQ.device) < count_A[:, None] - 1
    step_AQ = torch.where(exists_AQ, step_AQ.double(), 0.0)
    survives_AQ = (step_AQ > -torch.inf).long().cumprod(-1) > 0
    kept_A = 1 + (survives_AQ & exists_AQ).sum(-1)
    weight_A = logw_A.double() + torch.where(survives_AQ, step_AQ, 0.0).sum(-1)
    drawn_A = torch.arange(len(count_A), device=step_AQ.device)
    used_H = (groups[1] > 0).nonzero()[:, 0]
    if len(used_H):
        index_HN, exists_HN = grid(*(bound[used_H] for bound in groups))
        weight_HN = torch.where(exists_HN, weight_A[index_HN], -torch.inf).nan_to_num(
            nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf
        )
        top_H1 = weight_HN.amax(-1, keepdim=True)
        reach_HN = (weight_HN - torch.where(top_H1 > -torch.inf, top_H1, 0.0)).exp().cumsum(-1)
        pick_H1 = (reach_HN <= uniform_G[used_H, None] * reach_HN[:, -1:]).sum(-1, keepdim=True)
        pick_H1 = torch.where(reach_HN[:, -1:] > 0, pick_H1, 0).clamp(max=index_HN.shape[1] - 1)
        drawn_A[index_HN[exists_HN]] = index_HN.gather(1, pick_H1).expand_as(index_HN)[exists_HN]
    return drawn_A, kept_A[drawn_A]
