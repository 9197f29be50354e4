"""Forward passes through a decoder: of few packed rows, and of prompts. This is the torch form, which leaves padding
out; the Triton form is `smc.executor.triton_forward`. See `smc.round` for axes; E hidden size."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from smc.arrays import offsets, to_device, to_host
from smc.attention.backend import AttentionBackend, ForwardBatch, TorchAttention
from smc.memory.kv_cache import KVPool
from smc.memory.pages import DUMMY_PAGE
from smc.model.decoder import Decoder, RopeTable
from smc.model.linear import Linear
from smc.round.tensors import Rows


class Reader(Protocol):
    """The parts of a `ModelWorker` that a pass needs."""

    model: Decoder
    pool: KVPool
    rope: RopeTable
    device: torch.device
    width: int
    """Maximum number of positions of a sequence."""

    @property
    def attention(self) -> AttentionBackend: ...


class StaticForward:
    """A decoder with its KV pool and rotary table."""

    def __init__(self, model: Decoder, pool: KVPool, rope: RopeTable) -> None:
        self.model, self.pool, self.rope = model, pool, rope
        self._attention = TorchAttention()

    def __call__(self, tokens_T: Tensor, rows: Rows) -> Tensor:
        """Run the tokens of rows and store their keys and values. Returns hidden states [T, E], zero where there is no
        token."""
        live_R = np.flatnonzero(to_host(rows.count_R))
        hidden_TE = tokens_T.new_zeros(
            len(tokens_T), self.model.config.hidden_size, dtype=self.model.embed.weight.dtype
        )
        if not len(live_R):
            return hidden_TE
        batch, tokens_X = _without_padding(rows, live_R)
        index_X, position_X = (to_device(array, tokens_T.device) for array in (tokens_X, batch.positions_T))
        attend = self._attention.plan(self.pool, batch).attend
        hidden_TE[index_X] = self.model(tokens_T[index_X], self.rope.at(position_X), attend)
        return hidden_TE

    def logits(self, hidden_RE: Tensor, head: Linear | None = None) -> Tensor:
        """Return logits [R, V] of any float type; columns past the vocabulary are padding. With a `head`, the logits
        have a column for each of its rows."""
        if head is None:
            return self.model.logits(hidden_RE)
        return self.model.finish_logits(head(hidden_RE).float())


def run_prompt(reader: Reader, tokens_T: Tensor, batch: ForwardBatch, output_X: Tensor) -> Tensor:
    """Run rows of prompts through a model. Returns hidden states [X, E] of the tokens at index `output`; keys and
    values of all tokens are stored."""
    attend = reader.attention.plan(reader.pool, batch).attend
    rope_T2D = reader.rope.at(to_device(batch.positions_T, reader.device))
    return reader.model(tokens_T, rope_T2D, attend)[output_X]


def _without_padding(rows: Rows, live_X: np.ndarray) -> tuple[ForwardBatch, np.ndarray]:
    """Return the rows that have tokens, and the indices of these tokens among all."""
    counts_X, starts_X = to_host(rows.count_R)[live_X], to_host(rows.start_R)[live_X]
    table_XL = _tables(rows, live_X, int((starts_X + counts_X).max()))
    row_T = np.repeat(np.arange(len(live_X)), counts_X)
    offset_T = offsets(counts_X)
    position_T = starts_X[row_T] + offset_T
    pages_T = table_XL[row_T, position_T]
    group_X = to_host(rows.group_R)[live_X]
    first_S = np.flatnonzero(np.diff(group_X, prepend=-1))
    reach_X = starts_X if rows.tail_R is None else np.minimum(starts_X, to_host(rows.tail_R)[live_X])
    shared_S = np.minimum(to_host(rows.shared_G)[group_X[first_S]], np.minimum.reduceat(reach_X, first_S))
    batch = ForwardBatch(
        table_XL, starts_X, counts_X, pages_T, position_T, np.append(first_S, len(live_X)), np.maximum(shared_S, 0)
    )
    return batch, live_X[row_T] * rows.queries + offset_T


def _tables(rows: Rows, live_X: np.ndarray, end: int) -> np.ndarray:
    """Return the pages [X, end] of the leading positions of the rows `live`."""
    index_X = to_device(live_X, rows.slot_R.device)
    known = min(end, rows.table_SL.shape[1])
    table_XL = np.full((len(live_X), end), DUMMY_PAGE, dtype=np.int32)
    table_XL[:, :known] = to_host(rows.table_SL[rows.slot_R[index_X], :known])
    if rows.tail_RB is None or rows.tail_R is None:
        return table_XL
    tail_XB, offset_XL = to_host(rows.tail_RB[index_X]), np.arange(end) - to_host(rows.tail_R[index_X])[:, None]
    own_XL = np.take_along_axis(tail_XB, offset_XL.clip(0, tail_XB.shape[1] - 1), axis=1)
    own_XL[offset_XL >= tail_XB.shape[1]] = DUMMY_PAGE
    return np.where(offset_XL < 0, table_XL, own_XL)
