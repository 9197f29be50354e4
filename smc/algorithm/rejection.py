"""Exact decoding by rejection: what the target says after tokens that were drawn from the draft's law.

A drafted token x is kept with probability min(1, p(x) / q(x)); one that is not leaves the law max(0, p - q),
normalised, to whatever is tried next, and to the draw that ends the walk where nothing is kept (Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al., "Accelerating Large Language Model
Decoding with Speculative Sampling", 2023). Several chains from one root are tried one after the other, each against
what the one before has left (Miao et al., "SpecInfer", ASPLOS 2024). What comes out is drawn from p, whatever q is.

It stands where `smc.algorithm.walk` is given the target's own draws: the blocks that agree with what is said here are
walked in the same way. Knows nothing about models or requests.

Axes: A places of a packed batch, Q tokens of a block, L those but the last, V vocabulary, G groups, H those that have
places, N places of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import grid

NOTHING = -1
"""Said after a token that is not on the path: it agrees with none."""


@dataclass(frozen=True)
class Chains:
    """Blocks of which each group's begin with the same token, and were drawn from the draft's law independently of each
    other."""

    tokens_AQ: Tensor
    """int64; the first is known to be right."""
    count_A: Tensor
    """int64 tokens of a block."""
    alive_A: Tensor
    """bool: there is a chain at the place."""
    logp_AQV: Tensor
    """Log-law of the target after each token."""
    logq_ALV: Tensor
    """Log-law that the draft drew the next token from."""


def say(chains: Chains, groups: tuple[Tensor, Tensor], uniform_AQ: Tensor, noise_HQV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that the target says after each token on its path [A, Q], `NOTHING` elsewhere; and their log-probability
    [A, Q].

    `groups`: first and size [G]. `uniform_AQ`: in [0, 1), for the trial of the next token. `noise_HQV`: Gumbel variates
    of the groups that have places, in their order; where a chain is on the path up to token j, the draw after it is
    argmax(log r + noise), r what is left of p. Reads the host."""
    said_AQ = torch.full_like(chains.tokens_AQ, NOTHING)
    logp_AQ = torch.full(said_AQ.shape, torch.nan, dtype=torch.float32, device=said_AQ.device)
    used_H = (groups[1] > 0).nonzero()[:, 0]
    if not len(used_H):
        return said_AQ, logp_AQ
    place_HN, exists_HN = grid(*(bound[used_H] for bound in groups))
    on_path_HN = exists_HN & chains.alive_A[place_HN]
    for j in range(said_AQ.shape[1]):
        next_H, next_logp_H = _next(chains, place_HN, on_path_HN, j, uniform_AQ[:, j], noise_HQV[:, j])
        to_A = place_HN[on_path_HN]
        said_AQ[to_A, j] = next_H[:, None].expand_as(place_HN)[on_path_HN]
        logp_AQ[to_A, j] = next_logp_H[:, None].expand_as(place_HN)[on_path_HN].float()
        if j + 1 < said_AQ.shape[1]:
            goes_on_HN = (chains.count_A[place_HN] > j + 1) & (chains.tokens_AQ[place_HN, j + 1] == next_H[:, None])
            on_path_HN = on_path_HN & goes_on_HN
    return said_AQ, logp_AQ


def _next(
    chains: Chains, place_HN: Tensor, on_path_HN: Tensor, j: int, uniform_A: Tensor, noise_HV: Tensor
) -> tuple[Tensor, Tensor]:
    """What each group says after token j of the chains that are on the path [H], and its log-probability [H]."""
    first_H1 = on_path_HN.long().argmax(-1, keepdim=True)
    lead_H = place_HN.gather(1, first_H1)[:, 0]
    logp_HV = chains.logp_AQV[lead_H, j].double()
    left_HV, kept_H = logp_HV.exp(), torch.full_like(lead_H, NOTHING)
    for n in range(place_HN.shape[1]):
        at_H = place_HN[:, n]
        if j + 1 >= chains.tokens_AQ.shape[1]:
            break
        tried_H = on_path_HN[:, n] & (chains.count_A[at_H] > j + 1) & (kept_H == NOTHING)
        token_H1 = chains.tokens_AQ[at_H, j + 1][:, None]
        law_HV = chains.logq_ALV[at_H, j].double().exp()
        keeps_H = uniform_A[at_H] * law_HV.gather(1, token_H1)[:, 0] < left_HV.gather(1, token_H1)[:, 0]
        kept_H = torch.where(tried_H & keeps_H, token_H1[:, 0], kept_H)
        left_HV = torch.where((tried_H & ~keeps_H)[:, None], without(left_HV, law_HV), left_HV)
    drawn_H = (left_HV.log() + noise_HV).argmax(-1)
    next_H = torch.where(kept_H == NOTHING, drawn_H, kept_H)
    return next_H, logp_HV.gather(1, next_H[:, None])[:, 0]


def without(left_HV: Tensor, law_HV: Tensor) -> Tensor:
    """max(0, left - law), normalised; `left` where rounding leaves nothing of it."""
    rest_HV = (left_HV - law_HV).clamp(min=0.0)
    sum_H1 = rest_HV.sum(-1, keepdim=True)
    return torch.where(sum_H1 > 0, rest_HV / sum_H1, left_HV)
