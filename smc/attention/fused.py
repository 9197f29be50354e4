"""Attention of long prompts by torch's fused kernels, row by row: nothing is shared between prompts, and none is padded."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from smc.arrays import to_device
from smc.attention.base import AttentionBackend, ForwardBatch
from smc.kv.pool import KVPool
from smc.models.decoder import Attend


class FusedAttention(AttentionBackend):
    """For rows of many new tokens. That segments share a prefix is of no account to it."""

    def plan(self, pool: KVPool, batch: ForwardBatch) -> Attend:
        device = pool.keys.device
        pages_T = to_device(batch.pages_T, device)
        stored_T = None if batch.pages_T.all() else to_device(np.flatnonzero(batch.pages_T), device)
        ends_R = batch.starts_R + batch.counts_R
        tables = [to_device(table_L[:end], device) for table_L, end in zip(batch.table_RL, ends_R)]
        bounds = list(pairwise(np.concatenate(([0], np.cumsum(batch.counts_R))).tolist()))

        def attend(layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
            keys, values = pool.keys[layer], pool.values[layer]
            if stored_T is None:
                keys[pages_T], values[pages_T] = k_TJD, v_TJD
            else:
                keys[pages_T[stored_T]], values[pages_T[stored_T]] = k_TJD[stored_T], v_TJD[stored_T]
            rows = [_row(q_THD[a:b], keys[pages_L], values[pages_L]) for (a, b), pages_L in zip(bounds, tables)]
            return torch.cat(rows)

        return attend


def _row(q_QHD: Tensor, k_LJD: Tensor, v_LJD: Tensor) -> Tensor:
    """The queries are the last Q of L positions."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_QHD, k_LJD, v_LJD))
    grouped = q_QHD.shape[1] != k_LJD.shape[1]
    if len(q_QHD) == 1:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    elif len(q_QHD) == len(k_LJD):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(q, k, v, causal_lower_right(len(q_QHD), len(k_LJD)), enable_gqa=grouped)
    return out[0].transpose(0, 1)
