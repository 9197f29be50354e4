"""Verification of drafted blocks in exact decoding. Knows nothing about models or requests.

**Sample matching** finds the drafted block that agrees longest with the target's own draws.

**Rejection sampling** accepts a drafted token x with probability min(1, p(x) / q(x)). If it is rejected, p is replaced
by the residual distribution max(0, p - q), normalised, for the next trial and for the final draw if every trial is
rejected (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023). Several chains from one root are tried in
order, each against the residual of the trials before (Miao et al., "SpecInfer", ASPLOS 2024). The resulting tokens are
distributed as p for any q. They replace the target's own draws in sample matching.

Axes: A batch indices, Q tokens of a block, L = Q - 1: all tokens but the last, V vocabulary, G groups, H non-empty
groups, N batch indices of a group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from smc.algorithm.resampling import Spans, used_grid

NO_TOKEN = -1
"""Value for a token that is not on the accepted path. Matches no token."""


class Matches(NamedTuple):
    """The block of each batch index's group with the longest match."""

    best_A: Tensor
    """int64 batch index of that block, the first among equals."""
    right_A: Tensor
    """int64 number of its matching tokens, including its first."""


def match_samples(tokens_AQ: Tensor, count_A: Tensor, drawn_AQ: Tensor, alive_A: Tensor, groups: Spans) -> Matches:
    """Find the block of each group with the longest match.

    `tokens_AQ`: blocks of `count` tokens, of which the first is already accepted. `drawn_AQ`: the target's draw after
    each token. A padding index is its own best block, with one token. Synchronises with the host."""
    q = tokens_AQ.shape[1]
    exists_AQ = torch.arange(1, q, device=tokens_AQ.device) < count_A[:, None]
    agrees_AQ = (tokens_AQ[:, 1:] == drawn_AQ[:, :-1]) & exists_AQ
    matching_A = torch.where(alive_A, 1 + agrees_AQ.long().cumprod(-1).sum(-1), 0)
    best_A = torch.arange(len(count_A), device=tokens_AQ.device)
    _, index_HN, exists_HN = used_grid(groups)
    matching_HN = torch.where(exists_HN, matching_A[index_HN], -1)
    first_H1 = matching_HN.argmax(-1, keepdim=True)
    best_A[index_HN[exists_HN]] = index_HN.gather(1, first_H1).expand_as(index_HN)[exists_HN]
    return Matches(best_A, matching_A[best_A].clamp(min=1))


class Chains(NamedTuple):
    """Draft chains: blocks drawn independently from the draft's distribution. All chains of a group begin with the same
    token."""

    tokens_AQ: Tensor
    """Tokens of each chain, int64. The first is already accepted."""
    count_A: Tensor
    """Number of tokens of each chain, int64."""
    alive_A: Tensor
    """bool: there is a chain at this batch index."""
    logp_AQV: Tensor
    """Log-probabilities of the target after each token."""
    logq_ALV: Tensor
    """Log-probabilities of the draft from which the next token was drawn."""


def verify_by_rejection(chains: Chains, groups: Spans, uniform_AQ: Tensor, noise_HQV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's token after each token on the accepted path [A, Q], `NO_TOKEN` elsewhere, and its
    log-probability under the target [A, Q].

    `uniform_AQ`: uniforms in [0, 1) for the trial of the next token. `noise_HQV`: Gumbel variates of the non-empty
    groups, in order. The final draw after token j is argmax(log r + noise), where r is the residual of p. Synchronises
    with the host."""
    token_AQ = torch.full_like(chains.tokens_AQ, NO_TOKEN)
    logp_AQ = torch.full(token_AQ.shape, torch.nan, dtype=torch.float32, device=token_AQ.device)
    _, index_HN, exists_HN = used_grid(groups)
    on_path_HN = exists_HN & chains.alive_A[index_HN]
    for j in range(token_AQ.shape[1]):
        next_H, next_logp_H = _next(chains, index_HN, on_path_HN, j, uniform_AQ[:, j], noise_HQV[:, j])
        to_A = index_HN[on_path_HN]
        token_AQ[to_A, j] = next_H[:, None].expand_as(index_HN)[on_path_HN]
        logp_AQ[to_A, j] = next_logp_H[:, None].expand_as(index_HN)[on_path_HN].float()
        if j + 1 < token_AQ.shape[1]:
            goes_on_HN = (chains.count_A[index_HN] > j + 1) & (chains.tokens_AQ[index_HN, j + 1] == next_H[:, None])
            on_path_HN = on_path_HN & goes_on_HN
    return token_AQ, logp_AQ


def _next(
    chains: Chains, index_HN: Tensor, on_path_HN: Tensor, j: int, uniform_A: Tensor, noise_HV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next token of each group [H] after token j of the chains on the path, and its log-probability [H]."""
    first_H1 = on_path_HN.long().argmax(-1, keepdim=True)
    lead_H = index_HN.gather(1, first_H1)[:, 0]
    logp_HV = chains.logp_AQV[lead_H, j].double()
    left_HV, kept_H = logp_HV.exp(), torch.full_like(lead_H, NO_TOKEN)
    for n in range(index_HN.shape[1]):
        at_H = index_HN[:, n]
        if j + 1 >= chains.tokens_AQ.shape[1]:
            break
        tried_H = on_path_HN[:, n] & (chains.count_A[at_H] > j + 1) & (kept_H == NO_TOKEN)
        token_H1 = chains.tokens_AQ[at_H, j + 1][:, None]
        draft_HV = chains.logq_ALV[at_H, j].double().exp()
        keeps_H = uniform_A[at_H] * draft_HV.gather(1, token_H1)[:, 0] < left_HV.gather(1, token_H1)[:, 0]
        kept_H = torch.where(tried_H & keeps_H, token_H1[:, 0], kept_H)
        left_HV = torch.where((tried_H & ~keeps_H)[:, None], residual_distribution(left_HV, draft_HV), left_HV)
    drawn_H = (left_HV.log() + noise_HV).argmax(-1)
    next_H = torch.where(kept_H == NO_TOKEN, drawn_H, kept_H)
    return next_H, logp_HV.gather(1, next_H[:, None])[:, 0]


def residual_distribution(left_HV: Tensor, draft_HV: Tensor) -> Tensor:
    """Return the residual distribution max(0, left - draft), normalised; `left` if rounding makes the residual zero."""
    rest_HV = (left_HV - draft_HV).clamp(min=0.0)
    sum_H1 = rest_HV.sum(-1, keepdim=True)
    return torch.where(sum_H1 > 0, rest_HV / sum_H1, left_HV)
