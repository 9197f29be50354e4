"""Verification of drafted blocks in exact decoding. Knows nothing about models or requests.

**Sample matching** finds the drafted block that agrees longest with the target's own draws.

**Rejection sampling** accepts a drafted token x with probability min(1, p(x) / q(x)). If it is rejected, p is replaced
by the residual distribution max(0, p - q), normalised, for the next trial and for the final draw if every trial is
rejected (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023). Several chains from one root are tried in
order, each against the residual of the trials before (Miao et al., "SpecInfer", ASPLOS 2024). The resulting tokens are
distributed as p for any q. They replace the target's own draws in sample matching."""

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
    _, index_ZN, exists_ZN = used_grid(groups)
    matching_ZN = torch.where(exists_ZN, matching_A[index_ZN], -1)
    first_Z1 = matching_ZN.argmax(-1, keepdim=True)
    best_A[index_ZN[exists_ZN]] = index_ZN.gather(1, first_Z1).expand_as(index_ZN)[exists_ZN]
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
    logq_AKV: Tensor
    """Log-probabilities of the draft from which the next token was drawn."""


def verify_by_rejection(chains: Chains, groups: Spans, uniform_AQ: Tensor, noise_ZQV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target's token after each token on the accepted path [A, Q], `NO_TOKEN` elsewhere, and its
    log-probability under the target [A, Q].

    `uniform_AQ`: uniforms in [0, 1) for the trial of the next token. `noise_ZQV`: Gumbel variates of the non-empty
    groups, in order. The final draw after token j is argmax(log r + noise), where r is the residual of p. Synchronises
    with the host."""
    token_AQ = torch.full_like(chains.tokens_AQ, NO_TOKEN)
    logp_AQ = torch.full(token_AQ.shape, torch.nan, dtype=torch.float32, device=token_AQ.device)
    _, index_ZN, exists_ZN = used_grid(groups)
    on_path_ZN = exists_ZN & chains.alive_A[index_ZN]
    for j in range(token_AQ.shape[1]):
        next_Z, next_logp_Z = _next(chains, index_ZN, on_path_ZN, j, uniform_AQ[:, j], noise_ZQV[:, j])
        to_A = index_ZN[on_path_ZN]
        token_AQ[to_A, j] = next_Z[:, None].expand_as(index_ZN)[on_path_ZN]
        logp_AQ[to_A, j] = next_logp_Z[:, None].expand_as(index_ZN)[on_path_ZN].float()
        if j + 1 < token_AQ.shape[1]:
            goes_on_ZN = (chains.count_A[index_ZN] > j + 1) & (chains.tokens_AQ[index_ZN, j + 1] == next_Z[:, None])
            on_path_ZN = on_path_ZN & goes_on_ZN
    return token_AQ, logp_AQ


def _next(
    chains: Chains, index_ZN: Tensor, on_path_ZN: Tensor, j: int, uniform_A: Tensor, noise_ZV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next token of each group [Z] after token j of the chains on the path, and its log-probability [Z]."""
    first_Z1 = on_path_ZN.long().argmax(-1, keepdim=True)
    lead_Z = index_ZN.gather(1, first_Z1)[:, 0]
    logp_ZV = chains.logp_AQV[lead_Z, j].double()
    left_ZV, kept_Z = logp_ZV.exp(), torch.full_like(lead_Z, NO_TOKEN)
    for n in range(index_ZN.shape[1]):
        at_Z = index_ZN[:, n]
        if j + 1 >= chains.tokens_AQ.shape[1]:
            break
        tried_Z = on_path_ZN[:, n] & (chains.count_A[at_Z] > j + 1) & (kept_Z == NO_TOKEN)
        token_Z1 = chains.tokens_AQ[at_Z, j + 1][:, None]
        draft_ZV = chains.logq_AKV[at_Z, j].double().exp()
        keeps_Z = uniform_A[at_Z] * draft_ZV.gather(1, token_Z1)[:, 0] < left_ZV.gather(1, token_Z1)[:, 0]
        kept_Z = torch.where(tried_Z & keeps_Z, token_Z1[:, 0], kept_Z)
        left_ZV = torch.where((tried_Z & ~keeps_Z)[:, None], residual_distribution(left_ZV, draft_ZV), left_ZV)
    drawn_Z = (left_ZV.log() + noise_ZV).argmax(-1)
    next_Z = torch.where(kept_Z == NO_TOKEN, drawn_Z, kept_Z)
    return next_Z, logp_ZV.gather(1, next_Z[:, None])[:, 0]


def residual_distribution(left_ZV: Tensor, draft_ZV: Tensor) -> Tensor:
    """Return the residual distribution max(0, left - draft), normalised; `left` if rounding makes the residual zero."""
    rest_ZV = (left_ZV - draft_ZV).clamp(min=0.0)
    sum_Z1 = rest_ZV.sum(-1, keepdim=True)
    return torch.where(sum_Z1 > 0, rest_ZV / sum_Z1, left_ZV)
