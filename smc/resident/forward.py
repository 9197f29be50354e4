"""Runs a fixed number of tokens per row through a decoder. The reference, in plain torch, leaves padding out; see the package's legend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from smc.arrays import to_device
from smc.attention.base import ForwardBatch
from smc.attention.torch_backend import TorchAttention
from smc.kv.pages import DUMMY_PAGE
from smc.kv.pool import KVPool
from smc.models.decoder import Decoder, RopeTable


@dataclass(frozen=True)
class StaticRows:
    """R rows of Q tokens each, in groups of equally many rows."""

    table_RL: Tensor
    """int32 pages."""
    start_R: Tensor
    """int32 position of a row's first token."""
    count_R: Tensor
    """int32 tokens that exist; the others leave no trace."""
    size_G: Tensor
    """int32 rows of each group that are no padding."""
    shared_G: Tensor
    """int32 leading positions that all rows of a group have in common."""
    queries: int
    """Q."""
    short: bool
    """Rows hold few positions."""
    skip_R: Tensor | None = None
    """int32 leading tokens whose keys and values are there already."""


class StaticForward:
    """A decoder with its pool and rotary table."""

    def __init__(self, model: Decoder, pool: KVPool, rope: RopeTable) -> None:
        self.model, self.pool, self.rope = model, pool, rope
        self._attention = TorchAttention()

    def __call__(self, tokens_T: Tensor, rows: StaticRows) -> Tensor:
        """Hidden states [T, E], zero where there is no token; keys and values are stored."""
        count_R = rows.count_R.cpu().numpy()
        live_R = np.flatnonzero(count_R)
        hidden_TE = tokens_T.new_zeros(len(tokens_T), self.model.config.hidden_size, dtype=self.model.embed.weight.dtype)
        if not len(live_R):
            return hidden_TE
        batch, index_X = _without_padding(rows, count_R, live_R)
        index_X, position_X = (to_device(array, tokens_T.device) for array in (index_X, batch.positions_T))
        attend = self._attention.plan(self.pool, batch)
        hidden_TE[index_X] = self.model(tokens_T[index_X], self.rope.at(position_X), attend)
        return hidden_TE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, V], in whatever type; the columns past the vocabulary are padding."""
        return self.model.logits(hidden_RE)


def _without_padding(rows: StaticRows, count_R: np.ndarray, live_R: np.ndarray) -> tuple[ForwardBatch, np.ndarray]:
    """The rows that have tokens, and where those tokens are among all."""
    groups = len(rows.size_G)
    counts_X, starts_X = count_R[live_R], rows.start_R.cpu().numpy()[live_R]
    table_XL = rows.table_RL.cpu().numpy()[live_R]
    row_T = np.repeat(np.arange(len(live_R)), counts_X)
    offset_T = np.arange(len(row_T)) - np.repeat(np.cumsum(counts_X) - counts_X, counts_X)
    position_T = starts_X[row_T] + offset_T
    pages_T = table_XL[row_T, position_T]
    if rows.skip_R is not None:
        pages_T = np.where(offset_T < rows.skip_R.cpu().numpy()[live_R][row_T], DUMMY_PAGE, pages_T)
    members_G = np.bincount(live_R // (len(count_R) // groups), minlength=groups)
    bounds_S = np.concatenate(([0], np.cumsum(members_G[members_G > 0])))
    shared_S = rows.shared_G.cpu().numpy()[members_G > 0]
    batch = ForwardBatch(table_XL, starts_X, counts_X, pages_T, position_T, bounds_S, shared_S)
    return batch, live_R[row_T] * rows.queries + offset_T
