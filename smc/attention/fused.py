"""Attention of long prompts by torch's fused kernels, row by row: nothing is shared between prompts, and none is
padded."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smc.arrays import to_device
from smc.attention.base import AttentionBackend, AttentionPass, ForwardBatch
from smc.memory.kv_pool import KVPool


class FusedAttention(AttentionBackend):
    """For rows of many new tokens. That segments share a prefix is of no account to it."""

    def plan(self, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        return _FusedPass(pool, batch)


class _FusedPass(AttentionPass):
    def __init__(self, pool: KVPool, batch: ForwardBatch) -> None:
        super().__init__(pool, batch)
        ends_R = batch.starts_R + batch.counts_R
        self.tables = [to_device(table_L[:end], pool.keys.device) for table_L, end in zip(batch.table_RL, ends_R)]
        self.bounds = list(pairwise(np.concatenate(([0], np.cumsum(batch.counts_R))).tolist()))

    def read(self, layer: int, q_THD: Tensor) -> Tensor:
        keys, values, window = self.pool.keys[layer], self.pool.values[layer], self.pool.windows[layer]
        return torch.cat(
            [
                _row(q_THD[a:b], *_seen(keys, values, pages_L, b - a, window), window)
                for (a, b), pages_L in zip(self.bounds, self.tables)
            ]
        )


def _seen(keys: Tensor, values: Tensor, pages_L: Tensor, queries: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Keys and values of the positions that any of the last queries sees."""
    if window is not None:
        pages_L = pages_L[max(0, len(pages_L) - queries - window + 1) :]
    return keys[pages_L], values[pages_L]


def _row(q_QHD: Tensor, k_LJD: Tensor, v_LJD: Tensor, window: int | None) -> Tensor:
    """The queries are the last Q of L positions."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_QHD, k_LJD, v_LJD))
    grouped = q_QHD.shape[1] != k_LJD.shape[1]
    if window is not None and len(k_LJD) > window:
        seen_QL = torch.ones(len(q_QHD), len(k_LJD), dtype=torch.bool, device=q.device)
        last = len(k_LJD) - len(q_QHD)
        out = F.scaled_dot_product_attention(q, k, v, seen_QL.tril(last).triu(last - window + 1), enable_gqa=grouped)
    elif len(q_QHD) == 1:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    elif len(q_QHD) == len(k_LJD):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, _last_queries(len(q_QHD), len(k_LJD), q.device), enable_gqa=grouped
        )
    return out[0].transpose(0, 1)


def _last_queries(queries: int, positions: int, device: torch.device) -> Tensor:
    """What lets each of the last `queries` of so many positions see all up to itself."""
    if device.type == "cuda":
        # Takes seconds to import, and knows kernels that need no mask.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(queries, positions)
    return torch.ones(queries, positions, dtype=torch.bool, device=device).tril(positions - queries)
