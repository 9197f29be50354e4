"""Runs rows through one model: weights, KV pages and block tables live here. Does not know what a particle is.

Axes: R rows, T tokens, F branches, K steps, V vocabulary, E hidden size, D draws.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from smc.arrays import to_device, to_host
from smc.attention.base import AttentionBackend, ForwardBatch
from smc.attention.torch_backend import TorchAttention
from smc.engine.messages import Done, ExtendBatch, ExtendResult, Keys, Rows, SampleBatch, SampleResult
from smc.kv.pool import KVPool
from smc.kv.tables import BlockTables, PrefixMerge, RowMoves
from smc.laws import Laws, draw
from smc.models.decoder import Attend, Decoder, RopeTable
from smc.philox import exponentials, words


class Stopwatch:
    """Adds up the time spent inside `with`. A class, because a generator-based one costs as much as some of what it times."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_) -> None:
        self.seconds += time.perf_counter() - self._begin


@dataclass(frozen=True)
class WorkerTimes:
    """Where a worker's time goes (on a GPU: the time it takes to issue the work)."""

    forward: Stopwatch = field(default_factory=Stopwatch)
    """The model's layers and head."""
    sampling: Stopwatch = field(default_factory=Stopwatch)
    """Laws and draws."""


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
        attention: AttentionBackend | None = None,
    ) -> None:
        weight = model.embed.weight
        self.name = name
        self.model = model
        self.device = weight.device
        self.vocab_size = vocab_size
        self.tables = BlockTables(rows, width, pages)
        self.pool = KVPool(model.config, pages, weight.dtype, self.device)
        self.rope = RopeTable(model.config, width, self.device)
        self.attention = attention or TorchAttention()
        self.times = WorkerTimes()
        self.working: Callable[[], AbstractContextManager] = contextlib.nullcontext
        """Around what the device is asked to do, where that has to be in order with other work on it."""
        self.publish: Callable[[Tensor], None] | None = None
        """Where the first tokens [R, F] of a batch that asks for it go, as soon as they are drawn."""

    def move(self, moves: RowMoves) -> None:
        self.tables.move(moves)

    def merge(self, merge: PrefixMerge) -> None:
        self.tables.merge(merge)

    @torch.inference_mode()
    def extend(self, batch: ExtendBatch) -> Done:
        """Run the tokens; score labels, score another batch's first tokens, draw: each only if asked."""
        with self.working():
            return self._extend(batch)

    def _extend(self, batch: ExtendBatch) -> Done:
        hidden_TE = self._forward(batch.input)
        if batch.law is None:
            return Done(ExtendResult())
        last_R = to_device(np.cumsum(batch.input.counts_R) - 1, self.device)
        scored = batch.labels_T is not None
        logits_XV = self._logits(hidden_TE if scored else hidden_TE[last_R])
        with self.times.sampling:
            logp_T = next_logp_RF = None
            drawn = (None, None, None)
            if scored:
                laws = Laws(batch.law.take(np.repeat(np.arange(len(last_R)), batch.input.counts_R)), self.device)
                logp_TV = laws.target(logits_XV)
                logp_T, logp_RV = _label_logp(logp_TV, batch.labels_T), logp_TV[last_R]
            else:
                logp_RV = Laws(batch.law, self.device).target(logits_XV)
            if batch.next_of is not None:
                next_logp_RF = _next_logp(logp_RV, batch)
            if batch.draws is not None:
                drawn = self._draws(batch, logp_RV)
            return Done(ExtendResult(logp_T, next_logp_RF, *drawn))

    @torch.inference_mode()
    def sample(self, batch: SampleBatch) -> Done:
        """K tokens for each of F branches of every row. The rows' own tokens run once, before they part."""
        rows, branches = batch.branch_rows_RF.shape
        position_R = batch.input.starts_R + batch.input.counts_R
        word_KRF = self._words(batch.keys, position_R + np.arange(batch.steps)[:, None])
        hidden_TE = self._forward(batch.input)
        logits_RV = self._logits(hidden_TE[to_device(np.cumsum(batch.input.counts_R) - 1, self.device)])
        self._fork(batch)
        steps = self._plan_steps(batch, position_R)
        with self.times.sampling:
            logq_RV = Laws(batch.law, self.device).proposal(logits_RV, batch.mixture)
            tokens = [draw(logq_RV, self._noise(word_KRF, 0))]
            if batch.publish and self.publish is not None:
                self.publish(tokens[0])
            logq = [logq_RV.gather(-1, tokens[0])]
            laws = Laws(batch.law.take(np.repeat(np.arange(rows), branches)), self.device)
        for k, (rope_X2D, attend) in enumerate(steps, start=1):
            with self.times.forward:
                hidden_XE = self.model(tokens[-1].view(-1), rope_X2D, attend)
            logits_XV = self._logits(hidden_XE)
            with self.times.sampling:
                logq_XV = laws.proposal(logits_XV, batch.mixture)
                token_X1 = draw(logq_XV, self._noise(word_KRF, k).view(rows * branches, 1, -1))
                tokens.append(token_X1.view(rows, branches))
                logq.append(logq_XV.gather(-1, token_X1).view(rows, branches))
        with self.times.sampling:
            return Done(SampleResult(to_host(torch.stack(tokens, -1)).astype(np.int32), to_host(torch.stack(logq, -1))))

    def _forward(self, rows: Rows) -> Tensor:
        """Hidden states [T, E] of a batch of rows; their keys and values are stored. Bounds are checked first."""
        if (rows.starts_R != self.tables.length_R[rows.rows_R]).any():
            raise ValueError(f"{self.name}: rows start at {rows.starts_R}, the tables hold {self.tables.length_R[rows.rows_R]}")
        if rows.tokens_T.min() < 0 or rows.tokens_T.max() >= self.vocab_size:
            raise ValueError(f"{self.name}: token ids {rows.tokens_T.min()}..{rows.tokens_T.max()}; allowed 0..{self.vocab_size - 1}")
        pages_T, position_T = self.tables.extend(rows.rows_R, rows.counts_R)
        batch = ForwardBatch(rows.rows_R, rows.starts_R, rows.counts_R, pages_T, position_T, rows.bounds_S, rows.shared_S)
        attend = self.attention.plan(self.tables, self.pool, batch)
        with self.times.forward:
            rope_T2D = self.rope.at(to_device(position_T, self.device))
            return self.model(to_device(rows.tokens_T, self.device), rope_T2D, attend)

    def _plan_steps(self, batch: SampleBatch, position_R: np.ndarray) -> list[tuple[Tensor, Attend]]:
        """Pages, positions and attention of every step after the first, for R * F rows of one token each."""
        steps = batch.steps - 1
        if not steps:
            return []
        rows_X, branches = batch.branch_rows_RF.ravel(), batch.branch_rows_RF.shape[1]
        starts_X, counts_X = np.repeat(position_R, branches), np.full(len(rows_X), steps, dtype=np.int32)
        pages_T, position_T = self.tables.extend(rows_X, counts_X)
        bounds_S = batch.input.bounds_S * branches
        forward = ForwardBatch(rows_X, starts_X, counts_X, pages_T, position_T, bounds_S, batch.input.shared_S)
        rope_KX2D = self.rope.at(to_device(position_T.reshape(-1, steps).T, self.device))
        return list(zip(rope_KX2D, self.attention.plan_steps(self.tables, self.pool, forward)))

    def _logits(self, hidden_XE: Tensor) -> Tensor:
        """[X, V] over the vocabulary both models share: ids past it are padding of the embedding and never drawn."""
        with self.times.forward:
            return self.model.logits(hidden_XE)[:, : self.vocab_size]

    def _draws(self, batch: ExtendBatch, logp_RV: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens [R, D], their log p [R, D], log Z [R]."""
        powered_RV, log_z_R = Laws(batch.law, self.device).powered(logp_RV)
        position_R = batch.input.starts_R + batch.input.counts_R
        drawn_RD = draw(powered_RV, self._noise(self._words(batch.draws, position_R[None]), 0))
        # The likeliest token's log-probability is finite for any law, so it carries NaN logits and nothing else.
        nan_R = powered_RV.amax(-1) * 0.0
        log_z_R = nan_R if log_z_R is None else log_z_R + nan_R
        return to_host(drawn_RD).astype(np.int32), to_host(logp_RV.gather(-1, drawn_RD)), to_host(log_z_R)

    def _fork(self, batch: SampleBatch) -> None:
        """The other branch rows take over what the row itself has just run; before that they were its equals."""
        others = batch.branch_rows_RF.shape[1] - 1
        dst_M, src_M = batch.branch_rows_RF[:, 1:].ravel(), batch.branch_rows_RF[:, 0].repeat(others)
        self.tables.move(RowMoves(dst_M, src_M, batch.input.starts_R.repeat(others)))

    def _words(self, keys: Keys, position_KR: np.ndarray) -> tuple[Tensor, Tensor]:
        """Two random words for every draw, [K, R, D] each."""
        seed, rounds, position = keys.seed_R[:, None], keys.round_R[:, None], position_KR.astype(np.int64)[..., None]
        word0, word1, _, _ = words(seed, rounds, keys.stream_RD, position, keys.purpose)
        return to_device(word0, self.device), to_device(word1, self.device)

    def _noise(self, word_KRD: tuple[Tensor, Tensor], k: int) -> Tensor:
        return exponentials(word_KRD[0][k], word_KRD[1][k], self.vocab_size)


def _label_logp(logp_TV: Tensor, labels_T: np.ndarray) -> np.ndarray:
    label_T = to_device(labels_T, logp_TV.device)
    logp_T = logp_TV.gather(-1, label_T.clamp(min=0)[:, None]).squeeze(-1)
    return to_host(torch.where(label_T >= 0, logp_T, 0.0))


def _next_logp(logp_RV: Tensor, batch: ExtendBatch) -> np.ndarray:
    known_R = batch.next_index_R >= 0
    first_RF = torch.as_tensor(batch.next_of.result().tokens_RFK[..., 0], device=logp_RV.device)
    token_RF = first_RF[to_device(batch.next_index_R, logp_RV.device)].long()
    return np.where(known_R[:, None], to_host(logp_RV.gather(-1, token_RF)), np.float32(0))
