"""Runs prompts through one model: weights, KV pages and block tables live here. Does not know what a particle is.

Axes: R rows, T tokens, V vocabulary, E hidden size, D draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device, to_host
from smc.attention.base import ForwardBatch
from smc.attention.fused import FusedAttention
from smc.engine.messages import Done, Draws, PromptBatch, PromptResult
from smc.kv.pool import KVPool
from smc.kv.tables import BlockTables
from smc.models.decoder import Decoder, RopeTable
from smc.resident.sampling import DrawKeys, Sampling


class ModelWorker:
    """A decoder, its pool of `pages` token positions, and `rows` block tables of `width` positions."""

    def __init__(
        self,
        name: str,
        model: Decoder,
        *,
        rows: int,
        width: int,
        pages: int,
        vocab_size: int,
    ) -> None:
        weight = model.embed.weight
        self.name = name
        self.model = model
        self.device = weight.device
        self.vocab_size = vocab_size
        self.tables = BlockTables(rows, width, pages)
        self.pool = KVPool(model.config, pages, weight.dtype, self.device)
        self.rope = RopeTable(model.config, width, self.device)
        self._attention = FusedAttention()
        self.working: Callable[[], AbstractContextManager] = contextlib.nullcontext
        """Around what the device is asked to do, where that has to be in order with other work on it."""

    def release(self, rows_R: np.ndarray) -> None:
        self.tables.release(rows_R)

    @torch.inference_mode()
    def run_prompts(self, batch: PromptBatch) -> Done[PromptResult]:
        """Raises ValueError for rows, positions or tokens that cannot be, before anything is written."""
        with self.working():
            hidden_TE = self._forward(batch)
            if batch.draws is None:
                return Done(PromptResult())
            last_R = to_device(np.cumsum(batch.counts_R) - 1, self.device)
            return Done(PromptResult(*self._draw(batch.draws, self.model.logits(hidden_TE[last_R]), batch.starts_R + batch.counts_R)))

    def _forward(self, batch: PromptBatch) -> Tensor:
        """Hidden states [T, E]; their keys and values are stored."""
        held_R = self.tables.length_R[batch.rows_R]
        if (batch.starts_R != held_R).any():
            raise ValueError(f"{self.name}: rows start at {batch.starts_R}, the tables hold {held_R}")
        if batch.tokens_T.min() < 0 or batch.tokens_T.max() >= self.vocab_size:
            raise ValueError(f"{self.name}: token ids {batch.tokens_T.min()}..{batch.tokens_T.max()}; allowed 0..{self.vocab_size - 1}")
        pages_T, position_T = self.tables.extend(batch.rows_R, batch.counts_R)
        rows, table_RL = len(batch.rows_R), self.tables.table_RL[batch.rows_R]
        nothing_shared = (np.arange(rows + 1), np.zeros(rows, dtype=np.int64))
        forward = ForwardBatch(table_RL, batch.starts_R, batch.counts_R, pages_T, position_T, *nothing_shared)
        attend = self._attention.plan(self.pool, forward)
        rope_T2D = self.rope.at(to_device(position_T, self.device))
        return self.model(to_device(batch.tokens_T, self.device), rope_T2D, attend)

    def _draw(self, draws: Draws, logits_RV: Tensor, position_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens [R, D], their log p [R, D], log Z [R]."""
        numbers = (draws.seed_R, draws.round_R, draws.stream_RD, position_R.astype(np.int64))
        keys = DrawKeys(*(to_device(array, self.device) for array in numbers), draws.purpose)
        token_RD, logp_RD, log_z_R = Sampling(self.vocab_size).bonus(logits_RV, draws.law, keys)
        return to_host(token_RD).astype(np.int32), to_host(logp_RD), to_host(log_z_R)
