"""Forward passes through a decoder: of few packed rows, and of prompts. This is the torch form, which leaves padding
out; the Triton form is `smc.executor.triton_forward`.

Local axes: U segments of rows with a common prefix, Y rows that have tokens, Z tokens that exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from smc.arrays import offsets, to_device, to_host
from smc.attention.backend import AttentionBackend, ForwardBatch, TorchAttention
from smc.executor.graph_runner import StageRunner
from smc.memory.kv_cache import KVPool
from smc.memory.pages import DUMMY_PAGE
from smc.model.decoder import Decoder, RopeTable
from smc.model.linear import Linear
from smc.round.tensors import Rows, RowTables
from smc.types import Decoding, ModelRole, Numerics

PROMPT_ROW = 16
"""Tokens of a row that short prompts are cut into on a GPU: few, so that a prompt's last row has little padding."""
PROMPT_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of such rows that a pass may have. A pass of fewer rows is padded to the next."""


class Reader(Protocol):
    """The parts of a `ModelWorker` that a pass needs."""

    name: ModelRole
    model: Decoder
    pool: KVPool
    rope: RopeTable
    device: torch.device
    width: int
    """Maximum number of positions of a sequence."""
    wanted_numerics: Numerics
    """What the bits of a result may depend on, where kernels can ensure it."""
    vocab_size: int

    @property
    def stages(self) -> StageRunner: ...

    @property
    def attention(self) -> AttentionBackend: ...

    @property
    def sharing(self) -> Callable[[Tensor], Tensor]:
        """Replaces a tensor's values by those of the leader, if several ranks run the model, and returns it."""
        ...


class StaticForward:
    """A decoder with its KV pool and rotary table."""

    def __init__(self, model: Decoder, pool: KVPool, rope: RopeTable) -> None:
        self.model, self.pool, self.rope = model, pool, rope
        self._attention = TorchAttention()

    def __call__(self, tokens_T: Tensor, rows: Rows) -> Tensor:
        """Run the tokens of rows and store their keys and values. Returns hidden states [T, E], zero where there is no
        token."""
        live_R = np.flatnonzero(to_host(rows.spans.count_R))
        hidden_TE = tokens_T.new_zeros(
            len(tokens_T), self.model.config.hidden_size, dtype=self.model.embed.weight.dtype
        )
        if not len(live_R):
            return hidden_TE
        batch, tokens_Z = _without_padding(rows, live_R)
        index_Z, position_Z = (to_device(array, tokens_T.device) for array in (tokens_Z, batch.positions_T))
        hidden_TE[index_Z] = self.run_packed(tokens_T[index_Z], position_Z, batch)
        return hidden_TE

    def run_packed(self, tokens_Z: Tensor, position_Z: Tensor, batch: ForwardBatch) -> Tensor:
        """Run the tokens of a batch without padding. Returns hidden states [Z, E]."""
        attend = self._attention.plan(self.pool, batch).attend
        return self.model(tokens_Z, self.rope.at(position_Z), attend)

    def of(self, decodings: frozenset[Decoding]) -> StaticForward:
        """Return the form of this pass for rounds of these decodings."""
        return self

    def check(self) -> None:
        """Raise RuntimeError if an earlier pass has failed in a way that only its device knows."""

    def logits(self, hidden_RE: Tensor, head: Linear | None = None) -> Tensor:
        """Return logits [R, V] of any float type; columns past the vocabulary are padding. With a `head`, the logits
        have a column for each of its rows."""
        if head is None:
            return self.model.logits(hidden_RE)
        return self.model.finish_logits(head(hidden_RE).float())


def run_prompt(reader: Reader, tokens_T: np.ndarray, batch: ForwardBatch, output_T: np.ndarray) -> Tensor:
    """Run rows of prompts through a model. Returns hidden states [Y, E] of the tokens at index `output`; keys and
    values of all tokens are stored."""
    attend = reader.attention.plan(reader.pool, batch).attend
    rope_T2D = reader.rope.at(to_device(batch.positions_T, reader.device))
    hidden_TE = reader.model(to_device(tokens_T, reader.device), rope_T2D, attend)
    return hidden_TE[to_device(output_T, reader.device)]


def _without_padding(rows: Rows, live_Y: np.ndarray) -> tuple[ForwardBatch, np.ndarray]:
    """Return the rows that have tokens, and the indices of these tokens among all."""
    counts_Y, starts_Y = to_host(rows.spans.count_R)[live_Y], to_host(rows.spans.start_R)[live_Y]
    table_YL = _tables(rows.tables, live_Y, int((starts_Y + counts_Y).max()))
    row_T = np.repeat(np.arange(len(live_Y)), counts_Y)
    offset_T = offsets(counts_Y)
    position_T = starts_Y[row_T] + offset_T
    pages_T = table_YL[row_T, position_T]
    group_Y = to_host(rows.groups.group_R)[live_Y]
    first_U = np.flatnonzero(np.diff(group_Y, prepend=-1))
    reach_Y = starts_Y if rows.tables.tail_R is None else np.minimum(starts_Y, to_host(rows.tables.tail_R)[live_Y])
    shared_U = np.minimum(to_host(rows.groups.shared_G)[group_Y[first_U]], np.minimum.reduceat(reach_Y, first_U))
    batch = ForwardBatch(
        table_YL, starts_Y, counts_Y, pages_T, position_T, np.append(first_U, len(live_Y)), np.maximum(shared_U, 0)
    )
    return batch, live_Y[row_T] * rows.queries + offset_T


def _tables(tables: RowTables, live_Y: np.ndarray, end: int) -> np.ndarray:
    """Return the pages [X, end] of the leading positions of the rows `live`."""
    index_Y = to_device(live_Y, tables.slot_R.device)
    known = min(end, tables.table_SL.shape[1])
    table_YL = np.full((len(live_Y), end), DUMMY_PAGE, dtype=np.int32)
    table_YL[:, :known] = to_host(tables.table_SL[tables.slot_R[index_Y], :known])
    if tables.tail_RB is None or tables.tail_R is None:
        return table_YL
    tail_YB, offset_YL = to_host(tables.tail_RB[index_Y]), np.arange(end) - to_host(tables.tail_R[index_Y])[:, None]
    own_YL = np.take_along_axis(tail_YB, offset_YL.clip(0, tail_YB.shape[1] - 1), axis=1)
    own_YL[offset_YL >= tail_YB.shape[1]] = DUMMY_PAGE
    return np.where(offset_YL < 0, table_YL, own_YL)
