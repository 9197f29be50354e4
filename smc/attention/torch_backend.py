"""The reference backend, in plain torch: other backends are tested against it.

A segment's shared prefix is gathered and multiplied once for all its rows; what a row has for itself is gathered per row.
Scores of both parts meet in one softmax.

Axes: R rows, Q new tokens of a row (padded to the longest), T = all new tokens, J key/value heads, H query heads, D head
dimension, S segments, M rows of a segment (padded), P prefix positions, O own positions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from smc.attention.base import AttentionBackend, ForwardBatch
from smc.kv.pool import KVPool
from smc.kv.tables import BlockTables
from smc.models.decoder import Attend


class TorchAttention(AttentionBackend):
    def plan(self, tables: BlockTables, pool: KVPool, batch: ForwardBatch) -> Attend:
        return _Plan(tables, pool, batch).attend


class _Plan:
    def __init__(self, tables: BlockTables, pool: KVPool, batch: ForwardBatch) -> None:
        self.pool, self.device = pool, pool.keys.device
        self.pages_T = self._to_device(batch.pages_T)
        rows, q = len(batch.rows_R), int(batch.counts_R.max())
        self.shape_RQ = (rows, q)
        ragged = bool((batch.counts_R != q).any())
        self.slot_T = self._to_device(_padded_slots(batch.counts_R, q)) if ragged else None
        self._plan_own(tables, batch, q)
        self._plan_prefix(tables, batch)

    def _plan_own(self, tables: BlockTables, batch: ForwardBatch, q: int) -> None:
        shared_R = np.repeat(batch.shared_S, np.diff(batch.bounds_S))
        own_O = np.arange(int((batch.starts_R + batch.counts_R - shared_R).max()))
        column_RO = np.minimum(shared_R[:, None] + own_O, tables.table_RL.shape[1] - 1)
        self.own_RO = self._to_device(tables.table_RL[batch.rows_R[:, None], column_RO])
        last_RQ = batch.starts_R[:, None] + np.minimum(np.arange(q), batch.counts_R[:, None] - 1) - shared_R[:, None]
        self.hidden_RQO = None
        if (last_RQ < own_O[-1]).any():
            self.hidden_RQO = self._to_device(own_O > last_RQ[..., None])

    def _plan_prefix(self, tables: BlockTables, batch: ForwardBatch) -> None:
        self.prefix_positions = int(batch.shared_S.max(initial=0))
        if not self.prefix_positions:
            return
        prefix_P = np.arange(self.prefix_positions)
        first_S = batch.rows_R[batch.bounds_S[:-1]]
        outside_SP = prefix_P >= batch.shared_S[:, None]
        self.prefix_SP = self._to_device(np.where(outside_SP, 0, tables.table_RL[first_S[:, None], prefix_P]))
        self.outside_SP = self._to_device(outside_SP) if outside_SP.any() else None
        sizes_S = np.diff(batch.bounds_S)
        m = int(sizes_S.max())
        self.shape_SM = (len(sizes_S), m)
        self.member_R = self._to_device(_padded_slots(sizes_S, m)) if (sizes_S != m).any() else None

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys[self.pages_T], values[self.pages_T] = k_TJD, v_TJD
        q_RJXD = self._queries(q_THD, k_TJD.shape[1])
        scores_RJXO = q_RJXD @ keys[self.own_RO].permute(0, 2, 3, 1)
        if self.hidden_RQO is not None:
            scores = scores_RJXO.unflatten(2, (-1, self.shape_RQ[1]))
            scores_RJXO = scores.masked_fill(self.hidden_RQO[:, None, None], -torch.inf).flatten(2, 3)
        own = scores_RJXO.shape[-1]
        if self.prefix_positions:
            scores_RJXO = torch.cat((scores_RJXO, self._prefix_scores(q_RJXD, keys)), dim=-1)
        weights = torch.softmax(scores_RJXO, dim=-1, dtype=torch.float32).to(q_RJXD.dtype)
        out_RJXD = weights[..., :own] @ values[self.own_RO].transpose(1, 2)
        if self.prefix_positions:
            out_RJXD = out_RJXD + self._prefix_values(weights[..., own:], values)
        return self._flat(out_RJXD)

    def _queries(self, q_THD: Tensor, kv_heads: int) -> Tensor:
        """[R, J, X, D] with X = (query heads of one key/value head) * Q, scaled."""
        heads, dim = q_THD.shape[1:]
        q_THD = q_THD * dim**-0.5
        if self.slot_T is not None:
            padded = q_THD.new_zeros(self.shape_RQ[0] * self.shape_RQ[1], heads, dim)
            padded[self.slot_T] = q_THD
            q_THD = padded
        q_RQJGD = q_THD.view(*self.shape_RQ, kv_heads, heads // kv_heads, dim)
        return q_RQJGD.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def _flat(self, out_RJXD: Tensor) -> Tensor:
        out_RJGQD = out_RJXD.unflatten(2, (-1, self.shape_RQ[1]))
        out_THD = out_RJGQD.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return out_THD if self.slot_T is None else out_THD[self.slot_T]

    def _by_segment(self, x_RJXY: Tensor) -> Tensor:
        """[S, J, M * X, Y]: the rows of a segment side by side, so that one product reads its prefix for all of them."""
        _, j, x, y = x_RJXY.shape
        if self.member_R is not None:
            padded = x_RJXY.new_zeros(self.shape_SM[0] * self.shape_SM[1], j, x, y)
            padded[self.member_R] = x_RJXY
            x_RJXY = padded
        return x_RJXY.view(*self.shape_SM, j, x, y).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x_SJZY: Tensor) -> Tensor:
        m = self.shape_SM[1]
        x_RJXY = x_SJZY.unflatten(2, (m, -1)).transpose(1, 2).flatten(0, 1)
        return x_RJXY if self.member_R is None else x_RJXY[self.member_R]

    def _prefix_scores(self, q_RJXD: Tensor, keys: Tensor) -> Tensor:
        scores_SJZP = self._by_segment(q_RJXD) @ keys[self.prefix_SP].permute(0, 2, 3, 1)
        if self.outside_SP is not None:
            scores_SJZP = scores_SJZP.masked_fill(self.outside_SP[:, None, None], -torch.inf)
        return self._by_row(scores_SJZP)

    def _prefix_values(self, weights_RJXP: Tensor, values: Tensor) -> Tensor:
        return self._by_row(self._by_segment(weights_RJXP) @ values[self.prefix_SP].transpose(1, 2))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _padded_slots(sizes: np.ndarray, width: int) -> np.ndarray:
    """Where item i of ragged groups lands in a [len(sizes), width] grid, flattened."""
    offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(np.arange(len(sizes)) * width, sizes) + offset
