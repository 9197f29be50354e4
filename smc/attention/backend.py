"""The interface between the model runner and attention backends, and the reference backend in plain torch, with which
tests compare the other backends.

The reference gathers and multiplies a segment's shared prefix once for all its rows, and every row's own positions per
row. One softmax combines the scores of both parts.

Local axes: P prefix positions, U segments, Y queries of one key/value head, Z any axis."""

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
    """One forward pass over R rows: T new tokens, row after row. Consecutive rows form U segments that share a
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
    bounds_U: np.ndarray
    """[U + 1]: segment s is rows bounds[s] .. bounds[s + 1] - 1."""
    shared_U: np.ndarray
    """[U]: the first `shared` positions of all rows of a segment are the same pages."""


class NewEntries:
    """Stores the keys and values that a pass brings. The dummy page stays zero: its scores are masked, but its values
    are multiplied by zero weights, and 0 * NaN is NaN."""

    def __init__(self, batch: ForwardBatch, device: torch.device) -> None:
        stored_T = None if batch.pages_T.all() else np.flatnonzero(batch.pages_T)
        self.pages_T = to_device(batch.pages_T if stored_T is None else batch.pages_T[stored_T], device)
        self.index_T = None if stored_T is None else to_device(stored_T, device)
        """Indices of the tokens that are stored; None: all."""

    def store(self, keys: Tensor, values: Tensor, k_TJD: Tensor, v_TJD: Tensor) -> None:
        if self.index_T is not None:
            k_TJD, v_TJD = k_TJD[self.index_T], v_TJD[self.index_T]
        keys[self.pages_T], values[self.pages_T] = k_TJD, v_TJD


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
        outside_UP, sizes_U = np.arange(longest) >= batch.shared_U[:, None], np.diff(batch.bounds_U)
        pages_UP = np.where(outside_UP, 0, batch.table_RL[batch.bounds_U[:-1], :longest])
        self.pages_UP = to_device(pages_UP, device)
        self.outside_UP = to_device(outside_UP, device) if outside_UP.any() else None
        self.shape_UN = (len(sizes_U), int(sizes_U.max()))
        self.member_R = _padded_slots(sizes_U, device)

    def scores(self, q_RJYD: Tensor, keys: Tensor) -> Tensor:
        scores_UJYP = self._by_segment(q_RJYD) @ keys[self.pages_UP].permute(0, 2, 3, 1)
        if self.outside_UP is not None:
            scores_UJYP = scores_UJYP.masked_fill(self.outside_UP[:, None, None], -torch.inf)
        return self._by_row(scores_UJYP)

    def values(self, weights_RJYP: Tensor, values: Tensor) -> Tensor:
        return self._by_row(self._by_segment(weights_RJYP) @ values[self.pages_UP].transpose(1, 2))

    def _by_segment(self, x_RJYZ: Tensor) -> Tensor:
        """Return [U, J, N * Y, Z], the rows of a segment side by side, so that one product reads the prefix for all of
        them."""
        _, j, x, y = x_RJYZ.shape
        if self.member_R is not None:
            padded = x_RJYZ.new_zeros(math.prod(self.shape_UN), j, x, y)
            padded[self.member_R] = x_RJYZ
            x_RJYZ = padded
        return x_RJYZ.reshape(*self.shape_UN, j, x, y).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x_UJYZ: Tensor) -> Tensor:
        x_RJYZ = x_UJYZ.unflatten(2, (self.shape_UN[1], -1)).transpose(1, 2).flatten(0, 1)
        return x_RJYZ if self.member_R is None else x_RJYZ[self.member_R]


class _TorchPass(AttentionPass):
    """A pass of `TorchAttention`: pages and masks of every query."""

    def __init__(self, pool: KVPool, batch: ForwardBatch) -> None:
        super().__init__(pool, batch)
        device, q, longest = pool.keys.device, int(batch.counts_R.max()), int(batch.shared_U.max(initial=0))
        shared_R = np.repeat(batch.shared_U, np.diff(batch.bounds_U))
        own = int((batch.starts_R + batch.counts_R - shared_R).max())
        last_RQ = (batch.starts_R - shared_R)[:, None] + np.minimum(np.arange(q), batch.counts_R[:, None] - 1)
        self.shape_RQ, self.slot_T = (len(batch.starts_R), q), _padded_slots(batch.counts_R, device)
        self.prefix = _Prefix(batch, longest, device) if longest else None
        self.own_RL = to_device(_own_pages(batch, shared_R, own), device)
        self.hidden_RQL = None
        if (last_RQ < own - 1).any():
            self.hidden_RQL = to_device(np.arange(own) > last_RQ[..., None], device)
        if (window := max(filter(None, pool.windows), default=None)) is not None:
            # Own and prefix positions before a query's window; only layers that have one read this.
            before_RQ1 = (shared_R[:, None] + last_RQ)[..., None] - window
            self.outside_RQL = to_device(shared_R[:, None, None] + np.arange(own) <= before_RQ1, device)
            self.outside_RQP = to_device(np.arange(longest) <= before_RQ1, device)

    def read(self, layer: int, q_THD: Tensor) -> Tensor:
        keys, values, has_window = self.pool.keys[layer], self.pool.values[layer], self.pool.windows[layer] is not None
        q_RJYD = self._queries(q_THD, keys.shape[1])
        scores_RJYL = q_RJYD @ keys[self.own_RL].permute(0, 2, 3, 1)
        if self.hidden_RQL is not None:
            scores_RJYL = self._hide(scores_RJYL, self.hidden_RQL)
        if has_window:
            scores_RJYL = self._hide(scores_RJYL, self.outside_RQL)
        own = scores_RJYL.shape[-1]
        if self.prefix is not None:
            scores_RJYP = self.prefix.scores(q_RJYD, keys)
            if has_window:
                scores_RJYP = self._hide(scores_RJYP, self.outside_RQP)
            scores_RJYL = torch.cat((scores_RJYL, scores_RJYP), dim=-1)
        weights = torch.softmax(scores_RJYL, dim=-1, dtype=torch.float32).to(q_RJYD.dtype)
        out_RJYD = weights[..., :own] @ values[self.own_RL].transpose(1, 2)
        if self.prefix is not None:
            out_RJYD = out_RJYD + self.prefix.values(weights[..., own:], values)
        return self._flat(out_RJYD)

    def _hide(self, scores_RJYP: Tensor, hidden_RQP: Tensor) -> Tensor:
        scores = scores_RJYP.unflatten(2, (-1, self.shape_RQ[1]))
        return scores.masked_fill(hidden_RQP[:, None, None], -torch.inf).flatten(2, 3)

    def _queries(self, q_THD: Tensor, kv_heads: int) -> Tensor:
        """Return scaled queries [R, J, Y, D] with Y = (query heads of one key/value head) * Q."""
        heads, dim = q_THD.shape[1:]
        q_THD = q_THD * dim**-0.5
        if self.slot_T is not None:
            padded = q_THD.new_zeros(math.prod(self.shape_RQ), heads, dim)
            padded[self.slot_T] = q_THD
            q_THD = padded
        q_RQJHD = q_THD.view(*self.shape_RQ, kv_heads, heads // kv_heads, dim)
        return q_RQJHD.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def _flat(self, out_RJYD: Tensor) -> Tensor:
        out_RJHQD = out_RJYD.unflatten(2, (-1, self.shape_RQ[1]))
        out_THD = out_RJHQD.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        return out_THD if self.slot_T is None else out_THD[self.slot_T]


def _own_pages(batch: ForwardBatch, shared_R: np.ndarray, own: int) -> np.ndarray:
    """Return pages [R, L] of each row's positions after its shared prefix. Past the row's end it is the dummy page, to
    be masked: another page may hold NaN there, which no mask removes."""
    column_RL = shared_R[:, None] + np.arange(own)
    beyond_RL = column_RL >= (batch.starts_R + batch.counts_R)[:, None]
    pages_RL = np.take_along_axis(batch.table_RL, np.minimum(column_RL, batch.table_RL.shape[1] - 1), axis=1)
    return np.where(beyond_RL, DUMMY_PAGE, pages_RL)


def _padded_slots(sizes: np.ndarray, device: torch.device) -> Tensor | None:
    """Return the index of item i of ragged groups in a flattened grid whose rows are as wide as the largest group; None
    if it is i, because all groups are equally large."""
    width = int(sizes.max())
    if (sizes == width).all():
        return None
    offset = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return to_device(np.repeat(np.arange(len(sizes)) * width, sizes) + offset, device)
