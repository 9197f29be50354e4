"""The interface between the model runner and attention backends, and the reference backend in plain torch, with which
tests compare the other backends.

The reference gathers and multiplies a segment's shared prefix once for all its rows, and every row's own positions per
row. One softmax combines the scores of both parts.

Axes: R rows, Q new tokens of a row (padded to the longest), T = all new tokens, J key/value heads, H query heads, D
head dimension, S segments, M rows of a segment (padded), P prefix positions, O own positions, X queries of one
key/value head."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device
from smc.memory.kv_cache import KVPool
from smc.memory.pages import DUMMY_PAGE


@dataclass(frozen=True)
class ForwardBatch:
    """One forward pass over R rows: T new tokens, row after row. Consecutive rows form S segments that share a
    prefix."""

    table_RL: np.ndarray
    """Page of every position of each row; undefined past its last new token."""
    starts_R: np.ndarray
    """Number of positions that each row held before this pass."""
    counts_R: np.ndarray
    """Number of new tokens of each row, at least 1."""
    pages_T: np.ndarray
    """Page of every new token; the dummy page for a token whose keys and values are already stored."""
    positions_T: np.ndarray
    """Position of every new token."""
    bounds_S: np.ndarray
    """[S + 1]: segment s is rows bounds[s] .. bounds[s + 1] - 1."""
    shared_S: np.ndarray
    """[S]: the first `shared` positions of all rows of a segment are the same pages."""


class NewEntries:
    """Stores the keys and values that a pass brings. The dummy page stays zero: its scores are masked, but its values
    are multiplied by zero weights, and 0 * NaN is NaN."""

    def __init__(self, batch: ForwardBatch, device: torch.device) -> None:
        stored_T = None if batch.pages_T.all() else np.flatnonzero(batch.pages_T)
        self.pages_X = to_device(batch.pages_T if stored_T is None else batch.pages_T[stored_T], device)
        self.index_X = None if stored_T is None else to_device(stored_T, device)
        """Indices of the tokens that are stored; None: all."""

    def store(self, keys: Tensor, values: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> None:
        if self.index_X is not None:
            k_TJD, v_TJD = k_TJD[self.index_X], v_TJD[self.index_X]
        keys[self.pages_X], values[self.pages_X] = k_TJD, v_TJD


class AttentionPass(ABC):
    """One planned forward pass: everything that does not depend on the layer has been computed."""

    def __init__(self, pool: KVPool, batch: ForwardBatch) -> None:
        self.pool, self.batch = pool, batch

    @cached_property
    def new(self) -> NewEntries:
        return NewEntries(self.batch, self.pool.keys.device)

    def attend(self, layer: int, q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> Tensor:
        """Store the new tokens' keys and values, then `read`. This is what a decoder calls for each layer
        (`smc.model.decoder.Attend`)."""
        self.new.store(self.pool.keys[layer], self.pool.values[layer], k_TJD, v_TJD)
        return self.read(layer, q_THD)

    @abstractmethod
    def read(self, layer: int, q_THD: Tensor) -> Tensor:
        """Return causal attention [T, H, D] over the pages of every row, which already hold the new tokens' keys and
        values."""


class AttentionBackend(ABC):
    """Computes causal attention of new tokens over paged keys and values."""

    @abstractmethod
    def plan(self, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        """Plan a pass. Called once per pass; the result is used once per layer."""


class TorchAttention(AttentionBackend):
    def plan(self, pool: KVPool, batch: ForwardBatch) -> AttentionPass:
        return _TorchPass(pool, batch)


class _Prefix:
    """The prefixes of up to `longest` positions that the rows of each segment share, read once per segment."""

    def __init__(self, batch: ForwardBatch, longest: int, device: torch.device) -> None:
        outside_SP, sizes_S = np.arange(longest) >= batch.shared_S[:, None], np.diff(batch.bounds_S)
        pages_SP = np.where(outside_SP, 0, batch.table_RL[batch.bounds_S[:-1], :longest])
        self.pages_SP = to_device(pages_SP, device)
        self.outside_SP = to_device(outside_SP, device) if outside_SP.any() else None
        self.shape_SM = (len(sizes_S), int(sizes_S.max()))
        self.member_R = _padded_slots(sizes_S, device)

    def scores(self, q_RJXD: Tensor, keys: Tensor) -> Tensor:
        scores_SJZP = self._by_segment(q_RJXD) @ keys[self.pages_SP].permute(0, 2, 3, 1)
        if self.outside_SP is not None:
            scores_SJZP = scores_SJZP.masked_fill(self.outside_SP[:, None, None], -torch.inf)
        return self._by_row(scores_SJZP)

    def values(self, weights_RJXP: Tensor, values: Tensor) -> Tensor:
        return self._by_row(self._by_segment(weights_RJXP) @ values[self.pages_SP].transpose(1, 2))

    def _by_segment(self, x_RJXY: Tensor) -> Tensor:
        """Return [S, J, M * X, Y], the rows of a segment side by side, so that one product reads the prefix for all of
        them."""
        _, j, x, y = x_RJXY.shape
        if self.member_R is not None:
            padded = x_RJXY.new_zeros(math.prod(self.shape_SM), j, x, y)
            padded[self.member_R] = x_RJXY
            x_RJXY = padded
        return x_RJXY.reshape(*self.shape_SM, j, x, y).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x_SJZY: Tensor) -> Tensor:
        x_RJXY = x_SJZY.unflatten(2, (self.shape_SM[1], -1)).transpose(1, 2).flatten(0, 1)
        return x_RJXY if self.member_R is None else x_RJXY[self.member_R]


class _TorchPass(AttentionPass):
    """A pass of `TorchAttention`: pages and masks of every query."""

    def __init__(self, pool: KVPool, batch: ForwardBatch) -> None:
        super().__init__(pool, batch)
        device, q, longest = pool.keys.device, int(batch.counts_R.max()), int(batch.shared_S.max(initial=0))
        shared_R = np.repeat(batch.shared_S, np.diff(batch.bounds_S))
        own = int((batch.starts_R + batch.counts_R - shared_R).max())
        last_RQ = (batch.starts_R - shared_R)[:, None] + np.minimum(np.arange(q), batch.counts_R[:, None] - 1)
        self.shape_RQ, self.slot_T = (len(batch.starts_R), q), _padded_slots(batch.counts_R, device)
        self.prefix = _Prefix(batch, longest, device) if longest else None
        self.own_RO = to_device(_own_pages(batch, shared_R, own), device)
        self.hidden_RQO = None
        if (last_RQ < own - 1).any():
            self.hidden_RQO = to_device(np.arange(own) > last_RQ[..., None], device)
        if (window := max(filter(None, pool.windows), default=None)) is not None:
            # Own and prefix positions before a query's window; only layers that have one read this.
            before_RQ1 = (shared_R[:, None] + last_RQ)[..., None] - window
            self.outside_RQO = to_device(shared_R[:, None, None] + np.arange(own) <= before_RQ1, device)
            self.outside_RQP = to_device(np.arange(longest) <= before_RQ1, device)

    def read(self, layer: int, q_THD: Tensor) -> Tensor:
        keys, values, has_window = self.pool.keys[layer], self.pool.values[layer], self.pool.windows[layer] is not None
        q_RJXD = self._queries(q_THD, keys.shape[1])
        scores_RJXO = q_RJXD @ keys[self.own_RO].permute(0, 2, 3, 1)
        if self.hidden_RQO is not None:
            scores_RJXO = self._hide(scores_RJXO, self.hidden_RQO)
        if has_window:
            scores_RJXO = self._hide(scores_RJXO, self.outside_RQO)
        own = scores_RJXO.shape[-1]
        if self.prefix is not None:
            scores_RJXP = self.prefix.scores(q_RJXD, keys)
            if has_window:
                scores_RJXP = self._hide(scores_RJXP, self.outside_RQP)
            scores_RJXO = torch.cat((scores_RJXO, scores_RJXP), dim=-1)
        weights = torch.softmax(scores_RJXO, dim=-1, dtype=torch.float32).to(q_RJXD.dtype)
        out_RJXD = weights[..., :own] @ values[self.own_RO].transpose(1, 2)
        if self.prefix is not None:
            out_RJXD = out_RJXD + self.prefix.values(weights[..., own:], values)
        return self._flat(out_RJXD)

    def _hide(self, scores_RJXP: Tensor, hidden_RQP: Tensor) -> Tensor:
        scores = scores_RJXP.unflatten(2, (-1, self.shape_RQ[1]))
        return scores.masked_fill(hidden_RQP[:, None, None], -torch.inf).flatten(2, 3)

    def _queries(self, q_THD: Tensor, kv_heads: int) -> Tensor:
        """Return scaled queries [R, J, X, D] with X = (query heads of one key/value head) * Q."""
        heads, dim = q_THD.shape[1:]
        q_THD = q_THD * dim**-0.5
        if self.slot_T is not None:
            padded = q_THD.new_zeros(math.prod(self.shape_RQ), heads, dim)
            padded[self.slot_T] = q_THD
            q_THD = padded
        q_RQJGD = q_THD.view(*self.shape_RQ, kv_heads, heads // kv_heads, dim)
        return q_RQJGD.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def _flat(self, out_RJXD: Tensor) -> Tensor:
        out_RJGQD = out_RJXD.unflatten(2, (-1, self.shape_RQ[1]))
        out_THD = out_RJGQD.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return out_THD if self.slot_T is None else out_THD[self.slot_T]


def _own_pages(batch: ForwardBatch, shared_R: np.ndarray, own: int) -> np.ndarray:
    """Return pages [R, O] of each row's positions after its shared prefix. Past the row's end it is the dummy page, to
    be masked: another page may hold NaN there, which no mask removes."""
    column_RO = shared_R[:, None] + np.arange(own)
    beyond_RO = column_RO >= (batch.starts_R + batch.counts_R)[:, None]
    pages_RO = np.take_along_axis(batch.table_RL, np.minimum(column_RO, batch.table_RL.shape[1] - 1), axis=1)
    return np.where(beyond_RO, DUMMY_PAGE, pages_RO)


def _padded_slots(sizes: np.ndarray, device: torch.device) -> Tensor | None:
    """Return the index of item i of ragged groups in a flattened grid whose rows are as wide as the largest group; None
    if it is i, because all groups are equally large."""
    width = int(sizes.max())
    if (sizes == width).all():
        return None
    offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return to_device(np.repeat(np.arange(len(sizes)) * width, sizes) + offset, device)
