"""Short prompts on a GPU: as packed rows, like those of rounds, in CUDA graphs.

A pass over a prompt of 50 tokens takes a GPU a few milliseconds, and the host several times as long to launch its
kernels one by one. So prompts are cut into rows of `PROMPT_ROW` tokens, and a pass of each number of rows is recorded
once. Longer prompts keep a GPU busy while they are launched (`smc.executor.triton_forward.run_prompt`).

Local axes: Y rows of `PROMPT_ROW` tokens."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from smc.arrays import FieldMemory, PackedFields, map_tensors, offsets, to_device
from smc.attention.backend import ForwardBatch
from smc.attention.kernels import SharedPrefixAttention
from smc.executor.forward import PROMPT_ROW, PROMPT_SIZES, Reader
from smc.executor.triton_forward import TritonForward
from smc.round.plan import Contexts
from smc.round.tensors import RowGroups, Rows, RowSpans, RowTables
from smc.types import Array

MOST_EXPERT_ROWS = 4
"""Maximum number of rows for models with experts, of which each token reads its own."""
MOST_READ = 1 << 17
"""Maximum number of positions that the rows of a pass read before their own tokens, all together: rows read shared
positions again, where prompts' own kernels read them once for 128 queries."""


class PromptForward(TritonForward):
    """`TritonForward` of rows that read what other rows of the same pass store. The specialised kernel copies prefixes
    before they are stored, since those of a round are from earlier passes (`smc.kernels.launch`)."""

    attention_class = staticmethod(partial(SharedPrefixAttention, specialized=False))


@dataclass(frozen=True)
class PromptPass:
    """The key of recorded passes of one number of rows."""

    rows: int


class RowArrays(NamedTuple, Generic[Array]):
    """What a pass of Y rows reads."""

    tokens_T: Array
    """int64 tokens, `PROMPT_ROW` for each row."""
    slot_Y: Array
    """int32 prompt that a row is part of."""
    start_Y: Array
    """int32 position of the row's first token."""
    count_Y: Array
    """int32 number of tokens that exist, 0..`PROMPT_ROW`."""
    size_Y: Array
    """int32: 1 for rows that exist. Each row is a group of its own."""
    index_Y: Array
    """int32: 0, 1, .."""


class PromptRows:
    """Passes over short prompts of one model, by the kernels of its rounds."""

    def __init__(self, reader: Reader, forward: TritonForward) -> None:
        """`forward`: a `PromptForward`, or a pass in one order of sums."""
        self.forward, self._device = forward, reader.device
        most = MOST_EXPERT_ROWS if reader.model.config.num_experts else PROMPT_SIZES[-1]
        self.sizes = tuple(size for size in PROMPT_SIZES if size <= most)
        self._kept: dict[int, tuple[FieldMemory, PackedFields[RowArrays[Tensor]]]] = {}
        self._table_SL = torch.zeros(most, reader.width, dtype=torch.int32, device=reader.device)
        """Pages of the positions of a pass's prompts, whose numbers are its slots. Passes run one after another."""

    def takes(self, batch: ForwardBatch) -> bool:
        """Return whether these prompts are short enough."""
        rows_R = _rows(batch)
        return rows_R.sum() <= self.sizes[-1] and (rows_R * batch.starts_R).sum() <= MOST_READ

    def __call__(self, reader: Reader, tokens_T: np.ndarray, batch: ForwardBatch, output_T: np.ndarray) -> Tensor:
        """See `smc.executor.forward.run_prompt`."""
        rows_R = _rows(batch)
        size = self.sizes[bisect_left(self.sizes, rows_R.sum())]
        arrays, place_T = _laid_out(size, rows_R, tokens_T, batch)
        there = self._load(size, arrays)
        table_RL = batch.table_RL[:, : (batch.starts_R + batch.counts_R).max()]
        self._table_SL[: len(table_RL), : table_RL.shape[1]] = to_device(table_RL, self._device)
        rows = Rows(
            RowTables(self._table_SL, there.slot_Y),
            RowSpans(there.start_Y, there.count_Y),
            RowGroups(there.index_Y, there.index_Y, there.size_Y, there.start_Y),
            queries=PROMPT_ROW,
            # Keys and values of all rows are stored before any is read: a row reads what those before it store.
            contexts=Contexts.SINGLE,
        )
        hidden_TE = reader.stages.run(PromptPass(size), "prompt", lambda: self.forward(there.tokens_T, rows))
        return hidden_TE[to_device(place_T[output_T], self._device)]

    def _load(self, size: int, arrays: RowArrays[np.ndarray]) -> RowArrays[Tensor]:
        """Copy arrays to where passes of this size read them."""
        if size not in self._kept:
            memory = FieldMemory(arrays)
            self._kept[size] = memory, memory.allocate(self._device)
        memory, there = self._kept[size]
        host = torch.zeros(memory.nbytes, dtype=torch.uint8)
        map_tensors(np.copyto, map_tensors(Tensor.numpy, memory.views(host)), arrays)
        there.memory.copy_(to_device(host.numpy(), self._device))
        return there.fields


def _rows(batch: ForwardBatch) -> np.ndarray:
    """Return the number of rows of each prompt [R]."""
    return -(-batch.counts_R.astype(np.int64) // PROMPT_ROW)


def _laid_out(
    size: int, rows_R: np.ndarray, tokens_T: np.ndarray, batch: ForwardBatch
) -> tuple[RowArrays[np.ndarray], np.ndarray]:
    """Return a pass's arrays, and the place [T] of each token among those of the pass."""
    prompt_Y, offset_Y, live = (
        np.repeat(np.arange(len(rows_R)), rows_R),
        PROMPT_ROW * offsets(rows_R),
        int(rows_R.sum()),
    )
    place_T = np.repeat(PROMPT_ROW * (np.cumsum(rows_R) - rows_R), batch.counts_R) + offsets(batch.counts_R)
    row_tokens_T = np.zeros(size * PROMPT_ROW, dtype=np.int64)
    row_tokens_T[place_T] = tokens_T

    def padded(values_Y: np.ndarray) -> np.ndarray:
        return np.pad(values_Y.astype(np.int32), (0, size - live))

    arrays = RowArrays(
        tokens_T=row_tokens_T,
        slot_Y=padded(prompt_Y),
        start_Y=padded(batch.starts_R[prompt_Y] + offset_Y),
        count_Y=padded(np.minimum(PROMPT_ROW, batch.counts_R[prompt_Y] - offset_Y)),
        size_Y=padded(np.ones(live)),
        index_Y=np.arange(size, dtype=np.int32),
    )
    return arrays, place_T
