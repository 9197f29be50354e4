"""What passes between the scheduler and a worker: flat batches of rows in, tokens and log-probabilities out.

A worker learns nothing of requests, particles or weights from these. All arrays are NumPy, so a link can ship their bytes.
Axes: R rows, T tokens (row after row), S segments, F branches, K steps, D draws, M moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from smc.kv.tables import PrefixMerge, RowMoves
from smc.laws import LawSpec
from smc.philox import Purpose

Result = TypeVar("Result", covariant=True)


class Pending(Protocol, Generic[Result]):
    """A result on its way."""

    def result(self) -> Result: ...


@dataclass(frozen=True)
class Done(Generic[Result]):
    """A result that is already there."""

    value: Result

    def result(self) -> Result:
        return self.value


@dataclass(frozen=True)
class Keys:
    """Which random numbers each draw uses (smc/philox.py); the position is that of the token drawn."""

    seed_R: np.ndarray
    """int64."""
    round_R: np.ndarray
    """int64 count of rounds of the row's request."""
    stream_RD: np.ndarray
    """int64 number that tells apart draws of the same request, round and position."""
    purpose: Purpose


@dataclass(frozen=True)
class Rows:
    """R rows and the T tokens to run through the model for them. Consecutive rows form segments sharing a prefix."""

    rows_R: np.ndarray
    """int32 rows of the worker's block tables."""
    starts_R: np.ndarray
    """int32 positions the row holds already; checked against the worker's own count."""
    counts_R: np.ndarray
    """int32 tokens of each row, at least 1."""
    tokens_T: np.ndarray
    """int64 token ids, row after row."""
    bounds_S: np.ndarray
    """int64 [S + 1]: segment s is rows bounds[s] .. bounds[s + 1] - 1."""
    shared_S: np.ndarray
    """int64 [S]: leading positions that all rows of the segment hold in the same pages; at most their smallest start."""


@dataclass(frozen=True)
class SampleBatch:
    """Extend every row by K tokens, one at a time, along F independent branches."""

    input: Rows
    """Tokens each row has not run yet, the last one being where drawing starts."""
    branch_rows_RF: np.ndarray
    """int32 rows the branches continue in; the first is the row itself. Others are overwritten."""
    steps: int
    law: LawSpec
    mixture: float
    """Share of the untruncated law in the one drawn from (smc/laws.py); 0 = the truncated law alone."""
    keys: Keys
    publish: bool = False
    """Another worker will be asked to score the first tokens (`ExtendBatch.next_of`): where it is elsewhere, send them there."""


@dataclass(frozen=True)
class SampleResult:
    tokens_RFK: np.ndarray | Tensor
    """int32; a tensor where they went from one model's device straight to the other's."""
    logq_RFK: np.ndarray
    """float32 log-probability of each token under the law it was drawn from; NaN if the model's logits were."""


@dataclass(frozen=True)
class ExtendBatch:
    """Run tokens and, where asked, score them and what may follow."""

    input: Rows
    labels_T: np.ndarray | None = None
    """int64: the token that follows each one, to be scored; -1 = none. None = nothing to score."""
    draws: Keys | None = None
    """Draw D tokens after the last one of each row, from p^alpha normalised."""
    next_of: Pending[SampleResult] | None = None
    """Score the first token of every branch of another batch with the same rows, as what follows each row's last token."""
    next_index_R: np.ndarray | None = None
    """int64: which row of `next_of` belongs to each row; -1 = none."""
    law: LawSpec | None = None


@dataclass(frozen=True)
class ExtendResult:
    logp_T: np.ndarray | None = None
    """float32 log-probability of each label under the target law; 0 where there is none."""
    next_logp_RF: np.ndarray | None = None
    """float32 log-probability of each branch's first token; 0 where there is none."""
    drawn_RD: np.ndarray | None = None
    """int32."""
    drawn_logp_RD: np.ndarray | None = None
    """float32 log-probability of each drawn token under p itself, whatever alpha."""
    log_z_R: np.ndarray | None = None
    """float32 log normaliser of p^alpha after the last token; NaN if the model's logits were."""


class Worker(Protocol):
    """One model with its KV memory. Calls are carried out in the order they are made."""

    def move(self, moves: RowMoves) -> None: ...

    def merge(self, merge: PrefixMerge) -> None: ...

    def sample(self, batch: SampleBatch) -> Pending[SampleResult]: ...

    def extend(self, batch: ExtendBatch) -> Pending[ExtendResult]: ...
